"""Workers' reports of their own load, the latest per rank, kept even where there is no gate yet.

A report counts until it is too old (`--load-report-stale-s`), and goes with its worker. How a rank
counts whose reports have stopped is a setting: a lost reporter need not stop dispatch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    __slots__ = ("at", "stale", "stale_as", "told")

    def __init__(self, told: RankMetrics, at: float) -> None:
        self.told = told
        self.at = at
        self.stale = False
        self.stale_as: StaleReports | None = None  # how gates were last told to treat it


class LoadReports:
    """Reports by worker and rank; gates get them on arrival, and again when they open."""

    def __init__(self, catalog: Catalog, partitions: Mapping[Scope, Partition]) -> None:
        self.by_worker: dict[int, dict[int, TimedReport]] = {}
        self.dropped = 0
        """Reports for ranks their worker has not declared."""
        self._catalog = catalog
        self._partitions = partitions

    def replay(self, worker: Worker, keeper: PartitionAdmission) -> None:
        """Pass the known reports of a worker to a gate."""
        for report in self.by_worker.get(worker.worker_id, {}).values():
            if not report.stale:
                keeper.report(worker, report.told)

    def report(
        self, worker_id: int, metrics: WorkerMetrics, now: float
    ) -> tuple[WorkerMetricsAnswer, Partition | None]:
        """Store a worker's reports about its ranks; undeclared ranks are dropped.

        Raises:
            WorkerNotFound: no such worker.
        """
        worker = self._catalog.get(worker_id)
        partition = self._partitions.get(worker.scope)
        keeper = None if partition is None else partition.admission
        accepted, dropped = [], []
        told = self.by_worker.setdefault(worker_id, {})
        for rank in metrics.ranks:
            if rank.dp_rank not in worker.ranks:
                dropped.append(rank.dp_rank)
                continue
            told[rank.dp_rank] = TimedReport(rank, now)
            accepted.append(rank.dp_rank)
            if keeper is not None:
                keeper.report(worker, rank)
        self.dropped += len(dropped)
        return WorkerMetricsAnswer(accepted, dropped), partition if keeper is not None else None

    def declared(self, worker: Worker) -> None:
        """Drop reports of ranks no longer declared: a later rank of that number is another one."""
        told = self.by_worker.get(worker.worker_id, {})
        for rank in [one for one in told if one not in worker.ranks]:
            del told[rank]

    def forget(self, worker_id: int) -> None:
        """Drop the reports of a worker that is gone."""
        self.by_worker.pop(worker_id, None)

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
