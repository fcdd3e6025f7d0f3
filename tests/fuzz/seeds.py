"""Where the fuzzers begin: bytes recorded from engines and replicas, and what once went wrong.

`golden/fuzz/<target>/*.hex` are faults that were found; each is mended, and tried again for ever.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from select_service.edge.http.routes import ROUTES
from tests.fuzz.bodies import templates
from tests.models.recorded_fleet import RecordedFleet

GOLDEN: Final = Path(__file__).parents[1] / "golden"
_VECTORS_MAX_BYTES: Final = 4096


def _lines(name: str) -> Iterator[Any]:
    for line in (GOLDEN / "contract" / name).read_text("utf-8").splitlines():
        yield json.loads(line)


def _events() -> Iterator[bytes]:
    for path in sorted((GOLDEN / "events").glob("vectors_*.json")):
        for message in json.loads(path.read_text("utf-8"))["messages"]:
            yield bytes.fromhex(message["payload"])
    for case in json.loads((GOLDEN / "events" / "malformed.json").read_text("utf-8"))["cases"]:
        yield from (bytes.fromhex(frame) for frame in case["frames"])


def _replicas() -> Iterator[bytes]:
    for line in _lines("20_replica_sync_two_nodes.jsonl"):
        if "replica_event" in line:
            yield b"t" + bytes.fromhex(line["replica_event"]["frames_hex"][1])
    claim = {
        "type": "claim",
        "reservation_id": "r",
        "born": 1,
        "model_name": "m",
        "tenant_id": "t",
        "block_size": 16,
        "worker_id": 1,
        "dp_rank": 0,
        "hashes": bytes(16),
        "ttl_s": 5.0,
        "growth": {"prefill_done": True, "outputs": {1: 2}, "faded_at": 2, "fraction": 0.5},
        "adopts": [[1, 2]],
        "lease": {"lease_id": "l", "owner": "o", "ttl_s": 60.0},
    }
    name = {"reservation_id": "r", "owner": 1, "born": 2}
    items = [
        claim,
        {"type": "grown", **name, "growth": {}},
        {"type": "ended", **name, "heir": [1, 2], "freed": True},
        {"type": "renewed", "lease_id": "l", "ttl_s": 5.0, "age_s": 1.0},
    ]
    own = [
        {"type": "said", "router_id": 7, "epoch": 1, "seq": 2, "items": [*items, _CLOSED]},
        {"type": "heartbeat", "router_id": 7, "epoch": 1, "seq": 2, "live": 3, "digest": 4},
    ]
    parts = [
        {"type": "head", "router_id": 7, "epoch": 1, "seq": 2},
        *items,
        {"type": "hearsay", "owner": 5, "claim": claim},
        {"type": "end", "claims": 1},
    ]
    said = {"router_id": 7, "epoch": 1, "number": 1}
    yield b"c" + msgspec.msgpack.encode({"type": "cached_tokens", **said, "reports": [["r", 9]]})
    ranks = [["m", "t", "session", 1, 0], ["m", "t", "session", 1, 0, 3, False]]
    yield b"s" + msgspec.msgpack.encode({"type": "sessions", **said, "sessions": ranks})
    yield b"l" + msgspec.msgpack.encode({"type": "loads", **said, "ranks": [[1, 0, 0.5, 9.0]]})
    yield from (b"o" + msgspec.msgpack.encode(one) for one in own)
    yield from (b"p" + msgspec.msgpack.encode(one) for one in parts)


_CLOSED: Final = {"type": "closed", "lease_id": "l", "router_ids": [1, 2]}


def _dumps() -> Iterator[bytes]:
    for line in _lines("23_dump_and_recovery.jsonl"):
        if line.get("path") == "/dump":
            yield json.dumps(line["response"]).encode()
    yield b'{"m:t":{"block_size":16,"events":[{"worker_id":1,"event":{"data":"cleared"}}]}}'
    blocks = [{"block_hash": one, "tokens_hash": one} for one in (-1, 1 << 64, (1 << 70) + 5)]
    for tier in ("device", "host_pinned", "disk"):
        change = {"stored": {"parent_hash": -(1 << 65), "blocks": blocks}}
        event = {"worker_id": 1, "storage_tier": tier, "event": {"data": change}}
        yield json.dumps({"m:t": {"block_size": 16, "events": [event]}}).encode()


def _loads() -> Iterator[bytes]:
    rank = {"kv_used_blocks": 1.5, "kv_total_blocks": 9, "num_requests_waiting": 0, "dp_rank": 1}
    for report in (rank, {"ranks": [rank, {"num_requests_running": 3}]}):
        yield json.dumps(report).encode()
        yield msgspec.msgpack.encode(report)
    yield msgspec.msgpack.encode({"kv_used_blocks": float("inf")})


def _files() -> Iterator[bytes]:
    head = ["m", "t", 16, False, 1, 0, "tcp://w:1", None, None, False, []]
    for payloads in ((head, b"", [1, [1, 0, 0, 0]]), (head,)):
        out = b""
        for kind, payload in enumerate(payloads):
            content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
            out += bytes([kind, len(content)]) + content
        yield out
    yield b"ssindex1" + bytes(8)
    yield bytes.fromhex("377f0682002de218") + bytes(24) + bytes(24)


def _recordings() -> Iterator[bytes]:
    for seed in (0, 3, 4):
        fleet = RecordedFleet(seed, blocks=4, is_whole=True)
        fleet.play(60)
        head, *items = map(msgspec.msgpack.decode, fleet.recorded_file.items())
        seats: list[Any] = []
        kinds: dict[object, Any] = {}
        for one in items:
            if one[0] == "S":
                seats = [one] if one[-1] else [*seats, one]
            else:
                kinds[one[0], one[0] == "D" and (one[16] is None, *one[18:])] = [*seats, one]
        yield from (msgspec.msgpack.encode([head, *some]) for some in kinds.values())


def _bodies() -> Iterator[bytes]:
    takers = [route for route in ROUTES if route.takes is not None]
    for number, route in enumerate(takers):
        for template in templates(route):
            yield bytes([number]) + json.dumps(template).encode()
            yield bytes([number]) + msgspec.msgpack.encode(template)


_SOURCES: Final = {
    "events": _events,
    "replicas": _replicas,
    "dumps": _dumps,
    "loads": _loads,
    "files": _files,
    "recordings": _recordings,
    "bodies": _bodies,
}


_DEEP: Final = 1200  # more than msgspec follows
_BOMBS: Final = [
    *(b"[" * _DEEP + b"]" * _DEEP, b'{"":' * 900 + b"1" + b"}" * 900, b"\x91" * 3 * _DEEP),
    *(b"\x81\xa0" * _DEEP + b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"),
    b'{"m:t":{"block_size":16,"x":' + b"[" * _DEEP + b"]" * _DEEP + b',"events":[]}}',
    b'{"m:t":{"block_size":16,"events":[{"x":' + b"[" * _DEEP + b"]" * _DEEP + b"}]}}",
    b'{"\xff:t":{"block_size":16,"events":[]}}',
]

_LEADS: Final = {"replicas": (b"t", b"o", b"p", b"l", b"c", b"s"), "bodies": (b"\x03", b"\x06")}
"""First bytes of a target's input that say what the rest is."""


def seeds(target: str) -> list[bytes]:
    """What a target begins with, without repeats."""
    found = [data for data in _SOURCES[target]() if len(data) <= _VECTORS_MAX_BYTES]
    faults = sorted((GOLDEN / "fuzz" / target).glob("*.hex"))
    found += [bytes.fromhex(path.read_text("ascii")) for path in faults]
    bombs = [lead + bomb for bomb in _BOMBS for lead in _LEADS.get(target, (b"",))]
    return list(dict.fromkeys(found + bombs))
