"""The page's own arithmetic, in the browser that runs it: rates, quantiles, ids, costs, tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.tab import Tab
from tests.live.server import Server

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Serve = Callable[..., Server]
Tabs = Callable[..., Tab]

ABOUT = {
    "point": ["at_ms", "selections", "failed", "isl_tokens", "prefill_tokens", "waiting"],
    "latency_bounds_s": [0.001, 0.01],
    "rank_fields": ["worker_id", "dp_rank"],
    "assets": "x",
}
QUIET: dict[str, Any] = {"workers": [], "ranks": [], "gone": []}


@pytest.fixture
def run(serve: Serve, tab: Tabs) -> Callable[..., Any]:
    """Run JavaScript with what a module exports as `m`."""
    page = tab(serve())
    page.open("fleet")

    def run(module: str, script: str, argument: object = None) -> Any:
        source = f"async (arg) => {{ const m = await import('{page.origin}{module}'); {script} }}"
        return page.page.evaluate(source, argument)

    return lambda module, *rest: run(f"/console/static/{module}", *rest)


def snapshot(life: str, *points: list[int]) -> dict[str, Any]:
    *history, last = points
    about = ABOUT | {"life": life}
    return QUIET | {
        "about": about,
        "at_ms": last[0],
        "history": history,
        "chosen": [],
        "point": last,
    }


def test_the_grid_of_a_chart_reaches_its_peak(run: Callable[..., Any]) -> None:
    peaks = [0.0021, 0.5, 1, 1.01, 3, 7, 29, 31, 60, 61, 99, 1000, 12345]
    for peak in peaks:
        step = run("chart.js", "return m.gridStep(arg)", peak)
        lines = math.ceil(peak / step - 1e-9)
        assert peak <= lines * step * (1 + 1e-9)
        assert lines <= 3, (peak, step)
    assert run("chart.js", "return [m.gridStep(29), m.gridStep(31), m.gridStep(1, 1)]") == [
        10,
        20,
        1,
    ]


def test_rates_are_differences_and_end_with_a_life(run: Callable[..., Any]) -> None:
    first = snapshot(
        "one",
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [5000, 59, 5, 1000, 250, 1, 40, 9, 0],
        [6000, 60, 6, 1000, 250, 1, 40, 10, 0],  # one point every five seconds
        [10000, 61, 6, 1000, 250, 2, 41, 10, 0],
        [11000, 110, 6, 1000, 250, 2, 90, 10, 0],
    )
    second = snapshot("two", [15000, 0, 0, 0, 0, 0, 0, 0, 0], [20000, 35, 0, 0, 0, 0, 7, 0, 0])
    series = run(
        "store.js",
        "const s = new m.Store(); for (const one of arg) s.take('snapshot', one);"
        " return s.series();",
        [first, second],
    )
    assert [one.get("isBreak", False) for one in series] == [False, False, True, False]
    assert [one.get("selections") for one in series] == [10, 10, None, 7]
    assert series[0]["failed"] == 1
    assert series[0]["hitRate"] == 0.75
    assert series[3]["hitRate"] is None, "nobody asked for anything"
    # of 50 answers 40 took up to 1 ms and 10 up to 10 ms
    assert series[0]["p50"] == pytest.approx(0.001 * 25 / 40)
    assert series[0]["p99"] == pytest.approx(0.001 + 0.009 * 9.5 / 10)


def test_a_clock_that_is_set_back_does_not_stop_the_charts(run: Callable[..., Any]) -> None:
    first = snapshot("one", [10_000_000, 0, 0, 0, 0, 0, 0, 0, 0], [10_001_000] + [0] * 8)
    tick = QUIET | {"at_ms": 5000, "point": [5000, 1, 0, 0, 0, 0, 0, 0, 0]}
    later = QUIET | {"at_ms": 10_000, "point": [10_000, 11, 0, 0, 0, 0, 0, 0, 0]}
    series = run(
        "store.js",
        "const s = new m.Store(); s.take('snapshot', arg[0]);"
        " s.take('tick', arg[1]); s.take('tick', arg[2]); return s.series();",
        [first, tick, later],
    )
    assert [one["selections"] for one in series] == [2]


def test_what_a_rank_was_chosen_for_is_counted_from_when_it_was_first_seen(
    run: Callable[..., Any],
) -> None:
    """Over the time asked for; one that comes anew under the same id begins at nothing."""
    rows = [
        *([0, 100, 6400, 6400], [2000, 110, 7040, 6400], [4000, 120, 7680, 6400]),
        *([40_000, 120, 7680, 6400], [50_000, 124, 8080, 6500], [60_000, 0, 0, 0]),
    ]
    script = """
      const s = new m.Store();
      const served = [];
      for (const [at, ...totals] of arg) {
        s.atMs = at;
        s.notePast("1/0", [at, ...totals]);
        served.push(s.servedBy("1/0", 30000));
      }
      return served;"""
    served = run("store.js", script, rows)
    assert served[0] is None, "nothing has passed yet"
    assert served[1] == {"at_ms": 2000, "selections": 5, "hitRate": 1}
    assert (served[2]["selections"], served[2]["hitRate"]) == (5, 1)
    assert (served[3]["selections"], served[3]["hitRate"]) == (0, None), "idle for half a minute"
    assert served[4]["selections"] == pytest.approx(4 / 30)
    assert served[4]["hitRate"] == 0.75
    assert served[5] is None


def test_a_page_opened_later_has_what_the_service_has_kept_of_a_rank(
    run: Callable[..., Any],
) -> None:
    fields = ["worker_id", "dp_rank", "selections", "isl_tokens", "selected_prefill_tokens"]
    kept = snapshot("one", [60_000] + [0] * 8)
    kept["about"] |= {"rank_fields": fields}
    kept |= {
        "chosen": [[15_000, [["1/0", 0, 0, 0]]], [30_000, [["1/0", 30, 400, 100]]]],
        "workers": [{"worker_id": "1", "ranks": [0, 1]}],
        "ranks": [["1", 0, 60, 800, 200]],
    }
    script = "const s = new m.Store(); for (const one of arg) s.take('snapshot', one);"
    series = run("store.js", script + " return s.served('1');", [kept, kept])
    assert [one["at_ms"] for one in series] == [*range(20_000, 60_001, 5000)]
    assert {one["hitRate"] for one in series if one["selections"]} == {0.75}
    assert [one["selections"] for one in series][2:4] == [2, 1.5]


def test_ids_are_ordered_as_the_numbers_they_are(run: Callable[..., Any]) -> None:
    ids = ["2/10", "10/0", "18446744073709551615/0", "2/9", "18446744073709551614/0", "9", "b", "a"]
    assert run("table.js", "return arg.sort(m.compare);", ids) == [
        *("2/9", "2/10", "9", "10/0", "18446744073709551614/0", "18446744073709551615/0"),
        *("a", "b"),
    ]


def test_the_parts_of_a_cost_add_up(run: Callable[..., Any]) -> None:
    one = {
        "cost": 9.0,
        "prefill_cost": 8.0,
        "credit": 2.0,
        "decode_cost": 3.0,
        "taint_factor": 0.75,
    }
    weights = {"prefill_load_scale": 1.5}
    parts = run("decisions.js", "return m.parts(...arg);", [one, weights])
    assert parts["prefill"] + parts["decode"] == pytest.approx((1.5 * 6 + 3) * 0.75)
    assert parts["credit"] == pytest.approx(1.5 * 2 * 0.75)
    one |= {"delay_cost": 4.0, "eviction_cost": 2.0}
    weights["decode_load_scale"] = 0.125
    one["context_cost"], weights["context_load_scale"] = 10.0, 0.5
    parts = run("decisions.js", "return m.parts(...arg);", [one, weights])
    whole = (1.5 * (6 + 4 + 2) + 0.125 * 3 + 0.5 * 10) * 0.75
    assert sum(parts.values()) - parts["credit"] == pytest.approx(whole)
    assert run("decisions.js", "return m.parts(arg, {});", {"cost": None}) is None


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("[1, 2,3]", [1, 2, 3]),
        ('{"token_ids": [4294967295]}', [4294967295]),
        ("0\n7\t8", [0, 7, 8]),
        ("", None),
        ("1 -2", None),
        ("1.5", None),
        ("one 2", None),
        ("1e5", None),
        ("4294967296", None),
    ],
)
def test_tokens_as_people_paste_them(
    run: Callable[..., Any], text: str, tokens: list[int] | None
) -> None:
    script = "try { return m.readTokens(arg); } catch (error) { return String(error); }"
    read = run("prefix.js", script, text)
    assert read == tokens if tokens is not None else read.startswith("Error: ")
