"""The navigation of the site has the pages of the index, by kind; the site needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pytest
import yaml

from tests.readme import site
from tests.readme.document import INDEX, LINK, README

ROOT: Final = README.parent
KINDS: Final = ("Tutorials", "How-to guides", "Reference", "Explanation")
LINKED: Final = re.compile(r"<a [^>]*?href=\"?([^\"> ]+)")
PLACE: Final = re.compile(r" id=\"?([^\"> ]+)")
LOADED: Final = re.compile(
    r"<(?:script|img|iframe)[^>]* src=\"?([^\"> ]+)|<link[^>]* href=\"?([^\"> ]+)"
)


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose one tag names a function."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def navigation() -> dict[str, list[Path]]:
    """The pages of each kind."""
    settings: Any = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), _Loader)
    kinds: dict[str, list[Path]] = {}
    for entry in settings["nav"]:
        ((title, pages),) = entry.items()
        if isinstance(pages, list):
            kinds[title] = [ROOT / file for page in pages for file in page.values()]
    return kinds


def index() -> Iterator[tuple[str, Path]]:
    """The kind and the file of every page that the index names."""
    text = INDEX.read_text("utf-8")
    for kind, part in re.findall(
        r"^## (.*?)(?::.*)?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    ):
        for link in LINK.findall(part):
            yield kind, (INDEX.parent / link).resolve()


def test_the_navigation_is_the_index() -> None:
    kinds = navigation()
    assert (*kinds,) == KINDS
    pages = [page for found in kinds.values() for page in found]
    assert len(pages) == len({*pages})
    for kind, page in index():
        assert page in kinds[kind], page


@pytest.mark.heavy
def test_the_site() -> None:
    pytest.importorskip("mkdocs", reason="no mkdocs here: pip install '.[docs]'")
    assert site.build() == 0
    pages = [*site.SITE.rglob("*.html")]
    assert len(pages) > len([*site.GATHERED.rglob("*.md")])  # and the one for what is not found
    for page in pages:
        for found in LOADED.findall(page.read_text("utf-8")):
            assert "//" not in "".join(found), page
    assert [*_leading_nowhere(pages)] == []


def _leading_nowhere(pages: list[Path]) -> Iterator[tuple[Path, str]]:
    """Links within the site that do: MkDocs looks at those to documents alone."""
    texts = {page.resolve(): page.read_text("utf-8") for page in pages if page.name != "404.html"}
    places = {page: {*PLACE.findall(text)} for page, text in texts.items()}
    for page, text in texts.items():
        for link in {unescape(one) for one in LINKED.findall(text)}:
            path, _, place = link.partition("#")
            if re.match("[a-z]+:", path):
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            is_lost = place and target in places and unquote(place) not in places[target]
            if is_lost or not target.is_file():
                yield page, link
