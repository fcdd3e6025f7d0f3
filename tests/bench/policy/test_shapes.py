"""Drawn traffic is a trace that the simulator's own reader takes, and what its source says."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from bench.policy.shapes import SHAPES, drawn, write
from select_service.simulator.core.measures import ceiling_of
from select_service.simulator.traces import MOONCAKE_BLOCK, read_mooncake

if TYPE_CHECKING:
    from pathlib import Path

REQUESTS = 200


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_trace(name: str, tmp_path: Path) -> None:
    lines = drawn(name, random.Random(3), REQUESTS, 20.0)
    assert lines == drawn(name, random.Random(3), REQUESTS, 20.0)
    assert len(lines) == REQUESTS
    assert all(before.at_s <= after.at_s for before, after in pairwise(lines))
    assert all(len(one.hash_ids) == -(-one.isl // MOONCAKE_BLOCK) for one in lines)
    behind: dict[int, int] = {}  # equal number, equal prefix
    for one in lines:
        for parent, block in pairwise((-1, *one.hash_ids)):
            assert behind.setdefault(block, parent) == parent
    write(lines, tmp_path / "trace.jsonl")
    read = list(read_mooncake((tmp_path / "trace.jsonl").read_bytes().splitlines(), 64))
    assert [(one.isl, one.osl) for one in read] == [(one.isl, one.osl) for one in lines]


@pytest.mark.parametrize(
    ("name", "isl", "osl", "shared"),
    [  # published means, and what an infinite cache would find; a third either way
        ("toolagent", 8_596, 182, 0.59),
        ("synthetic", 15_325, 149, 0.66),
    ],
)
def test_it_is_about_what_its_source_says(
    name: str, isl: float, osl: float, shared: float, tmp_path: Path
) -> None:
    lines = drawn(name, random.Random(1), 2_000, 20.0)
    write(lines, tmp_path / "trace.jsonl")
    with (tmp_path / "trace.jsonl").open("rb") as opened:
        read = list(read_mooncake(opened, MOONCAKE_BLOCK))
    assert sum(one.isl for one in read) / len(read) == pytest.approx(isl, rel=1 / 3)
    assert sum(one.osl for one in read) / len(read) == pytest.approx(osl, rel=1 / 3)
    assert ceiling_of(read, MOONCAKE_BLOCK) == pytest.approx(shared, rel=1 / 3)
