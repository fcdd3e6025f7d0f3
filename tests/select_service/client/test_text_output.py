"""Answers as text: a decision says in words why its rank was chosen."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.client import text_output


@pytest.mark.parametrize(
    ("picked", "why"),
    [
        (
            {"picked_by": "lowest", "ties": 1, "margin": 1.5},
            "has the lowest cost, 1.50 blocks cheaper than the next best",
        ),
        ({"picked_by": "tie", "ties": 2, "margin": 0.0}, "was drawn among 2 of equal cost"),
        (
            {"picked_by": "softmax", "ties": 1, "margin": -2.0},
            "was drawn by temperature, 2.00 blocks dearer than the next best",
        ),
        ({"picked_by": "only", "ties": 1, "margin": None}, "was the only candidate"),
    ],
)
def test_why_a_rank_was_chosen(picked: dict[str, Any], why: str) -> None:
    one = {"decision_id": "d", "route": "select", "outcome": "placed"}
    told = text_output.decision(one | {"chosen": {"worker_id": 7, "dp_rank": 0} | picked})
    assert told.splitlines()[0] == f"d: placed on select; worker 7 rank 0 {why}"
