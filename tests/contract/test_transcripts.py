"""Every recorded transcript, one test each, against `python -m select_service`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.contract import transcript as transcripts
from tests.contract.replayer import Replayer
from tests.live.engine import FakeEngine
from tests.live.ports import free_base
from tests.live.server import OURS_EXTRA, Server

HTTP_PORT = 20  # 18120 in the recordings
LOGGED = ("--log-format", "json", "--log-level", "debug")  # each selection with its cost

SCENARIOS = [
    pytest.param(name, marks=pytest.mark.skip(reason=transcripts.NOT_YET[name]))
    if name in transcripts.NOT_YET
    else name
    for name in transcripts.names()
]


@pytest.mark.e2e
@pytest.mark.parametrize("name", SCENARIOS)
def test_transcript(name: str, tmp_path: Path) -> None:
    base = free_base(transcripts.port_offsets(name) | {HTTP_PORT})
    transcript = transcripts.load(name, base)
    with contextlib.ExitStack() as stack:
        engines = {p: stack.enter_context(FakeEngine(p)) for p in transcript.engine_ports}
        server = stack.enter_context(
            Server(
                tmp_path / "service.log",
                args=(*OURS_EXTRA, *LOGGED, *transcript.args),
                env=transcript.env,
                port=base + HTTP_PORT,
            )
        )
        Replayer(transcript, server, engines).play()
        assert server.stop() == 0, server.log_tail()
