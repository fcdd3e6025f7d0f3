"""Every recorded transcript, one test each, against `python -m select_service`.

And once more with an access log, which is written on the ASGI way only: both ways through the door
must satisfy the same recordings. And once in MessagePack, which must come to the same answers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import transcript as transcripts
from tests.contract.staging import play
from tests.live.server import OURS, OURS_EXTRA

LOGGED = ("--log-format", "json", "--log-level", "debug")  # each selection with its cost


@pytest.mark.e2e
@pytest.mark.parametrize("name", transcripts.names())
@pytest.mark.parametrize(
    "way",
    [
        pytest.param((), id="fast-lane"),
        pytest.param(("--access-log",), id="asgi", marks=pytest.mark.heavy),
    ],
)
def test_transcript(name: str, way: tuple[str, ...], tmp_path: Path) -> None:
    play(name, tmp_path, command=OURS, args=(*OURS_EXTRA, *LOGGED, *way))


@pytest.mark.e2e
@pytest.mark.parametrize("name", transcripts.names())
def test_transcript_in_msgpack(name: str, tmp_path: Path) -> None:
    play(name, tmp_path, command=OURS, args=(*OURS_EXTRA, *LOGGED), packed=True)
