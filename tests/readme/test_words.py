"""One word for one thing: what deploy/docs/words.md gives a name has no other in the documents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.readme.document import CHAPTERS, MIGRATION, README, REFERENCE

OTHERS: Final = {
    "booking": "reservation",
    "bookings": "reservations",
    "wave": "batch",
    "waves": "batches",
}
PAGES: Final = [README, *CHAPTERS, MIGRATION, *sorted(REFERENCE.glob("*.md"))]
_CODE: Final = re.compile(
    r"^ *```.*?^ *```$|`[^`]*`|\]\([^)]*\)|^#[^\n]*$", re.MULTILINE | re.DOTALL
)
"""Names, which may be older than the words: code, addresses, headings of sections of settings."""


def words(text: str) -> set[str]:
    """The other names in a document's prose."""
    plain = _CODE.sub("", text).lower()
    return {word for word in OTHERS if re.search(rf"\b{word}\b", plain)}


def test_prose_is_read() -> None:
    text = "# Waves\n`wave`\n\n```text\nwave\n```\nA booking [of](waves.md) all.\n# Wave\n"
    assert words(text) == {"booking"}


@pytest.mark.parametrize("file", PAGES, ids=lambda one: str(one.relative_to(README.parent)))
def test_words(file: Path) -> None:
    found = words(file.read_text("utf-8"))
    assert not found, [f"{word}: say {OTHERS[word]}" for word in sorted(found)]
