"""deploy/reference/api.md is what the service says of itself."""

from __future__ import annotations

from tests.readme import api


def test_the_reference_is_up_to_date() -> None:
    assert api.FILE.read_text("utf-8") == api.written(), f"run: {api.COMMAND}"


def test_every_route_is_at_a_glance() -> None:
    page = api.GLANCE.read_text("utf-8")
    assert not api.unnamed(page), f"{api.GLANCE} is written by hand, or run: {api.COMMAND}"


def test_a_route_that_the_page_does_not_name_gets_a_row() -> None:
    page = api.GLANCE.read_text("utf-8")
    without = "".join(line for line in page.splitlines(keepends=True) if "/trust" not in line)
    (missing,) = api.unnamed(without)
    made = api.at_a_glance(without)
    assert made.count(api.OTHERS) == 1  # the page itself may have that table
    assert f"| `GET /trust` | {missing.summary} |\n" in made
    assert not api.unnamed(made)
