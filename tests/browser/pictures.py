"""`make pictures`: deploy/pictures/console-*.png, the console before the demo's traffic.

A service of its own, fourteen engines of the demo, and one of them drained. Nothing is compared:
what a browser draws is never the same to the last pixel. Draw anew when the console has changed.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.browser.conftest import ARGS
from tests.browser.tab import Tab
from tests.live.server import OURS_EXTRA, Server

PICTURES = Path(__file__).parents[2] / "deploy" / "pictures"
ENGINES, RATE = "14", "25"
DRAINED = 990_005
WARM = 900  # requests: by then what chats have in common is cached here and there
DEADLINE_S = 600.0
SETTLED_S = 5.0  # of a second's message each: bars and rates of the page have come to rest
HEIGHT = 560


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = (*OURS_EXTRA, "--decision-ring", "4096")
        with Server(Path(folder, "service.log"), args=args) as server:
            url = f"http://127.0.0.1:{server.port}"
            flags = ("--plain", "--url", url, "--engines", ENGINES, "--rate", RATE)
            demo = subprocess.Popen(
                [sys.executable, "-m", "select_service", "demo", *flags, "--restart-every", "0"],
                stdout=subprocess.DEVNULL,
            )
            try:
                _draw(server)
            finally:
                demo.send_signal(signal.SIGINT)
                demo.wait()


def _draw(server: Server) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while _selections(server) < WARM:
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {WARM} selections in {DEADLINE_S:g} s")
        time.sleep(0.5)
    server.request("POST", f"/workers/{DRAINED}/drain", {"reason": "new image"})
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGS))
        _picture(chromium, server, "fleet", "console-fleet.png", width=1280, theme="light")
        view = f"decisions/{_decision_with_terms(server)}"
        _picture(chromium, server, view, "console-decision.png", width=1100, theme="dark")
        chromium.close()


def _selections(server: Server) -> float:
    text = server.request("GET", "/metrics").raw.decode()
    (line,) = (
        one for one in text.splitlines() if one.startswith("select_service_selections_total ")
    )
    return float(line.split()[1])


def _decision_with_terms(server: Server) -> str:
    """The decision whose candidates differ most in what they hold of the prompt."""
    found: Any = server.request("GET", "/decisions?limit=200&candidates=true").json

    def kinds(decision: Any) -> int:
        return len({one["cached_tokens"] for one in decision["candidates"]})

    best = max(found["decisions"], key=kinds)
    return str(best["decision_id"])


def _picture(
    browser: Browser, server: Server, view: str, name: str, *, width: int, theme: str
) -> None:
    with Tab(browser, server.port, width=width, theme=theme) as tab:
        tab.page.set_viewport_size({"width": width, "height": HEIGHT})
        tab.open(view)
        tab.page.wait_for_timeout(SETTLED_S * 1e3)
        tab.page.screenshot(path=PICTURES / name)


if __name__ == "__main__":
    main()
