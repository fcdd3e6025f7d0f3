"""Every address means those of both families, and IPv4 clients keep their names there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from indexer.edge.sockets import open_publisher
from select_service.demo.worker import EventPublisher
from select_service.tcp_listener import (
    bind_tcp,
    close_all,
    host_in_url,
    is_unspecified,
    plain_address,
)
from tests.live.ports import free_port
from tests.select_service.edge.serving import listening
from tests.wait import PATIENCE_S, run, until


@pytest.fixture(params=["0.0.0.0", "::", "[::]"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    (listener,) = bind_tcp(request.param, 0)
    with listener:
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_address_is_of_both_families(port: int, host: str) -> None:
    socket.create_connection((host, port)).close()


@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_one_address_is_of_its_own(host: str, other: str) -> None:
    (listener,) = bind_tcp(host, 0)
    with listener:
        listener.listen()
        port = listener.getsockname()[1]
        socket.create_connection((host, port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, port))


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Every name leads there."""
    families = {True: socket.AF_INET6, False: socket.AF_INET}
    rows = [
        (families[":" in one], socket.SOCK_STREAM, 6, "", (one, 0) + (0, 0) * (":" in one))
        for one in addresses
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: rows)


def test_a_name_is_bound_at_all_its_addresses_that_are_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named(monkeypatch, "192.0.2.77", "::1", "127.0.0.1")
    listeners = bind_tcp("some.name", 0)
    assert [one.getsockname()[0] for one in listeners] == ["::1", "127.0.0.1"]
    assert len({one.getsockname()[1] for one in listeners}) == 1
    close_all(listeners)


def test_a_name_with_no_address_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for addresses in (("192.0.2.77",), ()):
        named(monkeypatch, *addresses)
        with pytest.raises(OSError, match="address"):
            bind_tcp("some.name", 0)


def test_a_name_whose_port_is_taken_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    (taken,) = bind_tcp("127.0.0.1", 0)
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        named(monkeypatch, "::1", "127.0.0.1")
        with pytest.raises(OSError, match="in use"):
            bind_tcp("some.name", port)
    close_all(bind_tcp("::1", port))


def test_a_system_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = socket.socket

    def made(family: int, *args: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return genuine(family, *args)

    monkeypatch.setattr(socket, "socket", made)
    (listener,) = bind_tcp("0.0.0.0", 0)
    with listener:
        assert listener.family == socket.AF_INET


def test_a_taken_port_is_not_shared_between_families() -> None:
    (taken,) = bind_tcp("127.0.0.1", 0)
    with taken:
        taken.listen()
        with pytest.raises(OSError, match="in use"):
            bind_tcp("0.0.0.0", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_replica_port_is_of_both_families(host: str) -> None:
    port = free_port()
    publisher = open_publisher(f"tcp://*:{port}")
    try:
        socket.create_connection((host, port)).close()
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("tcp://*:*", "tcp://[::]:"),
        ("tcp://[::1]:*", "tcp://[::1]:"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:"),
    ],
)
def test_simulated_engines_publish_on_either_family(endpoint: str, shown: str) -> None:
    with EventPublisher(endpoint, endpoint) as publisher:
        assert publisher.endpoint.startswith(shown)
        assert str(publisher.replay_endpoint).startswith(shown)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_service_at_localhost_has_both_families(host: str) -> None:
    async def health() -> None:
        async with listening(host="localhost", side_host="localhost", side_port=0) as (*_, server):
            for port in (server._entrances.port, server._entrances.replica_port):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n")
                assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
                writer.close()

    run(health())


def test_clients_are_counted_by_the_address_they_know() -> None:
    async def counted() -> dict[str, int]:
        async with listening(host="0.0.0.0") as (port, _, server):
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.sendall(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n")
                await until(lambda: bool(server._counts.by_address))
                return dict(server._counts.by_address)

    assert run(counted()) == {"127.0.0.1": 1}


def test_spellings() -> None:
    assert [host_in_url(one) for one in ("::1", "[::1]", "10.0.0.1", "a.b")] == [
        *("[::1]", "[::1]"),
        *("10.0.0.1", "a.b"),
    ]
    assert [plain_address(one) for one in ("::ffff:10.0.0.1", "::1", "10.0.0.1")] == [
        *("10.0.0.1", "::1"),
        "10.0.0.1",
    ]
    assert [is_unspecified(one) for one in ("::", "0.0.0.0", "::1", "localhost")] == [
        *(True, True),
        *(False, False),
    ]


async def _delays_of_accepted() -> list[int]:
    """TCP_NODELAY of connections that asyncio accepts from every listener."""
    loop, seen = asyncio.get_running_loop(), list[int]()
    for host in ("127.0.0.1", "0.0.0.0"):
        (listener,) = bind_tcp(host, 0)
        accepted = loop.create_future()

        class Accepted(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made = transport.get_extra_info("socket")
                accepted.set_result(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        server = await loop.create_server(Accepted, sock=listener)
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
            seen.append(await asyncio.wait_for(accepted, PATIENCE_S))
        server.close()
    return seen


def test_answers_do_not_wait_for_more_of_them() -> None:
    """Nagle's algorithm is off, which asyncio sees to only for sockets that name their protocol."""
    assert all(asyncio.run(_delays_of_accepted()))


@pytest.mark.parametrize("host", ["localhost:18021", "10.0.0.1:80", "[::1]:80", ":80"])
def test_a_host_with_a_port_is_refused_with_where_ports_go(host: str) -> None:
    """The system says of it that there is no such name."""
    with pytest.raises(OSError, match="without a port; the port goes to --port"):
        bind_tcp(host, 0)
