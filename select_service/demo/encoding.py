"""Encodes pool events as vLLM does (map form, 0.24 and later; field order of 0.33).

The batch is an array `[ts, events, data_parallel_rank]`; an event is a map whose first key is
`type`; optional fields at their default are left out, as the engine's own encoder does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Consecutive blocks became reusable; `parent` is the hash before the first, None at a root."""

    hashes: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RemovedBlocks:
    """These blocks left the cache."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache was dropped."""


PoolEvent = StoredBlocks | RemovedBlocks | Cleared


def encode_batch(
    ts: float, events: Sequence[PoolEvent], *, block_size: int, dp_rank: int = 0
) -> bytes:
    """One MessagePack payload for the events of one engine step."""
    return _ENCODER.encode([ts, [_event(event, block_size) for event in events], dp_rank])


def _event(event: PoolEvent, block_size: int) -> dict[str, object]:
    if isinstance(event, StoredBlocks):
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": event.token_ids,
            "block_size": block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    if isinstance(event, RemovedBlocks):
        return {
            "type": "BlockRemoved",
            "block_hashes": event.hashes,
            "medium": "GPU",
            "group_idx": 0,
        }
    return {"type": "AllBlocksCleared"}
