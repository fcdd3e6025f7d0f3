"""Handshakes that are refused, as an operator meets them: real processes wired wrong on purpose."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator

from indexer.edge.curve import KeyPair, new_key_file
from tests.live.clocked import CLOCKED, Clocks
from tests.live.ports import HOST
from tests.live.replicas import Replica, ours
from tests.wait import PATIENCE_S, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

LASTING_S = 31.0
"""A handshake may fail while the other side starts: what is reported has lasted half a minute."""


def findings(server: Replica) -> dict[str, set[str]]:
    """The doctor's: of whom, by code."""
    report = msgspec.json.decode(server.request("GET", "/ready?verbose=true").raw)
    found: dict[str, set[str]] = {}
    for one in report["findings"]:
        who = one["subject"].get("peer") or str(one["subject"].get("worker_id"))
        found.setdefault(one["code"], set()).add(who)
    return found


def examine(server: Replica) -> subprocess.CompletedProcess[str]:
    """What `select-service doctor` says."""
    url = f"http://{HOST}:{server.port}"
    command = [sys.executable, "-m", "select_service", "doctor", "--url", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def last(server: Replica, clocks: Clocks) -> None:
    """Let what is suspected now last: the machine stands still meanwhile."""
    findings(server)  # suspected from now on
    clocks.pass_time(LASTING_S)


def test_replicas_that_refuse_us(tmp_path: Path) -> None:
    """One lists other keys than ours, one has none; who is set right is not named any more."""
    key = new_key_file(str(tmp_path / "key"))
    theirs = new_key_file(str(tmp_path / "their-key"))
    (tmp_path / "others-only").write_text(f"{KeyPair.new().public}\n")
    encrypted = ("--curve-key", str(tmp_path / "their-key"))
    narrow = (*encrypted, "--curve-replica-keys", str(tmp_path / "others-only"))
    clocks = Clocks(tmp_path / "clocks")
    with (
        ours(tmp_path, "narrow", *narrow) as lists_others,
        ours(tmp_path, "plain") as plain,
    ):
        wrong = {lists_others.replica_endpoint, plain.replica_endpoint}
        (tmp_path / "known").write_text(f"{theirs.public} {lists_others.replica_endpoint}\n")
        us = ("--curve-key", str(tmp_path / "key"), "--curve-replica-keys", str(tmp_path / "known"))
        with ours(tmp_path, "us", *us, command=CLOCKED, env=clocks.env, peers=[*wrong]) as server:
            server.add_worker(1)
            eventually(
                lambda: server.metric("handshakes_failed_total", plane="replicas") >= 2, True
            )
            last(server, clocks)
            eventually(lambda: findings(server).get("replica-refuses-us"), wrong)
            ended = examine(server)
            assert ended.returncode == 1, ended
            assert "ERROR   replica-refuses-us  2 findings\n" in ended.stdout  # reported together
            for endpoint in wrong:
                assert f"replica {endpoint}: it hangs up on our handshake" in ended.stdout
            # the remedy of its text: our key in their list, and both are read again on SIGHUP
            (tmp_path / "others-only").write_text(f"{key.public}\n")
            assert lists_others.process is not None
            lists_others.process.send_signal(1)
            eventually(lambda: findings(server).get("replica-refuses-us"), {plain.replica_endpoint})


class Engines:
    """Sockets that engines publish on: plain ones, and ones that admit listed keys only."""

    def __init__(self, folder: Path) -> None:
        self.keys, listed = KeyPair.new(), KeyPair.new()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._doorkeeper = ThreadAuthenticator(self._context)
        self._doorkeeper.start()
        folder.mkdir()
        listing = f'metadata\ncurve\n    public-key = "{listed.public}"\n'
        (folder / "them.key").write_text(listing)
        self._doorkeeper.configure_curve(domain="engines", location=str(folder))
        self._sockets: list[zmq.Socket[bytes]] = []

    def open(self, *, encrypts: bool) -> str:
        """Where another one publishes."""
        socket = self._context.socket(zmq.XPUB)
        self._sockets.append(socket)
        if encrypts:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret.encode())
            socket.setsockopt(zmq.ZAP_DOMAIN, b"engines")
        socket.bind(f"tcp://{HOST}:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._doorkeeper.stop()
        self._context.term()


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    engines = Engines(tmp_path / "admitted")
    yield engines
    engines.close()


def register(server: Replica, worker_id: int, endpoint: str, **fields: object) -> Any:
    worker = {"worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": 16}
    return server.request("POST", "/workers", worker | {"kv_events_endpoint": endpoint} | fields)


def test_engines_that_refuse_us(engines: Engines, tmp_path: Path) -> None:
    """Of a key that is not listed, of none where one is wanted, of another's; and the denied."""
    clocks, key = Clocks(tmp_path / "clocks"), engines.keys.public
    with ours(tmp_path, "us", command=CLOCKED, env=clocks.env) as server:
        register(server, 1, engines.open(encrypts=True), curve_public_key=key)  # it lists others
        register(server, 2, engines.open(encrypts=True))
        register(server, 3, engines.open(encrypts=False), curve_public_key=key)
        register(server, 4, engines.open(encrypts=False))
        denied = register(server, 5, "tcp://169.254.169.254:5557").json
        assert "169.254.0.0/16 is denied" in denied["not_schedulable_reasons"][0]
        eventually(lambda: server.metric("handshakes_failed_total", plane="events") >= 3, True)
        last(server, clocks)
        wrong = {"events-refused": {"1", "2", "3"}, "worker-incomplete": {"5"}}
        eventually(lambda: findings(server), wrong)
        ended = examine(server)
        assert ended.returncode == 1, ended
        assert "ERROR   events-refused  3 findings\n" in ended.stdout  # reported together
        for worker_id in (1, 2, 3):
            assert re.search(rf"^ +(what +)?worker {worker_id}, rank 0", ended.stdout, re.MULTILINE)
        assert "169.254.0.0/16 is denied" in ended.stdout
