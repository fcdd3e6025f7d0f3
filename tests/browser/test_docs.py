"""/docs as people read it: the whole API, in both themes, with what is folded open."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.browser.tab import Tab
from tests.deploy.tools import AXE
from tests.live.server import Server

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

OPENED = (
    "get-/health",
    "post-/workers",
    "patch-/workers/{worker_id}",
    "delete-/workers/{worker_id}",
)


def operation(verb: str, path: str) -> str:
    """What the line of an operation is found by."""
    return f".opblock-{verb}:has([data-path='{path}']) .opblock-summary-control"


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: make manifests")
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_in_docs(
    serve: Callable[..., Server], tab: Callable[..., Tab], theme: str, width: int
) -> None:
    page = tab(serve(), theme=theme, width=width)
    page.page.goto(f"{page.origin}/docs")
    page.page.wait_for_selector(operation("get", "/health"))
    assert page.axe() == []
    for one in OPENED:
        verb, _, path = one.partition("-")
        page.find(operation(verb, path)).click()
    page.find("section.models button").first.click()
    page.page.wait_for_selector(".opblock-delete .opblock-body")
    assert page.axe() == []
    assert page.overflow() == 0
