"""One tenant's open connections, and the answers it does not read, leave others room for theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from select_service.edge.http.connection_guard import RESERVED_MAX
from select_service.edge.http.traffic import Connections
from select_service.edge.server import Server
from tests.select_service.edge.http.test_slow_readers import slow
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.select_service.edge.security.test_tenant_shares import ACME, RIVAL, file_of
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, listening
from tests.wait import until

MOST = 12
PART = 2  # of twelve, half in three parts


def counts_of(server: Server) -> Connections:
    return server._counts


async def ask(wire: Wire, file: TokenFile, who: str, path: str = "/loads") -> tuple[int, str]:
    """Ask; returns the status and the code."""
    status, _, body = await wire.exchange("GET", path, None, file.line(who))
    return status, "" if status == 200 else json.loads(body)["code"]


async def held_by(port: int, file: TokenFile, tenant: str) -> float:
    wire = await Wire.to(port)
    text = (await wire.exchange("GET", "/metrics", None, file.line("all")))[2].decode()
    wire.close()
    name = "select_service_tenant_bound_held"
    line = f'{name}{{bound="connections_max",tenant_id="{tenant}"}} '
    (found,) = (one for one in text.splitlines() if one.startswith(line))
    return float(found.removeprefix(line))


@pytest.mark.parametrize("lines", [(), ("upgrade: none",)], ids=["fast lane", "asgi"])
async def test_a_tenant_fills_its_room_and_no_other(tmp_path: Path, lines: tuple[str, ...]) -> None:
    file = file_of(tmp_path)
    async with listening(**file.setting, connections_max=MOST) as (port, _, server):
        wires: list[Wire] = []

        async def fills(who: str, most: int) -> None:
            """Ask on new connections, which stay open, until one is refused."""
            for number in range(most + 1):
                wire = await Wire.to(port)
                status, headers, body = await wire.exchange(
                    "GET", "/loads", None, file.line(who), *lines
                )
                if number < most:
                    assert status != 503
                    wires.append(wire)
                    continue
                assert (status, json.loads(body)["code"]) == (503, "too_many_connections")
                assert headers["connection"] == "close"
                assert await wire.rest() == b""
                wire.close()
                error = json.loads(body)
                assert "--connections-max" in error["error"]
                assert error["details"] == {
                    "limit": "connections_max", "held": most, "share": PART,
                    **({} if who == "all" else {"tenant_id": ACME if who == "acme" else RIVAL}),
                }  # fmt: skip

        await fills("acme", MOST - 2 * PART)
        assert await held_by(port, file, ACME) == MOST - 2 * PART
        await fills("rival", PART)
        for _number in range(PART):
            wire = await Wire.to(port)
            assert (await ask(wire, file, "all"))[0] == 200
            wires.append(wire)
        await until(lambda: len(server.server_state.connections) == MOST)
        # all asked again on open connections are answered
        for who, wire in (("acme", wires[0]), ("rival", wires[-PART - 1]), ("all", wires[-1])):
            assert (await ask(wire, file, who))[0] == 200
        # room comes back at once
        wires[0].close()
        await until(lambda: len(server.server_state.connections) == MOST - 1)
        wire = await Wire.to(port)
        assert (await ask(wire, file, "acme"))[0] == 200


async def test_strangers_leave_the_tenants_their_part(tmp_path: Path) -> None:
    """Whoever connects and says nothing, or shows no token of a tenant, is one of the others."""
    file = file_of(tmp_path)
    async with listening(**file.setting, connections_max=MOST) as (port, _, server):
        silent = [await Wire.to(port) for _ in range(MOST - 2 * PART)]
        await until(lambda: len(server.server_state.connections) == len(silent))
        kept: list[Wire] = []
        for who in ("rival", "acme"):
            for number in range(PART + 1):
                wire = await Wire.to(port)
                status = (await ask(wire, file, who))[0]
                assert status == (200 if number < PART else 503)
                if status == 200:
                    kept.append(wire)
                else:
                    wire.close()
        # they are connections like any other: they go on, and take no place in the reserve
        for _round in range(2):
            assert (await ask(kept[0], file, "rival"))[0] == 200
            assert (await ask(kept[PART], file, "acme"))[0] == 200
        await until(lambda: counts_of(server).reserved == 0)
        assert (await ask(silent[0], file, "all"))[0] == 200
        # one that has connected as somebody else may still get what is kept for its tenant
        kept[0].close()
        await until(lambda: len(server.server_state.connections) == MOST - 1)
        assert (await ask(silent[1], file, "rival"))[0] == 200


async def test_a_connection_belongs_to_the_tenant_that_it_named_last(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    chosen = {**file.setting, "connections_max": MOST}
    async with listening(**chosen) as (port, service, server):
        bound = service.core.shares.bounds["connections_max"]
        wire = await Wire.to(port)
        for who, held in (
            *(("all", (0, 0, 1)), ("acme", (1, 0, 0)), ("all", (1, 0, 0))),
            *(("rival", (0, 1, 0)), ("rival", (0, 1, 0)), ("acme", (1, 0, 0))),
        ):
            assert (await ask(wire, file, who))[0] == 200
            assert (bound.held(ACME), bound.held(RIVAL), bound.held(None)) == held
            bound.check()
        # a head that nobody has read yet, then one that goes another way
        wire.say(b"GET /loads HTTP/1.1\r\nhost: s\r\n")
        wire.say(f"{file.line('rival')}\r\n\r\n".encode())
        assert (await wire.answer())[0] == 200
        assert bound.held(RIVAL) == 1
        security = service.security
        assert security is not None
        file.drop("rival")
        security.prepare()()
        bound.check()
        assert (bound.held(None), bound.total) == (1, 1)
        assert (await ask(wire, file, "acme"))[0] == 200
        assert (bound.held(ACME), bound.total) == (1, 1)
        wire.close()
        await until(lambda: not server.server_state.connections)
        bound.check()
        assert bound.total == 0


async def test_connections_that_are_refused_are_not_counted(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    chosen = {**file.setting, "connections_max": MOST, "connections_per_address_max": 1}
    async with listening(**chosen) as (port, service, server):
        bound = service.core.shares.bounds["connections_max"]
        first = await Wire.to(port)
        await until(lambda: bound.total == 1)
        others = [await Wire.to(port) for _ in range(RESERVED_MAX + 3)]
        await until(lambda: counts_of(server).reserved == RESERVED_MAX)
        await until(lambda: counts_of(server).refused_by_address == 3)
        assert bound.total == 1
        # a place beyond the bound per address is no place for a tenant
        assert (await ask(others[-1], file, "acme", "/loads")) == (503, "too_many_connections")
        assert (await ask(first, file, "acme"))[0] == 200
        for wire in (first, *others):
            wire.close()
        await until(lambda: not server.server_state.connections)
        bound.check()
        assert bound.total == 0


async def test_whoever_has_most_unread_is_cut_off_first(tmp_path: Path) -> None:
    """The answers that one tenant does not read do not cut off another that reads slowly."""
    file = file_of(tmp_path)
    chosen = {**file.setting, "unread_bytes_max": 16 << 20, "tenant_share": 1.0}
    async with listening(**chosen) as (port, service, server):
        for number in range(40):  # eight megabytes each: the system takes in four for a client
            add_worker(service, number, tenant_id=RIVAL, taints=["x" * 200_000])
            add_worker(service, 100 + number, tenant_id=ACME, taints=["x" * 200_000])
        counts = counts_of(server)
        async with slow(port, 1, "/workers", file.line("rival"), "connection: close") as (patient,):
            await until(lambda: counts.unread_bytes > 0)
            async with slow(port, 8, "/workers", file.line("acme")):
                await until(lambda: counts.unread > 0 and counts.unread_bytes <= 16 << 20)
                bound = service.core.shares.bounds["unread_bytes_max"]
                assert bound.held(RIVAL) > 0
                assert bound.refused == {ACME: counts.unread}
                head, _, body = (await patient.rest()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert len(json.loads(body)) == 40


async def test_requests_that_wait_take_no_place_of_others(tmp_path: Path) -> None:
    """Each waits on a connection of its tenant, in a queue of its own scope."""
    file = file_of(tmp_path)
    chosen = {**file.setting, "connections_max": MOST}
    async with listening(**chosen) as (port, service, _server):
        for number, tenant in enumerate((ACME, RIVAL), 1):
            add_worker(service, number, tenant_id=tenant, max_inflight=1, max_queued=100)
        room, refused = (
            service.core.waiting_requests,
            service.core.shares.bounds["connections_max"].refused,
        )
        held = {}
        for who, tenant, most in (("acme", ACME, MOST - 2 * PART), ("rival", RIVAL, PART)):
            asked = {**PROMPT, "tenant_id": tenant}
            held[who] = await Wire.to(port)
            assert (
                await held[who].status("POST", "/select_and_reserve", asked, file.line(who)) == 200
            )  # its worker is busy from now on
            before = room._waiting
            for number in range(most + 3):
                wire = await Wire.to(port)
                wire.ask("POST", "/select", asked, file.line(who))
                if number < most - 1:
                    await until(lambda before=before, n=number: room._waiting == before + n + 1)  # type: ignore[misc]
                else:
                    status, _, body = await wire.answer()
                    assert (status, json.loads(body)["code"]) == (503, "too_many_connections")
                    wire.close()
            assert refused[tenant] == 4
        service.core.check()


async def test_newcomers_have_room_even_where_everything_is_promised(tmp_path: Path) -> None:
    """Nobody knows whose they are before their first request: they are no strangers for that."""
    file = TokenFile(tmp_path / "tokens")
    file.add("acme", "admin", tenants=[ACME])
    file.add("rival", "admin", tenants=[RIVAL])
    count = 2 * RESERVED_MAX
    chosen = {**file.setting, "connections_max": 8 * count, "tenant_share": 1.0}
    async with listening(**chosen) as (port, service, server):
        wires = [await Wire.to(port) for _ in range(count)]
        await until(lambda: len(server.server_state.connections) == count)
        assert counts_of(server).reserved == 0
        for number, wire in enumerate(wires):
            assert (await ask(wire, file, ("acme", "rival")[number % 2]))[0] == 200
        bound = service.core.shares.bounds["connections_max"]
        assert (bound.held(ACME), bound.held(RIVAL)) == (count // 2, count // 2)
