"""The generated tables, and the pages of deploy/reference, are what the program says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from select_service.settings import FLAGS
from tests.readme import api, engines, tables
from tests.readme.document import CHAPTERS, INDEX, LINK, MIGRATION, README, REFERENCE
from tests.readme.fixed_limits import FIXED


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_is_up_to_date(name: str) -> None:
    shown = tables.shown(name)
    assert shown == tables.written(name), f"run: {tables.COMMAND}"


@pytest.mark.parametrize("name", tables.PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    shown = (REFERENCE / f"{name}.md").read_text("utf-8")
    assert shown == tables.page(name), f"run: {tables.COMMAND}"


def test_every_page_is_made() -> None:
    pages = {*REFERENCE.iterdir()}
    made = (REFERENCE / f"{name}.md" for name in tables.PAGES)
    assert pages == {api.FILE, engines.FILE, *made}


def test_every_page_and_chapter_is_named_in_the_index() -> None:
    named = {(INDEX.parent / link).resolve() for link in LINK.findall(INDEX.read_text("utf-8"))}
    assert {*REFERENCE.iterdir(), *CHAPTERS, MIGRATION} - {INDEX} <= named


def test_the_readme_names_the_index() -> None:
    assert f"({INDEX.relative_to(README.parent)})" in README.read_text("utf-8")


def test_what_to_watch_exists() -> None:
    exposed = set(re.findall(r"^\| `(\w+)`", tables.page("metrics"), re.MULTILINE))
    for flag in FLAGS:
        if flag.watch:
            assert flag.watch.partition("{")[0] in exposed, flag.name


SOURCE = README.parent
OTHERS = {"client", "demo", "planner", "simulator"}  # their own processes


def _bounds() -> Iterator[tuple[str, str, bool]]:
    """Every constant that is called a maximum: its module, its name, whether it says why."""
    for path in sorted([*SOURCE.glob("indexer/**/*.py"), *SOURCE.glob("select_service/**/*.py")]):
        place = path.relative_to(SOURCE)
        if OTHERS.intersection(place.parts):
            continue
        body = ast.parse(path.read_text("utf-8")).body
        for node, behind in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                if name.endswith("_MAX") and not name.startswith("_"):
                    yield _module(place), name, _is_text(behind)


def _module(place: Path) -> str:
    return ".".join(place.with_suffix("").parts)


def _is_text(node: ast.stmt | None) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def test_a_fixed_bound_is_in_the_table_or_says_why_nobody_meets_it() -> None:
    listed = {(room, name) for room, name, _ in FIXED}
    found = list(_bounds())
    assert len(found) > len(listed) / 2
    silent = [f"{room}.{name}" for room, name, says in found if not says]
    assert not [one for one in silent if tuple(one.rsplit(".", 1)) not in listed]
