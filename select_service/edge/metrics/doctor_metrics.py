"""Metrics of the doctor's findings; see `exposition.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from select_service.core.diagnostics.causes import CAUSES
from select_service.edge.metrics.families import Collector, counter, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from select_service.edge.driver.driver import Driver

__all__ = ["DoctorMetrics"]


class DoctorMetrics(Collector):
    """Findings by code; each code there is has a series."""

    def __init__(self, service: Driver) -> None:
        self._service = service

    @override
    def collect(self) -> Iterator[Metric]:
        doctor = self._service.diagnosed
        counts = {} if doctor is None else doctor.examiner.suspicions.counts()
        findings = gauge(
            "doctor_findings", "What is wired wrong, by the last examination.", ("code", "severity")
        )
        for cause in CAUSES:
            findings.add_metric([cause.code, cause.severity], counts.get(cause.code, 0))
        yield findings
        yield counter(
            "doctor_examinations",
            "Examinations made.",
            value=0 if doctor is None else doctor.examiner.rounds,
        )
        yield counter(
            "doctor_faults",
            "Examinations that failed by our error.",
            value=0 if doctor is None else doctor.faults,
        )
