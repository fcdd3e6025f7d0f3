"""One tenant's flood leaves every other tenant its part of each bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from select_service.core.tenancy.shares import prefix_of
from select_service.edge.driver.driver import Driver
from select_service.settings import Settings
from tests.coroutines import within
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.serving import PROMPT, add_worker, app_client, listening, worker
from tests.wait import until

ACME, RIVAL = "acme corp", "rival"


class Tenants:
    """Two tenants with tokens of their own, and an operator without a tenant."""

    def __init__(self, file: TokenFile, client: httpx.AsyncClient) -> None:
        self.file, self.client = file, client

    async def ask(self, who: str, method: str, path: str, body: Any = None) -> httpx.Response:
        return await self.client.request(method, path, json=body, headers=self.file.header(who))

    async def metric(self, name: str, **labels: str) -> float | None:
        text = (await self.ask("all", "GET", "/metrics")).text
        said = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        line = f"select_service_{name}{{{said}}} "
        found = [one for one in text.splitlines() if one.startswith(line)]
        return float(found[0].removeprefix(line)) if found else None


def file_of(tmp_path: Path) -> TokenFile:
    file = TokenFile(tmp_path / "tokens")
    file.add("acme", "admin", tenants=[ACME])
    file.add("rival", "admin", tenants=[RIVAL])
    file.add("all", "admin")
    return file


@contextlib.asynccontextmanager
async def tenants_of(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Tenants, Driver]]:
    file = file_of(tmp_path)
    async with app_client(**file.setting, **settings) as (client, service):
        yield Tenants(file, client), service


def lease(number: int) -> tuple[str, str, dict[str, Any]]:
    return "POST", "/leases", {"owner": "o", "ttl_s": 60, "lease_id": f"l{number}"}


async def flood(tenants: Tenants, bound: str, made: Any, code: str, status: int) -> int:
    """Let acme hold all it gets; returns how many that are."""
    for number in range(20):
        answer = await tenants.ask("acme", *made(number))
        if answer.status_code >= 400:
            break
    else:
        raise AssertionError("there is no bound")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    flag = "--" + bound.replace("_", "-")
    assert flag in answer.json()["error"]
    assert "--tenant-share" in answer.json()["error"]
    part = Settings().tenant_share * 12 // 3
    assert answer.json()["details"] == {
        "limit": bound, "held": number, "share": part, "tenant_id": ACME
    }  # fmt: skip
    assert await tenants.metric("tenant_bound_held", bound=bound, tenant_id=ACME) == number
    assert await tenants.metric("tenant_bound_share", bound=bound) == part
    refused = await tenants.metric("tenant_bound_refused_total", bound=bound, tenant_id=ACME)
    assert refused == 1.0
    return number


async def test_leases(tmp_path: Path) -> None:
    async with tenants_of(tmp_path, leases_max=12) as (tenants, service):
        held = await flood(tenants, "leases_max", lease, "too_many_leases", 503)
        assert held == 12 - 2 * 2
        for who in ("rival", "all"):
            for number in range(2):
                assert (await tenants.ask(who, *lease(number))).status_code == 201
            assert (await tenants.ask(who, *lease(2))).status_code == 503
        service.core.check()
        assert (await tenants.ask("acme", "DELETE", "/leases/l0")).status_code == 200
        assert (await tenants.ask("rival", *lease(2))).status_code == 201


async def test_workers(tmp_path: Path) -> None:

    def made(number: int, tenant: str = ACME, at: int = 100) -> tuple[str, str, dict[str, Any]]:
        return "POST", "/workers", worker(at + number, tenant_id=tenant)

    async with tenants_of(tmp_path, workers_max=12) as (tenants, service):
        held = await flood(tenants, "workers_max", made, "too_many_workers", 409)
        assert held == 8
        for who, tenant, at in (("rival", RIVAL, 200), ("all", "default", 300)):
            for number in range(2):
                answer = await tenants.ask(who, *made(number, tenant, at))
                assert answer.json()["lifecycle"] == "schedulable"
            assert (await tenants.ask(who, *made(2, tenant, at))).status_code == 409
        # what one has may be said again, and moved by who may
        assert (await tenants.ask("acme", *made(1))).status_code == 201
        moved = await tenants.ask("all", *made(1, RIVAL))
        assert moved.status_code == 201
        service.core.check()
        assert (await tenants.ask("acme", "DELETE", "/workers/100")).status_code == 200
        assert (await tenants.ask("rival", *made(2, RIVAL, 200))).status_code == 201


@pytest.mark.parametrize("bound", ["scopes_max", "event_sources_max"])
async def test_scopes_and_event_sources(tmp_path: Path, bound: str) -> None:

    async def register(tenants: Tenants, who: str, number: int, tenant: str) -> dict[str, Any]:
        spec = worker(number, tenant_id=tenant, model_name=f"m{number}")
        return (await tenants.ask(who, "POST", "/workers", spec)).json()  # type: ignore[no-any-return]

    async with tenants_of(tmp_path, **{bound: 12}) as (tenants, service):
        refusals: dict[str, Any] = {}
        for number in range(100, 120):
            refusals = await register(tenants, "acme", number, ACME)
            if refusals["lifecycle"] != "schedulable":
                break
        assert number == 100 + 8
        (why,) = refusals["not_schedulable_reasons"]
        assert "--" + bound.replace("_", "-") in why
        assert "--tenant-share" in why
        assert await tenants.metric("tenant_bound_held", bound=bound, tenant_id=ACME) == 8
        refused = await tenants.metric("tenant_bound_refused_total", bound=bound, tenant_id=ACME)
        assert refused == 1
        for who, tenant, at in (("rival", RIVAL, 200), ("all", "default", 300)):
            for number in (at, at + 1):
                assert (await register(tenants, who, number, tenant))["lifecycle"] == "schedulable"
        assert (await register(tenants, "rival", 202, RIVAL))["lifecycle"] == "incomplete"
        # an emptied scope makes room at once, though it would linger for ten minutes
        assert (await tenants.ask("acme", "DELETE", "/workers/100")).status_code == 200
        assert (await register(tenants, "rival", 202, RIVAL))["lifecycle"] == "schedulable"
        assert len(service.core.partitions) <= 13
        service.core.check()


async def test_emptied_scopes_are_no_way_around_the_bound(tmp_path: Path) -> None:
    """Nor do they keep their own tenant from opening others."""
    async with tenants_of(tmp_path, scopes_max=12) as (tenants, service):
        for number in range(100, 160):
            spec = worker(number, tenant_id=ACME, model_name=f"m{number}")
            answer = (await tenants.ask("acme", "POST", "/workers", spec)).json()
            assert answer["lifecycle"] == "schedulable"
            assert (await tenants.ask("acme", "DELETE", f"/workers/{number}")).status_code == 200
            assert len(service.core.partitions) <= 2 * 12
        service.core.check()
        await until(lambda: len(service.core.partitions) <= 12)


@pytest.mark.parametrize("path", ["/reservations", "/select_and_reserve"])
async def test_reservations(tmp_path: Path, path: str) -> None:

    def made(number: int, tenant: str = ACME, at: int = 1) -> tuple[str, str, dict[str, Any]]:
        where = {"worker_id": at} if path == "/reservations" else {}
        named = {"reservation_id": f"r{number}", "tenant_id": tenant}
        return "POST", path, {**PROMPT, **where, **named}

    async with tenants_of(tmp_path, reservations_max=12) as (tenants, service):
        add_worker(service, 1, tenant_id=ACME)
        add_worker(service, 2, tenant_id=RIVAL)
        add_worker(service, 3)
        held = await flood(tenants, "reservations_max", made, "too_many_reservations", 503)
        assert held == 8
        for who, tenant, at in (("rival", RIVAL, 2), ("all", "default", 3)):
            for number in range(2):
                answer = await tenants.ask(who, *made(number, tenant, at))
                assert answer.status_code in {200, 201}
            assert (await tenants.ask(who, *made(2, tenant, at))).status_code == 503
        service.core.check()
        # a worker that goes takes its load with it, whatever is still to be cleared away
        service.core.limits.dropped_per_turn_max = 0
        assert (await tenants.ask("acme", "DELETE", "/workers/1")).status_code == 200
        assert await tenants.metric(
            "tenant_bound_held", bound="reservations_max", tenant_id=ACME
        ) == (0)
        for number in range(2, 8):
            answer = await tenants.ask("rival", *made(number, RIVAL, 2))
            assert answer.status_code in {200, 201}
        service.core.check()


async def test_requests_that_wait(tmp_path: Path) -> None:
    """They count as the reservations that they are to become."""
    file = file_of(tmp_path)
    body = {**PROMPT, "tenant_id": ACME}
    async with (
        listening(**file.setting, reservations_max=12) as (port, service, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
        asyncio.TaskGroup() as group,
    ):
        add_worker(service, 1, tenant_id=ACME, max_inflight=1, max_queued=100)
        add_worker(service, 2, tenant_id=RIVAL)
        tenants = Tenants(file, client)
        bodies = [body | {"reservation_id": f"r{number}"} for number in range(8)]
        waits = [
            group.create_task(tenants.ask("acme", "POST", "/select_and_reserve", one))
            for one in bodies
        ]
        await until(lambda: service.core.lifecycle.bookings.expected == 8)
        more = body | {"reservation_id": "more"}
        answer = await tenants.ask("acme", "POST", "/select_and_reserve", more)
        assert answer.json()["code"] == "too_many_reservations"
        more["tenant_id"] = RIVAL
        answer = await tenants.ask("rival", "POST", "/select_and_reserve", more)
        assert answer.status_code == 200
        service.core.check()
        for one in waits:
            one.cancel()


async def test_dumps(tmp_path: Path) -> None:
    async with tenants_of(tmp_path, dumps_max=12) as (tenants, service):
        under_way = [service.dump(frozenset({ACME}), ACME) for _ in range(8)]
        answer = await tenants.ask("acme", "GET", "/dump")
        assert (answer.status_code, answer.json()["code"]) == (503, "too_many_dumps")
        assert answer.json()["details"]["limit"] == "dumps_max"
        for who in ("rival", "all"):
            assert (await tenants.ask(who, "GET", "/dump")).status_code == 200
        del under_way[0]
        assert (await tenants.ask("acme", "GET", "/dump")).status_code == 200


async def test_freed_ids_and_ended_leases(tmp_path: Path) -> None:
    """Who ends very many forgets its own."""
    async with tenants_of(tmp_path, freed_ids_max=12, ended_leases_max=12, lease_reopen_s=0.0) as (
        tenants,
        service,
    ):
        add_worker(service, 1, tenant_id=ACME)
        add_worker(service, 2, tenant_id=RIVAL)

        async def end(who: str, tenant: str, at: int, number: int, chars: int = 1) -> None:
            name = f"r{number:0{chars}}"
            body = {**PROMPT, "tenant_id": tenant, "reservation_id": name, "worker_id": at}
            assert (await tenants.ask(who, "POST", "/reservations", body)).status_code == 201
            assert (await tenants.ask(who, "DELETE", f"/reservations/{name}")).status_code == 200
            assert (await tenants.ask(who, *lease(number))).status_code == 201
            assert (await tenants.ask(who, "DELETE", f"/leases/l{number}")).status_code == 200

        for number in range(2):
            await end("rival", RIVAL, 2, number, chars=1 + 80 * number)
        for number in range(40):
            await end("acme", ACME, 1, number)
        for number in range(2):  # it may still say so again
            name = f"r{number:0{1 + 80 * number}}"
            again = await tenants.ask("rival", "DELETE", f"/reservations/{name}")
            assert again.status_code == 200
            late = await tenants.ask("rival", "POST", f"/leases/l{number}/renew", {})
            assert late.json()["code"] == "lease_closed"
        assert (await tenants.ask("acme", "DELETE", "/reservations/r39")).status_code == 200
        assert (await tenants.ask("acme", "DELETE", "/reservations/r0")).status_code == 404
        service.core.check()
        assert len(service.core.lifecycle.bookings.freed) == 12
        # an id that is used again is no freed one any more
        await end("rival", RIVAL, 2, 7)
        await tenants.ask("all", "DELETE", f"/reservations/{prefix_of(RIVAL)}r7")
        service.core.check()


async def test_sessions(tmp_path: Path) -> None:
    async with tenants_of(tmp_path, sessions_max=12, session_ttl_s=600.0) as (tenants, service):
        for number, tenant in enumerate((ACME, RIVAL), 1):
            add_worker(service, number, tenant_id=tenant)
        asked = {**PROMPT, "tenant_id": RIVAL, "session_id": "s"}
        assert (await tenants.ask("rival", "POST", "/select", asked)).status_code == 200
        for number in range(40):
            body = {**PROMPT, "tenant_id": ACME, "session_id": f"s{number}"}
            assert (await tenants.ask("acme", "POST", "/select", body)).status_code == 200
        sessions = service.core.sessions
        before = sessions.counters.kept
        assert (await tenants.ask("rival", "POST", "/select", asked)).status_code == 200
        assert sessions.counters.kept == before + 1
        assert len(sessions) == 12
        service.core.check()


async def test_decisions(tmp_path: Path) -> None:
    async with tenants_of(tmp_path, decision_ring=16) as (tenants, service):
        for number, tenant in enumerate((ACME, RIVAL, "default"), 1):
            add_worker(service, number, tenant_id=tenant)

        async def select(who: str, tenant: str, name: str | None) -> None:
            body = {**PROMPT, "tenant_id": tenant, "selection_id": name}
            assert (await tenants.ask(who, "POST", "/select", body)).status_code == 200

        await select("rival", RIVAL, "first")
        await select("rival", RIVAL, None)
        await select("all", "default", "whole")
        for number in range(100):
            await select("acme", ACME, f"s{number}")
        service.core.check()
        assert (await tenants.ask("rival", "GET", "/decisions/first")).status_code == 200
        decisions = (await tenants.ask("rival", "GET", "/decisions")).json()["decisions"]
        assert len(decisions) == 2
        unnamed = decisions[0]["decision_id"]
        assert unnamed.startswith("decision-")
        again = (await tenants.ask("rival", "GET", f"/decisions/{unnamed}")).json()
        assert again["decision_id"] == unnamed
        assert (await tenants.ask("acme", "GET", f"/decisions/{unnamed}")).status_code == 404
        assert (await tenants.ask("acme", "GET", "/decisions/s99")).status_code == 200
        assert (await tenants.ask("acme", "GET", "/decisions/s0")).status_code == 404
        # who sees all sees them in order of time
        every = (await tenants.ask("all", "GET", "/decisions")).json()["decisions"]
        newest = [f"s{number}" for number in range(99, 95, -1)]
        names = [one["decision_id"] for one in every]
        assert names == [*newest, "whole", unnamed, "first"]
        assert service.core.decisions.evicted == 96
        # another tenant enters the file: who had a ring as large as it has now keeps it
        security = service.security
        assert security is not None
        tenants.file.drop("acme")
        security.prepare()()
        service.core.check()
        await select("all", ACME, "later")
        assert (await tenants.ask("all", "GET", "/decisions/later")).status_code == 200
        service.core.check()
        kept = len(service.core.decisions)
        assert kept + service.core.decisions.evicted == 104


async def test_a_tenant_may_come_while_others_hold_everything(tmp_path: Path) -> None:
    """Its name enters the token file: its part is there from that moment."""
    file = TokenFile(tmp_path / "tokens")
    file.add("acme", "admin", tenants=[ACME])
    settings = {"token_file": str(file.path), "leases_max": 12, "reservations_max": 12}
    async with listening(**settings) as (port, service, _):
        add_worker(service, 1, tenant_id=ACME)
        add_worker(service, 2, tenant_id=RIVAL)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            tenants = Tenants(file, client)

            async def book(who: str, tenant: str, at: int, number: int) -> int:
                named = {"reservation_id": f"r{number}", "tenant_id": tenant}
                body = {**PROMPT, **named, "worker_id": at}
                return (await tenants.ask(who, "POST", "/reservations", body)).status_code

            for number in range(12):
                assert (await tenants.ask("acme", *lease(number))).status_code == 201
                assert await book("acme", ACME, 1, number) == 201
            assert (await tenants.ask("acme", *lease(12))).status_code == 503
            file.add("rival", "admin", tenants=[RIVAL])
            security = service.security
            assert security is not None
            security.prepare()()
            service.core.check()
            for number in range(3):
                assert (await tenants.ask("rival", *lease(number))).status_code == 201
                assert await book("rival", RIVAL, 2, number) == 201
            assert (await tenants.ask("rival", *lease(3))).status_code == 503
            assert await book("rival", RIVAL, 2, 3) == 503
            assert (await tenants.ask("acme", *lease(12))).status_code == 503
            service.core.check()


@within(app_client, leases_max=12)
async def test_without_tokens_whoever_comes_first_is_served(
    client: httpx.AsyncClient, service: Driver
) -> None:
    for number in range(12):
        method, path, body = lease(number)
        assert (await client.request(method, path, json=body)).status_code == 201
    method, path, body = lease(12)
    refused = (await client.request(method, path, json=body)).json()
    assert refused == {
        "error": "12 leases are open, no more may be", "code": "too_many_leases"
    }  # fmt: skip
    assert "tenant_bound_held{" not in (await client.get("/metrics")).text
    assert service.core.lifecycle.bookings.tenants is None
