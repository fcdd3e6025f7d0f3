"""Workers' reports of their own load, the latest per rank, kept even where there is no gate yet.

Reports received here are sent to the replicas (`RankLoads`), so a client that reports to one of
them reports to all; the latest report of a rank counts, wherever it was received. A report counts
until it is too old (`--load-report-stale-s`), and goes with its worker. How a rank counts whose
reports have stopped is a setting: a lost reporter need not stop dispatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.replication.messages import RankLoad
from select_service.types.admission import RankMetrics, WorkerMetricsAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from indexer.types import Scope
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.fleet.catalog import Catalog, Worker
    from select_service.core.partition import Partition
    from select_service.types.admission import AdmissionSettings, StaleReports, WorkerMetrics


class TimedReport:
    """One rank's report and its time."""

    __slots__ = ("at", "is_relayed", "metrics", "stale", "stale_as")

    def __init__(self, metrics: RankMetrics, at: float, *, is_relayed: bool = False) -> None:
        self.metrics = metrics
        self.at = at
        self.is_relayed = is_relayed  # we send it to the replicas
        self.stale = False
        self.stale_as: StaleReports | None = None  # how gates last treated it


class LoadReports:
    """Reports by worker and rank; gates get them on arrival, and again when they open."""

    def __init__(self, catalog: Catalog, partitions: Mapping[Scope, Partition]) -> None:
        self.by_worker: dict[int, dict[int, TimedReport]] = {}
        self.dropped = 0
        """Reports for ranks their worker has not declared."""
        self.from_replicas = 0
        """Reports of ranks that replicas received and that count here."""
        self.touched: dict[Partition, None] = {}
        """Partitions that replicas' reports may have relieved."""
        self._unsent: dict[tuple[int, int], None] = {}  # ranks whose report replicas lack
        self._catalog = catalog
        self._partitions = partitions

    def replay(self, worker: Worker, admission: PartitionAdmission) -> None:
        """Pass the known reports of a worker to a gate."""
        for report in self.by_worker.get(worker.worker_id, {}).values():
            if not report.stale:
                admission.report(worker, report.metrics)

    def report(
        self, worker_id: int, metrics: WorkerMetrics, now: float, *, is_relayed: bool = True
    ) -> tuple[WorkerMetricsAnswer, Partition | None]:
        """Store a worker's reports about its ranks; undeclared ranks are dropped.

        `is_relayed`: we send it to the replicas; not if the worker publishes it to all of them.

        Raises:
            WorkerNotFound: no such worker.
        """
        worker = self._catalog.get(worker_id)
        partition = self._partitions.get(worker.scope)
        admission = None if partition is None else partition.admission
        accepted, dropped = [], []
        reports = self.by_worker.setdefault(worker_id, {})
        for rank in metrics.ranks:
            if rank.dp_rank not in worker.ranks:
                dropped.append(rank.dp_rank)
                continue
            reports[rank.dp_rank] = TimedReport(rank, now, is_relayed=is_relayed)
            if is_relayed:
                self._unsent[worker_id, rank.dp_rank] = None
            accepted.append(rank.dp_rank)
            if admission is not None:
                admission.report(worker, rank)
        self.dropped += len(dropped)
        return WorkerMetricsAnswer(accepted, dropped), partition if admission is not None else None

    # -- between replicas ----------------------------------------------------------------------

    def take_unsent(self, now: float, limit: int) -> list[RankLoad]:
        """Take up to `limit` reports received here that were not sent to the replicas."""
        loads: list[RankLoad] = []
        while self._unsent and len(loads) < limit:
            worker_id, dp_rank = next(iter(self._unsent))
            del self._unsent[worker_id, dp_rank]
            report = self.by_worker.get(worker_id, {}).get(dp_rank)
            if report is None or not report.is_relayed:
                continue  # another replica has a later one, or the worker publishes to all
            metrics = report.metrics
            loads.append(
                RankLoad(
                    worker_id,
                    dp_rank,
                    max(0.0, now - report.at),
                    metrics.kv_used_blocks,
                    metrics.kv_total_blocks,
                    metrics.num_requests_waiting,
                    metrics.num_requests_running,
                )
            )
        return loads

    def queue_all(self) -> None:
        """Queue for the replicas every report received here that still counts; O(ranks)."""
        for worker_id, ranks in self.by_worker.items():
            for dp_rank, report in ranks.items():
                if report.is_relayed and not report.stale:
                    self._unsent[worker_id, dp_rank] = None

    def apply(self, load: RankLoad, now: float) -> None:
        """Store what a worker reported to a replica, unless a later report is known."""
        worker = self._catalog.find(load.worker_id)
        if worker is None or load.dp_rank not in worker.ranks:
            return  # not here, or not yet: the replica's next report may find it
        at = now - load.age_s
        reports = self.by_worker.setdefault(load.worker_id, {})
        before = reports.get(load.dp_rank)
        if before is not None and before.at >= at:
            return
        metrics = RankMetrics(
            dp_rank=load.dp_rank,
            kv_used_blocks=load.kv_used_blocks,
            kv_total_blocks=load.kv_total_blocks,
            num_requests_waiting=load.num_requests_waiting,
            num_requests_running=load.num_requests_running,
        )
        reports[load.dp_rank] = TimedReport(metrics, at)
        self.from_replicas += 1
        partition = self._partitions.get(worker.scope)
        if partition is not None and partition.admission is not None:
            partition.admission.report(worker, metrics)
            self.touched[partition] = None

    # -- the end of reports --------------------------------------------------------------------

    def declared(self, worker: Worker) -> None:
        """Drop reports of ranks no longer declared: a later rank of that number is another one."""
        reports = self.by_worker.get(worker.worker_id, {})
        for rank in [one for one in reports if one not in worker.ranks]:
            del reports[rank]
            self._unsent.pop((worker.worker_id, rank), None)

    def forget(self, worker_id: int) -> None:
        """Drop the reports of a worker that is gone."""
        for rank in self.by_worker.pop(worker_id, {}):
            self._unsent.pop((worker_id, rank), None)

    def stale(self) -> Iterator[tuple[int, int, TimedReport]]:
        """Yield (worker, rank, report) of reports that are too old."""
        for worker_id, ranks in self.by_worker.items():
            for rank, report in ranks.items():
                if report.stale:
                    yield worker_id, rank, report

    def age(self, now: float, settings: AdmissionSettings) -> set[Partition]:
        """Mark reports that are too old; O(ranks that ever reported).

        Returns:
            The partitions in which waiting requests may be admitted now.
        """
        changed: set[Partition] = set()
        oldest, stale_as = now - settings.load_report_stale_s, settings.load_report_stale_as
        for worker_id, ranks in self.by_worker.items():
            for rank, report in ranks.items():
                if (not report.stale and report.at >= oldest) or report.stale_as == stale_as:
                    continue
                report.stale, report.stale_as = True, stale_as
                worker = self._catalog.find(worker_id)
                partition = None if worker is None else self._partitions.get(worker.scope)
                if worker is not None and partition is not None and partition.admission:
                    partition.admission.report_stale(worker, rank, is_full=stale_as == "full")
                    changed.add(partition)
        return changed
