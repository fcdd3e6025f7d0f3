"""deploy/reference/engines.md has the engines whose events the tests replay."""

from __future__ import annotations

from tests.e2e.engines import ENGINES
from tests.readme import engines


def test_the_page_is_up_to_date() -> None:
    assert engines.FILE.read_text("utf-8") == engines.written(), f"run: {engines.COMMAND}"


def test_every_file_and_every_live_engine_has_a_row() -> None:
    shown = [(row[0].lower(), row[1]) for row in engines.rows()]
    assert len(shown) == len([*engines.VECTORS.glob("vectors_*.json")])
    assert {(one.package, one.version) for one in ENGINES} <= {*shown}
