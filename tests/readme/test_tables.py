"""The tables of README.md are what the program says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from select_service.config import FLAGS
from tests.readme import tables
from tests.readme.document import README


@pytest.mark.parametrize("name", tables.TABLES)
def test_a_table_is_up_to_date(name: str) -> None:
    shown = tables.shown(name, README.read_text("utf-8"))
    assert shown == tables.written(name), f"run: {tables.COMMAND}"


def test_what_to_watch_exists() -> None:
    exposed = set(re.findall(r"^\| `(\w+)`", tables.written("metrics"), re.MULTILINE))
    for flag in FLAGS:
        if flag.watch:
            assert flag.watch.partition("{")[0] in exposed, flag.name


def test_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.read_text("utf-8"))
    assert pictures
    for picture in pictures:
        assert (README.parent / picture).is_file(), picture


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
    listed = {(room, name) for room, name, _ in tables.FIXED}
    found = list(_bounds())
    assert len(found) > len(listed) / 2
    silent = [f"{room}.{name}" for room, name, says in found if not says]
    assert not [one for one in silent if tuple(one.rsplit(".", 1)) not in listed]
