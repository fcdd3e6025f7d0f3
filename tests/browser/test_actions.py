"""What the page changes: after a question, and with a token where the service wants one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.fleet import BIG, book, call, register
from tests.browser.tab import Tab
from tests.live.http import JSON_TYPE, exchange_raw
from tests.live.server import Server
from tests.select_service.edge.security.credentials_made import TokenFile

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Serve = Callable[..., Server]
Tabs = Callable[..., Tab]
TOKEN = "dialog[aria-label='Token for changes']"


def press(page: Tab, name: str) -> None:
    page.page.get_by_role("button", name=name, exact=True).click()


def without(page: Tab, *statuses: str) -> None:
    """These were meant; the browser notes every one of them."""
    page.complaints = [one for one in page.complaints if not any(map(one.count, statuses))]


def test_changes_are_asked_for_first(serve: Serve, tab: Tabs) -> None:
    server = serve()
    register(server, BIG)
    register(server, 1)
    book(server, "a", allowed_worker_ids=[BIG])
    page = tab(server)
    page.open("fleet")
    page.find(f"[data-key='{BIG}/0'] a").click()
    assert page.flaws() == []
    page.page.get_by_role("button", name="Remove …").click()
    page.until("dialog form", "1 live reservation")
    page.page.get_by_role("button", name="Cancel").click()
    assert len(call(server, "GET", "/workers")) == 2
    page.page.get_by_role("button", name="Cap requests …").click()
    page.page.get_by_label("Requests at a time").fill("7")
    page.page.get_by_role("button", name="Cap it").click()
    page.until("#notice", "7 requests")
    assert call(server, "GET", "/workers")[1]["max_inflight"] == 7
    page.page.get_by_role("button", name="Remove …").click()
    page.page.get_by_role("button", name="Remove", exact=True).click()
    page.page.wait_for_selector(f"[data-key='{BIG}/0']", state="detached")
    assert [one["worker_id"] for one in call(server, "GET", "/workers")] == [1]
    # what the service refuses is said, and the question stays
    page.open("admission")
    page.page.wait_for_selector("[data-table=thresholds] button")
    assert page.find("[data-table=thresholds] button:has-text('Change')").is_disabled()
    page.open("fleet")
    page.find("[data-key='1/0'] a").click()
    page.page.get_by_role("button", name="Remove …").click()
    call(server, "DELETE", "/workers/1")
    page.page.get_by_role("button", name="Remove", exact=True).click()
    page.until("dialog .problem[role=alert]", "not found")
    page.complaints = [one for one in page.complaints if "404" not in one]


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (800, "dark")])
def test_a_worker_is_drained_and_put_back(serve: Serve, tab: Tabs, width: int, theme: str) -> None:
    server = serve()
    register(server, BIG)
    register(server, 1)
    book(server, "a", 640, allowed_worker_ids=[BIG])
    page = tab(server, width=width, theme=theme)
    page.open("fleet")
    keys = page.page.keyboard
    page.find(f"[data-key='{BIG}/0'] a").focus()
    keys.press("Enter")
    page.page.wait_for_selector("#content[data-view=worker]")
    page.page.get_by_role("button", name="Drain …").focus()
    keys.press("Enter")
    page.until("dialog form", "1 live reservation")
    assert "last schedulable" not in page.text("dialog form")
    assert page.flaws() == []
    assert page.overflow() == 0
    keys.press("Escape")
    page.page.wait_for_selector("dialog form", state="detached")
    assert call(server, "GET", f"/workers/{BIG}/drain")["drains"] is False, "it was only a question"
    keys.press("Enter")  # the focus came back to where the question was asked
    page.page.wait_for_selector("#drain-reason")
    keys.type("new <b>image</b>")
    keys.press("Enter")
    page.until("#notice", f"Worker {BIG} drains.")
    page.until("#drain-progress", "Draining (new <b>image</b>): waits for 1 reservation")
    assert "640 prefill tokens to compute, 40 KV blocks held" in page.text("#drain-progress")
    assert page.flaws() == []
    assert page.overflow() == 0
    call(server, "DELETE", "/reservations/a")
    page.until("#drain-progress", "nothing is in flight, it may be terminated")
    page.open("fleet")
    page.until(f"[data-key='{BIG}/0']", "draining")
    page.find("#fleet-only").select_option("draining")
    assert page.order("fleet") == [f"{BIG}/0"]
    assert page.text("[data-card=workers] b") == "1 of 2"
    page.find(f"[data-key='{BIG}/0'] a").click()
    press(page, "Put back …")
    press(page, "Put back")
    page.until("#notice", "is back")
    page.until(".worker-title", "schedulable")
    assert not page.find("#drain-progress").is_visible()
    assert call(server, "GET", "/workers")[1]["lifecycle"] == "schedulable"


def test_changes_take_a_token_with_more_rights(serve: Serve, tab: Tabs, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("reader", "read")
    file.add("registrar", "catalog")
    file.add("operator", "admin")
    flags = ("--token-file", str(file.path), "--access-log")
    server = serve(*flags, "--admission-control", "token-capacity")

    def ask(method: str, path: str, body: object = None) -> Any:
        headers = {"Content-Type": JSON_TYPE, **file.header("operator")}
        answer = exchange_raw(server.port, method, path, json.dumps(body).encode(), headers)
        assert answer.status < 400, answer.raw
        return answer.json

    for worker_id in (1, 2):
        record = {"worker_id": worker_id, "endpoint": "http://w", "block_size": 16}
        ask("POST", "/workers", record | {"kv_events_endpoint": "tcp://127.0.0.1:9"})
    page = tab(server)

    def show(dialog: str, name: str) -> None:
        page.page.wait_for_selector(f"{dialog} input")
        page.find(f"{dialog} input").fill(file.tokens[name])
        page.page.keyboard.press("Enter")

    page.page.goto(f"{page.origin}/console")
    show("dialog[aria-label=Token]", "reader")
    page.live()
    page.find("[data-key='1/0'] a").click()
    press(page, "Drain …")
    press(page, "Drain")
    page.until(TOKEN, "the token has not the scope catalog")
    assert page.flaws() == []
    show(TOKEN, "reader")
    page.until(f"{TOKEN} .problem", "Not done: the token has not the scope catalog")
    assert not ask("GET", "/workers/1/drain")["drains"]
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector(TOKEN, state="detached")
    page.until("dialog form .problem", "Not done: the token has not the scope catalog")
    assert page.find("#forget").is_hidden(), "what does not do is not kept"
    press(page, "Drain")
    show(TOKEN, "registrar")
    page.until("#notice", "Worker 1 drains.")
    assert ask("GET", "/workers/1/drain")["drains"]
    # thresholds are an administrator's
    page.open("admission")
    press(page, "Change …")
    page.find("#limit-2").fill("0.5")
    press(page, "Put in force")
    page.until(TOKEN, "has not the scope admin")
    show(TOKEN, "operator")
    page.until("#notice", "are in force")
    page.until("[data-table=thresholds]", "0.5")
    # the same token does for what comes next, also after a reload, until it is forgotten
    page.page.reload()
    page.live()
    page.open("fleet")
    page.find("[data-key='1/0'] a").click()
    press(page, "Put back …")
    press(page, "Put back")
    page.until("#notice", "Worker 1 is back.")
    press(page, "Forget token for changes")
    page.page.wait_for_selector("#forget", state="hidden")
    page.open("fleet")
    page.find("[data-key='2/0'] a").click()
    press(page, "Remove …")
    press(page, "Remove")
    page.page.wait_for_selector(TOKEN)
    kept = page.page.evaluate("[Object.values(sessionStorage), Object.values(localStorage)]")
    assert kept == [[file.tokens["reader"]], ["system"]]
    # what a good token cannot do is shown where it was asked for
    ask("DELETE", "/workers/2")
    show(TOKEN, "operator")
    page.page.wait_for_selector(TOKEN, state="detached")
    page.until("dialog form .problem", "worker 2 not found")
    without(page, "401", "403", "404")
    log = server.log_path.read_text()
    assert all(token not in log + page.page.url for token in file.tokens.values())
