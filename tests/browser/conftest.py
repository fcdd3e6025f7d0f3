"""Debian's Chromium, driven by Playwright: one browser for the run, one service for each test.

Both may be missing; the tests then say so and skip. `make test-heavy` installs them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.tab import Tab
from tests.live.server import OURS_EXTRA, Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ARGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A browser, or a skip that says what is missing."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is missing: pip install 'select-service[browser]'"
    )
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("Chromium is missing: apt-get install chromium fonts-dejavu-core")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=list(ARGS))
        yield chromium
        chromium.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start services with the flags given; all are stopped at the end."""
    servers: list[Server] = []

    def start(*flags: str, **fields: Any) -> Server:
        log = tmp_path / f"service-{len(servers)}.log"
        server = Server(log, args=(*OURS_EXTRA, *flags), **fields)
        servers.append(server)
        return server.__enter__()

    yield start
    for server in servers:
        assert server.stop() == 0, server.log_tail()
        assert "Traceback" not in server.log_tail(), server.log_tail()


@pytest.fixture
def tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Open tabs; leaving the test fails if anything in one was odd."""
    tabs: list[Tab] = []

    def make(server: Server, **fields: Any) -> Tab:
        tabs.append(Tab(browser, server.port, **fields))
        return tabs[-1]

    yield make
    for one in tabs:
        one.__exit__(None)
