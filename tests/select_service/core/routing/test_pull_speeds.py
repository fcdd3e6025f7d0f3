"""What pulling KV blocks takes is learnt from first tokens, by path, and used where it is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pytest
from msgspec import UNSET

from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.ledger.pull_speeds import PullPath
from select_service.core.ledger.rank_speeds import SURE
from select_service.types import RouterConfig, Selection
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

if TYPE_CHECKING:
    from select_service.core.ledger.pull_speeds import PullSpeeds

BLOCK, TOKEN_S = 16, 1e-3
SHARED = 30
"""Blocks of a prompt that the first worker holds; it has two more of its own."""
Costs = Literal["set", "learnt"]


def fleet_of(costs: Costs = "learnt", each: float = 0.1, **spec: object) -> Fleet:
    """Two workers of known speed; the first is always busy."""
    fleet = Fleet(RouterConfig(kv_pull=True, kv_pull_costs=costs, kv_transfer_cost_per_block=each))
    for worker_id in (1, 2):
        fleet.worker(worker_id, **spec)
    for number in range(2 * SURE):
        name, length = f"warm{number}", 4 + number
        fleet.book(name, 2, *range(5_000 + 50 * number, 5_000 + 50 * number + length))
        ends(fleet, name, length * BLOCK * TOKEN_S)
    for number in range(8):
        fleet.book(f"busy{number}", 1, *range(9_000 + 50 * number, 9_050 + 50 * number))
    return fleet


def ends(fleet: Fleet, name: str, seconds: float) -> None:
    """Its first token comes now, and something after it."""
    fleet.now += seconds
    fleet.done(name)
    fleet.now += 1.0
    fleet.free(name)


def asks(fleet: Fleet, number: int) -> Selection:
    """A prompt of which the busy worker holds all but the end."""
    first = 100 + 100 * number
    fleet.hold(1, list(range(first, first + SHARED)))
    return selection_of(fleet.take(f"r{number}", *range(first, first + SHARED + 2)))


def pulls(fleet: Fleet, each_s: float, count: int = 2 * SURE) -> Selection:
    """Prompts pull; each of their blocks takes so long. Return the last answer."""
    answer = None
    for number in range(count):
        answer = asks(fleet, number)
        assert answer.worker_id == 2
        moved = answer.kv_source.blocks if answer.kv_source else 0
        ends(fleet, f"r{number}", answer.effective_prefill_tokens * TOKEN_S + moved * each_s)
    assert answer is not None
    return answer


def speeds(fleet: Fleet) -> PullSpeeds:
    return fleet.core.partitions[DEFAULT].ledger.loads.pull_speeds


@pytest.mark.parametrize("costs", ["set", "learnt"])
def test_a_pull_that_takes_longer_than_computing_is_left(costs: Costs) -> None:
    fleet = fleet_of(costs)
    pulls(fleet, 2 * BLOCK * TOKEN_S)
    assert bool(asks(fleet, 50).kv_source) == (costs == "set")


@pytest.mark.parametrize("costs", ["set", "learnt"])
def test_what_it_is_measured_to_take_is_predicted_and_told(costs: Costs) -> None:
    each_s = 0.5 * BLOCK * TOKEN_S
    fleet = fleet_of(costs)
    answer = pulls(fleet, each_s)
    expected_s = answer.effective_prefill_tokens * TOKEN_S
    expected_s += SHARED * (each_s if costs == "learnt" else 0.1 * BLOCK * TOKEN_S)
    assert answer.predicted_ttft_ms == pytest.approx(expected_s * 1e3, rel=0.02)
    rows = [row.speed for row in fleet.core.trust_monitor.table().ranks]
    (measured,) = [row.pulls for row in rows if row is not None]
    assert measured is not UNSET
    (row,) = measured
    assert (row.domain, row.tier, row.samples) == ("", "device", 2 * SURE)
    assert row.base_ms + row.ms_per_block * SHARED == pytest.approx(SHARED * each_s * 1e3)
    assert row.cost_per_block == pytest.approx(0.5, rel=0.02)
    assert row.abs_error_ms == pytest.approx(0.0, abs=0.01)


def test_pulls_within_a_domain_are_learnt_apart() -> None:
    config = RouterConfig(kv_pull=True, kv_transfer_cost_by_domain={"rack": 0.02})
    fleet = Fleet(config)
    for worker_id, rack in ((1, "a"), (2, "a"), (3, "b")):
        fleet.worker(worker_id, topology_domains={"rack": rack})
    partition = fleet.core.partitions[DEFAULT]
    fleet.hold(1, list(range(100, 130)))
    for number in range(8):
        fleet.book(f"busy{number}", 1, *range(9_000 + 50 * number, 9_050 + 50 * number))
    (near,) = partition.fleet_slots.workers[2].slots.values()
    (far,) = partition.fleet_slots.workers[3].slots.values()
    answer = selection_of(fleet.take("r", *range(100, 132)))
    assert answer.worker_id == 2
    booking = fleet.core.lifecycle.bookings.find("r")
    assert booking is not None
    pulled = booking.reservation.pulled
    assert pulled is not None
    assert partition.pull_path(near, pulled) == PullPath("rack", "device")
    assert partition.pull_path(far, pulled) == PullPath("", "device")
    fleet.delete(1)
    assert partition.pull_path(near, pulled) is None, "who left is connected by nothing"


@pytest.mark.parametrize("what", ["a queue before it", "another after it", "blocks that stay away"])
def test_a_first_token_that_waited_for_something_else_teaches_nothing(what: str) -> None:
    fleet = fleet_of()
    if what == "a queue before it":
        fleet.book("ahead", 2, 7_000)
    assert asks(fleet, 0).kv_source
    if what == "another after it":
        fleet.book("behind", 2, 7_000)
    cached = 0 if what == "blocks that stay away" else None
    fleet.now += 0.5
    fleet.core.reservations.prefill_complete("r0", fleet.now, cached)
    fleet.now += 1.0
    fleet.free("r0")
    assert not speeds(fleet).by_path


def test_one_engine_that_paused_teaches_little() -> None:
    fleet = fleet_of()
    each_s = 0.25 * BLOCK * TOKEN_S
    pulls(fleet, each_s)
    cost = speeds(fleet).cost(PullPath("", "device"), BLOCK)
    assert asks(fleet, 20).kv_source
    ends(fleet, "r20", 60.0)
    after = speeds(fleet).cost(PullPath("", "device"), BLOCK)
    assert cost is not None
    assert after is not None
    assert after[0] + SHARED * after[1] < 1.5 * (cost[0] + SHARED * cost[1])


@pytest.mark.parametrize("factor", [0.5, 10.0])
def test_a_pull_is_predicted_to_take_the_same_time_beside_engines_of_any_speed(
    factor: float,
) -> None:
    """Its price is in blocks of a rank of mean speed, and its time is its time."""
    fleet = fleet_of()
    loads = fleet.core.partitions[DEFAULT].ledger.loads
    (slot,) = fleet.core.partitions[DEFAULT].fleet_slots.workers[1].slots.values()
    for number in range(2 * SURE):
        tokens = 1_000 + 50 * number
        loads.speeds.computed(slot, tokens, tokens * TOKEN_S * factor)
    each_s = 0.25 * BLOCK * TOKEN_S
    answer = pulls(fleet, each_s)
    assert answer.kv_source
    expected_s = answer.effective_prefill_tokens * TOKEN_S + SHARED * each_s
    assert answer.predicted_ttft_ms == pytest.approx(expected_s * 1e3, rel=0.02)
    record = fleet.core.decisions.find(f"r{2 * SURE - 1}")
    assert record is not None
    explained = ExplainedRecord(record, 0.0, 0.1).whole()
    assert explained.predicted_ttft_ms == pytest.approx(answer.predicted_ttft_ms, abs=1e-3)
