"""kill -9 and back with --state-dir: the index is warm without a word of old events."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.e2e.test_recovery import register, removed, rows, stored, wait
from tests.indexer.edge.fake_engine import FakeEngine
from tests.live.server import OURS_EXTRA, PATIENT, Server
from tests.wait import block_until

pytestmark = pytest.mark.e2e

LOST_FROM_HOST = msgspec.msgpack.encode([1.0, [["BlockRemoved", [1004], "CPU"]], None])
OFTEN = ("--index-snapshot-interval-s", "0.1")


MakeEngine = Callable[..., FakeEngine]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[FakeEngine] = []

    def make(ports: tuple[int, int] = (0, 0)) -> FakeEngine:
        made.append(FakeEngine(context, ports))
        made[-1].pub.setsockopt(zmq.XPUB_VERBOSE, 1)  # or a second subscriber would not be seen
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    context.term()


@pytest.fixture
def engine(make_engine: MakeEngine) -> FakeEngine:
    return make_engine()


def life(folder: Path, *flags: str) -> Server:
    state = ("--state-dir", str(folder / "state"))
    return Server(folder / "service.log", args=(*OURS_EXTRA, *PATIENT, *state, *OFTEN, *flags))


def value(server: Server, series: str) -> float:
    text = server.request("GET", "/metrics").raw.decode()
    found = [line for line in text.splitlines() if line.startswith(f"select_service_{series} ")]
    return float(found[0].split()[-1]) if found else 0.0


def kill(server: Server) -> None:
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()


def first_life(folder: Path, engine: FakeEngine) -> None:
    """Blocks on every tier, in a snapshot; then one more event, and kill -9."""
    with life(folder) as server:
        register(server, engine)
        wait(engine.has_subscriber, engine)
        engine.publish(stored(0, 3, None))
        engine.publish(stored(3, 2, 1002, "CPU"))
        engine.publish(stored(5, 1, 1004, "EXTERNAL"))
        wait(lambda: rows(server) == [3, 5, 6], engine)
        wait(lambda: value(server, "index_snapshot_blocks") == 6, engine)
        engine.publish(LOST_FROM_HOST)
        kill(server)


def test_warm_after_kill_9(engine: FakeEngine, tmp_path: Path) -> None:
    first_life(tmp_path, engine)
    engine.publish(stored(4, 1, 1003, "CPU"))
    engine.buffer.popleft()  # long ago: only the snapshot shows it
    before = len(engine.requests)
    with life(tmp_path) as server:
        ready: Any = server.request("GET", "/ready").json
        assert ready["waiting_for"] == ["index_snapshot"]
        assert rows(server) == [0, 0, 0]
        dump: Any = server.request("GET", "/dump").json
        assert dump["default:default"]["events"] == []
        wait(lambda: rows(server) == [3, 5, 6], engine)
        assert min(engine.requests[before:]) >= 2, "from the last batch of the snapshot on"
        assert server.request("GET", "/ready").status == 200
        credited = 'index_snapshot_recalled_ranks_total{outcome="credited"}'
        assert value(server, credited) == 1
        wait(engine.has_subscriber, engine)
        engine.publish(removed(0))
        wait(lambda: rows(server) == [0, 0, 0], engine)
        assert server.stop() == 0, server.log_tail()


def test_another_engine_after_kill_9(
    make_engine: MakeEngine, engine: FakeEngine, tmp_path: Path
) -> None:
    first_life(tmp_path, engine)
    ports = engine.ports
    engine.close()
    heirs: list[FakeEngine] = []

    def is_bound() -> bool:
        with contextlib.suppress(zmq.ZMQError):  # libzmq has not let go of them yet
            heirs.append(make_engine(ports))
        return bool(heirs)

    block_until(is_bound)
    (other,) = heirs
    for _ in range(4):
        other.publish(stored(0, 1, None))
    with life(tmp_path) as server:
        wait(lambda: rows(server) == [1, 1, 1], other)
        restarted = 'index_snapshot_recalled_ranks_total{outcome="restarted"}'
        assert value(server, restarted) == 1


def test_a_peers_dump_of_this_minute_wins(engine: FakeEngine, tmp_path: Path) -> None:
    first_life(tmp_path, engine)
    with Server(tmp_path / "peer.log", args=(*OURS_EXTRA, *PATIENT)) as peer:
        register(peer, engine)
        wait(engine.has_subscriber, engine)
        engine.publish(stored(0, 1, None))  # the gap before it makes the peer ask
        wait(lambda: rows(peer) == [3, 4, 4], engine)
        with life(tmp_path, "--indexer-peers", f"http://127.0.0.1:{peer.port}") as server:
            assert rows(server) == [3, 4, 4], "known before any engine is asked"
            recovered = 'index_snapshot_recalled_ranks_total{outcome="recovered"}'
            wait(lambda: value(server, recovered) == 1, engine)
            wait(engine.has_subscriber, engine)
            engine.publish(removed(2))
            wait(lambda: rows(server) == [2, 2, 2], engine)
