"""Windows from the selectors' own /metrics: the difference of two scrapes.

After a restart of a selector all its counts are new; if it exports no start time, a restart shows
as a counter below its last value. A selector scraped for the first time has counted an unknown part
before: counting begins with its values then, and the time until then is missing. Each selector sees
a part of the traffic, so counters are summed; all of them know the load on the engines, so of
gauges the largest counts, never the sum.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Final, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from indexer.http_client import http_client
from select_service.planner.core.lengths import from_buckets
from select_service.planner.edge.http_answers import OK, whole_answer
from select_service.planner.edge.sources.source import counted, ratio
from select_service.planner.errors import SourceError
from select_service.planner.types import Idle, Load, Missing, Value, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import httpx

    from select_service.planner.types import ModelKey, Reading

__all__ = ["SelectorSource", "parse"]

TIMEOUT_S: Final = 5.0

PREFIX: Final = "select_service_"
Samples: TypeAlias = dict[tuple[str, str, str, str], float]
"""By name, model, tenant and bucket; summed over all other labels."""


STARTED: Final = ("process_start_time_seconds", "", "", "")
_READ: Final = tuple(
    PREFIX + name
    for name in (
        "demand_",
        "rank_prefill_tokens{",
        "reservations{",
        "pending_isl_tokens{",
    )
)
_STARTS_MAX: Final = 8  # processes behind one address, distinguished from restarts


def parse(text: str, models: Iterable[str] | None = None) -> Samples:
    """Parse the parts of an exposition that the planner needs; names are without the prefix.

    Of a thousand models and ranks few lines are needed: the others are skipped unparsed.

    Args:
        text: the page.
        models: names of the models to read; None: all.

    Raises:
        ValueError: one of these lines is malformed.
    """
    ours = None if models is None else [f'model_name="{_escaped(name)}"' for name in set(models)]
    lines = [
        line
        for line in text.split("\n")
        if (line.startswith(_READ) and (ours is None or any(one in line for one in ours)))
        or line.startswith(STARTED[0])
    ]
    samples: Samples = defaultdict(float)
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for one in family.samples:
            labels = one.labels
            if not math.isfinite(one.value):
                continue
            if one.name == STARTED[0]:
                samples[STARTED] = one.value
            elif "model_name" in labels:
                key = (
                    one.name.removeprefix(PREFIX),
                    labels["model_name"],
                    labels.get("tenant_id", "default"),
                    labels.get("le", ""),
                )
                samples[key] += one.value
    return dict(samples)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Selector:
    """One selector's last scrape, and the growth of its counters since the window began.

    Attributes:
        error: why the last scrape failed; empty: it succeeded.
        is_new: counting began after the start of the window.
        is_new_to_looks: counting began after the last look.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.last: Samples | None = None
        self._counted: Samples = {}  # including series absent from the last page
        self.grown: Samples = defaultdict(float)
        self.error = "not scraped yet"
        self.is_new = self.is_new_to_looks = False
        # start times of processes, the latest last
        self._starts: deque[float] = deque(maxlen=_STARTS_MAX)

    def take(self, samples: Samples) -> None:
        """Add the growth of counters since the last scrape.

        Raises:
            ValueError: the answer is from a process that another has already replaced.
        """
        started = samples.get(STARTED)
        known = self._starts[-1] if self._starts else None
        has_restarted = started is not None and known is not None and started != known
        if has_restarted and started in self._starts:
            # each alternation would count everything as new
            raise ValueError("several processes answer in turns: name every selector by itself")
        if started is not None and started != known:
            self._starts.append(started)
        if self.last is None:
            self.is_new = self.is_new_to_looks = True
        else:
            if has_restarted:
                self._counted = {}
            for key, value in samples.items():
                before = self._counted.get(key, 0.0)
                self.grown[key] += value - before if value >= before else value
        self.last = samples
        self._counted |= samples
        self.error = ""

    def begin(self) -> None:
        """Begin a window with the last scrape."""
        self.grown = defaultdict(float)
        self.is_new = self.is_new_to_looks = False


class SelectorSource:
    """Scrapes all selectors.

    Args:
        urls: of the selectors that share the traffic.
        credentials: returns the header with the bearer token, if one is required.
        client: for tests.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        credentials: Callable[[], Mapping[str, str]] | None = None,
        client: httpx.AsyncClient | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._selectors = [_Selector(url) for url in urls]
        self._headers = credentials
        self._client = client or http_client(TIMEOUT_S, has_credentials=True)
        self._live: dict[ModelKey, list[float]] = defaultdict(list)
        self._lost_s = 0.0  # of earlier unknown windows
        self._clock = clock
        self._looked_at = clock()
        self._counted: dict[ModelKey, float] = {}  # requests of this window as of the last look

    async def begin(self, models: Sequence[ModelKey]) -> None:
        """Scrape once: counting begins here."""
        await self.windows(models, 0.0)

    async def windows(self, models: Sequence[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        """Scrape, and return the changes since the last call.

        A failed scrape makes the whole interval missing, as that selector's share of the traffic is
        unknown. The next known window then covers that time, too, unless the selector was never
        scraped before: then counting begins there.
        """
        await self._scrape(models)
        seconds += self._lost_s
        told = {model: self._window(model, seconds) for model in models}
        is_lost = any(one.error for one in self._selectors)
        self._lost_s = seconds if is_lost else 0.0
        self._live.clear()
        if not is_lost:
            for one in self._selectors:
                one.begin()
            self._counted.clear()
            self._looked_at = self._clock()
        return told

    async def loads(self, models: Sequence[ModelKey]) -> dict[ModelKey, Load]:
        """Scrape, and return the current load."""
        await self._scrape(models)
        now, told = self._clock(), {}
        seconds = now - self._looked_at
        for model in models:
            live = self._gauge("reservations", model)
            if isinstance(live, Value):
                self._live[model].append(live.value)
            told[model] = Load(
                prefill_backlog_tokens=self._backlog(model),
                concurrency=live,
                arrived=self._arrived(model),
                seconds=seconds,
            )
        # otherwise the next look covers this time
        if not any(one.error for one in self._selectors):
            self._looked_at = now
            for one in self._selectors:
                one.is_new_to_looks = False
        return told

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _scrape(self, models: Sequence[ModelKey]) -> None:
        names = {model.model_name for model in models}
        await asyncio.gather(*(self._scrape_one(one, names) for one in self._selectors))

    async def _scrape_one(self, one: _Selector, models: set[str]) -> None:
        try:
            page = await whole_answer(
                self._client,
                "GET",
                f"{one.url}/metrics",
                within_s=TIMEOUT_S,
                failure=SourceError,
                headers=self._headers,
            )
            if page.status != OK:
                raise SourceError(f"answered {page.status}")  # noqa: TRY301 - told below
            # a foreign page is not a selector with no counts: its counts next time would all seem
            # new
            text = page.body.decode()
            if PREFIX not in text:
                raise SourceError("no metrics of a selector")  # noqa: TRY301 - as above
            one.take(parse(text, models))
        except (SourceError, ValueError) as error:
            one.error = f"{one.url}: {error}"

    def _arrived(self, model: ModelKey) -> Reading:
        """Return the requests since the last look; unknown while a selector does not answer."""
        lost = [one.error for one in self._selectors if one.error]
        total = self._sum("demand_requests_total", model)
        if lost or total is None:
            return Missing("; ".join(lost) or "no selector counts demand")
        before = self._counted.get(model, 0.0)
        self._counted[model] = total
        new = [one.url for one in self._selectors if one.is_new_to_looks]
        if new:
            return Missing(f"counting begins at {', '.join(new)}")
        return counted(total - before, "no selector counts demand")

    def _window(self, model: ModelKey, seconds: float) -> Window:
        lost = [one.error for one in self._selectors if one.error]
        if lost:
            return Window(seconds=seconds, requests=Missing("; ".join(lost)))
        new = [one.url for one in self._selectors if one.is_new]
        if new:
            why = f"counting begins at {', '.join(new)}"
            return Window(seconds=seconds, requests=Missing(why))
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
            arrived=self._arrived(model),
            arrived_s=self._clock() - self._looked_at,
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
        known = [one.value for one in (booked, waiting) if isinstance(one, Value)]
        return Value(sum(known)) if known else booked

    def _gauge(self, name: str, model: ModelKey) -> Reading:
        key = (name, model.model_name, model.tenant_id, "")
        seen = [one.last for one in self._selectors if one.last is not None and not one.error]
        if not seen:
            return Missing("; ".join(one.error for one in self._selectors))
        found = [samples[key] for samples in seen if key in samples]
        return Value(max(found)) if found else Missing(f"no selector tells {name}")
