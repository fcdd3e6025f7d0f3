"""Demand as the selectors count it."""

from __future__ import annotations

import httpx
import pytest

from select_service.planner.edge.sources.selector import SelectorSource
from select_service.planner.edge.sources.selector_counters import parse
from select_service.planner.types import IDLE, MOMENTS, Missing, ModelKey, Moments, Value
from tests.select_service.planner.edge.fakes import KEY, Clock
from tests.select_service.planner.edge.test_sources import client, number


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
        self.measured: dict[str, float] = {}  # first tokens, of 2,000 tokens and 50 ms each

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
        if name in self.measured:
            for moment, one in zip(MOMENTS, (1.0, 2000.0, 0.05, 4e6, 100.0), strict=True):
                labels = f'{{{scope},moment="{moment}"}}'
                number = one * self.measured[name]
                lines.append(f"select_service_measured_prefill_moments_total{labels} {number}")
            lines.append(f"select_service_measured_rank_kv_tokens{{{scope}}} 400000")
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


async def test_what_selectors_measured_is_reported_of_the_time_of_the_window() -> None:
    fake = Selectors()
    fake.measured = {"a": 1000.0, "b": 500.0}
    source = SelectorSource(["http://a", "http://b"], client=client(fake.answer))
    await source.windows([KEY], 180.0)
    fake.measured = {"a": 1030.0, "b": 30.0}  # b has restarted
    window = (await source.windows([KEY], 180.0))[KEY]
    assert isinstance(window.prefill_moments, Moments)
    assert window.prefill_moments == pytest.approx((60.0, 120e3, 3.0, 240e6, 6000.0))
    assert window.itl_moments == Missing("no selector reports measured_itl_moments_total")
    assert window.rank_kv_tokens == Value(400_000.0)
    assert isinstance(window.prefill_worker_ranks, Missing)
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


async def test_several_selectors_behind_one_address_are_reported() -> None:
    """A Service in front of replicas: each turn would count all that the other one ever has."""
    fake = Selectors()
    source = SelectorSource(["http://a"], client=client(fake.answer))
    readings = []
    for started in (1000.0, 1001.0, 1000.0):
        fake.started["a"] = started
        readings.append((await source.windows([KEY], 180.0))[KEY].requests)
    assert isinstance(readings[-1], Missing)
    assert "name every selector by itself" in readings[-1].why


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


async def test_an_interval_counts_what_came_since_the_last_look() -> None:
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


async def test_a_selector_that_counts_no_demand_is_missing() -> None:
    fake = Selectors()
    fake.has_demand = False
    source = SelectorSource(["http://a"], client=client(fake.answer))
    await source.windows([KEY], 180.0)
    window = (await source.windows([KEY], 180.0))[KEY]
    assert window.requests == Missing("no selector counts demand")


async def test_a_load_nobody_reports_is_missing_and_who_waits_without_a_rank_is_counted() -> None:
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
