"""Profiles of the hot path are kept, and bench/README.md says what each large cost in them is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.output import RESULTS

FOLDER = RESULTS / "profiles"
README = RESULTS.parent / "README.md"
KEPT = ("w1-select-hashes-isl-2048-ours", "w4-lifecycle-isl-2048-256-standing-ours", "w6-ours")
LARGE = 4.0  # percent of all samples
_ROW = re.compile(r"\| ([0-9.]+)% \| [0-9.]+% \| `([^` ]+) ")


def explained() -> str:
    """The section that says what each cost is."""
    text = README.read_text(encoding="utf-8")
    return text.partition("### Where the time goes\n")[2].partition("\n### ")[0]


@pytest.mark.parametrize("name", KEPT)
def test_the_hot_path_is_there(name: str) -> None:
    assert "* commit: " in (FOLDER / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_each_large_cost_is_explained(path: Path) -> None:
    rows = _ROW.findall(path.read_text(encoding="utf-8"))
    large = [function for share, function in rows if float(share) >= LARGE]
    assert large, "a server that does nothing"
    section = explained()
    assert [one for one in large if f"`{one}`" not in section] == []
