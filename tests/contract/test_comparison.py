"""The judge itself: what must pass passes, and one changed value anywhere is named."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.contract.comparison import mismatch
from tests.contract.transcript import load, names


def changed_somewhere(value: object) -> list[object]:
    """Every variant of a JSON value with one scalar changed."""
    if isinstance(value, dict):
        return [value | {k: v} for k in value for v in changed_somewhere(value[k])]
    if isinstance(value, list):
        return [
            [*value[:i], v, *value[i + 1 :]]
            for i in range(len(value))
            for v in changed_somewhere(value[i])
        ]
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int | float):
        return [value + 1]
    return [f"{value}x"]


def recorded_answers() -> list[Any]:
    return [
        pytest.param(step["path"], step["response"], id=f"{name}-{step['step']}")
        for name in names()
        for step in load(name, 18_100).steps
        if step.get("status") == 200
        and step.get("path", "/dump") != "/dump"  # judged apart, below
        and isinstance(step["response"], dict | list)
    ]


@pytest.mark.parametrize(("path", "response"), recorded_answers()[::7])
def test_every_change_of_a_recorded_answer_is_noticed(path: str, response: Any) -> None:
    assert mismatch(path, response, copy.deepcopy(response)) is None
    for variant in changed_somewhere(response):
        assert mismatch(path, response, variant) is not None


def test_surplus_keys_are_allowed_and_missing_ones_named() -> None:
    assert mismatch("/x", {"a": 1}, {"a": 1, "b": 2}) is None
    assert mismatch("/x", {"a": {"b": 1}}, {"a": {}}) == ".a.b: missing"


def test_rows_of_loads_have_no_order() -> None:
    rows = [{"worker_id": w, "dp_rank": 0, "active_requests": w} for w in (1, 2)]
    assert mismatch("/loads", [{"loads": rows}], [{"loads": rows[::-1]}]) is None
    assert mismatch("/loads", [{"loads": rows}], [{"loads": rows[:1]}]) is not None


def test_a_generated_id_is_any_uuid() -> None:
    recorded = {"reservation_id": "59e938d8-9d21-42f7-bb86-c8a70919c2cb"}
    other = {"reservation_id": "11111111-2222-4333-8444-555555555555"}
    assert mismatch("/x", recorded, other) is None
    assert mismatch("/x", recorded, {"reservation_id": "r1"}) is not None


@pytest.mark.parametrize(
    ("recorded", "got", "same"),
    [
        ("Failed to parse the request body as JSON: EOF", "not JSON", True),
        ("reservation x not found", "reservation y not found", False),
        (
            "Request a already exists (assigned to Rust)",
            "Request a already exists on worker 1",
            True,
        ),
        ("Request a already exists (assigned to Rust)", "Request b already exists", False),
    ],
)
def test_words_of_errors(recorded: str, got: str, *, same: bool) -> None:
    assert (mismatch("/x", {"error": recorded}, {"error": got}) is None) is same


def dump_of(*groups: list[tuple[int | None, int]]) -> dict[str, Any]:
    events = [
        {
            "worker_id": 1,
            "storage_tier": "device",
            "event": {
                "event_id": number,
                "dp_rank": 0,
                "data": {
                    "stored": {
                        "parent_hash": group[0][0],
                        "start_position": None,
                        "blocks": [
                            {"block_hash": h, "tokens_hash": h * 10, "mm_extra_info": None}
                            for _, h in group
                        ],
                    }
                },
            },
        }
        for number, group in enumerate(groups)
    ]
    return {"default:default": {"block_size": 16, "events": events}}


def test_the_grouping_of_a_dump_is_free_but_not_its_blocks() -> None:
    whole = dump_of([(None, 1), (1, 2), (2, 3)])
    assert mismatch("/dump", whole, dump_of([(None, 1)], [(1, 2), (2, 3)])) is None
    assert mismatch("/dump", whole, dump_of([(None, 1)], [(1, 2)])) is not None
    assert mismatch("/dump", whole, dump_of([(None, 1)], [(None, 2), (2, 3)])) is not None
