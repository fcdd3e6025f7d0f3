"""The least and the greatest numbers of 64 bits, through everything that carries them.

Hashes, worker ids and sequence numbers are what their sender makes of them: none may be taken for
another one, end a listener, or be lost where it is written down.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.e2e.stage import BLOCK_SIZE, Stage
from tests.indexer.edge.fake_engine import FakeEngine
from tests.indexer.encoding import message
from tests.live.ports import HOST, free_port
from tests.live.replicas import agree, ours
from tests.live.server import OURS_EXTRA, Server
from tests.wait import eventually

pytestmark = pytest.mark.e2e

LAST = (1 << 64) - 1
EXTREMES = [0, 1, (1 << 63) - 1, 1 << 63, LAST - 1, LAST]
PROMPT = list(range(len(EXTREMES) * BLOCK_SIZE))
FIRST_SEQ = LAST - 2  # the last one of all is no number but how a replay ends
HELD = [len(EXTREMES)] * 3


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.0, [*events], None])


def stored(first: int, count: int) -> list[object]:
    tokens = PROMPT[first * BLOCK_SIZE : (first + count) * BLOCK_SIZE]
    parent = EXTREMES[first - 1] if first else None
    return ["BlockStored", EXTREMES[first : first + count], parent, tokens, BLOCK_SIZE, None]


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = FakeEngine(context)
    made.sequence = FIRST_SEQ
    yield made
    made.close()
    context.term()


def served(engine: FakeEngine, question: Callable[[], object]) -> Callable[[], object]:
    """The same question, asked while the engine answers replays."""

    def ask() -> object:
        engine.serve()
        return question()

    return ask


def rows(server: Server) -> list[int]:
    return Stage(server).rows("default", {"token_ids": PROMPT}).get((LAST, 0), [0, 0, 0])


def blocks(server: Server) -> set[Any]:
    """What /dump says of every block: its two hashes, and what stands before it."""
    dump: Any = server.request("GET", "/dump").json
    found: set[Any] = set()
    for event in dump["default:default"]["events"]:
        data = event["event"]["data"]["stored"]
        names = (
            (data["parent_hash"], one["block_hash"], one["tokens_hash"]) for one in data["blocks"]
        )
        found |= {(event["worker_id"], *name) for name in names}
    return found


def test_events_dumps_replicas_and_state_carry_every_number(
    tmp_path: Path, engine: FakeEngine
) -> None:
    ports = [free_port(), free_port()]
    peers = [[f"tcp://{HOST}:{port}"] for port in reversed(ports)]
    kept = ("--state-dir", str(tmp_path / "state"), "--reservation-ttl-s", "0")
    sources = {0: engine.endpoint}, engine.replay_endpoint

    with contextlib.ExitStack() as stack:
        a = stack.enter_context(ours(tmp_path, "a", *kept, replica_port=ports[0], peers=peers[0]))
        b = stack.enter_context(ours(tmp_path, "b", replica_port=ports[1], peers=peers[1]))
        for one in (a, b):
            Stage(one).register(LAST, "default", *sources)
        for one in (a, b):
            eventually(lambda: one.metric("replica_peers", state="connected"), 1.0)
        for _ in range(2):
            eventually(served(engine, engine.has_subscriber), True)

        engine.publish(payload(stored(0, 3)))
        for one in (a, b):
            eventually(served(engine, lambda: rows(one)), [3] * 3)
        engine.pub.send_multipart(message(LAST, payload(["AllBlocksCleared"])))
        engine.publish(payload(stored(3, 3)))
        for one in (a, b):
            eventually(served(engine, lambda: rows(one)), HELD)

        body = {
            "sequence_hashes": EXTREMES,
            "isl_tokens": len(PROMPT),
            "effective_prefill_tokens": len(PROMPT),
            "worker_id": LAST,
            "reservation_id": "all",
        }
        a.ask("POST", "/reservations", body, ok=(201,))
        body |= {"sequence_hashes": EXTREMES[::-1], "reservation_id": "backwards"}
        b.ask("POST", "/reservations", body, ok=(201,))
        eventually(lambda: a.loads()["default", "default", LAST, 0][2], 2)
        loads = agree((a, b))["default", "default", LAST, 0]
        assert loads[0] == 2 * len(PROMPT)
        assert len(blocks(a)) == len(EXTREMES)
        assert blocks(a) == blocks(b)

        url = f"http://{HOST}:{a.port}"
        with Server(tmp_path / "c.log", args=(*OURS_EXTRA, "--indexer-peers", url)) as c:
            assert blocks(c) == blocks(a)
            Stage(c).register(LAST, "default", *sources)
            assert rows(c) == HELD

        assert a.process is not None
        a.process.kill()
        a.process.wait()
        with contextlib.suppress(zmq.Again):
            while engine.pub.recv(zmq.NOBLOCK):
                pass
        a.__enter__()
        eventually(lambda: agree((a, b)).get(("default", "default", LAST, 0)), loads)
        eventually(served(engine, engine.has_subscriber), True)
        engine.sequence = 0  # it begins anew: lower than everything it has said
        engine.buffer.clear()
        engine.publish(payload(stored(0, 1)))
        for one in (a, b):
            eventually(served(engine, lambda: rows(one)), [1] * 3)
        for name in ("all", "backwards"):
            a.ask("DELETE", f"/reservations/{name}")
        eventually(lambda: b.loads()["default", "default", LAST, 0], (0, 0, 0))


@pytest.mark.parametrize("number", [1 << 64, -1, -(1 << 63) - 1])
def test_what_is_no_such_number_is_refused_by_its_name(tmp_path: Path, number: int) -> None:
    with ours(tmp_path, "a") as a:
        a.add_worker(1)
        body = {"sequence_hashes": [1], "isl_tokens": 16, "worker_id": number}
        answer = a.request("POST", "/reservations", {**body, "reservation_id": "r"})
        assert answer.status in {400, 422}
        assert b"worker_id" in answer.raw
