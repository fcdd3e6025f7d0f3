"""Windows from Prometheus: /api/v1/query, with every name configurable.

Means are sum(increase(sum)) / sum(increase(count)) over all series of a model: a frontend with a
thousand requests weighs a thousand times one with a single request. No series at all is missing,
never zero; no increase of a count is idle. The fast loop's arrivals are counted in the time of the
samples (`scraped.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import msgspec

from indexer.http_client import http_client
from select_service.planner.core.lengths import from_buckets
from select_service.planner.edge.http_answers import OK, whole_answer, without_user
from select_service.planner.edge.sources.scraped import Arrived, ScrapedArrivals, ScrapedSample
from select_service.planner.edge.sources.series_names import DYNAMO, MATCH, SELECTOR
from select_service.planner.edge.sources.source import counted, moments, ratio
from select_service.planner.errors import SourceError
from select_service.planner.types import Idle, Load, Missing, Value, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import httpx

    from select_service.planner.edge.sources.series_names import Names
    from select_service.planner.types import ModelKey, Moments, Reading

TIMEOUT_S: Final = 10.0
LOOKS: Final = 12
"""At a gauge in an interval: as many as scrapes of a usual one."""

_ADDED: Final = ("__name__", "of")  # labels that a query adds or takes away


class PrometheusSource:
    """Queries one Prometheus.

    Args:
        url: of the server.
        names: of the series.
        client: asks; it is closed with this.
        credentials: returns the header that shows them, for each query; an address that contains a
            user's name and password needs none.
    """

    def __init__(
        self,
        url: str,
        names: Names = DYNAMO,
        client: httpx.AsyncClient | None = None,
        credentials: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        bare, header = without_user(url)
        self._url = bare.rstrip("/") + "/api/v1/query"
        self._names = names
        self._client = client or http_client(TIMEOUT_S, has_credentials=True)
        self._headers = credentials or header
        self._arrivals: dict[ModelKey, ScrapedArrivals] = defaultdict(ScrapedArrivals)

    @property
    def warnings(self) -> Sequence[str]:
        """Nothing: what cannot be read is missing."""
        return ()

    async def begin(self, models: Sequence[ModelKey]) -> None:
        """Do nothing: counters are read over any period."""

    async def windows(self, models: Sequence[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        """Query every model; a model whose queries fail has missing readings only."""
        windows = await asyncio.gather(*(self._window(model, seconds) for model in models))
        return dict(zip(models, windows, strict=True))

    async def loads(self, models: Sequence[ModelKey]) -> dict[ModelKey, Load]:
        """Query the counter of requests, and the two gauges if configured."""
        loads = await asyncio.gather(*(self._load(model) for model in models))
        return dict(zip(models, loads, strict=True))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _window(self, model: ModelKey, seconds: float) -> Window:
        names = self._names
        requests = await self._count(model, seconds)
        means = await asyncio.gather(
            *(
                self._mean(name, model, seconds, requests, scale)
                for name, scale in (
                    (names.isl, 1.0),
                    (names.osl, 1.0),
                    (names.ttft, 1e3),
                    (names.itl, 1e3),
                    (names.request_duration, 1.0),
                    (names.effective_isl, 1.0),
                )
            )
        )
        isl, osl, ttft_ms, itl_ms, request_s, effective = means
        isl_mix = await self._mix(names.isl, model, seconds)
        prefills, itls, kv_tokens, computing, writing = await asyncio.gather(
            self._moments(names.prefill_moments, model, seconds),
            self._moments(names.itl_moments, model, seconds),
            self._largest(names.rank_kv_tokens, model),
            self._largest(names.prefill_worker_ranks, model),
            self._largest(names.decode_worker_ranks, model),
        )
        live = await self._live(model, seconds)
        if isinstance(live, Missing):
            live = _by_littles_law(requests, request_s, seconds)
        return Window(
            seconds=seconds,
            requests=requests,
            isl=isl,
            osl=osl,
            ttft_ms=ttft_ms,
            itl_ms=itl_ms,
            request_s=request_s,
            effective_isl=effective,
            concurrency=live,
            isl_mix=isl_mix,
            prefill_moments=prefills,
            itl_moments=itls,
            rank_kv_tokens=kv_tokens,
            prefill_worker_ranks=computing,
            decode_worker_ranks=writing,
        )

    async def _live(self, model: ModelKey, seconds: float) -> Reading:
        """Return the live requests, on average over the interval."""
        if not self._names.concurrency_query:
            return Missing("no query is configured")
        whole_ms = round(1e3 * seconds)
        step_ms = max(1, whole_ms // LOOKS)
        over = f"[{whole_ms}ms:{step_ms}ms]"
        return await self._gauge(f"avg_over_time(({self._names.concurrency_query}){over})", model)

    async def _load(self, model: ModelKey) -> Load:
        names = self._names
        backlog, live, arrived = await asyncio.gather(
            self._gauge(names.backlog_query, model),
            self._gauge(names.concurrency_query, model),
            self._arrived(model),
        )
        return Load(
            prefill_backlog_tokens=backlog,
            concurrency=live,
            arrived=arrived.requests,
            seconds=arrived.seconds,
            ago_s=arrived.ago_s,
        )

    async def _gauge(self, query: str, model: ModelKey) -> Reading:
        if not query:
            return Missing("no query is configured")
        try:
            value = (await self._ask(query.replace(MATCH, self._match(model)))).get("")
        except SourceError as error:
            return Missing(str(error))
        return Missing("no series") if value is None else Value(value)

    async def _largest(self, name: str, model: ModelKey) -> Reading:
        return await self._gauge(f"max({self._series(name, model)})" if name else "", model)

    async def _moments(self, name: str, model: ModelKey, seconds: float) -> Moments | Missing:
        if not name:
            return Missing("not configured")
        try:
            values = await self._ask(self._increase(name, model, seconds, "moment"), "moment")
        except SourceError as error:
            return Missing(str(error))
        return moments(values, f"no series {name}")

    async def _arrived(self, model: ModelKey) -> Arrived:
        """Return the arrivals that have been scraped since the last look.

        The next look covers one that fails.
        """
        plain = self._of_requests(lambda name: self._series(name, model))
        timed = self._of_requests(lambda name: f"timestamp({self._series(name, model)})")
        # it answers with its time even where there is no series, as after a scrape that failed
        query = " or ".join(
            f'label_replace({one}, "of", "{of}", "", "")'
            for one, of in ((plain, "count"), (timed, "at"), ("vector(1)", "now"))
        )
        try:
            rows = await self._rows(query)
        except SourceError as error:
            return Arrived(Missing(str(error)))
        arrivals = self._arrivals[model]
        arrivals.take(_samples(rows))
        now = max((row.value[0] for row in rows), default=0.0)
        return arrivals.next(now)

    async def _count(self, model: ModelKey, seconds: float) -> Reading:
        grown = self._grown_from_zero if self._names.requests == SELECTOR.requests else self._grown
        query = self._of_requests(lambda name: grown(name, model, seconds))
        try:
            values = await self._ask(f"sum({query})")
            return counted(values.get(""), f"no series {self._names.requests}")
        except SourceError as error:
            return Missing(str(error))

    def _of_requests(self, expression: Callable[[str], str]) -> str:
        """Return an expression for requests as they arrive, from all targets that report that."""
        names = [name for name in (self._names.started, self._names.requests) if name]
        return " or on (instance, job) ".join(expression(name) for name in names)

    async def _mean(
        self, name: str, model: ModelKey, seconds: float, requests: Reading, scale: float
    ) -> Reading:
        if not name:
            return Missing("not configured")
        # in one query: a scrape between two would be in the count but not in the sum
        query = " or ".join(
            f'label_replace({self._increase(f"{name}_{of}", model, seconds)}, "of", "{of}", "", "")'
            for of in ("sum", "count")
        )
        try:
            both = await self._ask(query)
        except SourceError as error:
            return Missing(str(error))
        mean = ratio(both.get("sum"), both.get("count"), f"no series {name}", scale)
        if isinstance(mean, Idle) and isinstance(requests, Value):
            return Missing(f"{name} counts nothing while requests come")
        return mean

    async def _mix(
        self, name: str, model: ModelKey, seconds: float
    ) -> tuple[tuple[float, float], ...]:
        """Return lengths with their frequencies; empty without buckets."""
        if not name:
            return ()
        try:
            counts = await self._ask(self._increase(f"{name}_bucket", model, seconds, "le"), "le")
        except SourceError:
            return ()  # the mean is known, or reported as missing
        buckets = ((_value(bound), count) for bound, count in counts.items())
        return from_buckets(sorted(one for one in buckets if one[0] > 0))

    def _increase(self, name: str, model: ModelKey, seconds: float, by: str = "") -> str:
        kept = f" by ({by}) " if by else ""
        return f"sum{kept}({self._grown(name, model, seconds)})"

    def _grown(self, name: str, model: ModelKey, seconds: float) -> str:
        return f"increase({self._series(name, model)}[{round(1e3 * seconds)}ms])"

    def _grown_from_zero(self, name: str, model: ModelKey, seconds: float) -> str:
        """Return an expression for growth that counts what a new series begins with.

        The first request for a model begins a series, at 1, of which `increase` shows nothing. It
        is new where its target was scraped, or was not running yet, when the time began.
        """
        series, ms = self._series(name, model), round(1e3 * seconds)
        watched = f"up offset {ms}ms or process_start_time_seconds > time() - {ms / 1e3:g}"
        new = f"({series} unless {series} offset {ms}ms) and on (instance, job) ({watched})"
        return f"(({new}) or {self._grown(name, model, seconds)})"

    def _series(self, name: str, model: ModelKey) -> str:
        return f"{name}{{{self._match(model)}}}"

    def _match(self, model: ModelKey) -> str:
        names = self._names
        # engines and frontends differ in capitalisation
        matchers = [f'{names.model_label}=~"(?i){_quoted(model.model_name)}"']
        if names.tenant_label:
            matchers.append(f'{names.tenant_label}="{_escaped(model.tenant_id)}"')
        matchers += [f'{label}="{_escaped(value)}"' for label, value in names.matchers.items()]
        return ",".join(matchers)

    async def _ask(self, query: str, label: str = "of") -> dict[str, float]:
        """Return the finite values of an instant query by the given label, "" if that is absent.

        Of several the first counts; queries without series give nothing.
        """
        values: dict[str, float] = {}
        for row in await self._rows(query):
            value = _value(row.value[1])
            if math.isfinite(value):
                values.setdefault(row.metric.get(label, ""), value)
        return values

    async def _rows(self, query: str) -> list[_Sample]:
        """Return the answer to an instant query."""
        try:
            page = await whole_answer(
                self._client,
                "GET",
                self._url,
                within_s=TIMEOUT_S,
                failure=SourceError,
                params={"query": query},
                headers=self._headers,
            )
        except SourceError as error:
            raise SourceError(f"{self._url}: {error}") from error
        try:
            body = msgspec.json.decode(page.body, type=_Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            failure = f"answered {page.status}" if page.status != OK else str(error)
            raise SourceError(f"{self._url}: {failure}") from error
        if body.status != "success" or body.data is None:
            raise SourceError(f"{self._url}: {body.error or page.status}: {query}")
        return body.data.result


def _by_littles_law(requests: Reading, request_s: Reading, seconds: float) -> Reading:
    if isinstance(requests, Value) and isinstance(request_s, Value):
        return Value(requests.value * request_s.value / seconds)
    return Missing("not known without a gauge or request durations")


class _Sample(msgspec.Struct):
    value: tuple[float, str]
    metric: dict[str, str] = {}


def _samples(rows: Iterable[_Sample]) -> list[ScrapedSample]:
    """Join the counts of series with their times."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = defaultdict(dict)
    for row in rows:
        labels = {name: text for name, text in row.metric.items() if name not in _ADDED}
        found[tuple(sorted(labels.items()))][row.metric.get("of", "")] = _value(row.value[1])
    samples = []
    for series, values in found.items():
        labels = dict(series)
        at, count = values.get("at", math.nan), values.get("count", math.nan)
        if math.isfinite(at) and math.isfinite(count):
            # a series that names no target, such as one that was pushed, is one
            target = (labels.get("job"), labels["instance"]) if "instance" in labels else series
            samples.append(ScrapedSample(target, series, at, count))
    return samples


class _Data(msgspec.Struct):
    result: list[_Sample]


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""


def _value(text: str) -> float:
    """Parse a number as written by Prometheus; anything else is NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _quoted(text: str) -> str:
    """Escape for an RE2 regular expression inside a PromQL string."""
    plain = "".join(f"\\{one}" if one in r"\.+*?()|[]{}^$" else one for one in text)
    return _escaped(plain)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
