"""Writes events the way engines do: positional or as maps, hashes as numbers or digests."""

from __future__ import annotations

from typing import Any

import msgspec

from indexer.core.events import EventBatch

ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}

FORMS = ("array-int", "map-int", "map-bytes", "mixed-signed")


def _hash(value: int | None, form: str) -> Any:
    if value is None:
        return None
    if form.endswith("bytes"):  # a digest ends in its 64-bit form
        return b"\xa5" * 24 + value.to_bytes(8, "big")
    if form.endswith("signed") and value >= 1 << 63:
        return value - (1 << 64)
    return value


def plain(value: Any) -> Any:
    """The golden files write bytes as {"b": hex}."""
    if isinstance(value, dict):
        if set(value) == {"b"}:
            return bytes.fromhex(value["b"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def encode_event(event: dict[str, Any], form: str, at: int = 0) -> Any:
    """One event as an object that msgpack will write; `at` is its place in the batch."""
    event = plain(event)
    if "block_hashes" in event:
        event["block_hashes"] = [_hash(value, form) for value in event["block_hashes"]]
    if "parent_block_hash" in event:
        event["parent_block_hash"] = _hash(event["parent_block_hash"], form)
    if form.startswith("map") or (form.startswith("mixed") and at % 2):
        return event
    if "locality" in event:  # came with the map form
        return event
    tag = event["type"]
    return [tag, *(event.get(field) for field in ARRAY_FIELDS[tag])]


def encode_batch(
    events: list[dict[str, Any]], form: str = "map-int", *, ts: float = 1.0, rank: int | None = None
) -> bytes:
    """The payload of one message."""
    encoded = [encode_event(event, form, at) for at, event in enumerate(events)]
    return msgspec.msgpack.encode([ts, encoded, rank])


def comparable(batch: EventBatch | None) -> Any:
    """A batch as plain values: token arrays and token lists are one."""
    if batch is None:
        return None
    events = [msgspec.structs.asdict(event) | {"is": type(event)} for event in batch.events]
    for event in events:
        if "token_ids" in event:
            event["token_ids"] = [*event["token_ids"]]
    return events, repr(batch.ts), batch.dp_rank, batch.form


def message(seq: int, payload: bytes) -> list[bytes]:
    """The frames of one live message."""
    return [b"kv-events", seq.to_bytes(8, "big"), payload]


def reply(seq: int, payload: bytes, frames: int = 4) -> list[bytes]:
    """The frames of one reply as a DEALER gets them."""
    topic = [b"kv-events"] if frames == 4 else []
    return [b"", *topic, seq.to_bytes(8, "big"), payload]


def end_marker(frames: int = 4) -> list[bytes]:
    """The frames that end a replay."""
    return [b"", *([b""] if frames == 4 else []), b"\xff" * 8, b""]


def stored(hashes: list[Any], tokens: list[Any], parent: Any = None, **more: Any) -> dict[str, Any]:
    """A store event of blocks of 16 tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 16,
        **more,
    }


def removed(hashes: list[Any], **more: Any) -> dict[str, Any]:
    """A removal event."""
    return {"type": "BlockRemoved", "block_hashes": hashes, **more}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}
