"""The documentation as a site: what its pages look like, and whether everybody can read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.tab import axe
from tests.deploy.tools import AXE
from tests.readme import site

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

PAGES = (
    *("index", "CONTRIBUTING", "deploy/docs/tour", "deploy/docs/architecture"),
    *("deploy/docs/index", "deploy/docs/policies"),
    *("deploy/docs/routes", "deploy/reference/flags", "bench/admission/index"),
)
"""One of each kind: text, code of several languages, a drawing, tables, wide tables."""


@pytest.mark.skipif(not AXE.exists(), reason="no axe-core here: make manifests")
def test_axe_finds_nothing_on_the_site(browser: Browser) -> None:
    pytest.importorskip("mkdocs", reason="no mkdocs here: pip install '.[docs]'")
    assert site.build() == 0
    looks: tuple[tuple[int, Any], ...] = ((1280, "light"), (390, "dark"))
    found = {}
    for width, theme in looks:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        page = context.new_page()
        for name in PAGES:
            page.goto((site.SITE / f"{name}.html").as_uri())
            page.wait_for_selector(".md-search[aria-label]", state="attached")
            found[name, theme] = axe(page)
        context.close()
    assert {one: violations for one, violations in found.items() if violations} == {}
