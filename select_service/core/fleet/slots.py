"""The fleet of one scope: its workers, the slots of their ranks, and their roles.

A slot is the row of a rank in every column of the scope; the index assigns them. No rank is judged
here: `eligibility.py` and `roles.py` use this data to decide which may take a prompt.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from typing import TYPE_CHECKING

import numpy as np

from indexer.types import WorkerRank
from select_service.core.fleet.eligibility import eligible_slots
from select_service.core.fleet.roles import Roles
from select_service.errors import WorkerDraining

if TYPE_CHECKING:
    from select_service.core.columns import Rows
    from select_service.core.fleet.catalog import Worker
    from select_service.core.fleet.roles import TransferCosts
    from select_service.types import SelectRequest

    RankSlots = list[tuple[WorkerRank, int]]


class FleetSlots:
    """The workers of a scope and the slots of their ranks.

    A worker that comes, goes or changes costs O(its ranks), plus a copy of the open slots.
    """

    def __init__(self, costs: TransferCosts | None = None) -> None:
        self.workers: dict[int, Worker] = {}
        """Workers that may be chosen."""
        self.present: dict[int, Worker] = {}
        """The same plus those that drain: they keep load and index, but take nothing new."""
        self.roles = Roles(costs)
        self.everyone: Rows = slice(0, 0)
        self.ranks = 0  # number of rows in `everyone`
        self._open = array("q")  # selectable slots, ascending
        self._held: dict[int, list[int]] = {}  # slots by worker, as of its last `take`
        self.occupants: list[tuple[Worker, int] | None] = []
        """By slot, the worker and dp_rank that occupy it."""
        self._ranks_and_slots: tuple[RankSlots, RankSlots] | None = None
        """All ranks, and the open ones; None: not listed since the last change."""

    # -- arrivals and departures ---------------------------------------------------------------

    def ensure(self, slots: int) -> None:
        """Ensure that there are at least `slots` slots."""
        self.occupants += [None] * (slots - len(self.occupants))

    def take(self, worker: Worker) -> list[int]:
        """Attach a worker on the slots of its ranks, or follow a change of its record or slots.

        Returns:
            The slots it had before.
        """
        worker_id = worker.worker_id
        left = self._vacate(worker_id)
        self.present[worker_id] = worker
        held = self._held[worker_id] = list(worker.slots.values())
        self.ensure(max(held, default=-1) + 1)
        for rank, slot in worker.slots.items():
            self.occupants[slot] = worker, rank
        if worker.drain is None:
            self.workers[worker_id] = worker
            for slot in held:
                insort(self._open, slot)
        else:
            self.workers.pop(worker_id, None)
        self._count(worker_id, left)
        return left

    def let_go(self, worker: Worker) -> list[int]:
        """Remove a worker; return the slots it had."""
        left = self._vacate(worker.worker_id)
        self.workers.pop(worker.worker_id, None)
        self.present.pop(worker.worker_id, None)
        self._count(worker.worker_id, left)
        return left

    def _vacate(self, worker_id: int) -> list[int]:
        """Free the slots of a worker."""
        left = self._held.pop(worker_id, [])
        for slot in left:
            self.occupants[slot] = None
        if worker_id in self.workers:
            for slot in left:
                del self._open[bisect_left(self._open, slot)]
        return left

    def _count(self, changed: int, left: list[int]) -> None:
        self._ranks_and_slots = None
        workers, slots = self.workers, len(self.occupants)
        come = workers.get(changed)
        self.roles = self.roles.after(workers.values(), slots, changed, left, come)
        self.ranks = ranks = len(self._open)
        dense = not ranks or self._open[-1] == ranks - 1
        self.everyone = slice(0, ranks) if dense else np.array(self._open, dtype=np.int64)

    # -- slots and ranks -----------------------------------------------------------------------

    def rank_at(self, slot: int) -> tuple[Worker, int]:
        """Return the worker and dp_rank that occupy a slot."""
        occupant = self.occupants[slot]
        assert occupant is not None, "slot without a worker"
        return occupant

    def occupant(self, slot: int) -> WorkerRank | None:
        """Return the rank on a slot; None if it is empty."""
        occupant = self.occupants[slot] if slot < len(self.occupants) else None
        return None if occupant is None else WorkerRank(occupant[0].worker_id, occupant[1])

    def slot_of(self, rank: WorkerRank) -> int | None:
        """Return the slot of a rank; None: it has left during another task's turn."""
        worker = self.present.get(rank.worker_id)
        return None if worker is None else worker.slots.get(rank.dp_rank)

    def taints_at(self, slot: int) -> frozenset[str]:
        """Return the taints of a slot's worker; empty if it has left since a batch was planned."""
        occupant = self.occupants[slot]
        return frozenset() if occupant is None else occupant[0].taints

    def ranks_and_slots(self) -> RankSlots:
        """Return every rank with its slot, by worker id and rank, including those that drain."""
        return self._listed()[0]

    def open_ranks_and_slots(self) -> RankSlots:
        """Return the ranks that may be chosen."""
        return self._listed()[1]

    def _listed(self) -> tuple[RankSlots, RankSlots]:
        if self._ranks_and_slots is None:
            ranks_and_slots = [
                (WorkerRank(worker_id, rank), slot)
                for worker_id in sorted(self.present)
                for rank, slot in self.present[worker_id].slots.items()
            ]
            self._ranks_and_slots = (
                ranks_and_slots,
                [pair for pair in ranks_and_slots if pair[0].worker_id in self.workers],
            )
        return self._ranks_and_slots

    # -- draining ------------------------------------------------------------------------------

    def leaving(self) -> list[int]:
        """Return the slots of workers that drain."""
        drains = (worker for worker in self.present.values() if worker.drain is not None)
        return [slot for worker in drains for slot in worker.slots.values()]

    def only_draining(self, request: SelectRequest) -> WorkerDraining | None:
        """Return the refusal to use if only draining workers could serve a request, else None."""
        leaving = {id_: one for id_, one in self.present.items() if one.drain is not None}
        slots = eligible_slots(request, leaving) if leaving else []
        ids = dict.fromkeys(self.rank_at(slot)[0].worker_id for slot in slots)
        return WorkerDraining(ids) if ids else None

    def check(self) -> None:
        """Assert all invariants of the fleet."""
        assert self.workers == {i: one for i, one in self.present.items() if one.drain is None}
        for worker in self.present.values():
            assert worker.lifecycle == ("schedulable" if worker.drain is None else "draining")
            assert set(worker.slots) == set(worker.ranks), "a slot per rank"
            for rank, slot in worker.slots.items():
                assert self.rank_at(slot) == (worker, rank)
        slots = sorted(slot for one in self.workers.values() for slot in one.slots.values())
        assert list(self._open) == slots, "open are the slots that may be chosen"
        owned = {slot for one in self.present.values() for slot in one.slots.values()}
        for slot, occupant in enumerate(self.occupants):
            assert (occupant is not None) == (slot in owned), "a worker that left has no slots"
        self.roles.check()
        assert self.roles.given == any(one.slots and one.spec.role for one in self.workers.values())
        listed, self._ranks_and_slots = self._listed(), None
        assert listed == self._listed(), "lists are of present workers"
