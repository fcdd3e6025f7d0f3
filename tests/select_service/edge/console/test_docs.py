"""GET /docs: the API in a browser, with nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re

import httpx
import pytest

from select_service.edge.console.assets import DOCS
from tests.coroutines import within
from tests.select_service.edge.serving import app_client

VENDORED = {
    name: digest
    for digest, name in map(str.split, (DOCS / "swagger-ui.sha256").read_text().splitlines())
}
"""The SHA-256 of each file that others wrote."""


@within(app_client)
async def test_the_page_is_served_with_all_that_it_names(client: httpx.AsyncClient) -> None:
    page = await client.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self';" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 6
    for name in named:
        assert (await client.get(f"/{name}")).status_code == 200, name
    assert (await client.get("/docs/")).headers["location"] == "../docs"
    assert (await client.get("/docs/static/openapi.py")).status_code == 404


@pytest.mark.parametrize("name", ["index.html", "docs.js", "docs.css"])
def test_what_we_wrote_needs_nothing_from_elsewhere(name: str) -> None:
    assert not re.search(r"https?:|//[a-z]|@import|eval|innerHTML", _without_remarks(name))


def _without_remarks(name: str) -> str:
    return re.sub(r"^\s*//.*$|; // .*$|, // .*$", "", (DOCS / name).read_text(), flags=re.MULTILINE)


def test_swagger_ui_is_what_its_authors_published() -> None:
    """The files of npm's swagger-ui-dist 5.35.0, with licence, as `swagger-ui.sha256` has them."""
    ours = {"index.html", "docs.js", "docs.css", "swagger-ui.sha256"}
    assert {one.name for one in DOCS.iterdir()} == ours | set(VENDORED)
    for name, digest in VENDORED.items():
        assert hashlib.sha256((DOCS / name).read_bytes()).hexdigest() == digest, name
    assert "Apache License" in (DOCS / "swagger-ui.LICENSE").read_text()


@within(app_client, no_console=True)
async def test_without_the_console_there_is_none(client: httpx.AsyncClient) -> None:
    assert (await client.get("/docs")).status_code == 404
