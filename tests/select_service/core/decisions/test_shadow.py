"""Weights that look on: what is skipped and why, what it may cost, and how they come and go."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core.admission.queue import Ticket
from select_service.core.decisions.shadow import BURST_S, ShadowReport
from select_service.core.decisions.shadow_regret import RegretTally, ShadowTally
from select_service.types import RouterConfig, RouterConfigOverride, Selection, SelectRequest
from select_service.types.batches import SelectBatchItem
from select_service.types.shadow import REGRET_BOUNDS, ShadowSettings, ShadowStatus
from tests.effort import examples
from tests.select_service.core.batches.test_batch_selection import place
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

LOADED = {"prefill_load_scale": 0.0}


class Watch:
    """A stopwatch on which everything that is measured takes so long."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.now = 0.0
        self.took_s = took_s

    def __call__(self) -> float:
        self.now += self.took_s
        return self.now


def watched(weights: Any = None, *, sample: float = 1.0, workers: int = 2, **more: Any) -> Fleet:
    cost_max = more.pop("cost_max", 1.0)
    fleet = Fleet(RouterConfig(use_kv_events=False), **more)
    for worker_id in range(1, workers + 1):
        fleet.worker(worker_id)
    said = ShadowSettings(weights=weights or LOADED, sample=sample, cost_max=cost_max)
    fleet.core.follow_shadow(said, fleet.now)
    return fleet


def tally(fleet: Fleet) -> ShadowTally:
    return fleet.core.partitions[DEFAULT].shadow_tally or ShadowTally()


def test_what_is_not_scored_is_counted_with_its_reason() -> None:
    fleet = watched()
    assert isinstance(fleet.select(1, 2), Selection)
    fleet.pair("pair", 3, 4)
    fleet.select(5, allowed_worker_ids=[2])
    assert tally(fleet).skipped == {"pair": 1, "only": 1}
    place(fleet, SelectBatchItem(block_hashes=[7, 8], sequence_hashes=[7, 8], isl_tokens=32, n=2))
    assert tally(fleet).skipped == {"pair": 1, "only": 1, "batch": 2}
    assert tally(fleet).scored == 1


def test_a_requests_own_weights_count_for_both_sides() -> None:
    fleet = watched({"overlap_score_credit": 0.0})
    fleet.hold(1, [1, 2, 3, 4])
    fleet.book("load", 1, 90, 91, isl=16)
    own = RouterConfigOverride(overlap_score_credit=1.0)
    fleet.select(1, 2, 3, 4, router_config_override=own)
    assert (tally(fleet).scored, tally(fleet).agreed) == (1, 1)


@given(st.floats(0.001, 1.0), st.integers(1, 2000))
def test_the_sample_is_its_share_at_any_time(share: float, count: int) -> None:
    """However many decisions there were; drawn ones would be off by their square root."""
    fleet = watched(sample=share)
    shadow = fleet.core.selection.filters.shadow
    assert shadow is not None
    request = SelectRequest(block_hashes=[1], sequence_hashes=[1], isl_tokens=16)
    partition, prompt, weights = fleet.core.reader.selection(request)
    ticket = Ticket(partition, request, prompt, weights, None, b"")
    ticket.in_batch = True  # all there is to know of it here
    for _ in range(count):
        assert shadow.watch(ticket, slice(0, 2), None, fleet.now, fleet.core._rng) is None
    assert sum(tally(fleet).skipped.values()) == count
    assert abs(tally(fleet).skipped.get("batch", 0) - share * count) < 4.0


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.floats(0.0, 0.5), st.integers(0, 20_000)), min_size=1, max_size=30),
    st.floats(0.0005, 1.0),
)
def test_it_never_costs_more_than_it_may(asked: list[tuple[float, int]], cost_max: float) -> None:
    """Over any time: the share of it, a burst's worth, and the one that spends the last of it."""
    clock = Watch()
    fleet = watched(cost_max=cost_max, stopwatch=clock)
    began, spent, most_s = fleet.now, 0.0, 0.0
    for pause_s, took_us in asked:
        fleet.now += pause_s
        clock.took_s = took_us * 1e-6
        most_s = max(most_s, clock.took_s)
        fleet.select(1, 2)
        before, spent = spent, fleet.core.shadow_control.budget.spent_s
        assert spent <= cost_max * (fleet.now - began + BURST_S) + most_s + 1e-9
        if spent == before and took_us:
            assert tally(fleet).skipped["budget"] > 0
    seen = tally(fleet)
    assert seen.scored + seen.skipped.get("budget", 0) == len(asked)


def test_a_budget_that_is_spent_comes_back() -> None:
    clock = Watch(0.05)
    fleet = watched(cost_max=0.01, stopwatch=clock)
    for _ in range(5):
        fleet.select(1, 2)
    assert (tally(fleet).scored, tally(fleet).skipped) == (1, {"budget": 4})
    fleet.now += 3.0  # 40 ms were too much, and come back at 10 a second
    fleet.select(1, 2)
    assert tally(fleet).skipped == {"budget": 5}
    fleet.now += 1.1
    fleet.select(1, 2)
    assert tally(fleet).scored == 2


def test_other_settings_bring_no_more_budget() -> None:
    clock = Watch(0.05)
    fleet = watched(cost_max=0.01, stopwatch=clock)
    for number in range(10):
        weights = {"prefill_load_scale": float(number % 3)}
        said = ShadowSettings(weights=weights, sample=1.0, cost_max=0.01)
        fleet.core.follow_shadow(said, fleet.now)
        fleet.select(1, 2)
    assert fleet.core.shadow_control.scored == 1


def test_who_waited_is_scored_when_a_place_is_found() -> None:
    fleet = watched()
    for worker_id in (1, 2):
        fleet.patch(worker_id, max_num_batched_tokens=10)
    fleet.book("a", 1, 1, isl=200)
    fleet.book("b", 2, 2, isl=200)
    fleet.take("c", 3, 4)
    assert tally(fleet).scored == 0
    fleet.done("a")
    assert tally(fleet).scored == 1


def test_other_weights_begin_anew_and_other_bounds_do_not() -> None:
    fleet = watched()
    fleet.select(1)
    follow = fleet.core.follow_shadow
    follow(ShadowSettings(weights=LOADED, sample=1.0, cost_max=0.5), fleet.now)
    assert tally(fleet).scored == 1
    fleet.select(1)
    assert tally(fleet).scored == 2
    follow(ShadowSettings(weights={"temperature": 0.3}, sample=1.0), fleet.now)
    assert tally(fleet).scored == 0
    fleet.select(1)
    follow(None, fleet.now)
    assert tally(fleet).scored == 0
    fleet.select(1)
    assert tally(fleet).scored == 0
    assert fleet.core.shadow_control.scored == 3, "of the process"


def status_of(fleet: Fleet, scopes_max: int = 10) -> ShadowStatus:
    report = ShadowReport(fleet.core.shadow_control, scopes_max)
    for partition in fleet.core.partitions.values():
        report.add(partition.scope, partition.shadow_tally)
    return report.status(fleet.now, with_cost=True)


def test_what_is_told_of_it() -> None:
    fleet = watched({"overlap_score_credit": 0.0})
    fleet.worker(3, tenant_id="acme")
    fleet.hold(1, [1, 2, 3, 4])
    fleet.book("load", 1, 90, 91, isl=16)
    fleet.select(1, 2, 3, 4)
    fleet.now += 5.0
    status = status_of(fleet)
    assert status.total == status.scopes[0].numbers
    numbers = status.scopes[0].numbers
    assert (status.enabled, status.since_s, status.scopes_total) == (True, 5.0, 2)
    assert status.shadow_weights is not None
    assert (status.live_weights.overlap_score_credit, status.live_weights.temperature) == (1.0, 0.0)
    assert status.shadow_weights.overlap_score_credit == 0.0
    assert (numbers.scored, numbers.agreed, numbers.agreement) == (1, 0, 0.0)
    assert numbers.regret_by_live_weights.mean == 1.0
    assert numbers.choices is not None
    gain = numbers.choices.gain
    assert (gain.prefill_tokens, gain.cached_tokens) == (-64, -64)
    assert (gain.queued_prefill_tokens, gain.decode_blocks) == (16, 2)
    nothing = status.scopes[1].numbers
    assert (nothing.agreement, nothing.choices, nothing.regret_by_live_weights.mean) == (None,) * 3
    few = status_of(fleet, 1)
    assert (len(few.scopes), few.scopes_total, few.total) == (1, 2, status.total)
    fleet.core.follow_shadow(None, fleet.now)
    off = status_of(fleet)
    assert (off.enabled, off.shadow_weights, off.total, off.scopes) == (False, None, None, [])


def test_what_a_record_of_it_is_charged_with() -> None:
    """A record that was scored is charged for it, so that the ring keeps to its bytes."""
    fleet = watched()
    fleet.select(1)
    charged = fleet.core.decisions.bytes
    fleet.core.follow_shadow(None, fleet.now)
    fleet.select(1)
    assert fleet.core.decisions.bytes < 2 * charged - 500


@given(st.lists(st.floats(-10.0, 3000.0), max_size=50))
def test_classes_of_regret(regrets: list[float]) -> None:
    seen = RegretTally()
    for one in regrets:
        seen.note(one)
    below = [sum(one <= bound for one in regrets) for bound in REGRET_BOUNDS]
    assert [sum(seen.counts[: at + 1]) for at in range(len(REGRET_BOUNDS))] == below
    assert sum(seen.counts) == len(regrets)


def test_sampling_draws_nothing() -> None:
    state = random.getstate()
    fleet = watched(sample=0.5)
    before = fleet.core._rng.getstate()
    for _ in range(10):
        fleet.select(1, allowed_worker_ids=[1])
    assert fleet.core._rng.getstate() == before
    assert random.getstate() == state
