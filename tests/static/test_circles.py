"""No file needs itself by way of others: not at run time, and not for a type or in a kernel.

Import-linter holds the order of rooms at run time. A type that is imported under `TYPE_CHECKING`
ties two files together all the same: neither can be read, moved or replaced without the other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOUSES = ("indexer", "select_service")

BACK_REFERENCES: Mapping[tuple[str, str], str] = {
    ("select_service.core.admission.queue", "select_service.core.partition"): (
        "A partition's queues hold tickets, and a ticket says in which partition it waits. Who"
        " places it goes from one to the other some ten times a request: to look the partition up"
        " by its scope would cost more than the arc does."
    ),
    ("select_service.core.books.reservation", "select_service.core.replicas.claim"): (
        "What is booked and what is said of it to replicas stand for each other, one to one: each"
        " leads to the other with every step of a reservation's life."
    ),
}
"""Arcs that close a circle and may stay, and why: two things that own each other's name."""

_FROM = re.compile(r"^from (\S+) c?import (\([^)]*\)|[^\n]*)", re.MULTILINE)
"""As kernels have them; the syntax tree is Python's alone."""

Arcs = dict[str, set[str]]


def named_in(source: str, *, is_kernel: bool) -> Iterator[str]:
    """What a file imports, wherever it does: modules, or names out of them."""
    if is_kernel:
        for module, names in _FROM.findall(source):
            yield from (f"{module}.{one.strip()}" for one in names.strip("()").split(","))
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{one.name}" for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def module_of(name: str, known: Collection[str]) -> str | None:
    """The module that a name is, or is in; None: it is somebody else's."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else None


@cache
def arcs() -> Arcs:
    """What every file imports of ours.

    Stubs of kernels are left out: a kernel stands in for methods of the file that takes it, so
    that its signatures name that file's classes. Both are one thing in two languages.
    """
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for house in HOUSES
        for kind in ("*.py", "*.pyx")
        for path in (ROOT / house).rglob(kind)
    }
    found: Arcs = {}
    for module, path in paths.items():
        names = named_in(path.read_text("utf-8"), is_kernel=path.suffix == ".pyx")
        needed = {module_of(name, paths) for name in names}
        found[module] = {one for one in needed if one is not None and one != module}
    return found


def circle_in(graph: Arcs) -> list[str]:
    """One circle, each importing the next, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return []


def without(graph: Arcs, left_out: Collection[tuple[str, str]]) -> Arcs:
    return {one: {to for to in ends if (one, to) not in left_out} for one, ends in graph.items()}


def test_there_is_no_circle() -> None:
    graph = arcs()
    assert len(graph) > 400
    assert circle_in(without(graph, BACK_REFERENCES)) == []


@pytest.mark.parametrize("arc", BACK_REFERENCES, ids=lambda arc: arc[0].rpartition(".")[2])
def test_what_is_excepted_would_close_one(arc: tuple[str, str]) -> None:
    """Else it is an exception no longer, and has to go from the list."""
    others = [one for one in BACK_REFERENCES if one != arc]
    circle = circle_in(without(arcs(), others))
    assert arc in pairwise(circle)


@pytest.mark.parametrize(
    ("source", "is_kernel"),
    [
        ("from house.room import thing", False),
        ("from house import room", False),
        ("import house.room", False),
        ("if TYPE_CHECKING:\n    from house.room import Thing", False),
        ("def f():\n    from house.room import thing", False),
        ("from house.room cimport thing", True),
        ("from house.room import (\n    other,\n    thing,\n)", True),
    ],
)
def test_what_counts_as_an_import(source: str, is_kernel: bool) -> None:
    known = {"house.room", "house"}
    found = {module_of(name, known) for name in named_in(source, is_kernel=is_kernel)}
    assert found == {"house.room"}


def test_a_circle_is_found() -> None:
    graph: Arcs = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    circle = circle_in(graph)
    assert circle[0] == circle[-1]
    assert all(to in graph[one] for one, to in pairwise(circle))
    assert circle_in(without(graph, [("c", "a")])) == []
