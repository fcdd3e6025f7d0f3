"""Who sits where, against a list of who has come and not gone."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.types import WorkerRank
from select_service.core.fleet.catalog import Worker
from select_service.core.fleet.slots import FleetSlots
from select_service.types import SelectRequest, WorkerSpec
from tests.effort import examples

SLOTS = 24

coming = st.tuples(st.integers(0, 5), st.integers(1, 3), st.booleans())
steps = st.lists(st.one_of(coming, st.integers(0, 5)), max_size=25)


def attached(worker_id: int, size: int, free: list[int], *, drains: bool) -> Worker:
    worker = Worker(WorkerSpec(worker_id=worker_id, data_parallel_size=size, taints=["t"]))
    worker.slots = {rank: free.pop(0) for rank in range(size)}
    worker.lifecycle, worker.drain = ("draining", "tired") if drains else ("schedulable", None)
    return worker


@settings(max_examples=examples(200), deadline=None)
@given(steps)
def test_it_knows_who_has_come_and_not_gone(life: list[tuple[int, int, bool] | int]) -> None:
    fleet_slots, here = FleetSlots(), dict[int, Worker]()
    for step in life:
        worker_id = step if isinstance(step, int) else step[0]
        gone = here.pop(worker_id, None)
        if gone is not None:
            fleet_slots.let_go(gone)
        if not isinstance(step, int):
            taken = {slot for one in here.values() for slot in one.slots.values()}
            free = [slot for slot in range(SLOTS) if slot not in taken]
            here[worker_id] = attached(worker_id, step[1], free, drains=step[2])
            fleet_slots.take(here[worker_id])
        fleet_slots.ensure(SLOTS)
        fleet_slots.check()
        owners = {slot: (one, rank) for one in here.values() for rank, slot in one.slots.items()}
        for slot in range(SLOTS):
            assert fleet_slots.taints_at(slot) == ({"t"} if slot in owners else set())
            assert slot not in owners or fleet_slots.rank_at(slot) == owners[slot]
        is_open = {slot for slot, (one, _) in owners.items() if one.drain is None}
        assert set(np.arange(SLOTS)[fleet_slots.everyone].tolist()) == is_open
        assert fleet_slots.ranks == len(is_open)
        assert {slot for _, slot in fleet_slots.open_ranks_and_slots()} == is_open
        assert set(fleet_slots.leaving()) == owners.keys() - is_open
        ranks = [(WorkerRank(one.worker_id, rank), slot) for slot, (one, rank) in owners.items()]
        assert fleet_slots.ranks_and_slots() == sorted(ranks)
        only_draining = fleet_slots.only_draining(SelectRequest())
        drain = [one for one in here.values() if one.drain is not None]
        assert (only_draining is None) == (not drain)
