"""Windows out of the selectors' own /metrics: two scrapes, and what happened between them.

A counter that is smaller than before has started again: what it shows has all happened since.
Selectors each see a part of the traffic, so counters are summed; the load on the engines is known
to all of them, so of gauges the largest counts, never the sum.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, TypeAlias

import httpx
from prometheus_client.parser import text_string_to_metric_families

from select_service.planner.core.lengths import from_buckets
from select_service.planner.edge.sources.source import counted, ratio
from select_service.planner.types import IDLE, Idle, Load, Missing, Value, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.planner.types import ModelKey, Reading

__all__ = ["SelectorSource", "parse"]

TIMEOUT_S: Final = 5.0
PREFIX: Final = "select_service_"
Samples: TypeAlias = dict[tuple[str, str, str, str], float]
"""By name, model, tenant and bucket; summed over every other label."""


def parse(text: str) -> Samples:
    """Read what the planner needs of an exposition; names without the prefix."""
    samples: Samples = defaultdict(float)
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for one in family.samples:
            labels = one.labels
            if "model_name" not in labels:
                continue
            key = (
                one.name.removeprefix(PREFIX),
                labels["model_name"],
                labels.get("tenant_id", "default"),
                labels.get("le", ""),
            )
            samples[key] += one.value
    return dict(samples)


class _Selector:
    """One selector's last scrape, and sums over the time since a window began."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.last: Samples | None = None
        self.grown: Samples = defaultdict(float)
        self.error = "not scraped yet"

    def take(self, samples: Samples) -> None:
        """Add what counters gained since the scrape before."""
        if self.last is not None:
            for key, value in samples.items():
                before = self.last.get(key, 0.0)
                self.grown[key] += value - before if value >= before else value
        self.last = samples
        self.error = ""


class SelectorSource:
    """Scrapes every selector.

    Args:
        urls: of selectors that share the traffic.
        token: bearer token, where they ask for one.
        client: for tests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        token: str | None = None,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selectors = [_Selector(url) for url in urls]
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._headers = headers
        self._client = client or httpx.AsyncClient(timeout=TIMEOUT_S)
        self._live: dict[ModelKey, list[float]] = defaultdict(list)
        self._lost_s = 0.0  # of windows before that nobody knows
        self._clock = clock
        self._looked_at = clock()
        self._counted: dict[ModelKey, float] = {}  # requests of this window at the last look

    async def windows(self, models: Sequence[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        """Scrape, and return what happened since the last call.

        A selector that could not be scraped makes the whole interval missing: its share of the
        traffic is not known. The next window that is known then covers that time, too.
        """
        await self._scrape()
        seconds += self._lost_s
        told = {model: self._window(model, seconds) for model in models}
        is_lost = any(one.error for one in self._selectors)
        self._lost_s = seconds if is_lost else 0.0
        for one in self._selectors if not is_lost else ():
            one.grown = defaultdict(float)
        self._live.clear()
        if not is_lost:
            self._counted.clear()
        self._looked_at = self._clock()
        return told

    async def loads(self, models: Sequence[ModelKey]) -> dict[ModelKey, Load]:
        """Scrape, and return the load of this moment."""
        await self._scrape()
        now = self._clock()
        seconds, self._looked_at = now - self._looked_at, now
        told = {}
        for model in models:
            live = self._gauge("reservations", model)
            if isinstance(live, Value):
                self._live[model].append(live.value)
            told[model] = Load(
                prefill_backlog_tokens=self._backlog(model),
                concurrency=live,
                waiting=self._gauge("pending_requests", model),
                arrived=self._arrived(model),
                seconds=seconds,
            )
        return told

    async def close(self) -> None:
        """Let go of the connections."""
        await self._client.aclose()

    async def _scrape(self) -> None:
        await asyncio.gather(*(self._scrape_one(one) for one in self._selectors))

    async def _scrape_one(self, one: _Selector) -> None:
        try:
            response = await self._client.get(f"{one.url}/metrics", headers=self._headers)
            if not response.is_success:
                raise ValueError(f"answered {response.status_code}")  # noqa: TRY301 - told below
            # a page of somebody else's is no selector that has counted nothing: what it shows
            # the next time would all have happened in between
            if PREFIX not in response.text:
                raise ValueError("no metrics of a selector")  # noqa: TRY301 - as above
            one.take(parse(response.text))
        except (httpx.HTTPError, ValueError) as error:
            one.error = f"{one.url}: {str(error) or type(error).__name__}"

    def _arrived(self, model: ModelKey) -> Reading:
        """Requests since the last look; not known while a selector cannot be asked."""
        lost = [one.error for one in self._selectors if one.error]
        total = self._sum("demand_requests_total", model)
        if lost or total is None:
            return Missing("; ".join(lost) or "no selector counts demand")
        before = self._counted.get(model, 0.0)
        self._counted[model] = total
        return counted(total - before, "no selector counts demand")

    def _window(self, model: ModelKey, seconds: float) -> Window:
        lost = [one.error for one in self._selectors if one.error]
        if lost:
            return Window(seconds=seconds, requests=Missing("; ".join(lost)))
        requests = counted(self._sum("demand_requests_total", model), "no selector counts demand")
        live = self._live.get(model)
        return Window(
            seconds=seconds,
            requests=requests,
            isl=self._mean("demand_isl_tokens", model, requests),
            osl=self._mean("demand_output_tokens", model, requests),
            ttft_ms=self._mean("demand_ttft_seconds", model, requests, 1e3),
            itl_ms=self._mean("demand_itl_seconds", model, requests, 1e3),
            request_s=self._mean("demand_request_seconds", model, requests),
            effective_isl=self._mean("demand_prefill_tokens", model, requests),
            concurrency=Value(sum(live) / len(live)) if live else Missing("nobody looked"),
            isl_mix=from_buckets(self._buckets("demand_isl_tokens_bucket", model)),
        )

    def _mean(self, name: str, model: ModelKey, requests: Reading, scale: float = 1.0) -> Reading:
        told = ratio(
            self._sum(f"{name}_sum", model),
            self._sum(f"{name}_count", model),
            f"no selector tells {name}",
            scale,
        )
        if isinstance(told, Idle) and isinstance(requests, Value):
            return Missing(f"workers do not report {name.removeprefix('demand_')}")
        return told

    def _sum(self, name: str, model: ModelKey) -> float | None:
        key = (name, model.model_name, model.tenant_id, "")
        found = [one.grown[key] for one in self._selectors if key in one.grown]
        return sum(found) if found else None

    def _buckets(self, name: str, model: ModelKey) -> list[tuple[float, float]]:
        totals: dict[float, float] = defaultdict(float)
        for one in self._selectors:
            for (found, model_name, tenant_id, bound), value in one.grown.items():
                if (found, model_name, tenant_id) == (name, model.model_name, model.tenant_id):
                    totals[float(bound)] += value
        return sorted(totals.items())

    def _backlog(self, model: ModelKey) -> Reading:
        booked = self._gauge("rank_prefill_tokens", model)
        waiting = self._gauge("pending_isl_tokens", model)
        if not isinstance(booked, Value):
            return booked
        return Value(booked.value + (waiting.value if isinstance(waiting, Value) else 0.0))

    def _gauge(self, name: str, model: ModelKey) -> Reading:
        key = (name, model.model_name, model.tenant_id, "")
        seen = [one.last for one in self._selectors if one.last is not None and not one.error]
        if not seen:
            return Missing("; ".join(one.error for one in self._selectors))
        found = [samples[key] for samples in seen if key in samples]
        return Value(max(found)) if found else IDLE
