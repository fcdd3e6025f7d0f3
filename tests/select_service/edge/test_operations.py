"""The one table of operations: the embedded service and the clients follow it."""

from __future__ import annotations

import inspect
import re
import typing

import pytest

from select_service.client.operations import Operations
from select_service.edge.codec.responses import Status
from select_service.edge.embedded import SelectionService
from select_service.edge.http.routes import OPERATIONS, ROUTES
from select_service.types import OperationResult
from select_service.types.decisions import Decision

EMBEDDED = {
    name: method
    for name, method in inspect.getmembers(SelectionService, inspect.isfunction)
    if not name.startswith("_")
}
ONLY_BY_HTTP = {"health", "openapi", "scale_down_candidates"}
"""Operations for tenants that an embedded service does not have."""


def test_every_operation_has_a_name_of_its_own() -> None:
    assert len(OPERATIONS) == len(ROUTES)


def test_an_embedded_service_has_the_operations_of_the_table() -> None:
    assert set(EMBEDDED) <= set(OPERATIONS)
    missing = {
        name for name, route in OPERATIONS.items() if not route.of_process and name not in EMBEDDED
    }
    assert missing == ONLY_BY_HTTP, "a method in embedded.py, or of_process"


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


PLAIN = {name: route.calls for name, route in OPERATIONS.items() if route.calls is not None}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_operation_takes_and_answers_what_its_row_says(name: str) -> None:
    route, (_, *parameters) = OPERATIONS[name], inspect.signature(PLAIN[name]).parameters.values()
    opens = route.pattern.count("{")
    assert {one.annotation for one in parameters[:opens]} <= {"int", "str"}
    if route.takes is not None:
        assert parameters[opens].annotation == route.takes.__name__
    assert all(
        one.default is not inspect.Parameter.empty
        for one in parameters[opens + (route.takes is not None) :]
    )
    answers = [kind.__name__ for kind in (route.answers, *typing.get_args(route.answers))]
    assert re.findall(r"\w+", PLAIN[name].__annotations__["return"]) == answers


CLIENT = {
    name: method
    for name, method in inspect.getmembers(Operations, inspect.isfunction)
    if not name.startswith("_") and re.match(r"(GET|POST|PATCH|DELETE) /", method.__doc__ or "")
}
"""Methods of the clients that are one operation each."""
LISTED = {"batch": OperationResult, "decisions": Decision}
"""Operations of which the clients' methods return the list inside the answer."""


OTHERWISE_IN_CLIENTS = {
    *("select", "select_and_reserve", "select_pair", "reserve"),
    *("prefill_complete", "output_block", "free"),
}
"""Operations behind methods and objects of other names: `reserve`, `book`, `Reservation`."""
NOT_IN_CLIENTS = {*ONLY_BY_HTTP, "trust", "shadow", "dump"}


def test_the_clients_have_operations_of_the_table_by_their_names() -> None:
    assert CLIENT.keys() <= OPERATIONS.keys()
    missing = {name for name, route in OPERATIONS.items() if not route.of_process} - CLIENT.keys()
    why = "a method in client/verbs.py"
    assert missing == OTHERWISE_IN_CLIENTS | NOT_IN_CLIENTS, why


@pytest.mark.parametrize("name", CLIENT)
def test_an_operation_of_the_clients_says_its_route_and_its_answer(name: str) -> None:
    route = OPERATIONS[name]
    said = (CLIENT[name].__doc__ or "").partition(":")[0].partition(".")[0]
    assert said == f"{route.method} {re.sub('{.*}', '{id}', route.pattern)}"
    returned = str(CLIENT[name].__annotations__["return"]).removeprefix("Run[").removesuffix("]")
    answers = LISTED.get(name, route.answers)
    if answers is Status:
        assert returned == "None"
    elif inspect.isclass(answers) and typing.get_origin(answers) is None:
        assert returned.removeprefix("calls.") in (answers.__name__, f"list[{answers.__name__}]")
