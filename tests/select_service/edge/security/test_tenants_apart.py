"""Tenants of one service do not meet: ids, workers, decisions, pairs and dumps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import OPEN
from select_service.edge.security.tokens import SCOPES
from select_service.edge.tenancy.tenant_ids import prefix_of
from tests.select_service.edge.security.askers import (
    BODIES,
    NOBODYS,
    OURS,
    PATHS,
    THEIRS,
    ask,
    asked_by,
    body_of,
    path_of,
    two_tenants,
)
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, worker
from tests.wait import until


async def test_another_tenants_things_do_not_exist(tmp_path: Path) -> None:
    """What is refused for being another's is refused as what does not exist, to the letter."""
    file, asked = two_tenants(tmp_path), 0
    async with asked_by(file, shadow_weights={"temperature": 0.0}) as (do, service):
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        wire = do.wire
        book = {"worker_id": 2, "tenant_id": THEIRS, "selection_id": "s-theirs", **PROMPT}
        for name, reservation_id in (("theirs", "r-theirs"), ("all", "r-plain"), ("all", "r-gone")):
            booking = {"reservation_id": reservation_id, **book}
            assert (await do(name, "POST", "/reservations", booking))[0] == 201
        assert (await do("all", "DELETE", "/reservations/r-gone"))[0] == 200
        lease = {"owner": "o", "ttl_s": 60, "lease_id": "l-theirs"}
        assert (await do("theirs", "POST", "/leases", lease))[0] == 201
        ask_theirs = {"tenant_id": THEIRS, "selection_id": "d-theirs", **PROMPT}
        assert (await do("all", "POST", "/select", ask_theirs))[0] == 200
        assert (await do("ours", "POST", "/select", {"tenant_id": OURS, **PROMPT}))[0] == 200
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
        assert (await do("ours", "GET", "/leases"))[1] == {"leases": [], "total": 0}
    assert asked > 15


async def test_ids_of_two_tenants_do_not_meet(tmp_path: Path) -> None:
    """The same ids may be used by two tenants, and each reaches its own by them."""
    async with asked_by(two_tenants(tmp_path)) as (do, service):
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
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
        for path in ("r/output_block", "s/prefill_complete"):
            body = await do("ours", "POST", f"/reservations/{path}", {})
            assert body == (200, {"status": "ok"})
        assert (await do("ours", "DELETE", "/reservations/r"))[0] == 200
        assert (await do("ours", "DELETE", "/reservations/r"))[0] == 200, "repeatable"
        assert len(service.core.lifecycle.bookings) == 1
        names = ("acme%20corp:r", "r", "r")
        frees = {"operations": [{"op": "free", "reservation_id": name} for name in names]}
        results = (await do("theirs", "POST", "/reservations/batch", frees))[1]["results"]
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
    booking = {"reservation_id": "r", "worker_id": 1, "tenant_id": OURS, **PROMPT}
    async with asked_by(file) as (do, service):
        add_worker(service, 1, tenant_id=OURS)
        assert (await do("all", "POST", "/reservations", booking))[0] == 201
        assert (await do("ours", "DELETE", "/reservations/r"))[0] == 200
        assert not len(service.core.lifecycle.bookings)
        # of two tenants' tokens, each finds what the other booked for the tenant they share
        file.add("narrow", *SCOPES, tenants=[OURS])
        assert service.security is not None
        service.security.prepare()()
        booking["reservation_id"] = "s"
        assert (await do("narrow", "POST", "/reservations", booking))[0] == 201
        for _ in range(2):
            assert (await do("ours", "DELETE", "/reservations/s"))[0] == 200


async def test_a_name_like_ours_in_another_tenant_is_not_ours(tmp_path: Path) -> None:
    """Clients that are not bound may choose any name, and may pass on what theirs have chosen."""
    async with asked_by(two_tenants(tmp_path)) as (do, service):
        add_worker(service, 2, tenant_id=THEIRS)
        body = {"reservation_id": "acme%20corp:r", "worker_id": 2, "tenant_id": THEIRS, **PROMPT}
        assert (await do("all", "POST", "/reservations", body))[0] == 201
        for method, path in (("DELETE", "r"), ("POST", "r/prefill_complete")):
            status, answer = await do("ours", method, f"/reservations/{path}")
            assert (status, answer["error"]) == (404, "reservation r not found")
        assert len(service.core.lifecycle.bookings) == 1


@pytest.mark.parametrize("name", ["ü" * 100, "t" * 256, "%%" + "0" * 32, "t" * 33])
def test_a_tenant_with_a_long_name_has_room_for_ids(name: str) -> None:
    """The longest id of a trace or UUID has; other tenants' names never come out the same."""
    assert len(prefix_of(name)) < 60
    assert prefix_of(name) != prefix_of(name[:-1])
    assert prefix_of(prefix_of(name).removesuffix(":")) != prefix_of(name)


async def test_decisions_are_told_under_their_clients_names(tmp_path: Path) -> None:
    async with asked_by(two_tenants(tmp_path)) as (do, service):
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        ids = {"reservation_id": "r", "selection_id": "s"}
        for name, tenant in (("ours", OURS), ("theirs", THEIRS)):
            booking = {"tenant_id": tenant, "explain": True, **ids, **PROMPT}
            status, answer = await do(name, "POST", "/select_and_reserve", booking)
            assert status == 200, answer
            decision = answer["decision"]
            assert ids.items() <= decision.items()
            assert decision["decision_id"] == "s"
        for name, tenant in (("ours", OURS), ("theirs", THEIRS)):
            for found in ("r", "s"):
                status, decision = await do(name, "GET", f"/decisions/{found}")
                assert (status, decision["tenant_id"]) == (200, tenant)
                assert ids.items() <= decision.items()
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
    async with asked_by(two_tenants(tmp_path)) as (do, service):
        add_worker(service, 2, tenant_id=THEIRS)
        status, answer = await do("ours", "POST", "/workers", worker(2, tenant_id=OURS))
        assert (status, answer["error"]) == (409, "worker id 2 is not free")
        known = service.core.catalog.find(2)
        assert known is not None
        assert known.scope.tenant_id == THEIRS
        assert (await do("ours", "POST", "/workers", worker(3)))[0] == 404  # the tenant `default`
        assert (await do("ours", "POST", "/workers", worker(3, routing_group=OURS)))[0] == 201


async def test_ready_tells_strangers_little_and_tenants_their_own(tmp_path: Path) -> None:
    file = two_tenants(tmp_path)
    file.add("blind", "select")
    async with asked_by(file) as (do, service):
        assert (await do(None, "GET", "/ready"))[0] == 503
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        assert await do(None, "GET", "/ready") == (200, {"ready": True})
        assert (await do("blind", "GET", "/ready"))[1] == {"ready": True}
        shown = (await do("ours", "GET", "/ready"))[1]
        assert [one["worker_id"] for one in shown["workers"]] == [1]
        assert shown["schedulable_workers"] == 1
        assert (await do("all", "GET", "/ready"))[1]["schedulable_workers"] == 2
        for who, status in ((None, 401), ("blind", 403), ("ours", 403), ("all", 200)):
            assert (await do(who, "GET", "/ready?verbose=true"))[0] == status


async def test_a_request_that_waits_is_answered_under_its_clients_names(tmp_path: Path) -> None:
    file = two_tenants(tmp_path)
    async with asked_by(file, max_queued_default=8) as (do, service):
        add_worker(service, 1, tenant_id=OURS, max_inflight=1)
        second = await Wire.to(do.port)
        ask = {"tenant_id": OURS, **PROMPT}
        first = await do("ours", "POST", "/select_and_reserve", ask | {"reservation_id": "1"})
        assert first[0] == 200
        second.ask("POST", "/select_and_reserve", ask | {"reservation_id": "2"}, file.line("ours"))
        await until(lambda: any(one.pending_count for one in service.core.partitions.values()))
        assert (await do("ours", "DELETE", "/reservations/1"))[0] == 200
        status, _, content = await second.answer()
        assert (status, json.loads(content)["reservation_id"]) == (200, "2")


async def test_pairs_under_their_clients_names(tmp_path: Path) -> None:
    async with asked_by(two_tenants(tmp_path)) as (do, service):
        add_worker(service, 1, tenant_id=OURS, role="prefill")
        add_worker(service, 2, tenant_id=OURS, role="decode")
        ask = {"tenant_id": OURS, "reservation_id": "pair", **PROMPT}
        status, answer = await do("ours", "POST", "/select_pair", ask)
        assert (status, answer["reservation_id"]) == (200, "pair"), answer
        assert answer["decode"]["reservation_id"] == "pair:decode"
        assert answer["prefill"]["reservation_id"] == "pair:prefill"
        for path in ("pair/prefill_complete", "pair:decode/output_block"):
            assert (await do("ours", "POST", f"/reservations/{path}", {}))[0] == 200
        assert (await do("ours", "DELETE", "/reservations/pair"))[0] == 200
        assert not len(service.core.lifecycle.bookings)


async def test_answers_that_are_kept_are_not_changed(tmp_path: Path) -> None:
    """A repeat is answered from what was kept: under the tenant's name, and so to its client."""
    async with asked_by(two_tenants(tmp_path)) as (do, service):
        add_worker(service, 1, tenant_id=OURS)
        asked = {"tenant_id": OURS, "reservation_id": "r", **PROMPT}
        assert (await do("ours", "POST", "/select_and_reserve", asked))[0] == 200
        booking = service.core.lifecycle.bookings.live("acme%20corp:r")
        assert booking is not None
        assert msgspec.to_builtins(booking.answer)["reservation_id"] == "acme%20corp:r"
