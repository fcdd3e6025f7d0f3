"""Answers as text: a decision explains why its rank was chosen."""

from __future__ import annotations

import re
from typing import Any

import pytest

from select_service.client import text_output
from select_service.settings.environment import ENVIRONMENT
from select_service.settings.table.selection import CostSettings
from select_service.types.common_fields import WEIGHT_SETTINGS
from select_service.types.decisions import DecisionWeights


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
    text = text_output.decision(one | {"chosen": {"worker_id": 7, "dp_rank": 0} | picked})
    assert text.splitlines()[0] == f"d: placed on select; worker 7 rank 0 {why}"


RANK: dict[str, Any] = {
    "worker_id": 7, "dp_rank": 0, "cost": 6.0, "prefill_cost": 8.0, "credit": 4.0,
    "decode_cost": 2.0, "delay_cost": 0.0, "context_cost": 9.0, "requests": 3,
    "cached_tokens": 64, "taint_factor": None, "excluded": None, "trust": 1.0,
}  # fmt: skip
WEIGHTS: dict[str, Any] = {"prefill_load_scale": 1.0, "context_load_scale": 0.0, "delay_weight": 0}


def explained(weights: dict[str, Any], **rank: Any) -> tuple[dict[str, str], str]:
    """A decision's only row by column, and the text below."""
    one = {"decision_id": "d", "route": "select", "outcome": "placed", "weights": WEIGHTS | weights}
    text = text_output.decision(one | {"candidates": [RANK | rank]})
    _, names, row, *below = text.splitlines()
    heads = names.replace("LEFT OUT", "LEFT_OUT").split()
    return dict(zip(heads, row.split(), strict=True)), "\n".join(below)


def test_what_adds_nothing_to_a_cost_is_left_out() -> None:
    row, below = explained({})
    assert [*row] == ["WORKER", "RANK", "COST", "PREFILL", "CREDIT", "DECODE", "CACHED", "TRUST"]
    assert "COST = prefill_load_scale * (PREFILL - CREDIT) + decode_load_scale * DECODE, " in below
    assert "\nweights that are 0 or off here: context_load_scale, delay_weight" in below


@pytest.mark.parametrize(
    ("weights", "rank", "column", "value", "formula"),
    [
        ({}, {"delay_cost": 1.5}, "DELAY", "1.50", "(PREFILL - CREDIT + DELAY)"),
        ({}, {"pull_cost": 1.5}, "PULL", "1.50", "(PREFILL - CREDIT + PULL)"),
        ({"context_load_scale": 0.1}, {}, "CONTEXT", "9.00", "+ context_load_scale * CONTEXT"),
        (
            {"decode_active_request_weight": 2.0},
            *({}, "REQUESTS", "3.00", "+ decode_active_request_weight * REQUESTS"),
        ),
        ({}, {"taint_factor": 0.8}, "TAINT", "0.80", "* DECODE) * TAINT"),
        ({}, {"excluded": "busy"}, "LEFT_OUT", "busy", "COST = "),
    ],
)
def test_what_adds_to_a_cost_is_a_column_and_explained(
    weights: dict[str, Any], rank: dict[str, Any], column: str, value: str, formula: str
) -> None:
    row, below = explained(weights, **rank)
    assert row[column] == value
    assert formula in below
    assert f"\n  {column.replace('_', ' ')}  " in below


def test_every_weight_is_explained_and_says_what_sets_it() -> None:
    assert [*WEIGHT_SETTINGS] == [*DecisionWeights.__struct_fields__]
    _, below = explained(dict.fromkeys(WEIGHT_SETTINGS, 0.5))
    for name, setting in WEIGHT_SETTINGS.items():
        assert re.search(rf"^  {name} 0\.5 +[A-Z0].*\w", below, re.MULTILINE), name
        assert re.search(rf"\({setting}( [x/] [^.]+)?\)\.", " ".join(below.split())), name
    assert "(--delay-scale x prompts that a rank computes, on average)." in " ".join(below.split())
    flags = {f"--{name.replace('_', '-')}" for name in CostSettings.__struct_fields__}
    assert {*WEIGHT_SETTINGS.values()} <= flags | {one.name for one in ENVIRONMENT}


def test_nothing_to_list_is_said() -> None:
    for said in (text_output.workers([]), text_output.loads([]), text_output.decisions([])):
        assert said.splitlines()[1] == "(none)"


def test_every_column_that_is_no_name_is_explained() -> None:
    """Below a table stands what its columns mean, with units."""
    named = {"WORKER", "MODEL", "TENANT", "ENDPOINT", "DECISION", "ROUTE", "OUTCOME"}
    for said in (text_output.workers([]), text_output.loads([]), text_output.decisions([])):
        head, *below = said.splitlines()
        explained = {line.split()[0] for line in below if line.startswith("  ")}
        assert {*head.split()} - named <= explained, said
