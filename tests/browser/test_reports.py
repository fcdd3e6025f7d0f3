"""Reports as people open them: a file, nothing beside it, read on a desk and on a telephone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from select_service.planner.cli import main as select_planner
from select_service.simulator.cli import main as select_sim
from tests.browser.tab import CONTRAST, axe
from tests.deploy.tools import AXE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

GOLDEN = Path(__file__).parents[1] / "golden" / "planner"
PROFILE = str(GOLDEN / "profile_a")

MUDDLED = """() => [...document.querySelectorAll("svg")].flatMap((svg) => {
  const sheet = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter((one) => one.textContent.trim())
    .map((one) => [one.textContent, one.getBoundingClientRect()]);
  const isOut = (box) => box.left < sheet.left - 1 || box.right > sheet.right + 1
    || box.top < sheet.top - 1 || box.bottom > sheet.bottom + 1;
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  return [
    ...texts.filter(([, box]) => isOut(box)).map(([text]) => `cut: ${text}`),
    ...texts.flatMap(([text, box], at) => texts.slice(at + 1)
      .filter(([, other]) => meet(box, other)).map(([other]) => `${text} on ${other}`)),
    ...texts.filter(([text]) => /\\de[+-]?\\d/.test(text)).map(([text]) => `no number: ${text}`),
  ];
})"""
"""Words of a plot that are cut, stand on each other, or are numbers nobody writes."""

LARGER = "*{font-size:18px !important;letter-spacing:.8px !important}"
"""A browser with other fonts, whose letters are wider than those that are installed here."""

WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def simulated(folder: Path) -> tuple[str, list[str]]:
    page = folder / "simulated.html"
    workload = "chat,rate=4,requests=120"
    flags = ("--workload", workload, "--block-size", "64", "--workers", "3", "--seeds", "2")
    assert select_sim(["run", *flags, "--policy", "all", "--quiet", "--report", str(page)]) == 0
    return page.as_uri(), ["first-token", "round-robin", "chat", "first run"]


def profiled(folder: Path) -> tuple[str, list[str]]:
    page = folder / "profile.html"
    assert select_planner(["profile", "inspect", PROFILE, "--out", str(page)]) == 0
    return page.as_uri(), ["512 tokens", "16,384 tokens", "30 samples", "as measured"]


def replayed(folder: Path) -> tuple[str, list[str]]:
    page, trace = folder / "replay.html", folder / "trace.jsonl"
    rows = (
        {"timestamp": 150 * at, "input_length": 2000, "output_length": 100} for at in range(6000)
    )
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--trace", str(trace), "--profile-results-dir", PROFILE, "--ttft", "450")
    assert select_planner(["replay", *flags, "--out", str(page)]) == 0
    return page.as_uri(), ["oracle", "450 ms", "6,000 requests", "minutes"]


def swept(folder: Path) -> tuple[str, list[str]]:
    page = folder / "sweep.html"
    grid = ("--vary", "overlap_score_credit=0.5,1", "--vary", "prefill_load_scale=0.5,1,2")
    aims = "ttft_p90,itl_p90,load_cov,hit_rate"
    load = ("--workload", "agents,rate=2,requests=40", "--block-size", "64", "--seeds", "2")
    asked = (*grid, *load, "--aims", aims, "--quiet", "--report", str(page))
    assert select_sim(["sweep", *asked]) == 0
    return page.as_uri(), [
        "the best TTFT p90 has",
        "on the front",
        "prefill_load_scale=2",
        "kv-cost",
    ]


def made_again(folder: Path) -> tuple[str, list[str]]:
    page = folder / "again.html"
    recording = GOLDEN.parent / "recordings" / "first-token-before-sequences.rec"
    weights = ("--weights", "overlap_score_credit=0.5", "--quiet")
    assert select_sim(["replay", str(recording), *weights, "--report", str(page)]) == 0
    return page.as_uri(), ["1 file of select-service", "Ranks", "what if", "planned in batches"]


def note(some: list[str], name: str, event: object) -> None:
    some.append(getattr(event, name))


@pytest.mark.parametrize("made", [simulated, profiled, replayed, swept, made_again])
def test_a_report_can_be_read(
    browser: Browser, tmp_path: Path, made: Callable[[Path], tuple[str, list[str]]]
) -> None:
    address, texts = made(tmp_path)
    looks: tuple[tuple[int, Any], ...] = ((1280, "light"), (390, "dark"))
    for width, theme in looks:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        tab = context.new_page()
        asked: list[str] = []
        complaints: list[str] = []
        tab.on("request", partial(note, asked, "url"))
        tab.on("console", partial(note, complaints, "text"))
        tab.goto(address)
        assert len(tab.title()) > 15, "among ten tabs it is found again"
        text = tab.inner_text("body")
        assert [word for word in texts if word not in text] == []
        plots = tab.locator("svg:not([aria-hidden])")  # samples of a legend have its words
        assert plots.count() >= 3
        nameless = "all => all.filter((one) => !one.getAttribute('aria-label')).length"
        assert plots.evaluate_all(nameless) == 0
        assert tab.evaluate(MUDDLED) == []
        assert tab.evaluate(WIDER) == 0
        assert tab.evaluate(CONTRAST) == []
        assert re.fullmatch(r"[^.].{20,}\.", tab.inner_text(".verdict"))
        commands = ("select-sim", "select-planner profile inspect", "select-planner replay")
        assert tab.inner_text(".made code").startswith(commands)
        assert re.search(r"Made on \d{4}-\d\d-\d\d at", tab.inner_text(".made"))
        read = tab.locator("circle title, path title").evaluate_all(
            "all => all.map((one) => one.textContent)"
        )
        assert len(read) > 20
        assert all(re.fullmatch(r".+: [-\d.,e+]+ at [-\d.,e+]+", one) for one in read)
        assert tab.locator("details").count() == 1
        assert tab.locator("details[open]").count() == 0, "settings are unfolded by who wants them"
        assert (asked, complaints) == ([address], [])
        assert not AXE.exists() or axe(tab) == []
        tab.add_style_tag(content=LARGER)
        assert tab.evaluate(WIDER) == 0
        context.close()
