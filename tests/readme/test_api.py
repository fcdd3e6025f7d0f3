"""deploy/reference/api.md is what the service says of itself."""

from __future__ import annotations

from tests.readme import api


def test_the_reference_is_up_to_date() -> None:
    assert api.FILE.read_text("utf-8") == api.written(), f"run: {api.COMMAND}"
