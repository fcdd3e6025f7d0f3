"""The verbs of draining: a worker takes no new work, and its reservations live on.

A drain is not part of a worker's record (`fleet/catalog.py`): it ends when an operator undoes it or
the record is removed. Requests that only this worker could serve are refused at once
(`waiting_room.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from select_service.core.effects import Effects
from select_service.types.drains import DrainStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from indexer.types import Scope
    from select_service.core.counters import Counters
    from select_service.core.fleet.catalog import Catalog, Worker
    from select_service.core.partition import Partition
    from select_service.core.replicas.plane import Replicas
    from select_service.core.verbs.registering import Registering
    from select_service.core.verbs.waiting_room import WaitingRoom
    from select_service.types.drains import DrainRequest


class Draining:
    """Takes workers out of service, reports their progress, and puts them back."""

    def __init__(
        self,
        catalog: Catalog,
        partitions: Mapping[Scope, Partition],
        registering: Registering,
        room: WaitingRoom,
        replicas: Replicas,
        counters: Counters,
    ) -> None:
        self._catalog = catalog
        self._partitions = partitions
        self._registering = registering
        self._room = room
        self._replicas = replicas
        self._counters = counters

    def drain(
        self, worker_id: int, request: DrainRequest, now: float
    ) -> tuple[DrainStatus, Effects]:
        """Give a worker no more work, whoever registered it. Repeatable; a reason replaces another.

        Raises:
            WorkerNotFound: no such id.
        """
        before = self._catalog.get(worker_id).drain
        self._counters.drains_begun += before is None
        return self._set(
            worker_id, (before or "") if request.reason is None else request.reason, now
        )

    def undrain(self, worker_id: int, now: float) -> tuple[DrainStatus, Effects]:
        """Let a worker be chosen again. Repeatable.

        Raises:
            WorkerNotFound: no such id.
        """
        self._counters.drains_undone += self._catalog.get(worker_id).drain is not None
        return self._set(worker_id, None, now)

    def _set(self, worker_id: int, drain: str | None, now: float) -> tuple[DrainStatus, Effects]:
        effects = Effects()
        worker = self._catalog.get(worker_id)
        if worker.drain != drain:
            worker = self._registering.set_drain(worker, drain, now, effects)
            partition = self._partitions.get(worker.scope)
            if partition is not None:
                self._room.look_again(partition, now, effects)
        return self._told(worker), effects

    def status(self, worker_id: int) -> DrainStatus:
        """Report what is in flight on a worker, whether or not it drains.

        Raises:
            WorkerNotFound: no such id.
        """
        return self._told(self._catalog.get(worker_id))

    def _told(self, worker: Worker) -> DrainStatus:
        requests = prefill = blocks = 0
        partition = self._partitions.get(worker.scope)
        if partition is not None:
            loads = partition.ledger.loads
            for slot in worker.slots.values():
                requests += int(loads.requests[slot])
                prefill += loads.prefill_left[slot]
                blocks += int(loads.decode[slot])
        waiting_for = [] if worker.drain is not None else ["a drain: it may be given new work"]
        if requests:
            waiting_for.append(f"{requests} reservation{'s' if requests > 1 else ''}")
        waiting_for += self._replicas.unsettled()
        lifecycle = worker.lifecycle
        assert lifecycle != "unschedulable", "it is in the catalog"
        return DrainStatus(
            worker_id=worker.worker_id,
            model_name=worker.scope.model_name,
            tenant_id=worker.scope.tenant_id,
            lifecycle=lifecycle,
            drains=worker.drain is not None,
            reason=worker.drain or UNSET,
            reservations=requests,
            prefill_tokens=prefill,
            decode_blocks=blocks,
            safe_to_terminate=not waiting_for,
            waiting_for=waiting_for,
        )
