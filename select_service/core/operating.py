"""The verbs of admission's operators, and of workers that tell their load.

`admitting.py` changes what is in force; whoever waits may be let in, or be refused, by that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.effects import NOTHING, Effects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.admission_types import (
        AdmissionChange,
        AdmissionStatus,
        BusyThreshold,
        BusyThresholdChange,
        BusyThresholds,
        WorkerMetrics,
        WorkerMetricsAnswer,
    )
    from select_service.core.admitting import Admitting
    from select_service.core.partition import Partition
    from select_service.core.selecting import Selecting
    from select_service.types import CoreLimits


class Operating:
    """Changes admission while requests come."""

    def __init__(self, admitting: Admitting, selecting: Selecting, limits: CoreLimits) -> None:
        self._admitting = admitting
        self._selecting = selecting
        self._limits = limits

    def admission(self) -> AdmissionStatus:
        """Describe what is in force."""
        return self._admitting.status()

    def change_admission(
        self, change: AdmissionChange, now: float
    ) -> tuple[AdmissionStatus, Effects]:
        """Put another policy in force at once; the first of who waits are judged again by it.

        Housekeeping goes on with the rest.

        Raises:
            InvalidField: there is no such policy, or its configuration makes no sense.
        """
        effects = self._judge_again(self._admitting.change(change, now), now)
        return self._admitting.status(), effects

    def busy_thresholds(self) -> BusyThresholds:
        """List what is in force."""
        return self._admitting.busy_thresholds()

    def change_threshold(
        self, change: BusyThresholdChange, now: float
    ) -> tuple[BusyThreshold, Effects]:
        """Set, clear or read thresholds; in force at once.

        Raises:
            ServiceError: as `Admitting.change_threshold`.
        """
        answer, touched = self._admitting.change_threshold(change, now)
        return answer, self._judge_again(touched, now)

    def forget_threshold(
        self, model: str, tenant_id: str | None, now: float
    ) -> tuple[BusyThreshold, Effects]:
        """Let what is above hold again."""
        answer, touched = self._admitting.forget_threshold(model, tenant_id, now)
        return answer, self._judge_again(touched, now)

    def _judge_again(self, partitions: Sequence[Partition], now: float) -> Effects:
        effects = Effects()
        for partition in partitions:
            if partition.pending_count:
                self._selecting.gather(partition, now)
                limit = self._limits.judged_per_turn_max
                effects = self._selecting.judge_again(partition, now, limit, effects)
        return effects

    def report(
        self, worker_id: int, metrics: WorkerMetrics, now: float
    ) -> tuple[WorkerMetricsAnswer, Effects]:
        """Take in what a worker says of its ranks.

        Raises:
            WorkerNotFound: no such worker.
        """
        answer, partition = self._admitting.report(worker_id, metrics, now)
        if partition is None:
            return answer, NOTHING
        return answer, self._selecting.relieve(partition, now, NOTHING)
