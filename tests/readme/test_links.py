"""Links between the documents lead somewhere."""

from __future__ import annotations

import re

import pytest

from tests.readme import api
from tests.readme.document import MIGRATION, README, anchor, headings

BENCH = README.parent / "bench" / "README.md"


@pytest.mark.parametrize("file", [README, MIGRATION, api.FILE, BENCH], ids=lambda one: one.name)
def test_links(file: object) -> None:
    assert isinstance(file, type(README))
    links = re.findall(r"\]\(([^)\s]+)\)", file.read_text("utf-8"))
    assert links
    for link in links:
        path, _, place = link.partition("#")
        if "://" in path:
            continue
        target = file.parent / path if path else file
        assert target.exists(), link
        if place:
            known = {anchor(title) for _, title in headings(target.read_text("utf-8"))}
            assert place in known, link
