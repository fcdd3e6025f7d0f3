"""Unix sockets: there while somebody listens, replaced when nobody does, never taken away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from select_service.edge.http.application import Application
from select_service.edge.http.listening_sockets import (
    CannotListenError,
    ListeningSockets,
    UnixSocket,
    bind,
)
from tests import wait
from tests.live.ports import free_port
from tests.live.server import OURS
from tests.select_service.edge.serving import PROMPT, Wire, add_worker, listening
from tests.wait import until

MODE = 0o660


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "s.sock")
    assert list(tmp_path.glob("s.sock*")) == [], "nothing is left behind"


def in_use(path: str) -> UnixSocket:
    unix = UnixSocket(path, MODE)
    unix.socket.listen()
    unix.appear()
    return unix


def dead(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)


def test_silent_peers_are_probed_where_the_system_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(option: int, level: int = socket.IPPROTO_TCP) -> int:
        with bind("127.0.0.1", 0)[0] as listener:
            listener.listen()
            listener.setblocking(True)
            with socket.create_connection(listener.getsockname()), listener.accept()[0] as one:
                return one.getsockopt(level, option)

    assert asked(socket.SO_KEEPALIVE, socket.SOL_SOCKET) != 0
    assert asked(socket.TCP_KEEPCNT) == 4
    monkeypatch.delattr(socket, "TCP_KEEPCNT")
    assert asked(socket.SO_KEEPALIVE, socket.SOL_SOCKET) != 0


# -- the file ----------------------------------------------------------------------------------


def test_of_two_that_start_at_once_the_first_has_it(path: str) -> None:
    late, early = UnixSocket(path, MODE), in_use(path)
    late.socket.listen()
    with pytest.raises(CannotListenError, match="lives"):
        late.appear()
    late.close()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
    early.close()


def test_one_that_became_somebody_elses_is_left_alone(path: str) -> None:
    unix = in_use(path)
    os.unlink(path)
    dead(path)
    unix.close()
    assert os.path.exists(path)
    os.unlink(path)


def test_what_is_no_socket_is_left_alone(path: str) -> None:
    Path(path).write_text("mine", "utf-8")
    with pytest.raises(CannotListenError, match="no socket is in the way"):
        UnixSocket(path, MODE)
    assert Path(path).read_text("utf-8") == "mine"
    os.unlink(path)


@pytest.mark.parametrize("name", ["no/such/folder.sock", "x" * 120])
def test_paths_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(CannotListenError, match=name[:20]):
        UnixSocket(str(tmp_path / name), MODE)


def test_both_or_none(path: str) -> None:
    with ListeningSockets.bound(("127.0.0.1", 0), path, MODE) as both:
        assert len(both.sockets) == 2
        assert both.describe() == {"host": "127.0.0.1", "port": both.port, "uds": path}
        both.tcp[0].listen()
        with pytest.raises(CannotListenError, match=f"127.0.0.1 port {both.port}: "):
            ListeningSockets.bound(("127.0.0.1", both.port), f"{path}2", MODE)
    with ListeningSockets.bound(None, path, MODE) as alone:
        assert (alone.port, alone.tcp) == (0, ())
    port = free_port()
    Path(path).touch()
    with pytest.raises(CannotListenError):
        ListeningSockets.bound(("127.0.0.1", port), path, MODE)
    os.unlink(path)
    with ListeningSockets.bound(("127.0.0.1", port), None, MODE) as free_again:
        assert (free_again.port, free_again.replica_port) == (port, port)
        free_again.tcp[0].listen()
        other = free_port()
        with pytest.raises(CannotListenError, match=f"127.0.0.1 port {port}: "):
            ListeningSockets.bound(("127.0.0.1", other), path, MODE, ("127.0.0.1", port))
        with ListeningSockets.bound(
            ("127.0.0.1", other), path, MODE, ("127.0.0.1", 0)
        ) as all_three:
            assert all_three.port == other
            assert all_three.replica_port not in {0, other}
            addresses = all_three.describe()
            assert (addresses["side_host"], addresses["side_port"]) == (
                "127.0.0.1",
                all_three.replica_port,
            )


# -- served ------------------------------------------------------------------------------------


async def test_both_doors_lead_to_one_service(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slowly: list[object] = []
    real = Application.__call__

    async def spy(self: Application, scope: Any, receive: Any, send: Any) -> None:
        slowly.append(scope["path"])
        await real(self, scope, receive, send)

    monkeypatch.setattr(Application, "__call__", spy)

    async with listening(uds=path, connections_max=2) as (port, service, server):
        add_worker(service)
        tcp, unix = await Wire.to(port), await Wire.to(path)
        answers = []
        for wire in (tcp, unix, tcp, unix):
            status, _, body = await wire.exchange("POST", "/select", PROMPT)
            answers.append((status, body))
        assert answers == [answers[0]] * 4
        assert answers[0][0] == 200
        assert not slowly, "by the fast lane"
        await until(lambda: server._counts.open == 2)
        third = await Wire.to(path)
        assert await third.status("GET", "/loads") == 503
        assert server._counts.refused == 1
        _, _, text = await tcp.exchange("GET", "/metrics")
        assert b"select_service_http_connections 2" in text
    assert not await asyncio.to_thread(Path(path).exists)


def run_alone(path: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*OURS, "--uds", path, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@contextlib.contextmanager
def served(path: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that answers at the path; it is dead at the end, if not before."""
    with run_alone(path, *args) as process:
        try:

            def answers() -> bool:
                assert process.poll() is None, process.communicate()[0].decode()
                return _ask(path, "/health") is not None

            wait.block_until(answers)
            yield process
        finally:
            process.kill()


def _ask(path: str, url: str) -> bytes | None:
    """The answer, or None when nobody listens."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        client.sendall(f"GET {url} HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n".encode())
        with client.makefile("rb") as answer:
            return answer.read()


@pytest.mark.e2e
def test_a_process_with_nothing_else(path: str) -> None:
    with served(path, "--uds-mode", "600") as process:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with run_alone(path) as second:
            said, _ = second.communicate()
        assert second.returncode == 1
        assert f"cannot listen on {path}: a process that lives listens there".encode() in said
        assert (_ask(path, "/ready") or b"").startswith(b"HTTP/1.1 503 ")
        process.kill()
        process.communicate()
    assert os.path.exists(path)
    with served(path) as process:
        assert (_ask(path, "/health") or b"").endswith(b'{"status":"ok"}')
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate()
    assert process.returncode == 0
    assert b"Traceback" not in said
    (line,) = (line for line in said.decode().splitlines() if "listening" in line)
    assert path in line
    assert "port" not in line
