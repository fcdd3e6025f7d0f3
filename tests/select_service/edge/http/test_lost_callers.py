"""Real clients, and callers in this process, that leave around the instant of their turn."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import uvloop
from msgspec import convert

from select_service.edge import cooperative
from select_service.edge.embedded import SelectionService
from select_service.edge.security.tokens import SCOPES
from select_service.types import SelectAndReserveRequest
from tests.select_service.edge.http.fake_clients import BOOK, FORMS, request
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import HOST, PROMPT, add_worker, listening, worker
from tests.wait import run, until

# -- real sockets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["fin", "rst", "half-close"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_real_client_that_leaves_in_the_instant_of_its_turn(end: str, loop: str) -> None:
    async def use() -> None:
        async with listening() as (port, service, _):
            add_worker(service, max_inflight=1)
            service.select_and_reserve_now(_reserve("first"))
            client = socket.create_connection((HOST, port))
            client.setblocking(False)
            client.sendall(request("/select_and_reserve", BOOK))
            await until(lambda: service.waiting == 1)
            if end == "rst":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end == "half-close":
                client.shutdown(socket.SHUT_WR)
            else:
                client.close()
            service.free("first")
            await until(lambda: service.waiting == 0)
            await until(lambda: not service.core.lifecycle.bookings.by_id)
            client.close()

    if loop == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(use())
    else:
        run(use())


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def whole_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine pauses batches of three, whose callers are found gone before it books."""
    monkeypatch.setattr(cooperative, "SLICE_S", 60.0)


@pytest.mark.usefixtures("whole_batches")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("is_tls", [False, True])
@pytest.mark.parametrize("form", ["select_and_reserve", "explained", "batch"])
def test_a_real_client_that_breaks_off_behind_its_request(
    form: str, is_tls: bool, loop: str, ca: Authority
) -> None:
    """The server reads the request, and finds only then that nobody waits for the answer."""
    settings = ca.serving("server") if is_tls else {}

    def connect(port: int) -> socket.socket:
        client = socket.create_connection((HOST, port))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a reset drops what waits
        return ca.client().wrap_socket(client, server_hostname=HOST) if is_tls else client

    async def use() -> None:
        async with listening(**settings) as (port, service, server):
            add_worker(service)
            client = await asyncio.get_running_loop().run_in_executor(None, connect, port)
            await until(lambda: server.server_state.connections)
            client.sendall(request(*FORMS[form]))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            counters = service.core.counters
            await until(lambda: counters.reservations_withdrawn)
            assert not service.core.lifecycle.bookings.by_id

    if loop == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(use())
    else:
        run(use())


@pytest.mark.usefixtures("whole_batches")
@pytest.mark.parametrize(
    ("form", "waits"),
    [(form, False) for form in FORMS if form != "large batch"]  # that is found gone on its way
    + [(form, True) for form in ("select_and_reserve", "explained", "pair")],
)
async def test_what_a_tenants_own_token_has_booked_is_withdrawn(
    form: str, waits: bool, tmp_path: Path
) -> None:
    """Its ids are kept under other names than the client's."""
    path, body = FORMS[form]
    file = TokenFile(tmp_path / "tokens")
    file.add("ours", *SCOPES, tenants=["acme"])
    tokens = {"token_file": str(file.path), "session_ttl_s": 60.0}
    async with listening(**tokens) as (port, service, server):
        add_worker(service, tenant_id="acme", max_inflight=1 if waits else 100)
        if waits:
            first = {**PROMPT, "reservation_id": "first", "tenant_id": "acme"}
            service.select_and_reserve_now(convert(first, SelectAndReserveRequest))
        client = socket.create_connection((HOST, port))
        await until(lambda: server.server_state.connections)
        asked: Any = {**body, "tenant_id": "acme"}
        if "requests" in asked:
            asked["requests"] = [{**one, "tenant_id": "acme"} for one in asked["requests"]]
            del asked["tenant_id"]
        client.sendall(request(path, asked, "POST", file.line("ours")))
        if waits:
            await until(lambda: service.waiting == 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        if waits:
            service.free("first")
            await until(lambda: service.waiting == 0)
        else:
            await until(lambda: service.core.counters.reservations_withdrawn)
        await until(lambda: not service.core.lifecycle.bookings.by_id)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("is_tls", "blocks", "reads"),
    [
        (False, 60_000, ""),
        (True, 60_000, ""),
        (True, 6_000, ""),
        (True, 6_000, "and stays"),
        (True, 6_000, "and goes"),
    ],
)
def test_an_answer_that_a_real_kernel_has_no_room_for(
    *, reads: str, is_tls: bool, blocks: int, loop: str, ca: Authority
) -> None:
    """Its hashes are many, and nobody reads them; a TLS transport keeps some tens of kilobytes."""
    many = list(range(10**18, 10**18 + blocks // 4)) if is_tls else list(range(1, blocks))
    long = {"block_hashes": many, "sequence_hashes": many, "isl_tokens": 16 * len(many)}
    settings = ca.serving("server") if is_tls else {}

    def connect(client: socket.socket, port: int) -> socket.socket:
        client.connect((HOST, port))
        return ca.client().wrap_socket(client, server_hostname=HOST) if is_tls else client

    async def use() -> None:
        async with listening(**settings) as (port, service, server):
            add_worker(service)
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client = await asyncio.get_running_loop().run_in_executor(None, connect, client, port)
            await until(lambda: server.server_state.connections)
            connection: Any = next(iter(server.server_state.connections))
            accepted = connection.transport.get_extra_info("socket")
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            body = request("/select_and_reserve", {**BOOK, **long})
            await asyncio.get_running_loop().run_in_executor(None, client.sendall, body)
            await until(lambda: service.core.lifecycle.bookings.by_id)
            await until(lambda: connection.unsent.answers)
            if reads:
                reading = asyncio.get_running_loop().run_in_executor(None, _read, client)
                if reads == "and stays":
                    await until(lambda: not connection.unsent.answers)
                await reading
                client.close()
                await until(lambda: not server.server_state.connections)
                assert service.core.lifecycle.bookings.by_id
                return
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            await until(lambda: not service.core.lifecycle.bookings.by_id)

    if loop == "uvloop":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(use())
    else:
        run(use())


def _read(client: socket.socket) -> None:
    """Read an answer to its end."""
    received = b""
    while not received.endswith(b"}"):
        received += client.recv(1 << 16)


def _reserve(name: str) -> Any:
    return convert({**PROMPT, "reservation_id": name}, SelectAndReserveRequest)


# -- a caller in this process ----------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(4))
async def test_a_task_cancelled_around_its_turn_has_an_answer_or_no_booking(turns: int) -> None:
    async with SelectionService() as service:
        await service.upsert_worker({**worker(), "max_inflight": 1})
        await service.select_and_reserve({**PROMPT, "reservation_id": "first"})
        task = asyncio.ensure_future(service.select_and_reserve({**BOOK, "explain": True}))
        await until(lambda: service.driver.waiting == 1, pause_s=0)
        await service.free("first")
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        booked = list(service.driver.core.lifecycle.bookings.by_id)
        assert booked == ([] if task.cancelled() else ["mine"])
        assert turns or task.cancelled()


@pytest.mark.parametrize("form", [one for one in FORMS if one != "of a session"])
async def test_a_task_cancelled_while_the_disk_writes_has_booked_nothing(
    form: str, tmp_path: Path
) -> None:
    async with SelectionService(state_dir=tmp_path) as service:
        await service.upsert_worker(worker())
        path, body = FORMS[form]
        name = {"/reservations": "reserve"}.get(path, path[1:])
        task = asyncio.ensure_future(getattr(service, name)(body))
        await until(lambda: service.driver.core.lifecycle.bookings.by_id, pause_s=0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await until(lambda: not service.driver.core.lifecycle.bookings.by_id)
