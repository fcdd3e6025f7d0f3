"""The one table of operations: the embedded service follows it."""

from __future__ import annotations

import inspect
import typing

import pytest

from select_service.edge.codec.responses import Status
from select_service.edge.embedded import SelectionService
from select_service.edge.http.routes import OPERATIONS, ROUTES

EMBEDDED = {
    name: method
    for name, method in vars(SelectionService).items()
    if not name.startswith("_") and inspect.isfunction(method)
}
ONLY_BY_HTTP = {"health", "openapi", "report", "scale_down_candidates"}
"""Operations for tenants that an embedded service does not have."""


def test_every_operation_has_a_name_of_its_own() -> None:
    assert len(OPERATIONS) == len(ROUTES)


def test_an_embedded_service_has_the_operations_of_the_table() -> None:
    assert set(EMBEDDED) <= set(OPERATIONS)
    missing = {
        name for name, route in OPERATIONS.items() if not route.of_process and name not in EMBEDDED
    }
    assert missing == ONLY_BY_HTTP


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_operation_says_its_route(name: str) -> None:
    route = OPERATIONS[name]
    said = (inspect.getdoc(EMBEDDED[name]) or "").replace("{id}", "{}")
    path = route.pattern
    for part in path.split("/"):
        if part.startswith("{"):
            path = path.replace(part, "{}")
    short = "…" + path.rpartition("}")[2]
    assert any(f"{route.method} {one}" in said for one in (path, short)), said


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_operation_takes_what_its_route_takes(name: str) -> None:
    """Where a request is one argument; the few members of a small body are arguments."""
    route = OPERATIONS[name]
    parameters = list(inspect.signature(EMBEDDED[name]).parameters.values())[1:]
    if route.takes is None or not parameters or "Mapping" not in str(parameters[-1].annotation):
        return
    assert route.takes.__name__ in str(parameters[-1].annotation)


@pytest.mark.parametrize("name", EMBEDDED)
def test_an_embedded_operation_answers_what_its_route_answers(name: str) -> None:
    answers = OPERATIONS[name].answers
    said = str(EMBEDDED[name].__annotations__["return"])
    if answers is Status:
        assert said == "None"
    elif inspect.isclass(answers) and typing.get_origin(answers) is None and name != "dump":
        assert said in (answers.__name__, f"list[{answers.__name__.removesuffix('List')}]")
