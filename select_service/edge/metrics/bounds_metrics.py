"""Metrics of bounds: refused connections, room in the index, settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, counters, gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.config_reload import ConfigReload
    from select_service.edge.driver.driver import Driver

_ASKED_BY = ("put", "sighup", "restored")
_OUTCOMES = ("applied", "unchanged", "refused")


class BoundsMetrics(Collector):
    """Counters of what bounds did beside those of `limit_metrics.py`."""

    def __init__(self, service: Driver, reloading: ConfigReload | None) -> None:
        self._service = service
        self._reloading = reloading

    @override
    def collect(self) -> Iterator[Metric]:
        addresses, core = self._service.addresses, self._service.core
        yield counters(
            "connect_refused",
            "Endpoints and URLs that were not connected to, by what forbade it.",
            "reason",
            addresses.refused,
        )
        yield counters("connect_lookups", "Names looked up.", "outcome", addresses.lookups)
        budget = core.registry.budget
        yield gauge(
            "index_budget_bytes", "Estimate for all indexes, of the last round.", value=budget.bytes
        )
        yield counter(
            "scopes_closed",
            "Scopes given up because they had no worker.",
            value=core.membership.scopes_closed,
        )
        yield from self._config()

    def _config(self) -> Iterator[Metric]:
        reloads = counter("config_reloads", "Changes of settings while running.", ("by", "outcome"))
        waiting = 0
        if self._reloading is not None:
            waiting = self._reloading.waiting
            for by in _ASKED_BY:
                for outcome in _OUTCOMES:
                    count = self._reloading.counts[by, outcome]  # type: ignore[index] # literals
                    reloads.add_metric((by, outcome), count)
        yield reloads
        yield gauge(
            "config_after_restart",
            "Settings of the file that a restart would change.",
            value=waiting,
        )
