"""The replayer on trial: the recorded service itself must pass every step of its transcripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import transcript as transcripts
from tests.contract.replayer import StepFailedError
from tests.contract.staging import play
from tests.live import peer

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

ATTEMPTS = 3
"""The reference takes a worker in after it has said 201: a selection may come too early for it."""


@pytest.mark.parametrize("name", transcripts.names())
def test_the_reference_passes_its_own_transcript(name: str, tmp_path: Path) -> None:
    reason = peer.why_missing()
    if reason:
        pytest.skip(reason)
    for attempt in range(1, ATTEMPTS + 1):
        where = tmp_path / str(attempt)
        where.mkdir()
        try:
            play(name, where, command=peer.command(), reference=True)
        except StepFailedError:
            if attempt == ATTEMPTS:
                raise
        else:
            return
