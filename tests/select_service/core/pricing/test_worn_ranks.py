"""A worn engine, which takes many times as long as the others, costs as many times as much."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.ledger.loads import unpacked
from select_service.core.ledger.rank_speeds import SURE
from select_service.core.ledger.slot_loads import LOOK_EVERY_S, TRIED_AGAIN_S, SlotLoads
from select_service.core.pricing.weights import SLOWNESS_SCALE
from select_service.types import RouterConfig
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

WORN = 5
OURS = RouterConfig(policy="first-token")


def loads_of(some: Fleet) -> SlotLoads:
    return some.core.partitions[DEFAULT].ledger.loads


def fleet(config: RouterConfig = OURS, slow: float = 10.0) -> Fleet:
    """Five ranks, whose speeds were measured by as many prompts as make sure."""
    some = Fleet(config)
    for worker_id in range(1, WORN + 1):
        some.worker(worker_id)
    for turn in range(SURE + 1):
        for worker_id in range(1, WORN + 1):
            name = f"{turn}/{worker_id}"
            seconds = 0.1 * (slow if worker_id == WORN else 1.0)
            some.book(name, worker_id, turn * 100 + worker_id, isl=1_600)
            some.now += seconds
            some.done(name)
            some.now += 0.1
            some.free(name)
    some.now += 2 * LOOK_EVERY_S
    return some


def chosen(some: Fleet, count: int = 40) -> set[int]:
    """The ranks that prompts are sent to while each is computed at once."""
    found = set()
    for number in range(count):
        answer = selection_of(some.take(f"p{number}", 9_000 + number, isl=1_600))
        found.add(answer.worker_id)
        some.done(f"p{number}")
        some.free(f"p{number}")
    return found


def test_a_worn_rank_is_left_alone_where_others_have_room() -> None:
    assert WORN not in chosen(fleet())
    assert WORN in chosen(fleet(slow=2.0)), "another generation of engines"
    assert WORN in chosen(fleet(RouterConfig(policy="first-token", slowness_scale=0.0)))


def test_the_contracts_formula_knows_no_speeds() -> None:
    some = fleet(RouterConfig())
    assert WORN in chosen(some)
    assert unpacked(loads_of(some).pack()).slowness is None
    assert not loads_of(some).has_worn, "nor looks for them"


def test_it_is_told_with_the_decision() -> None:
    some = fleet()
    some.take("first", 1)  # the first booking that looks
    answer = selection_of(some.take("a", 2, explain=True))
    told: Any = ExplainedRecord(answer.decision, 0.0, 0.1).whole().candidates  # type: ignore[arg-type]
    candidates = {one.worker_id: one for one in told}
    assert [candidates[one].slowness for one in range(1, WORN)] == [1.0] * (WORN - 1)
    expected = 1.0 + SLOWNESS_SCALE * 9.0
    assert candidates[WORN].slowness == pytest.approx(expected, rel=0.05)


def test_what_was_not_heard_of_for_long_is_tried_again() -> None:
    some = fleet()
    some.take("a", 1)
    assert loads_of(some).has_worn
    some.now += TRIED_AGAIN_S + 1.0
    some.take("b", 2)
    assert not loads_of(some).has_worn
    some.book("c", WORN, 3)
    some.now += 2 * LOOK_EVERY_S
    some.take("d", 4)
    assert loads_of(some).has_worn, "its line is known, and it was heard of"


def test_another_rank_on_its_slot_is_not_worn() -> None:
    some = fleet()
    some.take("a", 1)
    assert loads_of(some).slowness.any()
    some.delete(WORN)
    assert not loads_of(some).slowness.any()
