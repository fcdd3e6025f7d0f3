"""The operator's operations of the driver: admission, busy thresholds, load reports of workers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from select_service.edge.cooperative import TimeSlices, take_steps
from select_service.edge.driver.core_calls import CoreCalls
from select_service.errors import WorkerNotFound

if TYPE_CHECKING:
    from select_service.core.instrumentation.recorder import Recorder
    from select_service.types.admission import (
        AdmissionChange,
        AdmissionStatus,
        BusyThreshold,
        BusyThresholdChange,
        BusyThresholds,
        WorkerMetrics,
        WorkerMetricsAnswer,
    )


class AdmissionOperations(CoreCalls):
    """Changes made while the service runs."""

    _recorder: Recorder | None
    _changing: set[asyncio.Task[AdmissionStatus]]

    async def admission(self) -> AdmissionStatus:
        """GET /admission; yields to the loop every fraction of a millisecond."""
        return await TimeSlices().through(self.core.admission.status())

    async def change_admission(self, change: AdmissionChange) -> AdmissionStatus:
        """PUT /admission; in force everywhere once answered, even if the caller disconnects.

        Yields to the loop every fraction of a millisecond; requests judged in between may still see
        the old policy. Housekeeping then re-evaluates waiting requests.

        Raises:
            InvalidField: there is no such policy, or its configuration is invalid.
        """
        steps = self.core.admission.change(change)
        self._carry_out(next(steps))
        self.note_change("admission", msgspec.to_builtins(change))
        work = take_steps(steps, self._clock, self._carry_out, are_begun=True)
        task = asyncio.get_running_loop().create_task(work)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return await asyncio.shield(task)

    async def busy_thresholds(self) -> BusyThresholds:
        """GET /busy_threshold; yields to the loop every fraction of a millisecond."""
        return await TimeSlices().through(self.core.admission.busy_thresholds())

    def change_threshold(self, change: BusyThresholdChange) -> BusyThreshold:
        """Set or clear busy thresholds of a model; with none given, read them."""
        answer, effects = self.core.admission.change_threshold(change, self._clock())
        self._carry_out(effects)
        self.note_change("busy_threshold", msgspec.to_builtins(change))
        return answer

    def forget_threshold(self, model: str, tenant_id: str | None) -> BusyThreshold:
        """DELETE /busy_threshold."""
        answer, effects = self.core.admission.forget_threshold(model, tenant_id, self._clock())
        self._carry_out(effects)
        self.note_change("busy_threshold_forgotten", {"model": model, "tenant_id": tenant_id})
        return answer

    def report(self, worker_id: int, metrics: WorkerMetrics) -> WorkerMetricsAnswer:
        """Apply what a worker reports of its own load."""
        answer, effects = self.core.admission.report(worker_id, metrics, self._clock())
        self._carry_out(effects)
        return answer

    def apply_published_load(self, worker_id: int, metrics: WorkerMetrics) -> None:
        """Apply a load report that a worker published beside its events."""
        with contextlib.suppress(WorkerNotFound):  # deregistered meanwhile
            _, effects = self.core.admission.report(
                worker_id, metrics, self._clock(), is_relayed=False
            )
            self._carry_out(effects)

    def note_change(self, what: str, values: dict[str, object]) -> None:
        """Note a change in the recording, if there is one."""
        if self._recorder is not None:
            self._recorder.change(self._clock(), what, values)
