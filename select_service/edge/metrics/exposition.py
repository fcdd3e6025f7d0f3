"""GET /metrics: plain counters of the core and of the HTTP side, turned into Prometheus text.

Everything is read when somebody scrapes, by the collectors of this room; no request pays for it.
Labels are patterns, codes and registered names, never what a request says. `app.py` makes one per
app, with a registry of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    Metric,
)

from select_service.edge.metrics.admission import AdmissionMetrics
from select_service.edge.metrics.bounds import BoundsMetrics
from select_service.edge.metrics.decisions import DecisionMetrics
from select_service.edge.metrics.demand import DemandMetrics
from select_service.edge.metrics.doctor import DoctorMetrics
from select_service.edge.metrics.http import HttpMetrics
from select_service.edge.metrics.index import IndexMetrics
from select_service.edge.metrics.limits import LimitMetrics
from select_service.edge.metrics.recording import RecordingMetrics
from select_service.edge.metrics.recovery import RecoveryMetrics
from select_service.edge.metrics.replicas import ReplicaMetrics
from select_service.edge.metrics.security import SecurityMetrics
from select_service.edge.metrics.service import ServiceMetrics
from select_service.edge.metrics.shadow import ShadowMetrics
from select_service.edge.metrics.snapshots import SnapshotMetrics
from select_service.edge.metrics.state import StateMetrics
from select_service.edge.metrics.tracing import TracingMetrics
from select_service.edge.metrics.trust import TrustMetrics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.config import Settings
    from select_service.edge.driver import Driver
    from select_service.edge.http.traffic import Traffic
    from select_service.edge.reloading import Reloading

__all__ = ["Metrics"]


class Metrics:
    """Renders /metrics for one app."""

    def __init__(
        self,
        service: Driver,
        traffic: Traffic,
        settings: Settings,
        reloading: Reloading | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(HttpMetrics(traffic))
        self._registry.register(ServiceMetrics(service, settings))
        self._registry.register(IndexMetrics(service, settings))
        self._registry.register(AdmissionMetrics(service, settings))
        self._registry.register(DecisionMetrics(service))
        self._registry.register(DemandMetrics(service, settings))
        self._registry.register(TrustMetrics(service, settings))
        self._registry.register(ShadowMetrics(service, settings))
        self._registry.register(ReplicaMetrics(service))
        self._registry.register(RecoveryMetrics(service))
        self._registry.register(StateMetrics(service))
        self._registry.register(SnapshotMetrics(service))
        self._registry.register(RecordingMetrics(service))
        self._registry.register(SecurityMetrics(service, settings))
        self._registry.register(TracingMetrics(service))
        self._registry.register(DoctorMetrics(service))
        self._registry.register(BoundsMetrics(service, reloading))
        self._registry.register(LimitMetrics(service, traffic, settings, reloading))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def families(self) -> Iterable[Metric]:
        """Return every family of series there is, also those that have no series yet."""
        return self._registry.collect()

    def render(self) -> tuple[bytes, str]:
        """Return (text, content type). A few microseconds per series, on the event loop."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
