"""Every recorded transcript, one test each, against `python -m select_service`.

And once more with an access log, which is written on the ASGI way only: both ways through the door
must satisfy the same recordings. And once in MessagePack, which must come to the same answers; what
tells of settings and peers rather than of bodies is repeated in the long run only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract import transcript as transcripts
from tests.contract.staging import play
from tests.live.server import OURS, OURS_EXTRA, PATIENT

LOGGED = ("--log-format", "json", "--log-level", "debug")  # each selection with its cost
SETTINGS_AND_PEERS = ("20", "22b", "23", "23b", "27", "28", "28b", "29")


def _in_msgpack(name: str) -> Any:
    is_long = name.partition("_")[0] in SETTINGS_AND_PEERS
    return pytest.param(name, marks=pytest.mark.heavy if is_long else ())


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
    play(name, tmp_path, command=OURS, args=(*OURS_EXTRA, *PATIENT, *LOGGED, *way))


@pytest.mark.e2e
@pytest.mark.parametrize("name", [_in_msgpack(name) for name in transcripts.names()])
def test_transcript_in_msgpack(name: str, tmp_path: Path) -> None:
    play(name, tmp_path, command=OURS, args=(*OURS_EXTRA, *PATIENT, *LOGGED), packed=True)
