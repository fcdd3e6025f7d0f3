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
from select_service.planner.edge.sources.selector_counters import parse
from select_service.planner.edge.sources.series_names import SELECTOR
from select_service.planner.edge.sources.trace import TraceSource, read_trace
from select_service.planner.errors import TraceError
from select_service.planner.types import IDLE, Load, Missing, ModelKey, Reading, Value, Window
from tests.select_service.planner.edge.fakes import KEY, Clock, run
from tests.select_service.planner.golden import GOLDEN

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
    told: list[Window] = []

    async def use() -> None:
        source = PrometheusSource("http://p:9090/", client=client(answer), **settings)
        told.append((await source.windows([KEY], 180.0))[KEY])
        await source.close()

    run(use)
    return told[0], asked


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


def test_prometheus_tells_the_mix_of_lengths_where_there_are_buckets() -> None:
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


def test_prometheus_quotes_names() -> None:
    answer, asked = prometheus({"load": "12"})

    async def use() -> None:
        source = PrometheusSource("http://p", SELECTOR, client(answer))
        model = ModelKey('a.b"c', "t\\")
        assert (await source.loads([model]))[model].concurrency == Value(12.0)

    run(use)
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
    """A Prometheus that scrapes two frontends; one tells requests only as they end."""

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


def test_prometheus_counts_arrivals_in_the_time_of_its_samples() -> None:
    fake = Scraped()

    async def use() -> None:
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

    run(use)
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


def test_prometheus_counts_what_names_no_target_by_itself() -> None:
    """Somebody pushed it: two of such do not wait for each other, nor begin at zero."""
    fake = Scraped()

    def answer(request: httpx.Request) -> httpx.Response:
        told = fake.answer(request).json()
        for row in told["data"]["result"]:
            row["metric"]["pod"] = row["metric"].pop("instance", "")
        return httpx.Response(200, json=told)

    async def use() -> None:
        source = PrometheusSource("http://p", client=client(answer))
        await source.loads([KEY])
        fake.now = 1200.0  # the one that is gone is waited for no longer
        fake.frontends = {"new:8000": (1195.0, {"": 2040.0}), "third": (1195.0, {"ok": 1e6})}
        load = (await source.loads([KEY]))[KEY]
        assert number(load.arrived) == pytest.approx(2000.0)

    run(use)


class Selectors:
    """/metrics of two selectors; counters as a test sets them."""

    def __init__(self) -> None:
        self.requests = {"a": 100.0, "b": 10.0}
        self.backlog = {"a": 500.0, "b": 480.0}
        self.down: set[str] = set()
        self.pages: dict[str, httpx.Response] = {}  # of somebody who is no selector
        self.has_demand = True
        self.started: dict[str, float] = {}
        self.ids: dict[str, str] = {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        if name in self.down:
            raise httpx.ConnectError("refused")
        if name in self.pages:
            return self.pages[name]
        count = self.requests[name]
        scope = 'model_name="m",tenant_id="default"'
        lines = [
            f'select_service_rank_prefill_tokens{{worker_id="1",{scope}}} {self.backlog[name]}',
            f'select_service_rank_prefill_tokens{{worker_id="2",{scope}}} 100',
            f'select_service_reservations{{state="prefill",{scope}}} 3',
            f'select_service_reservations{{state="decode",{scope}}} 5',
        ]
        if self.has_demand:
            for outcome, share in (("placed", 0.9), ("refused", 0.1)):
                labels = f'{{{scope},outcome="{outcome}"}}'
                lines.append(f"select_service_demand_requests_total{labels} {share * count}")
            for bound, share in (("1023", 0.5), ("4095", 1.0), ("+Inf", 1.0)):
                labels = f'{{{scope},le="{bound}"}}'
                lines.append(f"select_service_demand_isl_tokens_bucket{labels} {share * count}")
            lines.append(f"select_service_demand_isl_tokens_sum{{{scope}}} {1500 * count}")
            lines.append(f"select_service_demand_isl_tokens_count{{{scope}}} {count}")
        if name in self.started:
            lines.append(f"process_start_time_seconds {self.started[name]}")
        if name in self.ids:
            lines.append(f'select_service_instance_info{{instance_id="{self.ids[name]}"}} 1')
        return httpx.Response(200, text="\n".join(lines) + "\n")


async def test_selectors_are_added_up_and_their_loads_are_not() -> None:
    fake = Selectors()
    source = SelectorSource(["http://a", "http://b"], client=client(fake.answer))
    first = (await source.windows([KEY], 180.0))[KEY]
    assert isinstance(first.requests, Missing)  # there is nothing to compare with yet
    fake.requests = {"a": 400.0, "b": 40.0}
    load = (await source.loads([KEY]))[KEY]
    assert load.prefill_backlog_tokens == Value(600.0)  # of the fuller book, both its ranks
    assert load.concurrency == Value(8.0)
    window = (await source.windows([KEY], 180.0))[KEY]
    assert number(window.requests) == pytest.approx(330.0)
    assert number(window.isl) == pytest.approx(1500.0)
    assert window.concurrency == Value(8.0)
    assert [round(share) for _, share in window.isl_mix] == [165, 165]
    assert isinstance(window.ttft_ms, Missing)
    quiet = (await source.windows([KEY], 180.0))[KEY]
    assert (quiet.requests, quiet.isl) == (IDLE, IDLE)
    await source.close()


async def test_a_selector_that_restarts_loses_nothing_and_one_that_is_gone_is_missing() -> None:
    fake = Selectors()
    source = SelectorSource(["http://a", "http://b"], client=client(fake.answer))
    await source.windows([KEY], 180.0)
    fake.requests = {"a": 160.0, "b": 10.0}
    await source.loads([KEY])
    fake.requests["a"] = 30.0  # it started again after 60 more, and has counted 30 since
    window = (await source.windows([KEY], 180.0))[KEY]
    assert number(window.requests) == pytest.approx(90.0)
    fake.down = {"b"}
    window = (await source.windows([KEY], 180.0))[KEY]
    assert isinstance(window.requests, Missing)
    assert "http://b: refused" in window.requests.why
    fake.down = {"a", "b"}
    assert isinstance((await source.loads([KEY]))[KEY].concurrency, Missing)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (httpx.Response(200, text=""), "http://a: no metrics of a selector"),
        (httpx.Response(200, text="up 1\n"), "http://a: no metrics of a selector"),
        (httpx.Response(500, text="select_service_"), "http://a: answered 500"),
        (httpx.Response(302, headers={"location": "/login"}), "http://a: answered 302"),
    ],
)
async def test_a_page_that_is_no_selector_s_is_missing_and_no_new_beginning(
    page: httpx.Response, why: str
) -> None:
    fake = Selectors()
    source = SelectorSource(["http://a"], client=client(fake.answer))
    await source.windows([KEY], 180.0)
    fake.pages = {"a": page}
    window = (await source.windows([KEY], 180.0))[KEY]
    assert window.requests == Missing(why)
    fake.pages, fake.requests = {}, {"a": 130.0}
    window = (await source.windows([KEY], 180.0))[KEY]
    assert number(window.requests) == pytest.approx(30.0), "not all 130 in one interval"


async def test_a_series_that_is_away_for_a_page_has_not_counted_all_anew() -> None:
    """Of one that was no number, or not there, all it had ever counted came within a look."""
    fake = Selectors()
    source = SelectorSource(["http://a"], client=client(fake.answer))
    await source.begin([KEY])
    for away in (dict.fromkeys("ab", float("nan")), None):
        there = dict(fake.requests)
        fake.has_demand, fake.requests = away is not None, away or there
        await source.windows([KEY], 180.0)
        fake.has_demand, fake.requests = True, {"a": there["a"] + 7.0, "b": 10.0}
        window = (await source.windows([KEY], 180.0))[KEY]
        assert number(window.requests) == pytest.approx(7.0)
        assert number(window.isl) == pytest.approx(1500.0)


async def test_a_selector_that_has_counted_more_since_its_start_than_before_it() -> None:
    """By the counter alone it would have gained the difference of the two."""
    fake = Selectors()
    fake.started["a"] = 1000.0
    source = SelectorSource(["http://a"], client=client(fake.answer))
    await source.windows([KEY], 180.0)
    fake.requests["a"], fake.started["a"] = 250.0, 2000.0
    window = (await source.windows([KEY], 180.0))[KEY]
    assert number(window.requests) == pytest.approx(250.0)
    assert number(window.isl) == pytest.approx(1500.0)


async def test_several_selectors_behind_one_address_are_told() -> None:
    """A Service in front of replicas: each turn would count all that the other one ever has."""
    fake = Selectors()
    source = SelectorSource(["http://a"], client=client(fake.answer))
    told = []
    for started in (1000.0, 1001.0, 1000.0):
        fake.started["a"] = started
        told.append((await source.windows([KEY], 180.0))[KEY].requests)
    assert isinstance(told[-1], Missing)
    assert "name every selector by itself" in told[-1].why


async def test_what_came_while_a_selector_was_silent_did_not_come_in_one_look() -> None:
    fake, clock = Selectors(), Clock()
    source = SelectorSource(["http://a", "http://b"], client=client(fake.answer), clock=clock)
    await source.windows([KEY], 180.0)
    for fake.down in (set(), {"b"}, {"b"}, set[str](), set[str]()):
        clock.now += 5.0
        fake.requests = {name: count + 25.0 for name, count in fake.requests.items()}
        load = (await source.loads([KEY]))[KEY]
        if fake.down:
            assert isinstance(load.arrived, Missing)
        else:
            assert number(load.arrived) / load.seconds == pytest.approx(10.0)


async def test_an_interval_tells_what_came_since_the_last_look() -> None:
    """The next look counts from there: nothing is counted twice, and nothing left out."""
    fake, clock = Selectors(), Clock()
    source = SelectorSource(["http://a", "http://b"], client=client(fake.answer), clock=clock)
    await source.begin([KEY])
    spans: list[tuple[float, float]] = []
    for step in range(1, 9):
        clock.now += 5.0
        fake.requests = {name: count + step for name, count in fake.requests.items()}
        if step % 4:
            load = (await source.loads([KEY]))[KEY]
            spans.append((number(load.arrived), load.seconds))
        else:
            window = (await source.windows([KEY], 20.0))[KEY]
            spans.append((number(window.arrived), window.arrived_s))
    assert [seconds for _, seconds in spans] == [5.0] * 8
    assert [came for came, _ in spans] == pytest.approx([2.0 * step for step in range(1, 9)])


async def test_counting_begins_with_the_last_selector_that_is_found() -> None:
    """Planner and selectors are started together: who comes later was not followed before."""
    fake, clock = Selectors(), Clock()
    source = SelectorSource(["http://a", "http://b"], client=client(fake.answer), clock=clock)
    fake.down = {"b"}
    assert isinstance((await source.windows([KEY], 180.0))[KEY].requests, Missing)
    loads, windows = [], []
    for seconds in (100.0, 80.0, 100.0, 80.0):
        clock.now += seconds
        fake.requests = {name: count + 10 * seconds for name, count in fake.requests.items()}
        fake.down = set()
        if seconds == 100.0:
            loads.append((await source.loads([KEY]))[KEY])
            arrived = loads[-1].arrived
            assert isinstance(arrived, Missing) or number(arrived) == 2000.0
            continue
        windows.append((await source.windows([KEY], 180.0))[KEY])
        assert isinstance(windows[-1].requests, Missing) or clock.now > 300.0
    assert isinstance(loads[-1].arrived, Value), "it is followed by now"
    assert number(windows[-1].requests) / windows[-1].seconds == pytest.approx(20.0)


def test_of_a_large_page_few_lines_are_read() -> None:
    others = [f'select_service_demand_requests_total{{model_name="{n}"}} 1' for n in range(999)]
    broken = "select_service_rank_requests{"  # of no concern
    name = 'a "b" \\ c'
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    mine = f'select_service_demand_requests_total{{model_name="{escaped}"}} 7'
    nothing = 'select_service_reservations{model_name="7"} NaN'
    text = "\n".join([*others, broken, mine, nothing, ""])
    assert parse(text, [name]) == {("demand_requests_total", name, "default", ""): 7.0}
    assert parse(text, ["7"]) == {("demand_requests_total", "7", "default", ""): 1.0}
    assert len(parse(text)) == 1000
    with pytest.raises(ValueError, match=r"."):
        parse("select_service_demand_requests_total{", None)


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
async def test_what_prometheus_answers_instead_is_told(answer: httpx.Response, why: str) -> None:
    source = PrometheusSource("http://p", SELECTOR, client(lambda _: answer))
    window = (await source.windows([KEY], 180.0))[KEY]
    assert isinstance(window.requests, Missing)
    assert why in window.requests.why


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf", "seven", ""])
def test_a_number_that_is_none_is_missing(number: str) -> None:
    window, _ = prometheus_window(dict.fromkeys(FRONTEND, number))
    assert isinstance(window.requests, Missing)
    assert isinstance(window.isl, Missing)


async def test_a_selector_that_counts_no_demand_is_missing() -> None:
    fake = Selectors()
    fake.has_demand = False
    source = SelectorSource(["http://a"], client=client(fake.answer))
    await source.windows([KEY], 180.0)
    window = (await source.windows([KEY], 180.0))[KEY]
    assert window.requests == Missing("no selector counts demand")


async def test_a_load_nobody_tells_is_missing_and_who_waits_without_a_rank_is_counted() -> None:
    """Both were idle: a model that no selector knows, and one whose last rank had just gone."""
    fake = Selectors()
    waiting = 'select_service_pending_isl_tokens{model_name="m",tenant_id="default"} 3000\n'
    fake.pages["a"] = httpx.Response(200, text=waiting)
    source = SelectorSource(["http://a"], client=client(fake.answer))
    other = ModelKey("other")
    loads = await source.loads([KEY, other])
    assert loads[KEY].prefill_backlog_tokens == Value(3000.0)
    for load in (loads[KEY].concurrency, loads[other].prefill_backlog_tokens):
        assert isinstance(load, Missing)
    await source.close()


def test_a_trace_is_told_interval_by_interval(tmp_path: Path) -> None:
    source = TraceSource(read_trace(GOLDEN / "warmup_trace.jsonl"))

    async def use() -> None:
        told = [(await source.windows([KEY], 180.0))[KEY].requests for _ in range(12)]
        assert told[4] == IDLE
        assert told[0] == Value(540.0)
        assert isinstance(told[8], Value)
        assert isinstance(told[9], Missing), "fault 10: it ends before that interval does"
        assert isinstance(told[-1], Missing)
        assert (await source.loads([KEY]))[KEY] == Load()

    run(use)
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
