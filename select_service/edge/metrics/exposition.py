"""GET /metrics: plain counters of the core and of the HTTP side, rendered as Prometheus text.

Everything is read at scrape time by the tables of this package, in slices: no request pays for it,
and none waits longer than one slice. Labels are patterns, codes and registered names, never
contents of a request. `app.py` creates one per app.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from select_service.edge.cooperative import TimeSlices
from select_service.edge.metrics.admission_metrics import admission_tables
from select_service.edge.metrics.demand_metrics import demand_tables
from select_service.edge.metrics.epp_metrics import epp_table
from select_service.edge.metrics.http_metrics import http_tables
from select_service.edge.metrics.index_metrics import index_tables
from select_service.edge.metrics.limit_metrics import limit_tables, tenant_table
from select_service.edge.metrics.process_metrics import process_tables
from select_service.edge.metrics.recovery_metrics import recovery_tables
from select_service.edge.metrics.replica_metrics import replica_tables
from select_service.edge.metrics.scope_series import ScopeGroups
from select_service.edge.metrics.service_metrics import service_tables
from select_service.edge.metrics.shadow_metrics import shadow_tables
from select_service.edge.metrics.storage_metrics import storage_tables
from select_service.edge.metrics.text import text_of
from select_service.edge.metrics.trust_metrics import trust_tables

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

    from select_service.edge.config_reload import ConfigReload
    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.traffic import Traffic
    from select_service.metric_rows import Collector, Steps
    from select_service.settings import Settings


class Metrics:
    """Renders /metrics for one app."""

    def __init__(
        self,
        driver: Driver,
        traffic: Traffic,
        settings: Settings,
        reload: ConfigReload | None = None,
    ) -> None:
        self._traffic = traffic
        groups = ScopeGroups(driver.core, settings.metrics_scope_series_max)
        self._collectors: tuple[Collector, ...] = (
            groups,
            *http_tables(traffic),
            epp_table(traffic.epp),
            *service_tables(driver, settings, groups),
            *index_tables(driver, settings, groups),
            *admission_tables(driver, settings, groups),
            *demand_tables(groups, driver.core.reader.unserved),
            *trust_tables(driver, settings, groups),
            *shadow_tables(driver, groups),
            *replica_tables(driver),
            *recovery_tables(driver),
            *storage_tables(driver),
            *process_tables(driver, settings, reload),
            tenant_table(driver.core.shares, settings.tenant_labels_max),
            *limit_tables(driver, traffic, settings, reload),
        )
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)
        GCCollector(registry=self._process)
        # Our own: name lookups and hanging disks may occupy all of the loop's default threads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._rendering = asyncio.Lock()
        self._next: _Scrape | None = None  # has not begun to render

    def families(self) -> Iterable[Metric]:
        """Return every family of series there is, also those that have no series yet."""
        ours = (step for step in self._steps() if step is not None)
        return chain(ours, self._process.collect())

    async def render(self) -> tuple[bytes, str]:
        """Return (text, content type), read in slices of the event loop after this was called.

        A scrape during another waits for the next text, which all that wait share: two are
        never rendered at a time. A text that is no longer waited for is given up.
        """
        scrape = self._next
        if scrape is None:
            scrape = self._next = _Scrape(self)
        self._traffic.scrapes += 1
        try:
            return await scrape.text(), CONTENT_TYPE_LATEST
        finally:
            self._traffic.scrapes -= 1

    async def render_next(self) -> bytes:
        """Render the text for all that asked before it is begun."""
        async with self._rendering:
            self._next = None
            # Reads /proc for every open file: 4 ms with those of 1,000 workers.
            read = asyncio.get_running_loop().run_in_executor
            process = await read(self._thread, lambda: list(self._process.collect()))
            slices, pieces = TimeSlices(), list[bytes]()
            for step in chain(self._steps(), process):
                if step is not None:
                    for piece in text_of(step):
                        pieces.append(piece)
                        await slices.yield_if_due()
                await slices.yield_if_due()
            return b"".join(pieces)

    def forget(self, scrape: _Scrape) -> None:
        """Let no other join a scrape that is given up."""
        if self._next is scrape:
            self._next = None

    def _steps(self) -> Steps:
        for collector in self._collectors:
            yield from collector.collect()


class _Scrape:
    """One text, and how many wait for it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics, self._waiting = metrics, 0
        self._task = asyncio.get_running_loop().create_task(metrics.render_next())

    async def text(self) -> bytes:
        """Wait for it. The last to go ends it."""
        self._waiting += 1
        try:
            return await asyncio.shield(self._task)
        finally:
            self._waiting -= 1
            if not self._waiting and not self._task.done():
                self._task.cancel()
                self._metrics.forget(self)
