"""Who sits where, kept up piece by piece: always as if it were looked at anew."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from typing_extensions import override

from indexer.types import Scope
from select_service.core.decisions import fleet_snapshot
from select_service.core.decisions.fleet_snapshot import FleetSnapshot
from select_service.types import CoreLimits, RouterConfig, SelectRequest
from tests.effort import examples
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

IDS = st.integers(0, 4)


class Churn(RuleBasedStateMachine):
    """Workers come, change and go; selections look now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(limits=CoreLimits(decision_ring=4))

    @rule(
        worker_id=IDS,
        tenant=st.sampled_from(["default", "other"]),
        size=st.integers(1, 3),
        start=st.integers(0, 1),
        record=st.sampled_from(
            [{}, {}, {"endpoint": None}, {"block_size": 32}, {"taints": ["a"]}, {"role": "decode"}]
        ),
        port=st.integers(6000, 6001),
    )
    def upsert(
        self, worker_id: int, tenant: str, size: int, start: int, record: dict[str, Any], port: int
    ) -> None:
        sources = {str(rank): f"tcp://h{rank}:{port}" for rank in range(start, start + size)}
        self.fleet.worker(
            worker_id,
            tenant_id=tenant,
            data_parallel_size=size,
            data_parallel_start_rank=start,
            kv_events_endpoint=None,
            kv_events_endpoints=sources,
            **record,
        )

    @rule(worker_id=IDS)
    def delete(self, worker_id: int) -> None:
        if self.fleet.core.catalog.find(worker_id) is not None:
            self.fleet.delete(worker_id)

    @rule(tenant=st.sampled_from(["default", "other"]), seconds=st.sampled_from([0.0, 1.0]))
    def look(self, tenant: str, seconds: float) -> None:
        core = self.fleet.core
        self.fleet.now += seconds
        partition = core.partitions.get(Scope("default", tenant))
        if partition is None or not any(
            one.spec.role is None for one in partition.fleet_slots.workers.values()
        ):
            return
        request = SelectRequest(
            block_hashes=[1], sequence_hashes=[1], isl_tokens=16, tenant_id=tenant
        )
        core.selection.select(request, self.fleet.now)
        record = next(core.decisions.newest_first())
        fresh = FleetSnapshot(
            *(partition.scope, partition.fleet_slots, partition.index.block_size),
            *(core.catalog, core.membership.stream_at, partition.estimate),
            speeds=partition.ledger.loads.speeds,
        )
        fresh.look(self.fleet.now)
        assert partition.fleet_snapshot is not None
        assert (record.fleet_slots.rank_states, record.fleet_slots.absent) == (
            fresh.latest[0].rank_states,
            fresh.latest[0].absent,
        )
        assert partition.fleet_snapshot._open == fresh._open
        assert record.fleet_snapshot[1:] == fresh.latest[1:]
        assert record.fleet_slots.at == {
            state.slot: n for n, state in enumerate(record.fleet_slots.rank_states)
        }
        assert set(record.fleet_slots.at) == {
            slot
            for worker in partition.fleet_slots.workers.values()
            for slot in worker.slots.values()
        }


TestChurn = Churn.TestCase
TestChurn.settings = hypothesis_settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None
)


class ChurnNobodyWaitsFor(Churn):
    """As above, and one worker is left to the next selection."""

    def __init__(self) -> None:
        self._noted_max = fleet_snapshot.NOTED_MAX
        fleet_snapshot.NOTED_MAX = 1  # type: ignore[misc]
        super().__init__()

    @override
    def teardown(self) -> None:
        fleet_snapshot.NOTED_MAX = self._noted_max  # type: ignore[misc]


TestChurnNobodyWaitsFor = ChurnNobodyWaitsFor.TestCase
TestChurnNobodyWaitsFor.settings = TestChurn.settings


def workers_looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every look at a seated worker from now on."""
    looked_at: list[int] = []
    attached = FleetSnapshot._attached

    def counted(self: FleetSnapshot, worker: Any) -> Any:
        looked_at.append(worker.worker_id)
        return attached(self, worker)

    monkeypatch.setattr(fleet_snapshot.FleetSnapshot, "_attached", counted)
    return looked_at


def test_many_that_come_while_nobody_asks_are_looked_at_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first selection paid for all of them, 10 ms for a thousand."""
    fleet = Fleet(RouterConfig(use_kv_events=False))
    looked_at = workers_looked_at(monkeypatch)
    for worker_id in range(500):
        before = len(looked_at)
        fleet.worker(worker_id)
        assert len(looked_at) <= before + 2, "it is noted twice: by its partition and its record"
    before = len(looked_at)
    fleet.select(1)
    assert len(looked_at) <= before + fleet_snapshot.NOTED_MAX
    record = next(fleet.core.decisions.newest_first())
    assert [state.worker_id for state in record.fleet_slots.rank_states] == list(range(500))


def test_one_changed_worker_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(RouterConfig(use_kv_events=False))
    for worker_id in range(20):
        fleet.worker(worker_id)
    fleet.select(1)
    looked_at = workers_looked_at(monkeypatch)
    fleet.worker(7, endpoint="http://elsewhere")
    fleet.select(1)
    assert looked_at == [7]
    fleet.select(1)
    assert looked_at == [7]


def test_ids_that_came_and_went_while_nobody_asked_are_forgotten() -> None:
    fleet = Fleet(RouterConfig(use_kv_events=False))
    fleet.worker(0)
    fleet.select(1)
    for worker_id in range(1, 500):
        fleet.worker(worker_id)
        fleet.delete(worker_id)
    kept = fleet.core.partitions[DEFAULT].fleet_snapshot
    assert kept is not None
    assert len(kept._noted) < 100
    fleet.select(1)
    assert not kept._noted


def test_a_scope_that_is_given_up_takes_what_was_noted_of_it_along() -> None:
    """By its last reference: nobody looks for cycles for hours."""
    fleet = Fleet(limits=CoreLimits(decision_ring=4, scope_linger_s=1.0))
    core = fleet.core
    scopes = [Scope("default", f"tenant-{number}") for number in range(3)]
    fleet.worker(0)
    for number, scope in enumerate(scopes, 1):
        fleet.worker(number, tenant_id=scope.tenant_id)
        fleet.select(number, tenant_id=scope.tenant_id)
    left = [weakref.ref(core.partitions[scope]) for scope in scopes]
    for number in range(1, 4):
        fleet.delete(number)
    for number in range(4):
        fleet.select(number)  # the ring has forgotten them
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            fleet.now += 11.0
            while core.tick(fleet.now)[0]:
                pass
        assert list(core.partitions) == [DEFAULT]
        assert [one() for one in left] == [None, None, None]
    finally:
        gc.enable()
