"""What deploy/MIGRATION.md promises to who comes from Dynamo."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from select_service import SelectionService, errors, types
from select_service.cli import parse
from select_service.edge.http.routes import ROUTES
from select_service.settings import ENVIRONMENT
from tests.live.server import Server
from tests.readme.document import MIGRATION

TEXT = MIGRATION.read_text("utf-8")
WORKER = {
    "worker_id": 1, "endpoint": "http://w", "block_size": 16, "routing_group": "g",
    "kv_events_endpoint": "tcp://127.0.0.1:9",
}  # fmt: skip
PROMPT: dict[str, Any] = {"token_ids": list(range(32)), "routing_group": "g"}


def test_variables_and_flags_are_known() -> None:
    known = {one.name for one in ENVIRONMENT}
    named = set(re.findall(r"`(DYN_\w+)`", TEXT))
    assert named <= known
    assert {name for name in known if name.startswith("DYN_")} - named == {
        "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY"  # its name is cut short there
    }
    assert parse(["--threads", "4", "--port", "1"], {}).port == 1
    with pytest.raises(SystemExit):
        parse(["--session-affinity-ttl-secs", "9"], {})


def test_calls_and_types_exist() -> None:
    (table,) = re.findall(r"\| `dynamo._core.SelectionService`.*?\n\n", TEXT, re.DOTALL)
    ours = [line.split(" | ")[1] for line in table.strip().splitlines()[2:]]
    for call in re.findall(r"`(\w+)\(", " ".join(ours)):
        if call != "SelectionService":
            assert hasattr(SelectionService, call), call
    for name in re.findall(r"\b([A-Z]\w+(?:Request|Spec|Patch|Config))\(…\)", " ".join(ours)):
        assert hasattr(types, name), name
    assert issubclass(errors.ReservationNotFound, errors.ServiceError)


def test_fields_that_are_said_to_be_unknown_are() -> None:
    (row,) = re.findall(r"^\| (.*?) \| unknown: accepted and named", TEXT, re.MULTILINE)
    names = set(re.findall(r"`(\w+)`", row))
    assert names
    assert not names & {*types.SelectAndReserveRequest.__struct_fields__}
    said = set(re.findall(r"^\| `(\w+)` \(1.6\) \| the same", TEXT, re.MULTILINE))
    assert said <= {*types.SelectAndReserveRequest.__struct_fields__}


def test_routes_named_are_here() -> None:
    (section,) = re.findall(r"^## Routes\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"`(?:[A-Z]+ )?(/[\w/{}]+)`", section))
    known = {re.sub(r"\{\w+\}", "{id}", route.pattern) for route in ROUTES}
    assert len(named) > 10
    assert named <= known


@pytest.mark.e2e
def test_what_a_client_of_later_versions_sends(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:

        def ask(method: str, path: str, body: object = None) -> Any:
            return server.request(method, path, body)

        assert ask("POST", "/workers", WORKER).status == 201
        asked = PROMPT | {"selection_id": "s", "advisory": True, "cache_namespace": "n"}
        booked = ask("POST", "/select_and_reserve", asked)
        assert booked.status == 200
        assert booked.headers["warning"] == '299 - "unknown field: advisory"'
        assert booked.json["selection_id"] == "s"
        assert booked.json["reservation_id"] not in {"", "s"}
        assert ask("POST", "/reservations/s/prefill_complete").status == 200
        assert ask("DELETE", "/reservations/s").status == 200
        assert ask("DELETE", "/reservations/s").status == 200
        assert ask("DELETE", "/reservations/never").status == 404
        assert ask("POST", "/reservations", {"selection_id": "s"}).status == 422
        assert ask("POST", "/select", PROMPT | {"tenant_id": "other"}).status == 422
        assert ask("POST", "/select", PROMPT | {"token_ids": []}).status == 400
        assert [one["tenant_id"] for one in ask("GET", "/loads?routing_group=g").json] == ["g"]
