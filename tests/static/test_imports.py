"""Imports run one way: at run time, for a type and in a kernel alike.

Import-linter holds the orders in pyproject.toml at run time: it counts what is imported under
`TYPE_CHECKING` in all contracts or in none. But a type ties two files together all the same:
neither can be read, moved or replaced without the other. So no file may need itself by way of
others, whatever for, and each order holds for types, too, but for the arcs that are listed here.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("indexer", "select_service")
CORE: Final = "select_service.core."
EDGE: Final = "select_service.edge."

BACK_REFERENCES: Mapping[tuple[str, str], str] = {
    ("select_service.core.admission.queue", "select_service.core.partition"): (
        "A partition's queues hold tickets, and a ticket says in which partition it waits. Who"
        " places it goes from one to the other some ten times a request: to look the partition up"
        " by its scope would cost more than the arc does."
    ),
    ("select_service.core.ledger.reservation", "select_service.core.replication.claim"): (
        "What is booked and what is said of it to replicas stand for each other, one to one: each"
        " leads to the other with every step of a reservation's life."
    ),
}
"""Arcs that close a circle and may stay, and why."""

UPWARD: Final = (
    (CORE + "ledger.reservation_ids", CORE + "admission.queue"),
    # reservations speak to replicas, and what they say goes to them
    (CORE + "replication.dynamo_peers", CORE + "reservations.lifecycle"),
    (CORE + "replication.apply_messages", CORE + "reservations.lifecycle"),
    (CORE + "replication.plane", CORE + "reservations.lifecycle"),
    (CORE + "replication.resolver", CORE + "reservations.lifecycle"),
    (CORE + "replication.shared_leases", CORE + "reservations.lifecycle"),
    # who looks on hangs where there is something to see
    (CORE + "routing.place", CORE + "diagnostics.prompt_sample"),
    (CORE + "routing.place", CORE + "operations.pair_selection"),
)
"""Arcs for types alone that go up between rooms, or from one to its neighbour. No circle comes of
them, as other files are at either end; a room as a whole is not as independent as its order says.
Prefer moving the wall to adding one."""

_FROM = re.compile(r"^from (\S+) c?import (\([^)]*\)|[^\n]*)", re.MULTILINE)
"""As kernels have them; the syntax tree is Python's alone."""

Arcs = dict[str, set[str]]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement, however deep: there are many times as many expressions, and none imports."""
    for parts in ("body", "orelse", "finalbody", "handlers", "cases"):
        for one in getattr(tree, parts, ()):
            yield one
            yield from statements(one)


def named_in(source: str, *, is_kernel: bool) -> Iterator[str]:
    """What a file imports, wherever it does: modules, or names out of them."""
    if is_kernel:
        for module, names in _FROM.findall(source):
            yield from (f"{module}.{one.strip()}" for one in names.strip("()").split(","))
        return
    for node in statements(ast.parse(source)):
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
        for package in PACKAGES
        for kind in ("*.py", "*.pyx")
        for path in (ROOT / package).rglob(kind)
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


def orders() -> Iterator[tuple[str, dict[str, int]]]:
    """Each package that has an order, and the floors of what is in it; 0 is the highest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    contract: dict[str, Any]
    for contract in contracts["contracts"]:
        for container in contract.get("containers", ()):
            rows = (row.split("|") for row in contract["layers"])
            floors = {
                name.strip(" ()"): floor for floor, names in enumerate(rows) for name in names
            }
            yield container, floors


def against(graph: Arcs, container: str, floors: Mapping[str, int]) -> set[tuple[str, str]]:
    """Arcs inside a package that do not go down."""
    at = {
        module: module[len(container) + 1 :].partition(".")[0]
        for module in graph
        if module.startswith(container + ".")
    }
    return {
        (one, to)
        for one in at
        for to in graph[one] & at.keys()
        if at[one] != at[to] and floors.get(at[one], -1) >= floors.get(at[to], len(floors))
    }


@pytest.mark.parametrize(("container", "floors"), [*orders()], ids=[one for one, _ in orders()])
def test_orders_hold_for_types(container: str, floors: dict[str, int]) -> None:
    graph = without(arcs(), [*BACK_REFERENCES, *UPWARD])
    assert against(graph, container, floors) == set()


def test_what_goes_up_does() -> None:
    """Else it is an exception no longer, and has to go from the list."""
    graph = without(arcs(), BACK_REFERENCES)
    upward = set[tuple[str, str]]().union(*(against(graph, *order) for order in orders()))
    assert upward == set(UPWARD)
    assert len(upward) == len(UPWARD)


def test_what_is_against_an_order() -> None:
    graph: Arcs = {"a.high.x": {"a.low"}, "a.low": {"a.next", "b"}, "a.next": set(), "b": set()}
    floors = {"high": 0, "low": 1, "next": 1}
    assert against(graph, "a", floors) == {("a.low", "a.next")}
    graph["a.low"] = {"a.high.x"}
    assert against(graph, "a", floors) == {("a.low", "a.high.x")}


@pytest.mark.parametrize(
    ("source", "is_kernel"),
    [
        ("from package.module import thing", False),
        ("from package import module", False),
        ("import package.module", False),
        ("if TYPE_CHECKING:\n    from package.module import Thing", False),
        ("def f():\n    from package.module import thing", False),
        ("from package.module cimport thing", True),
        ("from package.module import (\n    other,\n    thing,\n)", True),
    ],
)
def test_what_counts_as_an_import(source: str, is_kernel: bool) -> None:
    known = {"package.module", "package"}
    found = {module_of(name, known) for name in named_in(source, is_kernel=is_kernel)}
    assert found == {"package.module"}


def test_a_circle_is_found() -> None:
    graph: Arcs = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    circle = circle_in(graph)
    assert circle[0] == circle[-1]
    assert all(to in graph[one] for one, to in pairwise(circle))
    assert circle_in(without(graph, [("c", "a")])) == []
