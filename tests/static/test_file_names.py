"""A file that a comment, a docstring or a page names in backticks is there, under that name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("indexer", "select_service")
PLACES = (*PRODUCT, "tests", "bench", "deploy", "examples")
"""Where a named file may be: comments tell of their tests and pages, too."""
READERS = {"route.py", "warm.py"}
"""What the reader of a page is to write."""
_NAMED = re.compile(r"`((?:\w+/)*\w+\.(?:pyx?|md))`")


def missing(text: str, paths: str) -> list[str]:
    """Return the names of files in a text that are the end of no path."""
    return [name for name in _NAMED.findall(text) if f"/{name}\n" not in paths]


@pytest.fixture(scope="module")
def paths() -> str:
    """Return every path below the places, one a line, each after a slash."""
    found = [path for place in PLACES for path in (ROOT / place).rglob("*.*")]
    found += ROOT.glob("*.*")
    return "".join(f"/{path.relative_to(ROOT).as_posix()}\n" for path in found)


def test_what_is_missing(paths: str) -> None:
    assert missing("see `place.py`, `routing/place.py` and `README.md`", paths) == []
    assert missing("see `lace.py` and `verbs/place.py`", paths) == ["lace.py", "verbs/place.py"]


def test_named_files_are_there(paths: str) -> None:
    sources = [path for place in PRODUCT for path in (ROOT / place).rglob("*.py*")]
    pages = [ROOT / "README.md", *(ROOT / "deploy").rglob("*.md")]
    wrong = {
        str(path.relative_to(ROOT)): names
        for path in (*sources, *pages)
        if path.suffix in {".py", ".pyx", ".pxd", ".md"}
        and (names := {*missing(path.read_text("utf-8"), paths)} - READERS)
    }
    assert not wrong
