"""What a load has taken is given back once nothing of it is remembered any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from indexer.compiled import PURE_VARIABLE
from select_service.core import expiring_map, plain_expiring_map

ROOT = Path(__file__).resolve().parents[3]
BACK = 1.2
"""Times what it was before; 1.12 were measured after 100,000 reservations, which took 6 times that,
and 1.04 without kernels."""

REMEMBERED_BYTES = 150
"""Of each id, while ended ones are remembered: 62 of the table's, and what the load has left behind
by then; 108 were measured. Without kernels they lie among all that goes, and keep it from going."""

PARTITIONS_BACK = {False: 1.33, True: 1.67}
"""A thousand partitions take two thirds as much again; 1.17 were measured, and 1.62 without
kernels, by `pure`. What they leave is in Python's arenas, for the next thousand; their names and
block sizes are not, but without kernels, and keep the arenas they lie in. So the objects are
counted, too, and a second thousand must find the room of the first."""

AGAIN = 1.1
BLOCKS_LEFT = {False: 0.2, True: 4.2}
"""Python's objects of a partition that was closed; without kernels those of its pin."""


def run(what: str, count: int, pure: bool) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.select_service.core.load_and_unload", what, str(count)],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {PURE_VARIABLE: "1" if pure else ""},
    )
    sizes = msgspec.json.decode(done.stdout, type=dict[str, float])
    assert sizes["left"] == 1
    assert sizes["full"] < sizes["before"] + 400, "4 KB each"
    return sizes


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pure", [False, True])
def test_memory_of_reservations_returns(pure: bool) -> None:
    count = 100_000
    measured = run("reservations", count, pure)
    assert measured["after"] < BACK * measured["before"], measured
    if not pure and expiring_map.ExpiringMap is not plain_expiring_map.ExpiringMap:
        assert measured["ended"] < measured["before"] + count * REMEMBERED_BYTES / 1e6, measured


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pure", [False, True])
def test_memory_of_partitions_returns(pure: bool) -> None:
    measured = run("partitions", 1_000, pure)
    assert measured["after"] < PARTITIONS_BACK[pure] * measured["before"], measured
    assert measured["again"] < AGAIN * measured["after"], measured
    assert measured["blocks"] < BLOCKS_LEFT[pure] * 1_000, measured
