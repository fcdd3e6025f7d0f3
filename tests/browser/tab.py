"""A tab with the console in it: opens views, reads tables, and notes everything that goes wrong."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Self

from tests.deploy.tools import AXE
from tests.wait import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Locator, Page, Request

WAIT_MS = int(PATIENCE_S * 1000)
LOST = re.compile("ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_INCOMPLETE_CHUNKED|ERR_EMPTY")
"""What Chromium says while the service is away."""

CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const bent = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [x, y, z] = [r, g, b].map((v) => bent(v / 255));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim();
    if (!text || !node.checkVisibility() || node.closest(":disabled, .unseen, .skip")) continue;
    const style = getComputedStyle(node);
    const fore = node.closest("svg") ? parse(style.fill) : parse(style.color);
    const [a, b] = [light(fore), light(behind(node))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) poor.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return poor;
}"""

SLIPS = """() => document.body.innerText.split("\\n")
  .filter((line) => /\\b(undefined|null|NaN|false|true|\\[object)\\b/.test(line))"""

NAMELESS = """() => [
  ...document.querySelectorAll("button, a, input, select, textarea, [role=img], table, dialog")]
  .filter((node) => node.checkVisibility())
  .filter((node) => !node.textContent.trim() || node.matches("table, dialog, [role=list]"))
  .filter((node) => !(node.ariaLabel || node.labels?.length || node.caption))
  .map((node) => node.outerHTML.slice(0, 120))"""


TOUCHING = """() => {
  const boxes = [...document.querySelectorAll("#content .panel")]
    .filter((one) => one.checkVisibility()).map((one) => [one, one.getBoundingClientRect()]);
  return boxes.flatMap(([one, a]) => boxes.filter(([other, b]) => one !== other
    && !one.contains(other) && !other.contains(one) && a.left < b.right && b.left < a.right
    && b.top >= a.bottom - 1 && b.top - a.bottom < 4).map(([other]) =>
      `${one.ariaLabel} and ${other.ariaLabel}`));
}"""
"""Panels with nothing between them."""

STICKING_OUT = """() => [...document.querySelectorAll("#content .panel")].flatMap((panel) =>
  [...panel.children].filter((one) => one.checkVisibility()
    && one.getBoundingClientRect().right > panel.getBoundingClientRect().right)
    .map((one) => `${panel.ariaLabel}: ${one.outerHTML.slice(0, 80)}`))"""
"""What is wider than the panel that it is in."""


def axe(page: Page) -> list[str]:
    """What axe finds, by the rules of WCAG 2.2 AA and its own best practice."""
    page.evaluate(AXE.read_text("utf-8"))
    found: list[dict[str, Any]] = page.evaluate("axe.run().then((result) => result.violations)")
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found]


class Tab:
    """One page. Leaving it fails the test if anything was odd."""

    def __init__(self, browser: Browser, port: int, *, width: int = 1280, theme: Any = "light"):
        self.origin = f"http://127.0.0.1:{port}"
        self._context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=theme
        )
        self.page = self._context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.complaints: list[str] = []
        self.service_may_be_away = False
        self.page.on("console", lambda message: self._on_message(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("request", self._see)

    def _on_message(self, kind: str, text: str) -> None:
        if kind in {"error", "warning"} and not (self.service_may_be_away and LOST.search(text)):
            self.complaints.append(f"{kind}: {text}")

    def _see(self, request: Request) -> None:
        if not request.url.startswith(self.origin):
            self.complaints.append(f"request to elsewhere: {request.url}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._context.close()
        assert kind is not None or not self.complaints, self.complaints

    def open(self, view: str) -> None:
        """Open a view; it is live when this returns."""
        self.page.goto(f"{self.origin}/console#{view}")
        self.live()
        self.page.wait_for_selector(f"#content[data-view={re.split('[/?]', view)[0]}]")

    def live(self) -> None:
        self.page.wait_for_selector("#connection[data-state=live]")

    def find(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def text(self, selector: str) -> str:
        shown: str = self.find(selector).first.inner_text()  # where no playwright is: of no type
        return shown

    def until(self, selector: str, text: str) -> None:
        """Wait until an element says something."""
        self.page.wait_for_function(
            "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)",
            arg=[selector, text],
        )

    def until_while(self, act: Callable[[], object], script: str) -> None:
        """Wait until a function in the page is true, while something goes on: rates and shares are
        of the last seconds, and a busy machine needs longer than that to draw them."""
        for _ in range(WAIT_MS // 250):
            act()
            if self.page.evaluate(script):
                return
            self.page.wait_for_timeout(250)
        raise AssertionError(f"not seen while it went on: {script}")

    def rows(self, table: str) -> dict[str, dict[str, str]]:
        """A table as people see it: by the key of the row, then by column head."""
        rows: dict[str, dict[str, str]] = self.page.evaluate(
            """(name) => {
              const table = document.querySelector(`[data-table="${name}"]`);
              const heads = [...table.tHead.rows[0].cells].map((cell) => cell.innerText);
              const read = (tr) => [...tr.cells].map((cell, at) => [heads[at], cell.innerText]);
              return Object.fromEntries([...table.tBodies[0].rows].map((tr) => [
                tr.dataset.key ?? tr.cells[0].innerText, Object.fromEntries(read(tr)),
              ]));
            }""",
            table,
        )
        return rows

    def order(self, table: str) -> list[str]:
        """The keys of a table's rows from top to bottom."""
        return list(self.rows(table))

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        wide: int = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return wide

    def axe(self) -> list[str]:
        return axe(self.page)

    def flaws(self) -> list[str]:
        """Text hard to read, no name, words nobody meant, panels that touch or are stuck out of."""
        return [
            one
            for look in (CONTRAST, NAMELESS, SLIPS, TOUCHING, STICKING_OUT)
            for one in self.page.evaluate(look)
        ]
