"""Start-up recovery between processes: ours from ours, and both ways with the live reference."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from bench.compare import peer
from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.indexer.edge.fake_engine import FakeEngine
from tests.live.server import OURS_EXTRA, PATIENT, Server
from tests.wait import block_until

pytestmark = pytest.mark.e2e

TENANT = "default"
PROMPT = list(range(6 * BLOCK_SIZE))
ASK = {"token_ids": PROMPT}


def stored(first: int, count: int, parent: int | None, medium: str | None = None) -> bytes:
    tokens = PROMPT[first * BLOCK_SIZE : (first + count) * BLOCK_SIZE]
    names = [1000 + n for n in range(first, first + count)]
    event = ["BlockStored", names, parent, tokens, BLOCK_SIZE, None, medium, None, None]
    return msgspec.msgpack.encode([1.0, [event], None])


def removed(*blocks: int) -> bytes:
    names = [1000 + n for n in blocks]
    return msgspec.msgpack.encode([1.0, [["BlockRemoved", names, None]], None])


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = FakeEngine(context)
    made.pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # or the second subscriber would not be seen
    yield made
    made.close()
    context.term()


def wait(holds: Callable[[], Any], engine: FakeEngine | None = None) -> None:
    def have_served() -> bool:
        if holds():
            return True
        if engine is not None:
            engine.serve()
        return False

    block_until(have_served)


def rows(server: Server) -> list[int]:
    found = Stage(server).rows(TENANT, ASK)
    return found.get((1, 0), [0, 0, 0])


def register(server: Server, engine: FakeEngine, *, replay: bool = True) -> None:
    at = engine.replay_endpoint if replay else None
    Stage(server).register(1, TENANT, {0: engine.endpoint}, at)


def fill(server: Server, engine: FakeEngine) -> None:
    """A worker with blocks on all tiers, known to one service."""
    register(server, engine)
    wait(engine.has_subscriber, engine)
    engine.publish(stored(0, 3, None))
    engine.publish(stored(3, 2, 1002, "CPU"))
    engine.publish(stored(5, 1, 1004, "EXTERNAL"))
    wait(lambda: rows(server) == [3, 5, 6], engine)


def recovering(folder: Path, source: Server) -> Server:
    url = f"http://127.0.0.1:{source.port}"
    return Server(folder / "recovering.log", args=(*OURS_EXTRA, *PATIENT, "--indexer-peers", url))


def served(server: Server) -> Any:
    scope: Any = server.request("GET", "/dump").json
    return scope["default:default"]["events"]


@pytest.mark.parametrize("replay", [True, False])
def test_ours_from_ours(replay: bool, engine: FakeEngine, tmp_path: Path) -> None:
    with Server(tmp_path / "source.log", args=(*OURS_EXTRA, *PATIENT)) as source:
        fill(source, engine)
        with recovering(tmp_path, source) as server:
            assert len(served(server)) == len(served(source))
            ready: Any = server.request("GET", "/ready").json
            assert ready["waiting_for"] == ["schedulable_worker"]
            register(server, engine, replay=replay)
            assert rows(server) == [3, 5, 6]
            wait(engine.has_subscriber, engine)
            before = len(engine.requests)
            engine.publish(removed(2))
            wait(lambda: rows(server) == [2, 2, 2], engine)
            if replay:
                assert engine.requests[before:] == [0], "nothing of the engine was known before"
            engine.publish(stored(2, 1, 1001))
            wait(lambda: rows(server) == [3, 5, 6], engine)
            # sent by the dump and again by the replay, held once: one removal is enough
            engine.publish(removed(0))
            wait(lambda: rows(server) == [0, 0, 0], engine)
            assert server.stop() == 0, server.log_tail()


def test_a_peer_that_hangs_holds_the_port_for_a_while_only(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts, nobody answers
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        flags = ("--indexer-peers", url, "--recovery-hold-s", "0.2", "--recovery-silence-s", "60")
        with Server(tmp_path / "held.log", args=(*OURS_EXTRA, *flags)) as server:
            answer = server.request("GET", "/ready")
            ready: Any = answer.json
            assert answer.status == 503
            assert ready["waiting_for"] == ["schedulable_worker", "index_recovery"]
            assert server.stop() == 0, server.log_tail()


def installed(version: str) -> tuple[str, ...]:
    try:
        python = peer.installed(version)
    except peer.PeerMissing as error:
        pytest.skip(str(error))
    if python is None:
        pytest.skip(f"the reference service {version} is not installed here: make peer")
    return peer.command(python)


@pytest.mark.heavy
@pytest.mark.parametrize("version", peer.VERSIONS)
def test_ours_from_theirs(version: str, engine: FakeEngine, tmp_path: Path) -> None:
    command = installed(version)
    with Server(tmp_path / "theirs.log", command=command, args=()) as theirs:
        fill(theirs, engine)
        with recovering(tmp_path, theirs) as server:
            register(server, engine)
            assert rows(server) == [3, 5, 6]
            wait(engine.has_subscriber, engine)
            engine.publish(removed(2))
            for one in (server, theirs):
                wait(lambda: rows(one) == [2, 2, 2], engine)
            engine.publish(stored(2, 1, 1001))
            for one in (server, theirs):
                wait(lambda: rows(one) == [3, 5, 6], engine)


@pytest.mark.heavy
@pytest.mark.parametrize("version", peer.VERSIONS)
def test_theirs_from_ours(version: str, engine: FakeEngine, tmp_path: Path) -> None:
    command = installed(version)
    with Server(tmp_path / "source.log", args=(*OURS_EXTRA, *PATIENT)) as source:
        fill(source, engine)
        url = f"http://127.0.0.1:{source.port}"
        with Server(
            tmp_path / "theirs.log", command=command, args=("--indexer-peers", url)
        ) as theirs:
            register(theirs, engine)
            wait(lambda: rows(theirs) == [3, 5, 6])  # it answers before it has taken all in
            wait(engine.has_subscriber, engine)
            engine.publish(removed(2))
            for one in (source, theirs):
                wait(lambda: rows(one) == [2, 2, 2], engine)
