"""What the documents point at is there: links, pictures, files named in the text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.readme.document import LINK, README, anchor, headings

ROOT = README.parent
DOCUMENTS = sorted(
    file
    for folder in (".", "bench", "bench/*", "deploy", "deploy/docs", "deploy/reference")
    for file in (ROOT / folder).glob("*.md")
)
HEAD = re.compile(r"^\|(.*)\|\n\|[ :|-]+\|$", re.MULTILINE)
NAMED = re.compile(r"`((?:bench|deploy|indexer|select_service|tests)/[\w./-]+)`")


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda one: str(one.relative_to(ROOT)))
def test_links(file: Path) -> None:
    for link in LINK.findall(file.read_text("utf-8")):
        path, _, place = link.partition("#")
        if "://" in path:
            continue
        target = file.parent / path if path else file
        assert target.exists(), link
        if place:
            known = {anchor(title) for _, title in headings(target.read_text("utf-8"))}
            assert place in known, link


def test_there_are_links_and_pictures() -> None:
    links = LINK.findall(README.read_text("utf-8"))
    assert [link for link in links if link.endswith(".md")]
    assert [link for link in links if link.endswith((".png", ".svg"))]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda one: str(one.relative_to(ROOT)))
def test_every_column_of_a_table_has_a_head(file: Path) -> None:
    heads = HEAD.findall(file.read_text("utf-8"))
    assert [head for head in heads if "" in {cell.strip() for cell in head.split("|")}] == []


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda one: str(one.relative_to(ROOT)))
def test_files_named_in_the_text(file: Path) -> None:
    if file.name == "CHANGELOG.md":
        return  # history: what it names was there then
    for name in NAMED.findall(file.read_text("utf-8")):
        assert (ROOT / name).exists(), name
