"""The tab of the doctor: what has lasted, what has not yet, and what is alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.fleet import BIG, call, register
from tests.browser.tab import Tab
from tests.live.server import Server

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Serve = Callable[..., Server]
Tabs = Callable[..., Tab]

LASTING = "[data-code]:not(#suspected [data-code])"
ARTICLE = "article:not(#suspected article)"


def test_what_has_not_lasted_is_shown_as_the_command_shows_it(serve: Serve, tab: Tabs) -> None:
    server = serve("--doctor-interval-s", "0.2")
    register(server, 1, block_size=None)
    page = tab(server)
    page.open("doctor")
    page.until("#suspected [data-code=worker-incomplete]", "a problem if it lasts")
    assert "No lasting problem found yet" in page.text("[data-empty=none-lasting]")
    assert page.find("[data-empty=no-findings]").count() == 0
    page.page.wait_for_selector(f"{LASTING}[data-code=worker-incomplete]")


def test_findings_of_the_doctor(serve: Serve, tab: Tabs) -> None:
    server = serve("--doctor-interval-s", "0.2")
    register(server, 1)
    clash = {"worker_id": BIG, "endpoint": "http://w", "block_size": 32}
    call(server, "POST", "/workers", clash | {"kv_events_endpoint": "tcp://127.0.0.1:9"})
    page = tab(server)
    page.open("doctor")
    page.page.wait_for_selector(f"{LASTING}[data-code=worker-incomplete]")
    findings = call(server, "GET", "/ready?verbose=true")["findings"]
    page.page.wait_for_function(
        f"n => document.querySelectorAll({LASTING!r}).length === n", arg=len(findings)
    )
    shown = page.find(LASTING).evaluate_all("all => all.map((one) => one.dataset.code)")
    assert sorted(shown) == sorted(one["code"] for one in findings)
    text = page.text("#content")
    for one in findings:
        assert one["what"] in text
        assert one["why"] in text
        assert one["remedy"] in text
    assert str(BIG) in text
    page.open("fleet")
    page.page.wait_for_function(
        "n => document.querySelector('#tabs .badge').innerText === String(n)",
        arg=sum(one["severity"] != "info" for one in findings),
    )


def test_many_alike_are_one_finding_with_long_names(serve: Serve, tab: Tabs) -> None:
    """Of many engines that are down cause and remedy are read once; names may be of any length."""
    server = serve("--doctor-interval-s", "0.2")
    lacking = {"model_name": "m" * 200, "tenant_id": "t" * 200, "endpoint": "http://w"}
    for at in range(12):
        call(server, "POST", "/workers", lacking | {"worker_id": BIG - at})
    page = tab(server)
    page.open("doctor")
    page.page.wait_for_function(f"() => document.querySelectorAll({LASTING!r}).length === 12")
    assert page.find(ARTICLE).count() == 1
    width = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    found, there = page.page.evaluate(width)
    assert found == there
    assert str(BIG) not in page.text("#content")
    page.find("summary").press("Enter")
    page.page.wait_for_function("id => document.body.innerText.includes(id)", arg=str(BIG))
    first = page.find(ARTICLE).element_handle()
    server.request("DELETE", f"/workers/{BIG - 11}")
    page.page.wait_for_function(f"() => document.querySelectorAll({LASTING!r}).length === 11")
    assert not first.is_visible()  # it was made anew, and stays unfolded
    assert str(BIG) in page.text("#content")


def test_a_worker_that_never_published_is_silent_also_in_trouble(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, 1)  # where its events should come from nothing answers
    page = tab(server)
    page.open("fleet")
    page.page.wait_for_function(
        "() => document.querySelector('[data-card=events] b')?.innerText === '1 in trouble'"
    )
    assert page.text("[data-card=events] .muted") == "1 silent so far"
    assert page.text("[data-vital=hits] dd") == page.text("[data-vital=p99] dd")  # both a dash
