"""The replayer on trial: the recorded service itself must pass every step of its transcripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import transcript as transcripts
from tests.contract.staging import play
from tests.live import peer

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]


@pytest.mark.parametrize("name", transcripts.names())
def test_the_reference_passes_its_own_transcript(name: str, tmp_path: Path) -> None:
    reason = peer.why_missing()
    if reason:
        pytest.skip(reason)
    play(name, tmp_path, command=peer.command(), reference=True)
