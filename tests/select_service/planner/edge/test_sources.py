"""Windows: weighted means, counters that start again, and three states that are never confused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.planner.edge import http_answers
from select_service.planner.edge.sources import prometheus as prometheus_module
from select_service.planner.edge.sources import selector as selector_module
from select_service.planner.edge.sources.prometheus import PrometheusSource
from select_service.planner.edge.sources.selector import SelectorSource
from select_service.planner.edge.sources.series_names import SELECTOR
from select_service.planner.edge.sources.source import ratio
from select_service.planner.edge.sources.trace import TraceSource, read_trace
from select_service.planner.errors import TraceError
from select_service.planner.types import (
    IDLE,
    MOMENTS,
    Load,
    Missing,
    ModelKey,
    Moments,
    Reading,
    Value,
    Window,
)
from tests.select_service.planner.edge.fakes import KEY
from tests.select_service.planner.golden import GOLDEN
from tests.wait import run

Answer = Callable[[httpx.Request], httpx.Response]


def number(reading: Reading) -> float:
    assert isinstance(reading, Value)
    return reading.value


def client(answer: Answer) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


def prometheus(values: dict[str, str | None]) -> tuple[Answer, list[str]]:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        query = request.url.params["query"]
        asked.append(query)
        if " by (le) " in query:
            buckets = {"0": "0", "1000": "90", "NaN": "1", "4000": "360", "+Inf": "360"}
            rows = [{"metric": {"le": le}, "value": [1.0, n]} for le, n in buckets.items()]
            found = rows if values.get("buckets") else []
            return httpx.Response(200, json={"status": "success", "data": {"result": found}})
        names = re.findall(r"increase\((\w+)\{", query) or ["load"]
        if query.startswith("avg_over_time("):
            names = ["live"]
        if "or on (instance, job)" in query:  # of one target: the first that is there
            names = [next((name for name in names if values.get(name) is not None), names[-1])]
        of = (
            re.findall(r'"of", "(\w+)", "", ""', query) if names not in (["load"], ["live"]) else []
        )
        metrics = [{"of": one} for one in of] or [{}]
        result = [
            {"metric": metric, "value": [1.0, values[name]]}
            for name, metric in zip(names, metrics, strict=True)
            if values.get(name) is not None
        ]
        return httpx.Response(200, json={"status": "success", "data": {"result": result}})

    return answer, asked


def prometheus_window(values: dict[str, str | None], **settings: Any) -> tuple[Window, list[str]]:
    answer, asked = prometheus(values)
    windows: list[Window] = []

    async def use() -> None:
        source = PrometheusSource("http://p:9090/", client=client(answer), **settings)
        windows.append((await source.windows([KEY], 180.0))[KEY])
        await source.close()

    run(use())
    return windows[0], asked


FRONTEND: dict[str, str | None] = {
    "dynamo_frontend_requests_total": "360",
    "dynamo_frontend_input_sequence_tokens_sum": "720000",
    "dynamo_frontend_input_sequence_tokens_count": "360",
    "dynamo_frontend_output_sequence_tokens_sum": "36000",
    "dynamo_frontend_output_sequence_tokens_count": "360",
    "dynamo_frontend_time_to_first_token_seconds_sum": "72",
    "dynamo_frontend_time_to_first_token_seconds_count": "360",
    "dynamo_frontend_request_duration_seconds_sum": "720",
    "dynamo_frontend_request_duration_seconds_count": "360",
}


def test_prometheus_weighs_every_request_the_same() -> None:
    window, asked = prometheus_window(FRONTEND)
    assert window.requests == Value(360.0)
    assert (window.isl, window.osl, window.ttft_ms) == (Value(2000.0), Value(100.0), Value(200.0))
    assert window.concurrency == Value(4.0)  # 2 requests/s of 2 s each
    assert isinstance(window.itl_ms, Missing)  # no series
    began, ended = (
        f'increase(dynamo_frontend_requests{name}_total{{model=~"(?i)m"}}[180000ms])'
        for name in ("_started", "")
    )
    assert asked[0] == f"sum({began} or on (instance, job) {ended})"
    assert prometheus_window(FRONTEND | {"dynamo_frontend_requests_started_total": "400"})[
        0
    ].requests == Value(400.0), "40 are being answered"


def test_prometheus_measures_live_requests_where_a_gauge_counts_them() -> None:
    """They were arrivals times their time, and refused arrivals are never live."""
    window, asked = prometheus_window(FRONTEND | {"live": "2.5"}, names=SELECTOR)
    assert window.concurrency == Value(2.5)
    (query,) = [one for one in asked if one.startswith("avg_over_time(")]
    assert "select_service_reservations{model_name=" in query
    assert query.endswith("[180000ms:15000ms])")
    assert prometheus_window(FRONTEND | {"live": "0"})[0].concurrency == Value(0.0)


def test_prometheus_reports_the_mix_of_lengths_where_there_are_buckets() -> None:
    """Prefill was sized by the mean alone: of a histogram only the sum and the count were read."""
    window, asked = prometheus_window(FRONTEND | {"buckets": "yes"})
    assert [(round(tokens), share) for tokens, share in window.isl_mix] == [
        (707, 90.0),
        (2828, 270.0),
    ]
    name = "dynamo_frontend_input_sequence_tokens_bucket"
    assert f'sum by (le) (increase({name}{{model=~"(?i)m"}}[180000ms]))' in asked
    assert prometheus_window(FRONTEND)[0].isl_mix == ()


@pytest.mark.parametrize(("count", "reading"), [("0", IDLE), (None, Missing), ("NaN", Missing)])
def test_prometheus_idle_is_not_missing(count: str | None, reading: Any) -> None:
    quiet: dict[str, str | None] = {}
    quiet |= dict.fromkeys(FRONTEND, "0")
    quiet["dynamo_frontend_requests_total"] = count
    window, _ = prometheus_window(quiet)
    if reading is IDLE:
        assert window.requests == window.isl == window.ttft_ms == IDLE
    else:
        assert isinstance(window.requests, reading)


def test_prometheus_a_metric_that_stopped_is_missing_while_requests_come() -> None:
    silent = FRONTEND | {
        "dynamo_frontend_time_to_first_token_seconds_sum": "0",
        "dynamo_frontend_time_to_first_token_seconds_count": "0",
    }
    window, _ = prometheus_window(silent)
    assert isinstance(window.ttft_ms, Missing)
    assert "counts nothing while requests come" in window.ttft_ms.why


async def test_what_selectors_measured_is_asked_for_by_moment() -> None:
    asked: list[str] = []
    sums = dict(zip(MOMENTS, ("60", "120000", "3", "2.4e8", "6000"), strict=True))

    def answer(request: httpx.Request) -> httpx.Response:
        query = request.url.params["query"]
        asked.append(query)
        rows: list[dict[str, Any]] = []
        if "by (moment) (increase(select_service_measured_prefill" in query:
            rows = [{"metric": {"moment": one}, "value": [1.0, n]} for one, n in sums.items()]
        elif "by (moment) (increase(select_service_measured_itl" in query:
            rows = [{"metric": {"moment": "count"}, "value": [1.0, "3"]}]
        elif query.startswith("max(select_service_measured_rank_kv_tokens{"):
            rows = [{"metric": {}, "value": [1.0, "400000"]}]
        return httpx.Response(200, json={"status": "success", "data": {"result": rows}})

    source = PrometheusSource("http://p", SELECTOR, client(answer))
    window = (await source.windows([KEY], 180.0))[KEY]
    assert window.prefill_moments == Moments(60.0, 120e3, 3.0, 2.4e8, 6000.0)
    series = "select_service_measured_itl_moments_total"
    assert window.itl_moments == Missing(f'no series {series} of moment "tokens"')
    assert window.rank_kv_tokens == Value(400_000.0)
    assert isinstance(window.prefill_worker_ranks, Missing)
    asked.clear()
    other = PrometheusSource("http://p", client=client(answer))
    window = (await other.windows([KEY], 180.0))[KEY]
    assert window.prefill_moments == Missing("not configured")
    assert not any("moment" in one for one in asked), "Dynamo reports no such thing"
    await source.close()
    await other.close()


async def test_prometheus_quotes_names() -> None:
    answer, asked = prometheus({"load": "12"})
    source = PrometheusSource("http://p", SELECTOR, client(answer))
    model = ModelKey('a.b"c', "t\\")
    assert (await source.loads([model]))[model].concurrency == Value(12.0)
    assert r'model_name=~"(?i)a\\.b\"c",tenant_id="t\\"' in asked[0]


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: httpx.Response(503, text="starting"),
        lambda _: httpx.Response(400, json={"status": "error", "error": "parse error"}),
        lambda request: (_ for _ in ()).throw(httpx.ConnectError("refused", request=request)),
    ],
)
async def test_prometheus_that_fails_is_missing(answer: Answer) -> None:
    source = PrometheusSource("http://p", SELECTOR, client(answer))
    window = (await source.windows([KEY], 180.0))[KEY]
    assert isinstance(window.requests, Missing)
    assert isinstance((await source.loads([KEY]))[KEY].concurrency, Missing)


class Scraped:
    """A Prometheus that scrapes two frontends; one counts requests only as they end."""

    def __init__(self) -> None:
        self.now = 1000.0
        # by frontend: scraped at, and the requests by status
        self.frontends = {"new:8000": (995.0, {"": 40.0}), "old:8000": (990.0, {"ok": 7.0})}
        self.asked: list[str] = []
        self.is_down = False

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.is_down:
            raise httpx.ConnectError("refused")
        query = request.url.params["query"]
        if "timestamp" not in query:
            return httpx.Response(200, json={"status": "success", "data": {"result": []}})
        self.asked.append(query)
        rows = []
        for name, (at, counts) in self.frontends.items():
            for status, count in counts.items():
                labels = {"instance": name, "job": "front", "model": "M", "status": status}
                for of, value in (("count", count), ("at", at)):
                    added = {"of": of} | ({"__name__": "requests"} if of == "count" else {})
                    rows.append({"metric": labels | added, "value": [self.now, str(value)]})
        if "vector(1)" in query:
            rows.append({"metric": {"of": "now"}, "value": [self.now, "1"]})
        return httpx.Response(200, json={"status": "success", "data": {"result": rows}})


async def test_prometheus_counts_arrivals_in_the_time_of_its_samples() -> None:
    fake = Scraped()
    source = PrometheusSource("http://p", client=client(fake.answer))

    async def look() -> Load:
        fake.now += 5.0
        return (await source.loads([KEY]))[KEY]

    assert (await look()).arrived == Missing("counting begins")
    assert await look() == Load(
        prefill_backlog_tokens=Missing("no query is configured"),
        concurrency=Missing("no series"),
        arrived=IDLE,
        seconds=0.0,
        ago_s=15.0,
    )
    fake.is_down = True
    assert isinstance((await look()).arrived, Missing)
    fake.is_down = False
    fake.frontends = {
        "new:8000": (1010.0, {"": 190.0}),
        "old:8000": (1015.0, {"ok": 32.0, "error": 5.0}),
    }
    load = await look()
    assert (load.seconds, load.ago_s) == (15.0, 10.0)  # from 995 to 1010
    assert number(load.arrived) == pytest.approx(150.0 + 30.0 * 15 / 25)
    began, ended = (
        f'dynamo_frontend_requests{one}_total{{model=~"(?i)m"}}' for one in ("_started", "")
    )
    assert fake.asked[0] == (
        f'label_replace({began} or on (instance, job) {ended}, "of", "count", "", "") or '
        f"label_replace(timestamp({began}) or on (instance, job) timestamp({ended}), "
        '"of", "at", "", "") or label_replace(vector(1), "of", "now", "", "")'
    )


async def test_prometheus_without_series_for_a_look_does_not_begin_anew() -> None:
    """A scrape of the only frontend failed: it has no series until the next one."""
    fake = Scraped()
    source = PrometheusSource("http://p", client=client(fake.answer))
    fake.frontends = {"new:8000": (995.0, {"": 40.0})}
    await source.loads([KEY])
    fake.now, fake.frontends = 1015.0, {}
    load = (await source.loads([KEY]))[KEY]
    assert (load.arrived, load.seconds, load.ago_s) == (IDLE, 0.0, 20.0)
    fake.now, fake.frontends = 1030.0, {"new:8000": (1025.0, {"": 340.0})}
    load = (await source.loads([KEY]))[KEY]
    assert (load.arrived, load.seconds, load.ago_s) == (Value(300.0), 30.0, 5.0)
    fake.frontends = {}
    other = (await source.loads([ModelKey("other")]))[ModelKey("other")]
    assert other.arrived == Missing("no series"), "it has none at all"


async def test_prometheus_counts_what_names_no_target_by_itself() -> None:
    """Somebody pushed it: two of such do not wait for each other, nor begin at zero."""
    fake = Scraped()

    def answer(request: httpx.Request) -> httpx.Response:
        answer = fake.answer(request).json()
        for row in answer["data"]["result"]:
            row["metric"]["pod"] = row["metric"].pop("instance", "")
        return httpx.Response(200, json=answer)

    source = PrometheusSource("http://p", client=client(answer))
    await source.loads([KEY])
    fake.now = 1200.0  # the one that is gone is waited for no longer
    fake.frontends = {"new:8000": (1195.0, {"": 2040.0}), "third": (1195.0, {"ok": 1e6})}
    load = (await source.loads([KEY]))[KEY]
    assert number(load.arrived) == pytest.approx(2000.0)


class Dribble(httpx.AsyncByteStream):
    """A body that does not end."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: httpx.Response(200, stream=Dribble()), "no whole answer within 0.1 s"),
        (lambda _: httpx.Response(200, content=b"x" * 101), "more than 100 bytes"),
        (lambda _: (_ for _ in ()).throw(httpx.InvalidURL("no address")), "no address"),
    ],
)
async def test_who_never_ends_an_answer_holds_nobody_up(
    answer: Answer, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_answers, "PAGE_BYTES_MAX", 100)
    monkeypatch.setattr(prometheus_module, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(selector_module, "TIMEOUT_S", 0.1)
    for source in (
        PrometheusSource("http://p", SELECTOR, client(answer)),
        SelectorSource(["http://a"], client=client(answer)),
    ):
        window = (await source.windows([KEY], 180.0))[KEY]
        assert isinstance(window.requests, Missing)
        assert why in window.requests.why


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (httpx.Response(502, text="<html>"), "http://p/api/v1/query: answered 502"),
        (httpx.Response(302, headers={"location": "/login"}), "answered 302"),
        (httpx.Response(200, text="{"), "truncated"),
        (httpx.Response(200, json=["status"]), "Expected `object`"),
    ],
)
async def test_what_prometheus_answers_instead_is_reported(
    answer: httpx.Response, why: str
) -> None:
    source = PrometheusSource("http://p", SELECTOR, client(lambda _: answer))
    window = (await source.windows([KEY], 180.0))[KEY]
    assert isinstance(window.requests, Missing)
    assert why in window.requests.why


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "seven", ""])
def test_a_number_that_is_none_is_missing(number: str) -> None:
    window, _ = prometheus_window(dict.fromkeys(FRONTEND, number))
    assert isinstance(window.requests, Missing)
    assert isinstance(window.isl, Missing)


async def test_a_trace_is_read_interval_by_interval(tmp_path: Path) -> None:
    source = TraceSource(read_trace(GOLDEN / "warmup_trace.jsonl"))
    readings = [(await source.windows([KEY], 180.0))[KEY].requests for _ in range(12)]
    assert readings[4] == IDLE
    assert readings[0] == Value(540.0)
    assert isinstance(readings[8], Value)
    assert isinstance(readings[9], Missing), "fault 10: it ends before that interval does"
    assert isinstance(readings[-1], Missing)
    assert (await source.loads([KEY]))[KEY] == Load()
    broken = tmp_path / "trace.jsonl"
    broken.write_text('{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1}\n')
    with pytest.raises(TraceError, match=r"line 2: .*input_length"):
        read_trace(broken)
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize("tokens", ["-1", "9223372036854775807", "1e300"])
@pytest.mark.parametrize("name", ["input_length", "output_length"])
def test_a_length_that_is_none_is_refused(tmp_path: Path, name: str, tokens: str) -> None:
    """A negative one was a root of a negative number, and a huge one was counted out for ever."""
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": "0", "input_length": "10", "output_length": "3", name: tokens}
    trace.write_text("{" + ", ".join(f'"{key}": {value}' for key, value in line.items()) + "}\n")
    with pytest.raises(TraceError, match=rf"line 1: .*{name}"):
        read_trace(trace)


@pytest.mark.parametrize(("total", "count"), [(-3.0, 2.0), (1e308, 0.5), (1.0, 1e-320)])
def test_a_mean_that_cannot_be_is_missing(total: float, count: float) -> None:
    mean = ratio(total, count, "no series x", 1e3)
    assert isinstance(mean, Missing)
    assert mean.why.startswith("no series x that can be: the mean is ")
