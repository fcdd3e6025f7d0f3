"""The verbs of the catalog: workers come, change and go, and so do their load and listeners.

`catalog.py` judges a record alone, `membership.py` puts it into its scope; this module makes both
one step and clears away the reservations that lost their rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.effects import Effects
from select_service.core.fleet.catalog import reconciliation_failed
from select_service.core.fleet.roster import API
from select_service.errors import WorkerConflict
from select_service.types import KvRankState, Outlier, Ready

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from indexer.core.stream import EventStream
    from indexer.types import WorkerRank
    from select_service.core.admission.controller import AdmissionController
    from select_service.core.fleet.catalog import Catalog, Worker
    from select_service.core.membership import Membership
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.partition import Partition
    from select_service.core.replication.plane import Replicas
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.core.routing.read import RequestReader
    from select_service.types import CoreLimits, WorkerPatch, WorkerRecord, WorkerSpec


class Registration:
    """Registers, changes, removes and lists workers."""

    def __init__(  # noqa: PLR0917 - the rooms a worker's coming and going touches
        self,
        catalog: Catalog,
        membership: Membership,
        lifecycle: Lifecycle,
        replicas: Replicas,
        reader: RequestReader,
        limits: CoreLimits,
        controller: AdmissionController,
        waiting_requests: WaitingRequests,
    ) -> None:
        self.sources: set[str] = set()
        """Sources now active; only they may change the workers they registered."""
        self._catalog = catalog
        self._membership = membership
        self._lifecycle = lifecycle
        self._replicas = replicas
        self._reader = reader
        self._limits = limits
        self._controller = controller
        self._waiting_requests = waiting_requests

    def upsert_worker(
        self, spec: WorkerSpec, now: float, source: str = API
    ) -> tuple[WorkerRecord, Effects]:
        """Put a whole record into the catalog.

        Raises:
            WorkerConflict: another source keeps this worker.
            TooManyWorkers: as many are registered as may be.
        """
        self._check_source(spec.worker_id, source)
        worker = self._catalog.admit(spec, source)
        self._catalog.check_room(spec.worker_id, worker.scope.tenant_id)
        return self._replace(worker, now)

    def restore(
        self,
        spec: WorkerSpec,
        now: float,
        source: str,
        operator_drain: str | None,
        unready: str | None,
    ) -> Effects:
        """Register a worker restored from disk, even if fewer workers may be registered now."""
        self._check_source(spec.worker_id, source)
        worker = self._catalog.admit(spec, source)
        worker.hold_back(operator_drain, unready)
        effects = Effects()
        self._put(worker, now, effects)
        return effects

    def _check_source(self, worker_id: int, source: str) -> None:
        known = self._catalog.find(worker_id)
        if known is None or known.source == source or known.is_absent:
            return
        if source != API or known.source in self.sources:
            raise WorkerConflict(worker_id, known.source)

    def patch_worker(
        self, worker_id: int, patch: WorkerPatch, now: float
    ) -> tuple[WorkerRecord, Effects]:
        """Merge a patch into a record.

        Raises:
            WorkerNotFound: no such id.
            WorkerConflict: another source keeps this worker.
        """
        self._check_source(worker_id, API)
        return self._replace(self._catalog.patched(worker_id, patch), now, is_patch=True)

    def delete_worker(
        self, worker_id: int, now: float, source: str = API
    ) -> tuple[WorkerRecord, Effects]:
        """Remove a record; its load and its index go with it.

        Raises:
            WorkerNotFound: no such id.
            WorkerConflict: another source keeps this worker.
        """
        self._check_source(worker_id, source)
        worker = self._catalog.get(worker_id)
        effects = Effects()
        self._change(worker, None, effects, now)
        self._catalog.remove(worker_id)
        self._recount()
        self.repin(now, effects)
        worker.lifecycle, worker.reasons = "unschedulable", []
        return worker.record(), effects

    def hold_back(
        self, old: Worker, operator: str | None, source: str | None, now: float, effects: Effects
    ) -> Worker:
        """Let a worker drain for these reasons (an operator's, its source's), or no longer."""
        worker = self._catalog.admit(old.spec, old.source)
        worker.hold_back(operator, source)
        self._put(worker, now, effects)
        return worker

    def _replace(
        self, worker: Worker, now: float, *, is_patch: bool = False
    ) -> tuple[WorkerRecord, Effects]:
        effects = Effects()
        known = self._catalog.find(worker.worker_id)
        if known is not None:  # its registration says that it is there
            worker.hold_back(known.operator_drain, None)
        self._put(worker, now, effects, is_patch=is_patch)
        self.repin(now, effects)
        worker = self._catalog.get(worker.worker_id)
        partition = self._membership.partitions.get(worker.scope)
        if known is not None and known.unready is not None and partition is not None:
            self._waiting_requests.look_again(partition, now, effects)
        return self._record(worker), effects

    def repin(self, now: float, effects: Effects) -> None:
        """Judge again the workers that could not agree with a scope's last ones, which have gone.

        The first of them pins its block size and EAGLE setting.
        """
        waiting = self._membership.waiting_to_pin
        if waiting:
            free = {scope for scope in set(waiting.values()) if self._membership.unpin(scope)}
            for worker_id in [one for one, scope in waiting.items() if scope in free]:
                self._judge_again(worker_id, now, effects)

    def _put(self, worker: Worker, now: float, effects: Effects, *, is_patch: bool = False) -> None:
        before = self._catalog.find(worker.worker_id)
        self._membership.judge(worker, before, is_patch=is_patch)
        self._change(before, worker, effects, now)
        self._catalog.put(worker)
        self._recount()

    def _change(self, old: Worker | None, new: Worker | None, effects: Effects, now: float) -> None:
        """Replace a worker's ranks; the first slice of the lost load is cleared away at once."""
        self._lifecycle.dropped(self._membership.replace(old, new, effects, now))
        partition = None if old is None else self._membership.partitions.get(old.scope)
        if partition is not None:
            self._lifecycle.sweep(partition, self._limits.dropped_per_turn_max, now)
        if new is not None:
            self._replicas.resolver.worker_came(new.scope, new.worker_id)
        self._update_gates(old, new, effects, now)

    def _update_gates(
        self, old: Worker | None, new: Worker | None, effects: Effects, now: float
    ) -> None:
        """Open a gate if there is reason to, and let in requests that waited for such a worker."""
        if new is None and old is not None:
            self._controller.reports.forget(old.worker_id)
        touched = [] if new is None else [self._controller.follow(new)]
        if old is not None and (new is None or new.scope != old.scope):
            touched.append(self._partition_with_gate(old))
        for partition in touched:
            if partition is not None and partition.pending_count:
                self._waiting_requests.gather(partition, now, to_judge=False)
                admission = partition.admission
                # those in the policy file's queue go when load goes
                if admission is not None and admission.waiting_count:
                    self._waiting_requests.relieve(partition, now, effects)

    def _partition_with_gate(self, worker: Worker) -> Partition | None:
        partition = self._membership.partitions.get(worker.scope)
        return partition if partition is not None and partition.admission is not None else None

    def refuse_source(self, rank: WorkerRank, why: str, now: float) -> Effects:
        """Take a worker out of service because its event source cannot be listened to."""
        effects = Effects()
        old = self._catalog.get(rank.worker_id)
        worker = self._catalog.admit(old.spec, old.source)
        worker.hold_back(old.operator_drain, old.unready)
        where = f"worker {rank.worker_id} dp_rank {rank.dp_rank}"
        worker.reasons = [reconciliation_failed(f"event source of {where}: {why}")]
        self._change(old, worker, effects, now)
        self._catalog.put(worker)
        self._recount()
        return effects

    def retry_source(self, worker_id: int, now: float) -> Effects:
        """Judge a worker again whose event source was refused for a reason that may be gone."""
        effects = Effects()
        self._judge_again(worker_id, now, effects)
        return effects

    def _judge_again(self, worker_id: int, now: float, effects: Effects) -> None:
        old = self._catalog.find(worker_id)
        if old is not None and old.lifecycle == "incomplete":
            worker = self._catalog.admit(old.spec, old.source)
            worker.hold_back(old.operator_drain, old.unready)
            self._put(worker, now, effects)

    def worker(self, worker_id: int) -> WorkerRecord:
        """Return one record.

        Raises:
            WorkerNotFound: no such id.
        """
        return self._record(self._catalog.get(worker_id))

    def _recount(self) -> None:
        self._reader.schedulable = self._catalog.count("schedulable")

    def _record(self, worker: Worker) -> WorkerRecord:
        streams = self._membership.streams_of(worker)
        doubts = _doubts(one for one in streams if one.kv_state == "uncertain")
        return worker.record(doubts, self._outliers(worker))

    def _outliers(self, worker: Worker) -> list[Outlier]:
        partition = self._membership.partitions.get(worker.scope)
        if partition is None or not partition.outliers.ranks:
            return []
        ranks, ejected = partition.outliers.ranks, partition.outliers.ejected
        return [
            Outlier(rank, one.reason, slot in ejected, one.failures, one.backoff_s)
            for rank, slot in worker.slots.items()
            if (one := ranks.get(slot)) is not None and one.reason is not None
        ]

    def workers(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[WorkerRecord]:
        """Return records by ascending id, filtered exactly. O(workers), some 5 µs each."""
        doubtful = self._membership.doubtful_streams()  # read once for all; usually empty
        return [
            worker.record(_doubts(doubtful.get(worker.worker_id, ())), self._outliers(worker))
            for worker in self._matching(model_name, tenant_id)
        ]

    def worker_ids(self, model_name: str | None = None, tenant_id: str | None = None) -> list[int]:
        """Return the ids of those records."""
        return [worker.worker_id for worker in self._matching(model_name, tenant_id)]

    def _matching(self, model_name: str | None, tenant_id: str | None) -> Iterator[Worker]:
        return (
            worker
            for worker in self._catalog
            if (model_name is None or worker.scope.model_name == model_name)
            and (tenant_id is None or worker.scope.tenant_id == tenant_id)
        )

    def ready(self, *, with_workers: bool = True) -> Ready:
        """Return whether at least one worker is schedulable, with all records if wanted."""
        schedulable = self._reader.schedulable
        return Ready(schedulable > 0, schedulable, self.workers() if with_workers else [])


def _doubts(streams: Iterable[EventStream]) -> list[KvRankState]:
    return [KvRankState(one.rank.dp_rank, "uncertain", one.lost_batches) for one in streams]
