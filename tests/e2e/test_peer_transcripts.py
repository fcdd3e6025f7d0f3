"""The replayer on trial: the recorded service itself must pass every step of its transcripts."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.contract import transcript as transcripts
from tests.contract.replayer import Replayer, StepFailedError
from tests.live import peer
from tests.live.engine import FakeEngine
from tests.live.ports import free_base
from tests.live.server import Server

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

HTTP_PORT = 20
ATTEMPTS = 3
"""The reference takes a worker in after it has said 201: a selection may come too early for it."""


@pytest.mark.parametrize("name", [n for n in transcripts.names() if n not in transcripts.NOT_YET])
def test_the_reference_passes_its_own_transcript(name: str, tmp_path: Path) -> None:
    reason = peer.why_missing()
    if reason:
        pytest.skip(reason)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _play(name, tmp_path / f"{attempt}.log")
        except StepFailedError:
            if attempt == ATTEMPTS:
                raise
        else:
            return


def _play(name: str, log_path: Path) -> None:
    base = free_base(transcripts.port_offsets(name) | {HTTP_PORT})
    transcript = transcripts.load(name, base)
    with contextlib.ExitStack() as stack:
        engines = {p: stack.enter_context(FakeEngine(p)) for p in transcript.engine_ports}
        server = stack.enter_context(
            Server(
                log_path,
                command=peer.command(),
                args=transcript.args,
                env=transcript.env,
                port=base + HTTP_PORT,
            )
        )
        Replayer(transcript, server, engines, reference=True).play()
