"""Who may do what: every route of the table, asked by everybody, over TCP and over TLS.

The routes come from the table itself, so a new one is in the matrix with its first commit. Each
request is sent twice on one connection: the second is answered by the header lines remembered.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from select_service.edge.console.console_app import ConsoleApp
from select_service.edge.driver.driver import Driver
from select_service.edge.http.api import Handler
from select_service.edge.http.routes import ROUTES
from select_service.edge.http.traffic import Traffic
from select_service.edge.routing import OPEN, Route
from select_service.edge.security.tokens import SCOPES
from tests.coroutines import within
from tests.select_service.edge.security.askers import OURS, THEIRS, ask, body_of
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, listening

"""A body for each that a route may take, of what exists or might."""

ADDRESSES = [(route, f"{route.method} {route.pattern}") for route in ROUTES]


@pytest.mark.parametrize(("route", "name"), ADDRESSES, ids=[name for _, name in ADDRESSES])
def test_every_route_says_who_may(route: Route[Handler], name: str) -> None:
    assert route.scope in {*SCOPES, OPEN}, name
    if route.scope == OPEN:
        assert route.pattern in {"/health", "/ready"}, "nothing else is for everybody"
    if route.method != "GET":
        assert route.scope != "read"


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
async def test_route_by_scope(tmp_path: Path, secure: bool) -> None:  # noqa: C901 - its cases
    file = TokenFile(tmp_path / "tokens")
    for scope in SCOPES:
        file.add(scope, scope)
    file.add("bound", *SCOPES, tenants=[OURS])
    settings = file.setting
    tls = None
    if secure:
        ca = Authority(tmp_path)
        settings |= ca.serving("server")
        tls = ca.client()

    def check(
        route: Route[Handler], name: str | None, status: int, headers: dict[str, str], body: bytes
    ) -> None:
        what = f"{route.method} {route.pattern} by {name}: {status} {body[:200]!r}"
        code = json.loads(body).get("code") if status in (401, 403) else None
        if route.scope == OPEN or name in (route.scope, "admin"):
            assert code is None, what
            assert status != 404 or "{" in route.pattern or "deregister" in what, what
        elif name in (None, "unknown"):
            assert (status, code) == (401, "unauthenticated"), what
            assert headers["www-authenticate"].startswith("Bearer"), what
        elif name != "bound":
            assert (status, code) == (403, "missing_scope"), what
            assert f'scope="{route.scope}"' in headers["www-authenticate"], what
        elif route.of_process:
            assert (status, code) == (403, "token_bound"), what
        else:
            assert code is None, f"{what}: it is not in tenant_view.py, nor of_process"
        assert status != 500, what

    async with listening(**settings) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS)
        expected = 0
        wire = await Wire.to(port, tls)
        for route in ROUTES:
            for name in (None, "unknown", *SCOPES, "bound"):
                line = () if name is None else (f"authorization: Bearer {'x' * 43}",)
                if name in file.tokens:
                    line = (file.line(name),)
                for _ in range(2):
                    status, headers, content = await ask(wire, route, body_of(route), *line)
                    check(route, name, status, headers, content)
                expected += 1
        assert expected == len(ROUTES) * (3 + len(SCOPES))


async def test_the_page_is_for_everybody_and_what_it_shows_for_who_may_read_all(
    tmp_path: Path,
) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("reader", "read")
    file.add("gateway", "select")
    file.add("bound", *SCOPES, tenants=[OURS])
    async with listening(**file.setting) as (port, service, _):
        wire = await Wire.to(port)
        statuses = {}
        for route in ConsoleApp(service, Traffic(), clients_max=1).routes:
            file_name = "docs.js" if route.pattern.startswith("/docs") else "app.js"
            path = route.pattern.replace("{name}", file_name).replace("{id}", "x")
            is_page = path.rstrip("/") in {"/console", "/docs"} or "/static/" in path
            assert route.scope == ("open" if is_page else "read")
            assert route.of_process is not is_page
            if route.pattern.endswith("/events"):
                continue  # without an end
            body: object = {"token_ids": [1]} if route.method == "POST" else None
            for line in ("x: y", f"authorization: Bearer {'x' * 43}", "authorization: Basic eDp5"):
                status, headers, _ = await ask(wire, route, body, line, path=path)
                if is_page:
                    assert status in (200, 308), path
                else:
                    assert (status, headers["www-authenticate"][:6]) == (401, "Bearer"), path
            if not is_page:
                for name in ("gateway", "bound"):
                    assert (await ask(wire, route, body, file.line(name), path=path))[0] == 403
                status, _, _ = await ask(wire, route, body, file.line("reader"), path=path)
                statuses[path.rpartition("/")[2]] = status
        assert statuses == {
            "decisions": 200,
            "x": 404,
            "leases": 200,
            "reservations": 200,
            "findings": 200,
            "shadow": 200,
            "prefix": 503,
        }


async def test_who_looks_on_looks_no_longer_than_the_token_is_good_for(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("reader", "read")
    file.add("ops", "admin")
    async with listening(**file.setting) as (port, service, _):
        wires = {name: await Wire.to(port) for name in ("reader", "ops")}
        for name, wire in wires.items():
            wire.ask("GET", "/console/events", None, file.line(name))
            await wire.reader.readuntil(b"event: snapshot")
        file.drop("reader")
        assert service.security is not None
        service.security.prepare()()
        await wires["reader"].reader.readuntil(b"\r\n0\r\n\r\n")  # the end, within two rounds
        for _ in range(2):
            await wires["ops"].reader.readuntil(b"event: tick")


async def test_a_dump_is_cut_to_the_tenant(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", "read", tenants=[OURS])
    async with listening(**file.setting) as (port, service, _):
        add_worker(service, 1, tenant_id=OURS)
        add_worker(service, 2, tenant_id=THEIRS)
        wire = await Wire.to(port)
        wire.ask("GET", "/dump", None, file.line("ours"), "connection: close")
        content = await wire.rest()
        assert b"default:acme corp" in content
        assert b"rival" not in content


@within(listening)
async def test_without_a_token_file_nobody_is_asked(port: int, service: Driver) -> None:
    add_worker(service, 1)
    wire = await Wire.to(port)
    for lines in ((), ("authorization: Bearer whatever",)):
        assert await wire.status("POST", "/select", PROMPT, *lines) == 200
