"""The verbs that change admission, and that take in workers' load reports.

`controller.py` changes what is in force; the waiting requests that this lets in or refuses are then
handled through `waiting_requests.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.admission.status import status_in_steps
from select_service.core.effects import NOTHING, Effects

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from select_service.core.admission.controller import AdmissionController
    from select_service.core.membership import Membership
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.partition import Partition
    from select_service.types import CoreLimits
    from select_service.types.admission import (
        AdmissionChange,
        AdmissionStatus,
        BusyThreshold,
        BusyThresholdChange,
        BusyThresholds,
        WorkerMetrics,
        WorkerMetricsAnswer,
    )


class AdmissionControl:
    """Changes admission at run time."""

    def __init__(
        self,
        controller: AdmissionController,
        membership: Membership,
        waiting_requests: WaitingRequests,
        limits: CoreLimits,
    ) -> None:
        self._controller = controller
        self._membership = membership
        self._partitions = membership.partitions
        self._waiting_requests = waiting_requests
        self._limits = limits

    def reconfigure(
        self, limits: Mapping[str, object], admission: Mapping[str, object], now: float
    ) -> Effects:
        """Put other, already validated limits and admission settings in force at once."""
        for name, value in limits.items():
            setattr(self._limits, name, value)
        if not admission:
            return NOTHING
        settings = self._controller.settings
        for name, value in admission.items():
            setattr(settings, name, value)
        self._membership.cache_hit_threshold = settings.cache_hit_threshold
        for partition in self._partitions.values():
            partition.holds_to_cache = settings.cache_hit_threshold > 0.0
        return self._relieve(self._controller.follow_settings(now), now, to_judge=False)

    def status(self) -> Generator[None, None, AdmissionStatus]:
        """Describe the admission settings in force, pausing after every scope and threshold."""
        return status_in_steps(self._controller, self._membership)

    def change(self, change: AdmissionChange) -> Generator[Effects, float, AdmissionStatus]:
        """Put another policy in force; the first waiting requests are judged again by it.

        It goes one scope at a time: each step is sent the time, and yields its effects. From the
        first step on, new gates use the new policy; an existing gate keeps the old one until its
        turn comes. If two changes overlap, the later one ends up in force everywhere. All steps
        must be taken. Housekeeping continues with the rest of those that wait.

        Raises:
            InvalidField: there is no such policy, or its configuration makes no sense; with the
                first step.
        """
        self._controller.put(change)
        now = yield NOTHING
        for scope in self._membership.scopes():
            partition = self._partitions.get(scope)
            effects: Effects = NOTHING
            if partition is not None and self._controller.apply_to(partition, now):
                effects = self._relieve([partition], now, to_judge=True)
            now = yield effects
        steps = status_in_steps(self._controller, self._membership)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                status: AdmissionStatus = end.value
                return status
            yield NOTHING

    def busy_thresholds(self) -> Generator[None, None, BusyThresholds]:
        """List the thresholds in force, pausing after every one."""
        return self._controller.busy_thresholds()

    def change_threshold(
        self, change: BusyThresholdChange, now: float
    ) -> tuple[BusyThreshold, Effects]:
        """Set, clear or read thresholds; in force at once.

        Raises:
            ServiceError: as `AdmissionController.change_threshold`.
        """
        answer, touched = self._controller.change_threshold(change, now)
        return answer, self._relieve(touched, now, to_judge=False)

    def forget_threshold(
        self, model: str, tenant_id: str | None, now: float
    ) -> tuple[BusyThreshold, Effects]:
        """Drop a threshold, so that the more general one applies again."""
        answer, touched = self._controller.forget_threshold(model, tenant_id, now)
        return answer, self._relieve(touched, now, to_judge=False)

    def _relieve(self, partitions: Sequence[Partition], now: float, *, to_judge: bool) -> Effects:
        """Let in the waiting requests that may go now; under a new policy they are judged first."""
        effects = Effects()
        for partition in partitions:
            if partition.pending_count:
                self._waiting_requests.gather(partition, now, to_judge=to_judge)
                limit = self._limits.judged_per_turn_max
                effects = self._waiting_requests.judge_again(partition, now, limit, effects)
                effects.more |= bool(partition.admission and partition.admission.displaced)
        return effects

    def report(
        self, worker_id: int, metrics: WorkerMetrics, now: float, *, is_relayed: bool = True
    ) -> tuple[WorkerMetricsAnswer, Effects]:
        """Apply a worker's report of its ranks' load.

        `is_relayed`: the worker does not send it to the replicas, so we do.

        Raises:
            WorkerNotFound: no such worker.
        """
        answer, partition = self._controller.reports.report(
            worker_id, metrics, now, is_relayed=is_relayed
        )
        if partition is None:
            return answer, NOTHING
        return answer, self._waiting_requests.relieve(partition, now, NOTHING)
