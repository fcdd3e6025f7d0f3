"""Tenants of one service do not meet: ids, workers, decisions, pairs and dumps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import OPEN, Route
from select_service.edge.security.tokens import SCOPES
from select_service.edge.tenancy.tenant_ids import prefix_of
from tests.select_service.edge.security.askers import (
    BODIES,
    NOBODYS,
    OURS,
    PATHS,
    THEIRS,
    ask,
    body_of,
    path_of,
)
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, listening, worker
from tests.wait import until


async def test_another_tenants_things_do_not_exist(tmp_path: Path) -> None:
    """What is refused for being another's is refused as what does not exist, to the letter."""
    file = TokenFile(tmp_path / "tokens")
    ours = file.add("ours", *SCOPES, tenants=[OURS])
    file.add("theirs", *SCOPES, tenants=[THEIRS])
    file.add("all", "admin")
    asked = 0
    chosen = {**file.setting, "shadow_weights": {"temperature": 0.0}}
    async with listening(**chosen) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        wire = await Wire.to(port)
        book = {"worker_id": 2, "tenant_id": THEIRS, "selection_id": "s-theirs", **PROMPT}
        for name, reservation_id in (("theirs", "r-theirs"), ("all", "r-plain")):
            assert (
                await wire.status(
                    "POST",
                    "/reservations",
                    {"reservation_id": reservation_id, **book},
                    file.line(name),
                )
                == 201
            )
        assert (
            await wire.status(
                *("POST", "/leases", {"owner": "o", "ttl_s": 60, "lease_id": "l-theirs"}),
                file.line("theirs"),
            )
            == 201
        )
        ask_theirs = {"tenant_id": THEIRS, "selection_id": "d-theirs", **PROMPT}
        assert await wire.status("POST", "/select", ask_theirs, file.line("all")) == 200
        assert (
            await wire.status("POST", "/select", {"tenant_id": OURS, **PROMPT}, file.line("ours"))
            == 200
        )
        for freed in ("r-gone",):
            await wire.exchange(
                *("POST", "/reservations", {**book, "reservation_id": freed}), file.line("all")
            )
            assert (
                await wire.status("DELETE", f"/reservations/{freed}", None, file.line("all")) == 200
            )

        theirs: dict[str, tuple[str, ...]] = {
            "worker_id": ("2",),
            "reservation_id": ("r-theirs", "r-plain", "s-theirs", "r-gone", "rival:r-theirs"),
            "lease_id": ("l-theirs", "rival:l-theirs"),
            "id": ("d-theirs", "decision-1"),
        }
        nobodys = PATHS
        for route in ROUTES:
            if route.of_process or route.scope == OPEN:
                continue
            found = re.search(r"\{(\w+)\}", route.pattern)
            if found:
                kind = found[1]
                for name in theirs[kind]:
                    real = await ask(
                        wire, route, body_of(route), file.line("ours"),
                        path=path_of(route, {kind: name}),
                    )  # fmt: skip
                    unreal = await ask(
                        wire, route, body_of(route), file.line("ours"),
                        path=path_of(route, {kind: nobodys[kind]}),
                    )  # fmt: skip
                    assert real[0] == unreal[0] == 404, (route.pattern, name, real)
                    text = real[2].decode().replace(name, nobodys[kind])
                    assert text == unreal[2].decode(), route.pattern
                    asked += 1
            if "tenant_id" in route.query:
                real = await ask(
                    wire, route, None, file.line("ours"), path=f"{route.pattern}?tenant_id={THEIRS}"
                )
                empty = (b"[]", b'{"ranks":[]}', b'{"decisions":[]}', b'{"candidates":[]}')
                assert real[0] == 200, route.pattern
                is_empty = real[2] in empty or b'"scopes_total":0' in real[2]
                assert is_empty, route.pattern
                whole = await ask(wire, route, None, file.line("ours"))
                assert b"acme corp" in whole[2], route.pattern
                assert THEIRS.encode() not in whole[2], route.pattern
                asked += 1
            if route.takes is not None and "tenant_id" in BODIES[route.takes]:
                body = {**BODIES[route.takes]}
                real = await ask(wire, route, body | {"tenant_id": THEIRS}, file.line("ours"))
                unreal = await ask(wire, route, body | {"tenant_id": NOBODYS}, file.line("ours"))
                assert real[0] == unreal[0] >= 400, (route.pattern, real)
                assert real[2].decode().replace(THEIRS, NOBODYS) == unreal[2].decode()
                asked += 1
        # nothing of it was done
        assert len(service.core.lifecycle.bookings) == 2
        assert service.core.catalog.find(2) is not None
        assert service.security is not None
        assert service.security.authority is not None
        assert service.security.authority.foreign > 0
        assert json.loads(
            (await wire.exchange("GET", "/leases", None, f"authorization: Bearer {ours}"))[2]
        ) == {"leases": [], "total": 0}
    assert asked > 15


async def test_ids_of_two_tenants_do_not_meet(tmp_path: Path) -> None:
    """The same ids may be used by two tenants, and each reaches its own by them."""
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", *SCOPES, tenants=[OURS])
    file.add("theirs", *SCOPES, tenants=[THEIRS])
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        wire = await Wire.to(port)

        async def do(name: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
            status, _, content = await wire.exchange(method, path, body, file.line(name))
            return status, json.loads(content)

        for name, tenant in (("ours", OURS), ("theirs", THEIRS)):
            lease = {"owner": "me", "ttl_s": 60, "lease_id": "L"}
            status, record = await do(name, "POST", "/leases", lease)
            assert (status, record["lease_id"]) == (201, "L")
            ask = {"reservation_id": "r", "tenant_id": tenant, "selection_id": "s", **PROMPT}
            status, answer = await do(name, "POST", "/select_and_reserve", ask | {"lease_id": "L"})
            assert (status, answer["reservation_id"]) == (200, "r"), answer
            assert answer["selection_id"] == "s"
            again = await do(name, "POST", "/select_and_reserve", ask | {"lease_id": "L"})
            assert again == (200, answer), "the same request again gets the first answer"
            status, other = await do(name, "POST", "/select_and_reserve", ask)
            assert (status, other["code"]) == (409, "reservation_conflict")
            assert "Request r already exists" in other["error"]
            status, one = await do(name, "GET", "/leases?owner=me")
            assert (one["total"], one["leases"][0]["lease_id"]) == (1, "L")
            assert one["leases"][0]["reservations"] == 1
        assert len(service.core.lifecycle.bookings) == 2
        assert await do("ours", "POST", "/reservations/r/output_block", {}) == (
            200,
            {"status": "ok"},
        )
        assert await do("ours", "POST", "/reservations/s/prefill_complete") == (
            200,
            {"status": "ok"},
        )
        assert (await do("ours", "DELETE", "/reservations/r"))[0] == 200
        assert (await do("ours", "DELETE", "/reservations/r"))[0] == 200, "repeatable"
        assert len(service.core.lifecycle.bookings) == 1
        results = (
            await do(
                "theirs",
                "POST",
                "/reservations/batch",
                {
                    "operations": [
                        {"op": "free", "reservation_id": "acme%20corp:r"},
                        {"op": "free", "reservation_id": "r"},
                        {"op": "free", "reservation_id": "r"},
                    ]
                },
            )
        )[1]["results"]
        assert [one["status"] for one in results] == [404, 200, 200]
        assert results[0]["error"] == "reservation acme%20corp:r not found"
        assert (await do("theirs", "DELETE", "/leases/L"))[0] == 200
        assert (await do("ours", "POST", "/leases/L/renew"))[0] == 200
        # an id that the service chose
        answer = (await do("ours", "POST", "/select_and_reserve", {"tenant_id": OURS, **PROMPT}))[1]
        name = answer["reservation_id"]
        assert ":" not in name
        assert (await do("theirs", "DELETE", f"/reservations/{name}"))[0] == 404
        assert (await do("ours", "DELETE", f"/reservations/{name}"))[0] == 200
        assert not len(service.core.lifecycle.bookings)
        service.core.check()


async def test_a_bound_token_reaches_what_an_unbound_one_booked_for_its_tenant(
    tmp_path: Path,
) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", "lifecycle", tenants=["other", OURS])
    file.add("all", "admin")
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS)
        wire = await Wire.to(port)
        assert (
            await wire.status(
                *("POST", "/reservations"),
                {"reservation_id": "plain", "worker_id": 1, "tenant_id": OURS, **PROMPT},
                file.line("all"),
            )
            == 201
        )
        assert await wire.status("DELETE", "/reservations/plain", None, file.line("ours")) == 200
        assert not len(service.core.lifecycle.bookings)
        # of two tenants' tokens, each finds what the other booked for the tenant they share
        file.add("narrow", *SCOPES, tenants=[OURS])
        assert service.security is not None
        service.security.prepare()()
        assert (
            await wire.status(
                *("POST", "/reservations"),
                {"reservation_id": "r", "worker_id": 1, "tenant_id": OURS, **PROMPT},
                file.line("narrow"),
            )
            == 201
        )
        assert await wire.status("DELETE", "/reservations/r", None, file.line("ours")) == 200
        assert await wire.status("DELETE", "/reservations/r", None, file.line("ours")) == 200


async def test_a_name_like_ours_in_another_tenant_is_not_ours(tmp_path: Path) -> None:
    """Clients that are not bound may choose any name, and may pass on what theirs have chosen."""
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", *SCOPES, tenants=[OURS])
    file.add("all", "admin")
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 2, tenant_id=THEIRS)
        wire = await Wire.to(port)
        body = {"reservation_id": "acme%20corp:r", "worker_id": 2, "tenant_id": THEIRS, **PROMPT}
        assert await wire.status("POST", "/reservations", body, file.line("all")) == 201
        for method, path in (("DELETE", "r"), ("POST", "r/prefill_complete")):
            status, _, content = await wire.exchange(
                method, f"/reservations/{path}", None, file.line("ours")
            )
            assert (status, json.loads(content)["error"]) == (404, "reservation r not found")
        assert len(service.core.lifecycle.bookings) == 1


@pytest.mark.parametrize("name", ["ü" * 100, "t" * 256, "%%" + "0" * 32, "t" * 33])
def test_a_tenant_with_a_long_name_has_room_for_ids(name: str) -> None:
    """The longest id of a trace or UUID has; other tenants' names never come out the same."""
    assert len(prefix_of(name)) < 60
    assert prefix_of(name) != prefix_of(name[:-1])
    assert prefix_of(prefix_of(name).removesuffix(":")) != prefix_of(name)


async def test_decisions_are_told_under_their_clients_names(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", *SCOPES, tenants=[OURS])
    file.add("theirs", *SCOPES, tenants=[THEIRS])
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        wire = await Wire.to(port)

        async def do(name: str, method: str, path: str, body: object = None) -> tuple[int, Any]:
            route: Route[Any] = Route(method, path, None)
            status, _, content = await ask(wire, route, body, file.line(name))
            return status, json.loads(content)

        ids = {"reservation_id": "r", "selection_id": "s"}
        for name, tenant in (("ours", OURS), ("theirs", THEIRS)):
            booking = {"tenant_id": tenant, "explain": True, **ids, **PROMPT}
            status, answer = await do(name, "POST", "/select_and_reserve", booking)
            assert status == 200, answer
            told = answer["decision"]
            assert ids.items() <= told.items()
            assert told["decision_id"] == "s"
        for name, tenant in (("ours", OURS), ("theirs", THEIRS)):
            for found in ("r", "s"):
                status, told = await do(name, "GET", f"/decisions/{found}")
                assert (status, told["tenant_id"]) == (200, tenant)
                assert ids.items() <= told.items()
            listed = (await do(name, "GET", "/decisions"))[1]["decisions"]
            assert [one["tenant_id"] for one in listed] == [tenant]
            assert ids.items() <= listed[0].items()
        # how long an id may be, is said without what is put before it
        booking = {"tenant_id": OURS, "reservation_id": "x" * 250, **PROMPT}
        status, answer = await do("ours", "POST", "/select_and_reserve", booking)
        assert (status, answer["field"]) == (422, "reservation_id")
        assert "at most 244 characters" in answer["error"]
        booking["reservation_id"] = "x" * 244
        assert (await do("ours", "POST", "/select_and_reserve", booking))[0] == 200


async def test_a_worker_number_of_another_tenant_is_taken(tmp_path: Path) -> None:
    """Numbers of workers are the process's; that one is taken is all there is to learn."""
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", "catalog", tenants=[OURS])
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 2, tenant_id=THEIRS)
        wire = await Wire.to(port)
        status, _, content = await wire.exchange(
            "POST", "/workers", worker(2, tenant_id=OURS), file.line("ours")
        )
        assert (status, json.loads(content)["error"]) == (409, "worker id 2 is not free")
        known = service.core.catalog.find(2)
        assert known is not None
        assert known.scope.tenant_id == THEIRS
        wire.ask("POST", "/workers", worker(3), file.line("ours"))  # the tenant `default`
        assert (await wire.answer())[0] == 404
        assert (
            await wire.status("POST", "/workers", worker(3, routing_group=OURS), file.line("ours"))
            == 201
        )


async def test_ready_tells_strangers_little_and_tenants_their_own(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", "read", tenants=[OURS])
    file.add("all", "read")
    file.add("blind", "select")
    async with listening(**file.setting) as (port, service, _):
        wire = await Wire.to(port)
        assert await wire.status("GET", "/ready") == 503
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        status, _, content = await wire.exchange("GET", "/ready")
        assert (status, content) == (200, b'{"ready":true}')
        shown = json.loads((await wire.exchange("GET", "/ready", None, file.line("ours")))[2])
        assert [one["worker_id"] for one in shown["workers"]] == [1]
        assert shown["schedulable_workers"] == 1
        assert (
            json.loads((await wire.exchange("GET", "/ready", None, file.line("all")))[2])[
                "schedulable_workers"
            ]
            == 2
        )
        assert (await wire.exchange("GET", "/ready", None, file.line("blind")))[
            2
        ] == b'{"ready":true}'
        for lines, status in (
            ((), 401),
            ((file.line("blind"),), 403),
            ((file.line("ours"),), 403),
            ((file.line("all"),), 200),
        ):
            assert await wire.status("GET", "/ready?verbose=true", None, *lines) == status


async def test_a_request_that_waits_is_answered_under_its_clients_names(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", *SCOPES, tenants=[OURS])
    async with listening(**file.setting, max_queued_default=8) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS, max_inflight=1)
        first, second = await Wire.to(port), await Wire.to(port)
        ask = {"tenant_id": OURS, **PROMPT}
        assert (
            await first.status(
                "POST", "/select_and_reserve", ask | {"reservation_id": "1"}, file.line("ours")
            )
            == 200
        )
        second.ask("POST", "/select_and_reserve", ask | {"reservation_id": "2"}, file.line("ours"))
        await until(lambda: any(one.pending_count for one in service.core.partitions.values()))
        assert await first.status("DELETE", "/reservations/1", None, file.line("ours")) == 200
        status, _, content = await second.answer()
        assert (status, json.loads(content)["reservation_id"]) == (200, "2")


async def test_pairs_under_their_clients_names(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", *SCOPES, tenants=[OURS])
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS, role="prefill")
        add_worker(service, 2, tenant_id=OURS, role="decode")
        wire = await Wire.to(port)
        ask = {"tenant_id": OURS, "reservation_id": "pair", **PROMPT}
        status, _, content = await wire.exchange("POST", "/select_pair", ask, file.line("ours"))
        answer = json.loads(content)
        assert (status, answer["reservation_id"]) == (200, "pair"), answer
        assert answer["decode"]["reservation_id"] == "pair:decode"
        assert answer["prefill"]["reservation_id"] == "pair:prefill"
        for path in ("pair/prefill_complete", "pair:decode/output_block"):
            assert await wire.status("POST", f"/reservations/{path}", {}, file.line("ours")) == 200
        assert await wire.status("DELETE", "/reservations/pair", None, file.line("ours")) == 200
        assert not len(service.core.lifecycle.bookings)


async def test_answers_that_are_kept_are_not_changed(tmp_path: Path) -> None:
    """A repeat is answered from what was kept: under the tenant's name, and so to its client."""
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", "select", tenants=[OURS])
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS)
        wire = await Wire.to(port)
        assert (
            await wire.status(
                *("POST", "/select_and_reserve"),
                {"tenant_id": OURS, "reservation_id": "r", **PROMPT},
                file.line("ours"),
            )
            == 200
        )
        booking = service.core.lifecycle.bookings.live("acme%20corp:r")
        assert booking is not None
        assert msgspec.to_builtins(booking.answer)["reservation_id"] == "acme%20corp:r"
