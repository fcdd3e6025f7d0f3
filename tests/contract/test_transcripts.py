"""Every recorded transcript, one test each, against `python -m select_service`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import transcript as transcripts
from tests.contract.staging import play
from tests.live.server import OURS, OURS_EXTRA

LOGGED = ("--log-format", "json", "--log-level", "debug")  # each selection with its cost


@pytest.mark.e2e
@pytest.mark.parametrize("name", transcripts.names())
def test_transcript(name: str, tmp_path: Path) -> None:
    play(name, tmp_path, command=OURS, args=(*OURS_EXTRA, *LOGGED))
