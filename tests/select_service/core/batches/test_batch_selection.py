"""Batches: equal prefixes go together, nobody drowns, each is answered as it would be alone."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.types import WorkerRank
from select_service.core.batches.batch_plan import even_share
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.effects import Effects
from select_service.errors import BatchNotPlaced, InvalidField, InvalidRequest
from select_service.types import CoreLimits, PinnedWorker, RoutingConstraints, Selection
from select_service.types.admission import AdmissionSettings
from select_service.types.batches import SelectBatchAnswer, SelectBatchItem, SelectBatchRequest
from tests.effort import examples
from tests.select_service.core.whole_fleet import Fleet

if TYPE_CHECKING:
    from select_service.core.batches.batch_selection import Item


def prompt(*hashes: int, n: int = 1, isl: int | None = None, **wishes: Any) -> SelectBatchItem:
    return SelectBatchItem(
        block_hashes=list(hashes),
        sequence_hashes=list(hashes),
        isl_tokens=len(hashes) * 16 if isl is None else isl,
        n=n,
        **wishes,
    )


def place(
    fleet: Fleet, *items: Item | SelectBatchItem, checked: bool = True, **wants: Any
) -> SelectBatchAnswer:
    """Drive a batch to its end, stating all promises after each step; keep what it publishes."""
    request = SelectBatchRequest(requests=[], **wants)
    pairs = [(one, b"") if isinstance(one, SelectBatchItem) else one for one in items]
    steps = fleet.core.batch_selection.begin(request, pairs).steps(fleet.now)
    fleet.effects = Effects()
    try:
        effects = next(steps)
        while True:
            if checked:
                fleet.core.check()
            fleet.effects.published += effects.published
            effects = steps.send(fleet.now)
    except StopIteration as done:
        answer = done.value
        assert isinstance(answer, SelectBatchAnswer)
        fleet.core.check()
        return answer


def end_of(steps: Generator[Any, float, Any], now: float) -> Any:
    """Go on with a batch to its end."""
    try:
        while True:
            steps.send(now)
    except StopIteration as done:
        return done.value


def where(answer: SelectBatchAnswer) -> list[int]:
    """Return the workers of all samples, all of which were placed."""
    found = []
    for one in answer.results:
        assert isinstance(one.selection, Selection), one
        found.append(one.selection.worker_id)
    return found


def booked(fleet: Fleet) -> int:
    return sum(row.active_requests for row in fleet.core.queries.loads()[0].loads)


def fleet_of(workers: int, **more: Any) -> Fleet:
    fleet = Fleet(**more)
    for worker_id in range(1, workers + 1):
        fleet.worker(worker_id)
    return fleet


def group(number: int, blocks: int = 8) -> tuple[int, ...]:
    return tuple(1000 * number + block for block in range(1, blocks + 1))


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16])
def test_sixteen_groups_of_sixteen_compute_each_prefix_once_and_spread_evenly(workers: int) -> None:
    fleet = fleet_of(workers)
    items = [prompt(*group(number), n=16) for number in range(16)]
    answer = place(fleet, *items, reserve=True, checked=False)
    assert answer.placed == 256
    assert answer.groups == answer.prefixes_computed == 16
    taken = Counter(where(answer))
    assert set(taken.values()) == {256 // workers}
    (loads,) = fleet.core.queries.loads()
    assert [row.active_requests for row in loads.loads] == [256 // workers] * workers
    computed = 16 // workers * 8 * 16
    assert [row.potential_prefill_tokens for row in loads.loads] == [computed] * workers
    assert [row.potential_decode_blocks for row in loads.loads] == [16 // workers * 8] * workers
    assert [rank.prefill_tokens for rank in answer.ranks] == [computed] * workers


def test_samples_of_one_prompt_stay_together_on_an_idle_fleet_but_not_all_of_them() -> None:
    answer = place(fleet_of(8), prompt(*group(1), n=3))
    assert len(set(where(answer))) == 1
    answer = place(fleet_of(8), prompt(*group(1), n=16))
    assert sorted(Counter(where(answer)).values()) == [4, 4, 4, 4]
    assert answer.prefixes_computed == 4
    answer = place(fleet_of(8), prompt(*group(1), n=16), keep_together=16)
    assert answer.prefixes_computed == 1


def test_a_group_beyond_its_share_goes_on_elsewhere() -> None:
    answer = place(fleet_of(4), prompt(*group(1), n=100))
    assert sorted(Counter(where(answer)).values()) == [25, 25, 25, 25]
    answer = place(fleet_of(4), prompt(*group(1), n=100), load_limit=4.0)
    assert answer.prefixes_computed == 1


def test_what_stands_there_already_counts() -> None:
    fleet = fleet_of(2)
    for number in range(10):
        fleet.take(f"r{number}", 1, pinned_worker=PinnedWorker(worker_id=1, dp_rank=0))
    answer = place(fleet, *(prompt(*group(number)) for number in range(6)))
    assert set(where(answer)) == {2}


def test_a_group_goes_where_its_prefix_is_cached() -> None:
    fleet = fleet_of(4)
    fleet.hold(3, list(group(5)))
    answer = place(fleet, prompt(*group(5), n=4), prompt(*group(6), n=4))
    taken = where(answer)
    assert taken[:4] == [3] * 4
    assert 3 not in taken[4:]
    first = answer.results[0]
    assert isinstance(first.selection, Selection)
    assert first.selection.effective_prefill_tokens == 0
    assert first.selection.overlap.longest_matched == 128


def test_long_common_prefixes_make_a_group_and_short_ones_do_not() -> None:
    fleet = fleet_of(2)
    items = [prompt(1, 2, 3, 4, 5, 6, 100 + tail, 200 + tail) for tail in range(4)]
    answer = place(fleet, *items, reserve=True, keep_together=4)
    assert answer.groups == 1
    assert [one.shared_tokens for one in answer.results].count(0) == answer.prefixes_computed
    assert {one.shared_tokens for one in answer.results} == {0, 96}
    apart = [prompt(1, *(1000 * tail + block for block in range(7))) for tail in range(1, 5)]
    answer = place(fleet_of(2), *apart)
    assert answer.groups == 4
    assert sorted(Counter(where(answer)).values()) == [2, 2]


def test_each_sample_is_answered_as_it_would_be_alone() -> None:
    fleet = fleet_of(2, limits=CoreLimits(id_length_max=40))
    fleet.take("mine", *group(9))
    answer = place(
        fleet,
        prompt(*group(1), model_name="nobody"),
        InvalidRequest("it is odd", field="isl_tokens"),
        prompt(*group(2), pinned_worker=PinnedWorker(worker_id=2, dp_rank=0)),
        prompt(*group(3), reservation_id="mine"),
        prompt(*group(4), isl=0),
        prompt(*group(5), reservation_id="x" * 41),
        prompt(*group(6), reservation_id="ids", selection_id="seen", n=2),
        reserve=True,
    )
    assert [one.request for one in answer.results] == [0, 1, 2, 3, 4, 5, 6, 6]
    assert [one.status for one in answer.results] == [503, 400, 200, 409, 400, 422, 200, 200]
    assert answer.results[0].code == "no_schedulable_worker"
    assert answer.results[0].retry_after_s == 1
    assert answer.results[1].field == "requests[1].isl_tokens"
    pinned, *twice = (one.selection for one in answer.results if one.status == 200)
    assert isinstance(pinned, Selection)
    assert pinned.worker_id == 2
    assert [one.reservation_id for one in twice if isinstance(one, Selection)] == ["ids.0", "ids.1"]
    assert [one.selection_id for one in twice if isinstance(one, Selection)] == ["seen.0", "seen.1"]
    assert answer.placed == 3
    failed = fleet.core.counters.selections_failed
    assert failed["no_schedulable_worker"] == 1
    assert sum(row.active_requests for row in fleet.core.queries.loads()[0].loads) == 4


def test_all_or_none() -> None:
    fleet = fleet_of(2)
    items = [prompt(*group(1), n=3), prompt(*group(2), allowed_worker_ids=[77])]
    with pytest.raises(BatchNotPlaced, match=r"sample 3 of the batch \(requests\[1\]\)") as refused:
        place(fleet, *items, reserve=True, atomic=True)
    assert refused.value.status == 503
    assert refused.value.details == {"request": 1, "sample": 3, "code": "no_eligible_worker"}
    assert booked(fleet) == 0
    assert all(row.active_requests == 0 for row in fleet.core.queries.loads()[0].loads)
    assert fleet.core.counters.batches_undone == 1
    assert place(fleet, items[0], reserve=True, atomic=True).placed == 3


def test_what_was_booked_before_survives_a_batch_that_is_undone() -> None:
    fleet = fleet_of(2)
    place(fleet, prompt(*group(1), reservation_id="kept"), reserve=True)
    with pytest.raises(BatchNotPlaced):
        place(
            fleet,
            prompt(*group(1), reservation_id="kept"),
            prompt(*group(2), model_name="nobody"),
            reserve=True,
            atomic=True,
        )
    assert fleet.core.lifecycle.bookings.find("kept") is not None


def test_nobody_waits_in_a_batch() -> None:
    fleet = fleet_of(1, admission=AdmissionSettings(max_inflight=2, max_queued=5))
    answer = place(fleet, prompt(*group(1), n=3), reserve=True)
    assert [one.status for one in answer.results] == [200, 200, 503]
    assert answer.results[2].code == "would_wait"
    assert answer.results[2].retry_after_s >= 1  # type: ignore[operator] # it is a refusal for load
    assert fleet.core.partitions[next(iter(fleet.core.partitions))].pending_count == 0
    with pytest.raises(BatchNotPlaced, match="a batch does not wait"):
        place(fleet, prompt(*group(2)), reserve=True, atomic=True)


def test_a_full_worker_gets_none_and_others_take_over() -> None:
    fleet = fleet_of(2, admission=AdmissionSettings(max_inflight=4, max_queued=0))
    fleet.hold(1, list(group(1)))
    answer = place(fleet, prompt(*group(1), n=6), reserve=True, load_limit=4.0)
    assert Counter(where(answer)) == {1: 4, 2: 2}
    shared = dict(zip(where(answer), (one.shared_tokens for one in answer.results), strict=True))
    assert shared == {1: 128, 2: 0}  # the last on each: of those on 2, none was planned there


def test_a_rank_that_only_the_index_knows_takes_nothing() -> None:
    fleet = fleet_of(2)
    (partition,) = fleet.core.membership.partitions.values()
    partition.index.attach(WorkerRank(9, 0))  # as for a listener whose worker is incomplete
    assert sorted(where(place(fleet, prompt(*group(1)), prompt(*group(2))))) == [1, 2]


def test_wishes_are_met() -> None:
    fleet = Fleet()
    for worker_id in range(1, 5):
        fleet.worker(worker_id, taints=["big"] if worker_id > 2 else [])
    big = RoutingConstraints(required_taints=["big"])
    answer = place(
        fleet,
        prompt(*group(1), n=8, routing_constraints=big),
        prompt(*group(1), n=4, allowed_worker_ids=[1]),
        checked=False,
    )
    taken = where(answer)
    assert set(taken[:8]) <= {3, 4}
    assert set(taken[8:]) == {1}
    liked = RoutingConstraints(preferred_taints={"big": 5.0})
    assert set(where(place(fleet, prompt(*group(7), n=2, routing_constraints=liked)))) <= {3, 4}


def test_a_decision_says_that_the_rank_was_chosen_with_others() -> None:
    fleet = fleet_of(3, limits=CoreLimits(decision_ring=100))
    answer = place(fleet, prompt(*group(1), n=2, explain=True, reservation_id="r"), reserve=True)
    taken = where(answer)
    record = fleet.core.decisions.find("r.1")
    assert record is not None
    explained = ExplainedRecord(record, 0.0, 0.0)
    candidates = explained.candidates(0, 3)
    assert [one.excluded for one in candidates if one.worker_id != taken[1]] == ["batch"] * 2
    (chosen,) = (one for one in candidates if one.worker_id == taken[1])
    assert chosen.excluded is None


def test_a_worker_that_goes_in_between_takes_none_of_the_rest() -> None:
    fleet = fleet_of(2)
    request = SelectBatchRequest(requests=[], reserve=True)
    batch = fleet.core.batch_selection.begin(request, [(prompt(*group(n)), b"") for n in range(8)])
    steps = batch.steps(fleet.now)
    next(steps)
    while not fleet.core.queries.loads()[0].loads[0].active_requests:
        steps.send(fleet.now)
    fleet.delete(1)
    answer = end_of(steps, fleet.now)
    assert answer.placed == 8
    assert sum(row.active_requests for row in fleet.core.queries.loads()[0].loads) == 7
    fleet.core.check()


def test_a_worker_that_goes_while_ranks_are_priced_takes_nothing() -> None:
    """Also where workers' taints are looked at, and it has none any more."""
    fleet = fleet_of(2)
    preferred = RoutingConstraints([], {"near": 1.0})
    items = [prompt(*group(n), routing_constraints=preferred) for n in range(4)]
    batch = fleet.core.batch_selection.begin(
        SelectBatchRequest(requests=[]), [(one, b"") for one in items]
    )
    steps = batch.steps(fleet.now)
    next(steps)
    fleet.delete(1)
    assert set(where(end_of(steps, fleet.now))) == {2}


def test_a_batch_that_is_given_up_leaves_nothing() -> None:
    fleet = fleet_of(2)
    request = SelectBatchRequest(requests=[], reserve=True)
    batch = fleet.core.batch_selection.begin(request, [(prompt(*group(n)), b"") for n in range(8)])
    steps = batch.steps(fleet.now)
    next(steps)
    while booked(fleet) < 5:
        steps.send(fleet.now)
    steps.close()
    undoing = batch.undo(fleet.now)
    with contextlib.suppress(StopIteration):
        next(undoing)
        while True:
            fleet.core.check()
            undoing.send(fleet.now)
    assert booked(fleet) == 0
    fleet.core.check()


@given(standing=st.lists(st.integers(0, 50), min_size=1, max_size=12), arriving=st.integers(0, 200))
def test_the_even_share_is_a_water_level(standing: list[int], arriving: int) -> None:
    level = even_share(standing, arriving)
    filled = sum(max(0.0, level - one) for one in standing)
    assert filled == pytest.approx(arriving)


@settings(max_examples=examples(60))
@given(seed=st.integers(0, 2**32), limit=st.sampled_from([1.0, 1.1, 1.5, 4.0]))
def test_whatever_comes_is_placed_once_where_it_may_go_and_no_rank_takes_too_many(
    seed: int, limit: float
) -> None:
    draw = random.Random(seed)
    workers = draw.randint(1, 6)
    fleet = fleet_of(workers)
    for number in range(draw.randint(0, 10)):
        fleet.take(f"before{number}", draw.randint(1, 5))
    standing = [row.active_requests for row in fleet.core.queries.loads()[0].loads]
    items = []
    for _ in range(draw.randint(1, 8)):
        hashes = group(draw.randint(1, 4), draw.randint(0, 9))
        items.append(prompt(*hashes, n=draw.randint(1, 9), isl=len(hashes) * 16 + 3))
    together = draw.randint(1, 4)
    answer = place(
        fleet, *items, reserve=True, load_limit=limit, keep_together=together, checked=False
    )
    samples = sum(item.n for item in items)
    assert len(where(answer)) == samples == answer.placed
    assert answer.groups <= answer.prefixes_computed <= samples
    rows = fleet.core.queries.loads()[0].loads
    assert sum(row.active_requests for row in rows) == samples + sum(standing)
    level = even_share(standing, samples)
    for row, before in zip(rows, standing, strict=True):
        most = max(before, level * limit, level + 1)
        assert row.active_requests <= most + together
    assert sum(rank.requests for rank in answer.ranks) == samples
    total = sum(row.potential_prefill_tokens for row in rows)
    for one in answer.results:
        assert isinstance(one.selection, Selection)
        fleet.free(str(one.selection.reservation_id))
    assert total >= sum(rank.prefill_tokens for rank in answer.ranks)


def test_who_is_refused_takes_nothing_from_those_who_sit_behind_him() -> None:
    """The prefix is computed by who sits before him; the plan had them share it with him."""
    fleet = fleet_of(1)
    fleet.take("mine", *group(9))
    items = [prompt(*group(1), reservation_id=name) for name in ("a", "mine", "c", "mine", "d")]
    answer = place(fleet, *items, reserve=True)
    assert [one.status for one in answer.results] == [200, 409, 200, 409, 200]
    assert [one.shared_tokens for one in answer.results] == [0, 0, 128, 0, 128]
    assert answer.prefixes_computed == answer.groups == 1
    assert sum(rank.prefill_tokens for rank in answer.ranks) == 128
    first = place(fleet_of(1), prompt(*group(1), n=2), reserve=True)
    assert first.prefixes_computed == 1


def test_an_id_that_comes_twice_in_a_batch_takes_nothing_from_others() -> None:
    same = prompt(*group(1), reservation_id="r")
    answer = place(fleet_of(1), same, same, prompt(*group(1), reservation_id="s"), reserve=True)
    assert [one.status for one in answer.results] == [200] * 3
    assert answer.prefixes_computed == 1
    assert sum(rank.requests for rank in answer.ranks) == 2


def test_what_who_is_refused_had_in_common_is_the_most_his_neighbours_have() -> None:
    fleet = fleet_of(1)
    fleet.take("mine", *group(9))
    items = [
        prompt(*group(1, 8)),
        prompt(*group(1, 6), 72, 73, reservation_id="mine"),
        prompt(*group(1, 6), 74, 75),
    ]
    answer = place(fleet, *items, reserve=True)
    assert [one.status for one in answer.results] == [200, 409, 200]
    assert answer.results[2].shared_tokens in {0, 96}
    assert answer.groups == answer.prefixes_computed == 1


def test_what_others_compute_counts_for_who_asks_for_hits_too_but_is_no_hit() -> None:
    asked: dict[str, Any] = {"cache_hit_threshold": 0.9, "reservation_id": "r"}
    refused = place(fleet_of(2), prompt(*group(1), n=2, **asked), reserve=True)
    assert refused.placed == 0, "nobody holds it yet"
    answer = place(
        fleet_of(2), prompt(*group(1), n=3, on_cache_threshold="fallback", **asked), reserve=True
    )
    computed = [
        one.selection.effective_prefill_tokens
        for one in answer.results
        if isinstance(one.selection, Selection)
    ]
    assert computed == [128, 0, 0]
    assert [one.shared_tokens for one in answer.results] == [0, 128, 128]
    assert [rank.prefill_tokens for rank in answer.ranks] == [128]


def test_limits_are_told_before_anything_happens() -> None:
    fleet = fleet_of(1, limits=CoreLimits(batch_samples_max=3))
    with pytest.raises(InvalidField, match="at most 3 samples"):
        place(fleet, prompt(1, n=2), prompt(2, n=2))
    with pytest.raises(InvalidField, match="atomic needs reserve"):
        place(fleet, prompt(1), atomic=True)
    assert fleet.core.counters.batches == 0
