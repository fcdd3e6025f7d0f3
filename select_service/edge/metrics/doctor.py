"""What the doctor finds, for /metrics; see `exposition.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from typing_extensions import override

from select_service.core.doctor.causes import CAUSES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from select_service.edge.driver import Driver

__all__ = ["DoctorMetrics"]


class DoctorMetrics(Collector):
    """Findings by code; each code there is has a series."""

    def __init__(self, service: Driver, prefix: str) -> None:
        self._service = service
        self._prefix = prefix

    @override
    def collect(self) -> Iterator[Metric]:
        doctor = self._service.diagnosed
        counts = {} if doctor is None else doctor.examiner.suspicions.counts()
        findings = GaugeMetricFamily(
            self._prefix + "doctor_findings",
            "What is wired wrong, by the last examination.",
            labels=("code", "severity"),
        )
        for cause in CAUSES:
            findings.add_metric([cause.code, cause.severity], counts.get(cause.code, 0))
        yield findings
        rounds = CounterMetricFamily(self._prefix + "doctor_examinations", "Examinations made.")
        rounds.add_metric((), 0 if doctor is None else doctor.examiner.rounds)
        yield rounds
        faults = CounterMetricFamily(
            self._prefix + "doctor_faults", "Examinations that failed by our error."
        )
        faults.add_metric((), 0 if doctor is None else doctor.faults)
        yield faults
