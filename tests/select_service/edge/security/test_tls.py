"""TLS on our own protocol: versions, client certificates, and exchanging them under way."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from select_service.edge import server as server_module
from select_service.edge.driver.driver import Driver
from select_service.edge.http import connection_guard
from select_service.edge.security.tls import FILE_BYTES_MAX, Certificates
from select_service.errors import CertificatesUnusable
from tests.select_service.edge.security.credentials_made import Authority, TokenFile
from tests.select_service.edge.serving import HOST, PROMPT, Wire, add_worker, listening
from tests.wait import until


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def settings_of(ca: Authority, directory: Path, **more: Any) -> dict[str, Any]:
    cert, key = ca.issue("server", cert=directory / "server.pem")
    return {"tls_cert": str(cert), "tls_key": str(key), **more}


def certificates_of(service: Driver) -> Certificates:
    assert service.security is not None
    assert service.security.certificates is not None
    return service.security.certificates


def look(certificates: Certificates) -> None:
    """Look at the files now, not when it is time again."""
    certificates._looked_at = -math.inf
    certificates.watch(0.0)


def serial(wire: Wire) -> str:
    shown: Any = wire.writer.get_extra_info("peercert")
    return str(shown["serialNumber"])


async def health(wire: Wire) -> int:
    return await wire.status("GET", "/health")


async def test_requests_over_tls(ca: Authority, tmp_path: Path) -> None:
    async with listening(**settings_of(ca, tmp_path)) as (port, service, _):
        add_worker(service)
        wire = await Wire.to(port, ca.client())
        for _ in range(3):
            assert await wire.status("POST", "/select", PROMPT) == 200
        version = wire.writer.get_extra_info("ssl_object").version()
        assert version == "TLSv1.3"


async def test_old_tls_and_no_tls_are_refused(ca: Authority, tmp_path: Path) -> None:
    async with listening(**settings_of(ca, tmp_path)) as (port, _, _):
        old = ca.client()
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            old.minimum_version = ssl.TLSVersion.TLSv1
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises((ssl.SSLError, OSError)):
            await Wire.to(port, old)
        plain = await Wire.to(port)
        plain.ask("GET", "/health")
        assert b"200" not in await plain.rest()
        assert await health(await Wire.to(port, ca.client())) == 200


async def test_new_handshakes_get_the_new_certificate_and_connections_stay(
    ca: Authority, tmp_path: Path
) -> None:
    async with listening(**settings_of(ca, tmp_path)) as (port, service, _):
        before = await Wire.to(port, ca.client())
        assert await health(before) == 200
        ca.issue("server", cert=tmp_path / "server.pem")
        certificates = certificates_of(service)
        while not certificates.reloads["done"]:  # it looks every other second
            certificates._looked_at = -math.inf
            await asyncio.sleep(0.01)
        after = await Wire.to(port, ca.client())
        assert await health(after) == 200
        assert serial(after) != serial(before)
        assert await health(before) == 200, "whoever is connected stays so"


async def test_a_bad_pair_keeps_the_old_one_and_says_why(
    ca: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(**settings_of(ca, tmp_path)) as (port, service, _):
        before = await Wire.to(port, ca.client())
        certificates = certificates_of(service)
        ca.issue("other", cert=tmp_path / "other.pem")
        shutil.copy(tmp_path / "other.pem", tmp_path / "server.pem")  # the key is not there yet
        look(certificates)
        assert certificates.reloads == {"done": 0, "refused": 1}
        assert "certificates stay as they are" in caplog.text
        assert "KEY_VALUES_MISMATCH" in caplog.text
        look(certificates)
        assert certificates.reloads["refused"] == 1, "said once, not with every look"
        assert serial(await Wire.to(port, ca.client())) == serial(before)
        shutil.copy(tmp_path / "other.key", tmp_path / "server.key")
        look(certificates)
        assert certificates.reloads == {"done": 1, "refused": 1}
        assert serial(await Wire.to(port, ca.client())) != serial(before)
        (tmp_path / "server.pem").unlink()
        look(certificates)
        assert "No such file" in caplog.text
        assert await health(await Wire.to(port, ca.client())) == 200


async def test_clients_must_show_a_certificate(ca: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with listening(**settings_of(ca, tmp_path, tls_client_ca=str(ca.cert))) as (
        port,
        _,
        _,
    ):
        client = ca.issue("client", cert=tmp_path / "client.pem")
        assert await health(await Wire.to(port, ca.client(client))) == 200
        for nobody in (None, stranger.issue("evil")):
            with pytest.raises((ssl.SSLError, OSError, asyncio.IncompleteReadError)):
                await health(await Wire.to(port, ca.client(nobody)))
        old = ca.client(client)
        old.maximum_version = ssl.TLSVersion.TLSv1_2  # can go on with a session, see tls.py
        with pytest.raises((ssl.SSLError, OSError)):
            await Wire.to(port, old)


async def test_an_authority_taken_away_vouches_for_nobody(ca: Authority, tmp_path: Path) -> None:
    """Also not for who was here before: no session may be gone on with."""
    first = Authority(tmp_path, "first")
    shutil.copy(first.cert, tmp_path / "clients.pem")
    async with listening(
        **settings_of(ca, tmp_path, tls_client_ca=str(tmp_path / "clients.pem"))
    ) as (port, service, _):
        context = ca.client(first.issue("client"))
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n")
        await reader.readuntil(b"ok")
        session = writer.get_extra_info("ssl_object").session
        second = Authority(tmp_path, "second")
        shutil.copy(second.cert, tmp_path / "clients.pem")
        look(certificates_of(service))
        assert certificates_of(service).reloads["done"] == 1

        def resume() -> bytes:
            with (
                socket.create_connection(("127.0.0.1", port)) as plain,
                context.wrap_socket(plain, server_hostname="localhost", session=session) as tls,
            ):
                tls.sendall(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n")
                return tls.recv(100)

        answer = b""
        with contextlib.suppress(ssl.SSLError, OSError):
            answer = await asyncio.get_running_loop().run_in_executor(None, resume)
        assert answer == b""
        writer.close()


async def test_a_certificate_in_place_of_a_token(ca: Authority, tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens")
    file.add_certificate("by name", "spiffe://fleet/gateway", "select")
    file.add_certificate("other", "reader.example", "read")
    file.add_certificate("never", "mallory", "admin")
    file.add("token", "lifecycle")
    settings = settings_of(ca, tmp_path, tls_client_ca=str(ca.cert), **file.setting)
    async with listening(**settings) as (port, service, _):
        add_worker(service)
        gateway = ca.issue("anything", "URI:spiffe://fleet/gateway", cert=tmp_path / "g.pem")
        reader = ca.issue("reader", "DNS:reader.example", cert=tmp_path / "r.pem")
        nobody = ca.issue("mallory", cert=tmp_path / "n.pem")  # its SAN has other names
        wires = [await Wire.to(port, ca.client(who)) for who in (gateway, reader, nobody)]

        async def select_and_list(wire: Wire, *lines: str) -> tuple[int, int]:
            status = await wire.status("POST", "/select", PROMPT, *lines)
            return status, await wire.status("GET", "/workers", None, *lines)

        for _ in range(3):  # what one's header lines mean is not what they mean from another
            assert [await select_and_list(wire) for wire in wires] == [
                (200, 403),
                (403, 200),
                (401, 401),
            ]
        # a token counts before a certificate
        assert await select_and_list(wires[0], file.line("token")) == (403, 403)
        assert await select_and_list(wires[0], "authorization: Bearer " + "x" * 43) == (401, 401)
        file.drop("by name")
        assert service.security is not None
        service.security.prepare()()
        assert await select_and_list(wires[0]) == (401, 401)


async def test_a_unix_socket_beside_tls_is_plain(ca: Authority, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with listening(uds=path, **settings_of(ca, tmp_path)) as (port, _, _):
        assert await health(await Wire.to(path)) == 200
        assert await health(await Wire.to(port, ca.client())) == 200


async def test_refusals_of_the_connection_over_tls(
    ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transport of TLS cannot be closed on one side: it is closed when the time is up."""
    monkeypatch.setattr(connection_guard, "LINGER_S", 0.1)
    async with listening(**settings_of(ca, tmp_path)) as (port, _, _):
        wire = await Wire.to(port, ca.client())
        wire.say(b"nonsense\r\n\r\n")
        assert b"malformed_http" in await wire.rest()
        wire = await Wire.to(port, ca.client())
        wire.say(b"GET /health HTTP/1.1\r\nx: " + b"y" * 70_000)
        assert b"head_too_large" in await wire.rest()


async def test_those_who_do_not_shake_hands_are_limited_too(ca: Authority, tmp_path: Path) -> None:
    """Each would hold a descriptor and 60 KB, and no limit knew of it."""
    chosen = {"connections_per_address_max": 2, **settings_of(ca, tmp_path)}
    async with listening(**chosen) as (port, _, server):
        silent = [await Wire.to(port) for _ in range(3)]
        assert await silent[0].rest() == b"", "the first makes room for the third"
        assert server._counts.refused_by_address == 1
        silent[1].say(b"no TLS\r\n\r\n")
        await silent[1].rest()
        wire = await Wire.to(port, ca.client())
        assert await health(wire) == 200
        other = await Wire.to(port)  # who has shaken hands counts among connections, not here
        server._limits.tls_handshakes_max = 2
        await Wire.to(port)
        assert await silent[2].rest() == b""
        assert server._counts.handshakes == 2
        server._limits.connections_per_address_max = 9
        await Wire.to(port)
        assert await other.rest() == b""
        assert (server._counts.refused_handshakes, server._counts.refused_by_address) == (1, 2)
        assert server._counts.handshakes == 2
        assert await health(wire) == 200


@pytest.mark.parametrize("flood", ["tls_handshakes_max", "connections_per_address_max"])
async def test_who_never_shakes_hands_keeps_nobody_out(
    ca: Authority, tmp_path: Path, flood: str
) -> None:
    """Not from the service, as long as a handshake is quicker than so many connections."""
    async with listening(**{flood: 4}, **settings_of(ca, tmp_path)) as (port, _service, server):
        silent = [await Wire.to(port) for _ in range(40)]
        for _ in range(3):
            silent.append(await Wire.to(port))
            wire = await Wire.to(port, ca.client())
            assert (
                await wire.status("PUT", "/config", {"settings": {"header_timeout_s": 60}}) == 200
            )
            wire.close()
        assert server._counts.handshakes <= 4


async def test_the_reserve_over_tls(ca: Authority, tmp_path: Path) -> None:
    """Limits of connections that were set too low can be taken back over TLS, too."""
    chosen = {"connections_max": 1, **settings_of(ca, tmp_path)}
    async with listening(**chosen) as (port, _service, server):
        first = await Wire.to(port, ca.client())
        assert await health(first) == 200
        wire = await Wire.to(port, ca.client())
        assert b"too_many_connections" in (await wire.exchange("GET", "/loads"))[2]
        wire.close()  # else the server lingers
        silent = [
            await Wire.to(port, ca.client()) for _ in range(connection_guard.RESERVED_MAX + 4)
        ]
        assert server._counts.reserved == connection_guard.RESERVED_MAX
        wire = await Wire.to(port, ca.client())
        assert await wire.status("PUT", "/config", {"settings": {"connections_max": None}}) == 200
        for one in silent:
            one.close()


async def test_handshakes_that_fail_are_counted_by_what_was_wrong(
    ca: Authority, tmp_path: Path
) -> None:
    """Each is closed without a word: the number is all there is to see of a client set up wrong."""
    client = ca.client(ca.issue("client", cert=tmp_path / "client.pem"))
    async with listening(**settings_of(ca, tmp_path, tls_client_ca=str(ca.cert))) as (
        port,
        _,
        server,
    ):

        async def logged(reason: str) -> None:
            line = f'select_service_tls_handshakes_failed_total{{reason="{reason}"}} 1.0'
            wire = await Wire.to(port, client)
            while True:
                wire.ask("GET", "/metrics")
                if line.encode() in (await wire.answer())[2]:
                    return

        plain = await Wire.to(port)
        plain.ask("GET", "/health")
        assert await plain.rest() == b""
        await logged("plain")
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await health(await Wire.to(port, ca.client()))
        await logged("certificate")
        old = ca.client()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError):
            await Wire.to(port, old)
        await logged("protocol")
        gone = await Wire.to(port)
        gone.writer.close()
        await logged("gone")
        server._limits.header_timeout_s = 0.2
        assert await (await Wire.to(port)).rest() == b""
        server._limits.header_timeout_s = 10.0
        await logged("timeout")


async def test_who_has_connected_when_the_end_comes_may_shake_hands(
    ca: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "LAST_WORDS_S", 3600.0)
    async with listening(**settings_of(ca, tmp_path)) as (port, _, server):
        waits = [socket.create_connection((HOST, port)) for _ in range(40)]
        server.go()
        while True:  # until the port is closed
            try:
                waits.append(socket.create_connection((HOST, port)))
            except ConnectionError:
                break
            await asyncio.sleep(0)
        for one in waits:
            one.setblocking(False)
            reader, writer = await asyncio.open_connection(
                sock=one, ssl=ca.client(), server_hostname=HOST
            )
            writer.write(b"GET /health HTTP/1.1\r\nhost: s\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await writer.wait_closed()


async def test_the_end_waits_for_nobodys_goodbye(ca: Authority, tmp_path: Path) -> None:
    """Of a connection in a pool that nobody reads none comes, for as long as one waits."""
    async with listening(**settings_of(ca, tmp_path, shutdown_timeout_s=3600)) as (port, _, server):
        mute, spoken = await Wire.to(port, ca.client()), await Wire.to(port, ca.client())
        for wire in (mute, spoken):
            assert await health(wire) == 200
        mute.writer.transport.pause_reading()  # type: ignore[attr-defined]
        server.go()
        assert await spoken.rest() == b""
        await until(lambda: not server.server_state.connections)
        mute.writer.transport.resume_reading()  # type: ignore[attr-defined] # to close it


async def test_who_says_nothing_is_no_client(ca: Authority, tmp_path: Path) -> None:
    async with listening(header_timeout_s=0.2, **settings_of(ca, tmp_path)) as (port, _, _):
        wire = await Wire.to(port)
        assert await wire.rest() == b"", "closed when the handshake has taken too long"


def test_files_that_cannot_be_used(ca: Authority, tmp_path: Path) -> None:
    cert, key = map(str, ca.issue("server", cert=tmp_path / "server.pem"))
    with pytest.raises(CertificatesUnusable, match="No such file"):
        Certificates(str(tmp_path / "none"), key, None)
    with pytest.raises(CertificatesUnusable, match="client CA"):
        Certificates(cert, key, str(tmp_path / "none"))
    with pytest.raises(CertificatesUnusable):
        Certificates(cert, str(ca.key), None)
    (tmp_path / "garbage").write_text("nothing")
    with pytest.raises(CertificatesUnusable):
        Certificates(str(tmp_path / "garbage"), key, None)
    (tmp_path / "long").write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(CertificatesUnusable, match="longer than"):
        Certificates(cert, key, str(tmp_path / "long"))
    os.mkfifo(tmp_path / "fifo")  # the event loop would wait at it for ever
    for files in (("fifo", None, None), (cert, "fifo", None), (cert, key, "fifo")):
        with pytest.raises(CertificatesUnusable, match="not a plain file"):
            Certificates(*(one and str(tmp_path / one) for one in files))  # type: ignore[arg-type]
