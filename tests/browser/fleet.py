"""What the tests put into a service, over its API."""

from __future__ import annotations

from typing import Any

from tests.live.engine import FakeEngine
from tests.live.server import Server

BIG = 2**64 - 1
BLOCK_SIZE = 16


def call(server: Server, method: str, path: str, body: object = None) -> Any:
    """One exchange that must go well."""
    answer = server.request(method, path, body)
    assert answer.status < 400, answer.raw
    return answer.json


def register(server: Server, worker_id: int, **fields: Any) -> None:
    """Register a worker nobody publishes for, unless an endpoint is given."""
    worker = {
        "worker_id": worker_id,
        "endpoint": f"http://10.0.0.{worker_id % 250}:8000",
        "block_size": BLOCK_SIZE,
        "total_kv_blocks": 1000,
        "kv_events_endpoint": "tcp://127.0.0.1:9",
    }
    call(server, "POST", "/workers", worker | fields)


def book(server: Server, name: str, tokens: int = 64, **fields: Any) -> Any:
    """Book a prompt of its own."""
    first = sum(name.encode()) * 1000
    body = {"reservation_id": name, "token_ids": list(range(first, first + tokens))}
    return call(server, "POST", "/select_and_reserve", body | fields)


def publish(engine: FakeEngine, seq: int, tokens: list[int], first_hash: int, ts: float) -> None:
    """Let an engine say that it holds a prompt from its beginning."""
    blocks = len(tokens) // BLOCK_SIZE
    event = {
        "type": "BlockStored",
        "block_hashes": [first_hash + number for number in range(blocks)],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
    }
    engine.publish(seq, [ts, [event], None])
