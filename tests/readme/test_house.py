"""The trees under "Code layout" are what is there: a short one in README.md, and the whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bench.provenance import git
from tests.readme.document import DOCS, README, blocks

ROOT = README.parent
WHOLE_TREE: Final = DOCS / "architecture.md"
INDENT = 2  # columns for each floor
WHOLE = ("indexer", "select_service", "select_service/core", "select_service/edge")
"""Folders whose rooms are all listed, each by a line of its own."""
TOP = {
    *("indexer", "select_service", "tests", "bench", "deploy", "examples", ".ci"),
    *("pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE", "Makefile"),
    *("CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml"),
}


def listed(file: Path = WHOLE_TREE) -> Iterator[Path]:
    """Every folder of a document's tree."""
    (tree,) = (text for _, text in blocks(file) if text.startswith("indexer/"))
    above: list[str] = []
    for line in tree.splitlines():
        found = re.match(r"( *)(\w+)/ ", line)
        assert found is not None, line
        above[len(found[1]) // INDENT :] = [found[2]]
        yield Path(*above)


@pytest.mark.parametrize("file", [README, WHOLE_TREE], ids=lambda one: one.stem)
def test_what_is_listed_is_there(file: Path) -> None:
    for folder in listed(file):
        assert (ROOT / folder).is_dir(), folder


@pytest.mark.parametrize("folder", WHOLE)
def test_every_room_is_listed(folder: str) -> None:
    rooms = {init.parent.relative_to(ROOT) for init in (ROOT / folder).glob("*/__init__.py")}
    assert rooms <= {*listed()}


def test_nothing_else_lies_at_the_door() -> None:
    """A report that a run had left there, named `x`, was committed and seen by nobody."""
    tracked = {line.partition("/")[0] for line in git("ls-files").splitlines()}
    assert {name for name in tracked if name not in TOP and not name.startswith(".")} == set()
    assert tracked >= TOP
