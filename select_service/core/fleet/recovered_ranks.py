"""Ranks that came with a dump and are not registered yet; they may stay for a limited time.

A recovered rank is claimed once a worker of its scope has it, or an event source is followed for
it. Ranks unclaimed by their deadline leave the index, and so does a scope without any ranks.
`service.py` notes what recovery brought and ages it in `tick`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from indexer.core.registry import StreamRegistry
    from indexer.types import Scope, WorkerRank
    from select_service.core.partition import Partition


class RecoveredRanks:
    """The ranks to be claimed, and their deadlines.

    Attributes:
        dropped: ranks that were not claimed in time.
    """

    def __init__(
        self, registry: StreamRegistry, partitions: Mapping[Scope, Partition], *, unclaimed_s: float
    ) -> None:
        self.dropped = 0
        self._registry = registry
        self._partitions = partitions
        self._unclaimed_s = unclaimed_s
        self._due: deque[tuple[float, Scope, WorkerRank]] = deque()  # by deadline

    def __len__(self) -> int:
        return len(self._due)

    def note(self, scope: Scope, ranks: Iterable[WorkerRank], now: float) -> None:
        """Set the deadline of a scope's ranks."""
        deadline = now + self._unclaimed_s
        self._due.extend((deadline, scope, rank) for rank in ranks)

    def age(self, now: float, budget: int) -> bool:
        """Judge up to `budget` ranks whose deadline has passed; return whether more are due."""
        while self._due and self._due[0][0] <= now:
            if budget <= 0:
                return True
            budget -= 1
            _, scope, rank = self._due.popleft()
            if not self._is_claimed(scope, rank):
                self._drop(scope, rank)
        return False

    def _is_claimed(self, scope: Scope, rank: WorkerRank) -> bool:
        partition = self._partitions.get(scope)
        worker = None if partition is None else partition.fleet_slots.present.get(rank.worker_id)
        return worker is not None and (
            rank.dp_rank in worker.slots or rank.dp_rank in worker.event_sources
        )

    def _drop(self, scope: Scope, rank: WorkerRank) -> None:
        index = self._registry.index(scope)
        if index is None or index.slot_of(rank) is None:
            return
        index.detach(rank)
        self.dropped += 1
        if scope not in self._partitions and not index.ranks():
            self._registry.drop_index(scope)  # its block size no longer binds
