"""What a load has taken is given back once nothing of it is remembered any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from indexer.compiled import PURE_VARIABLE

ROOT = Path(__file__).resolve().parents[3]
BACK = 1.2
"""Times what it was before; 1.12 were measured after 100,000 reservations, which took 6 times that,
and 1.04 without kernels."""

PARTITIONS_BACK = 1.67
"""A thousand partitions take two thirds as much again; 1.62 were measured. What they leave is in
Python's arenas, for the next thousand, and so are their names and block sizes, which keep the
arenas they lie in. So the objects are counted, too, and a second thousand must find the room of the
first."""

AGAIN = 1.1
BLOCKS_LEFT = 4.2
"""Python's objects of a partition that was closed: those of its pin."""


def run(what: str, count: int, pure: bool) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.select_service.core.load_and_unload", what, str(count)],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {PURE_VARIABLE: "1" if pure else ""},
    )
    told = msgspec.json.decode(done.stdout, type=dict[str, float])
    assert told["left"] == 1
    assert told["full"] < told["before"] + 400, "4 KB each"
    return told


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pure", [False, True])
def test_memory_of_reservations_returns(pure: bool) -> None:
    told = run("reservations", 100_000, pure)
    assert told["after"] < BACK * told["before"], told


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pure", [False, True])
def test_memory_of_partitions_returns(pure: bool) -> None:
    told = run("partitions", 1_000, pure)
    assert told["after"] < PARTITIONS_BACK * told["before"], told
    assert told["again"] < AGAIN * told["after"], told
    assert told["blocks"] < BLOCKS_LEFT * 1_000, told
