"""The sections that comments cite are sections of the contract."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = "deploy/docs/contract.md"
CITED: Final = re.compile(
    rf"`{re.escape(PAGE)}`,? (?:sections? )?([0-9](?:\.[0-9])?)(?: to ([0-9]))?"
)


def test_cited_sections_exist() -> None:
    sections = set(re.findall(r"^#+ ([0-9](?:\.[0-9])?) ", (ROOT / PAGE).read_text(), re.MULTILINE))
    cited = {
        section
        for house in ("select_service", "indexer", "tests/contract")
        for path in (ROOT / house).rglob("*.py")
        for pair in CITED.findall(path.read_text())
        for section in pair
        if section
    }
    assert cited
    assert cited <= sections
