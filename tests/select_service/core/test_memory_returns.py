"""What a load has taken is given back once nothing of it is remembered any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[3]
BACK = 1.3
"""Times what it was before; 1.13 were measured after 100,000 reservations, which took 6 times that.
While ended ids are remembered, for ten minutes, each takes 300 bytes more."""

PARTITIONS_BACK = 1.33
"""A thousand partitions take half as much again; 1.25 were measured. What they leave is in Python's
arenas, for the next thousand; their names and block sizes are not."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "count", "back", "left"),
    [("reservations", 100_000, BACK, 1), ("partitions", 1_000, PARTITIONS_BACK, 1)],
)
def test_memory_returns(what: str, count: int, back: float, left: int) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.select_service.core.load_and_unload", what, str(count)],
        capture_output=True,
        check=True,
        cwd=ROOT,
    )
    told = msgspec.json.decode(run.stdout, type=dict[str, float])
    assert told["left"] == left
    assert told["full"] < told["before"] + 400, "4 KB each"
    assert told["after"] < back * told["before"], told
