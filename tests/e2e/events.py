"""Meaning of events, as the golden files write it, put on the wire in either encoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Positions of the array form; names of the map form. What is absent travels as nil or not at all.
POSITIONS = {
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


def plain(value: object) -> Any:
    """`{"b": hex}` stands for bytes."""
    if isinstance(value, Mapping):
        if set(value) == {"b"}:
            return bytes.fromhex(value["b"])
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def as_map(event: Mapping[str, Any]) -> dict[str, Any]:
    """The map form."""
    fields: dict[str, Any] = plain(event)
    return fields


def as_array(event: Mapping[str, Any]) -> list[Any]:
    """The positional form."""
    return [event["type"], *(plain(event.get(name)) for name in POSITIONS[event["type"]])]


ENCODINGS = {"map": as_map, "array": as_array}
