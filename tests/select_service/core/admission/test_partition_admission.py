"""A gate that reads the ledger when asked knows at any time who is busy and who is full."""

from __future__ import annotations

import contextlib
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.errors import ServiceError
from select_service.types.admission import (
    AdmissionSettings,
    BusyThresholdChange,
    RankMetrics,
    WorkerMetrics,
)
from tests.effort import examples
from tests.select_service.core.admission.gated import keeper_of
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

WORKERS: tuple[dict[str, Any], ...] = (
    {"max_inflight": 3, "total_kv_blocks": 40, "max_num_batched_tokens": 64},
    {"max_inflight": 2, "total_kv_blocks": 9, "max_num_batched_tokens": 512, "ranks": 3},
    {},
)


def attach(some: Fleet, worker_id: int, ranks: int = 1, **record: Any) -> None:
    endpoints = {str(rank): f"tcp://127.0.0.1:{5000 + rank}" for rank in range(ranks)}
    sources = {"kv_events_endpoint": None, "kv_events_endpoints": endpoints}
    some.worker(worker_id, data_parallel_size=ranks, **sources, **record)


def fleet(*attached: int) -> Fleet:
    some = Fleet(
        admission=AdmissionSettings(
            mode="token-capacity",
            active_decode_blocks_threshold=0.5,
            active_prefill_tokens_threshold_frac=1.0,
        )
    )
    for number in attached or (1, 2, 3):
        attach(some, number, **WORKERS[number - 1])
    return some


def test_who_tells_how_little_he_has_is_busy_sooner_than_others() -> None:
    run = _Run(fleet(1, 3))
    keeper = keeper_of(run.some)
    keeper.refresh(run.some.now)
    run.report(3, 0, 10)
    keeper.refresh(run.some.now)
    run.book(3, 0, 6, 1)
    keeper.refresh(run.some.now)
    assert keeper.busy.count == 1
    run.some.core.check()


def test_less_load_on_who_is_not_busy_is_nothing_to_look_at() -> None:
    some = fleet(1, 3)
    keeper = keeper_of(some)
    keeper.refresh(some.now)
    noted = some.core.partitions[DEFAULT].ledger.changes
    assert noted is not None
    some.book("small", 3, 1)
    some.done("small")
    some.free("small")
    assert not noted.slots, "below every limit"


steps = st.one_of(
    st.tuples(
        *(st.just("book"), st.integers(1, 3), st.integers(0, 2)),
        *(st.integers(0, 30), st.integers(1, 400)),
    ),
    st.tuples(st.just("report"), st.integers(1, 3), st.integers(0, 60), st.integers(1, 60)),
    st.tuples(st.just("done"), st.integers(0, 9)),
    st.tuples(st.just("free"), st.integers(0, 9)),
    st.tuples(st.just("output"), st.integers(0, 9), st.none() | st.floats(0, 1)),
    st.tuples(st.just("leave"), st.integers(1, 3)),
    st.tuples(st.just("come"), st.integers(1, 3)),
    st.tuples(st.just("threshold"), st.none() | st.floats(0, 1), st.none() | st.integers(0, 300)),
)


class _Run:
    """One fleet, and what is booked on it."""

    def __init__(self, some: Fleet) -> None:
        self.some = some
        self._names, self._hashes = count(), count(1)
        self._live: list[str] = []

    def book(self, worker_id: int, rank: int, blocks: int, tokens: int) -> None:
        name, own = f"r{next(self._names)}", [next(self._hashes) for _ in range(blocks)]
        self.some.book(name, worker_id, *own, dp_rank=rank, isl=tokens)
        self._live.append(name)

    def done(self, number: int) -> None:
        if self._live:
            self.some.done(self._live[number % len(self._live)])

    def free(self, number: int) -> None:
        if self._live:
            self.some.free(self._live[number % len(self._live)])

    def output(self, number: int, fraction: float | None) -> None:
        if self._live:
            name = self._live[number % len(self._live)]
            self.some.core.reservations.output_block(name, fraction, self.some.now, 8)

    def report(self, worker_id: int, used: int, total: int) -> None:
        metrics = RankMetrics(kv_used_blocks=used, kv_total_blocks=total)
        self.some.core.admission.report(worker_id, WorkerMetrics(ranks=[metrics]), self.some.now)

    def leave(self, worker_id: int) -> None:
        self.some.delete(worker_id)

    def come(self, worker_id: int) -> None:
        attach(self.some, worker_id, **WORKERS[worker_id - 1])

    def threshold(self, decode: float | None, prefill: int | None) -> None:
        change = BusyThresholdChange(
            model="default",
            active_decode_blocks_threshold=decode,
            active_prefill_tokens_threshold=prefill,
        )
        self.some.core.admission.change_threshold(change, self.some.now)


@pytest.mark.parametrize("attached", [(1, 3), (1, 2, 3)], ids=["ranks alone", "ranks together"])
@settings(max_examples=examples(100), deadline=None)
@given(taken=st.lists(steps, max_size=40))
def test_bits_are_right_whatever_was_not_looked_at(
    attached: tuple[int, ...], taken: list[tuple[Any, ...]]
) -> None:
    run = _Run(fleet(*attached))
    for kind, *facts in taken:
        if kind == "come" and facts[0] not in attached:
            continue  # where ranks share a cap every booking is looked at
        with contextlib.suppress(ServiceError):  # full, gone, or unknown: nothing has changed
            getattr(run, kind)(*facts)
        run.some.core.check()


@pytest.mark.parametrize("policy", ["tier-shed", "gaie-legacy", "slo-shed"])
def test_policies_see_what_is_booked_at_once(policy: str) -> None:
    some = Fleet(admission=AdmissionSettings(policy=policy, prefill_tokens_per_s=1000.0))
    some.worker(1, total_kv_blocks=100)
    pool = keeper_of(some).pool
    assert (pool.saturation, pool.heaviest, pool.prefill_backlog) == (0.0, 0, 0)
    some.book("a", 1, *range(20), isl=320)
    some.book("b", 1, *range(20), isl=320)
    assert pool.saturation == pytest.approx(0.64), "of the tokens computed in a second"
    assert (pool.queue_depth.tolist(), pool.batch_size.tolist()) == ([1.0], [1.0])
    some.done("a")
    some.done("b")
    assert pool.saturation == pytest.approx(0.25)
    assert pool.prefill_backlog == 0
    assert pool.kv_utilization.tolist() == [0.2]
