"""The verbs of draining: a worker takes no new work, and its reservations live on.

An operator drains it, or the source that named it says that it is not ready. Neither is part of the
record (`fleet/catalog.py`), and neither undoes the other. Requests that only this worker could
serve are refused at once (`waiting_requests.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from select_service.core.effects import Effects
from select_service.types.workers import DrainStatus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from indexer.types import Scope
    from select_service.core.counters import Counters
    from select_service.core.fleet.catalog import Catalog, Worker
    from select_service.core.operations.registration import Registration
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.partition import Partition
    from select_service.core.replication.plane import Replicas
    from select_service.types.workers import DrainRequest


class Drain:
    """Takes workers out of service, reports their progress, and puts them back."""

    def __init__(
        self,
        catalog: Catalog,
        partitions: Mapping[Scope, Partition],
        registration: Registration,
        waiting_requests: WaitingRequests,
        replicas: Replicas,
        counters: Counters,
    ) -> None:
        self._catalog = catalog
        self._partitions = partitions
        self._registration = registration
        self._waiting_requests = waiting_requests
        self._replicas = replicas
        self._counters = counters

    def drain(
        self, worker_id: int, request: DrainRequest, now: float
    ) -> tuple[DrainStatus, Effects]:
        """Give a worker no more work, whatever its source. Repeatable; a reason replaces another.

        Raises:
            WorkerNotFound: no such id.
        """
        worker = self._catalog.get(worker_id)
        before = worker.operator_drain
        self._counters.drains_begun += before is None
        reason = (before or "") if request.reason is None else request.reason
        effects = Effects()
        return self._status_of(self._set(worker, reason, worker.unready, now, effects)), effects

    def undrain(self, worker_id: int, now: float) -> tuple[DrainStatus, Effects]:
        """Let a worker be chosen again, as far as its source agrees. Repeatable.

        Raises:
            WorkerNotFound: no such id.
        """
        worker = self._catalog.get(worker_id)
        self._counters.drains_undone += worker.operator_drain is not None
        effects = Effects()
        return self._status_of(self._set(worker, None, worker.unready, now, effects)), effects

    def hold_back(self, worker_id: int, source: str, why: str | None, now: float) -> Effects:
        """Note that a source says why a worker takes no new work; None: it takes work again.

        Only the source that keeps the worker is believed.
        """
        effects = Effects()
        worker = self._catalog.find(worker_id)
        if worker is not None and worker.source == source:
            self._set(worker, worker.operator_drain, why, now, effects)
        return effects

    def _set(
        self, worker: Worker, operator: str | None, source: str | None, now: float, effects: Effects
    ) -> Worker:
        if (worker.operator_drain, worker.unready) == (operator, source):
            return worker
        worker = self._registration.hold_back(worker, operator, source, now, effects)
        partition = self._partitions.get(worker.scope)
        if partition is not None:
            self._waiting_requests.look_again(partition, now, effects)
        return worker

    def status(self, worker_id: int) -> DrainStatus:
        """Report what is in flight on a worker, whether or not it drains.

        Raises:
            WorkerNotFound: no such id.
        """
        return self._status_of(self._catalog.get(worker_id))

    def _status_of(self, worker: Worker) -> DrainStatus:
        requests = prefill = blocks = 0
        partition = self._partitions.get(worker.scope)
        if partition is not None:
            loads = partition.ledger.loads
            for slot in worker.slots.values():
                requests += int(loads.requests[slot])
                prefill += loads.prefill_left[slot]
                blocks += int(loads.decode[slot])
        drains = worker.operator_drain is not None
        waiting_for = [] if drains else ["a drain: it may be given new work"]
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
            drains=drains,
            reason=worker.operator_drain or UNSET,
            reservations=requests,
            prefill_tokens=prefill,
            decode_blocks=blocks,
            safe_to_terminate=not waiting_for,
            waiting_for=waiting_for,
        )
