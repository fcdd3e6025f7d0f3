"""A service that asks for tokens: the page asks its user, and keeps the answer to itself."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.tab import Tab
from tests.live.server import Server
from tests.select_service.edge.security.credentials_made import TokenFile

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Serve = Callable[..., Server]
Tabs = Callable[..., Tab]
DIALOG = "dialog[aria-label=Token]"


def test_the_page_asks_for_a_token(serve: Serve, tab: Tabs, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("reader", "read")
    file.add("gateway", "select")
    server = serve("--token-file", str(file.path), "--access-log")
    page = tab(server)

    def answer(token: str) -> None:
        page.page.wait_for_selector(DIALOG)
        page.find(f"{DIALOG} input").fill(token)
        page.page.keyboard.press("Enter")

    page.page.goto(f"{page.origin}/console")
    answer("x" * 43)
    page.until(f"{DIALOG} .problem", "the token is not known")
    answer(file.tokens["gateway"])
    page.until(f"{DIALOG} .problem", "has not the scope read")
    answer(file.tokens["reader"])
    page.page.wait_for_selector(DIALOG, state="detached")
    page.live()
    assert page.find("#token").is_visible()
    page.page.reload()
    page.live()
    page.open("doctor")
    assert page.find(DIALOG).count() == 0, "asked once for a tab"

    other = tab(server)
    other.page.goto(f"{other.origin}/console")
    other.page.wait_for_selector(DIALOG)
    other.page.keyboard.press("Escape")
    other.page.wait_for_selector(DIALOG, state="detached")
    other.page.wait_for_timeout(1500)
    assert other.find(DIALOG).count() == 0, "who will not say is not asked again and again"
    other.find("#token").click()
    other.page.wait_for_selector(DIALOG)

    file.drop("reader")
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)
    page.page.wait_for_selector(DIALOG)  # taken back: the stream ends, and the page asks again
    page.until("#connection", "the token is not known")
    for one in (page, other):
        one.page.goto("about:blank")  # it would try again, and be refused again
        refused = ("401", "403", "blank")
        one.complaints = [said for said in one.complaints if not any(map(said.count, refused))]
    log = (tmp_path / "service-0.log").read_text()
    assert all(token not in log for token in file.tokens.values())
