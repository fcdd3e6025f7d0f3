"""Sets the stage of a transcript: its services, fake engines and replica wire, then plays it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from tests.contract import transcript as transcripts
from tests.contract.http_peer import http_peer
from tests.contract.replayer import Replayer
from tests.contract.transcript import Start
from tests.contract.wire import ReplicaWire
from tests.live.engine import FakeEngine
from tests.live.ports import free_base
from tests.live.server import Server
from tests.wait import eventually

HTTP_PORT = 20  # 18120 in the recordings


def _option(server: Server, name: str) -> str | None:
    args = [*server.args]
    return args[args.index(name) + 1] if name in args else None


def _wait_until_synced(servers: Collection[Server]) -> None:
    """Return once services hear each other.

    What one misses at first it would ask for later, and be told more than the recorded one was.
    """
    ports = {_option(one, "--replica-sync-port") for one in servers}
    for server in servers:
        peers = (_option(server, "--replica-sync-peers") or "").split(",")
        count = sum(peer.rpartition(":")[2] in ports for peer in peers)
        if count:
            eventually(
                partial(server.metric, "replica_publishers", state="synced"),
                float(count),
            )


def play(
    name: str,
    folder: Path,
    *,
    command: Sequence[str],
    args: Sequence[str] = (),
    reference: bool = False,
    packed: bool = False,
) -> None:
    """Play one transcript against fresh processes; they must end cleanly where they are ours."""
    servers: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(free_base(transcripts.port_offsets(name) | {HTTP_PORT}))
        transcript = transcripts.load(name, base)

        def start_server(start: Start) -> None:
            server = Server(
                folder / f"service-{start.label}.log",
                command=command,
                args=(*args, *start.args),
                env=start.env,
                port=start.port or base + HTTP_PORT,
            )
            servers[start.label] = stack.enter_context(server)

        engines = {p: stack.enter_context(FakeEngine(p)) for p in transcript.engine_ports}
        for peer in transcript.http_peers:
            stack.enter_context(http_peer(peer))
        for start in transcript.starts:
            start_server(start)
        wire = stack.enter_context(ReplicaWire(transcript.replica_ports))
        if transcript.has_replica_events:
            wire.wait_until_heard(has_heartbeats=not reference)
            if not reference:
                _wait_until_synced(servers.values())
        replayer = Replayer(transcript, servers, start_server, engines, wire)
        replayer.reference, replayer.packed = reference, packed
        replayer.play()
        for server in servers.values():
            assert reference or server.stop() == 0, server.log_tail()
