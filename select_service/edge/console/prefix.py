"""Which ranks hold which part of a prompt: the backend of the prefix browser.

Like POST /overlap_scores, but hashes are strings, and the answer lists only ranks that hold
something, the deepest first, up to a limit: a page cannot show more, nor should the loop compute
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from indexer.core.hashing import sequence_hashes
from indexer.core.packing import pack_tokens, pack_u64
from indexer.types import HASH_BYTES, U64_MASK
from select_service.edge.codec.json_codec import refusal_of
from select_service.errors import InvalidField
from select_service.types import U32, OverlapScoresRequest

if TYPE_CHECKING:
    from select_service.core.partition import Partition
    from select_service.core.pricing.cost import MatchedRows
    from select_service.edge.driver.driver import Driver

HOLDERS_MAX: Final = 128
"""Ranks in one answer."""

_TIERS: Final = ("device", "host", "disk")


class PrefixRequest(msgspec.Struct, kw_only=True):
    """A prompt as tokens, or as the block hashes of a decision."""

    model_name: str = "default"
    tenant_id: str = "default"
    token_ids: list[U32] | None = None
    block_hashes: list[str] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


_decode: Final = msgspec.json.Decoder(PrefixRequest).decode


def look_up(service: Driver, body: bytes) -> dict[str, Any]:
    """Return the holders of a prompt, with the block ranges each has on each tier.

    Raises:
        ServiceError: the body is malformed, or there is no such scope.
    """
    try:
        asked = _decode(body)
    except (ValueError, RecursionError) as error:
        raise refusal_of(error) from None
    partition, prompt, _ = service.core.reader.prompt(_question(asked, service))
    found = partition.found(prompt)
    held = None if found is None else found.by_slot(partition.index.capacity)
    slots = [] if held is None else _holders(partition, held)
    return {
        "model_name": asked.model_name,
        "tenant_id": asked.tenant_id,
        "block_size": partition.index.block_size,
        "blocks": prompt.blocks,
        "isl_tokens": prompt.isl_tokens,
        "holders_total": len(slots),
        "ranks_total": sum(len(worker.slots) for worker in partition.fleet_slots.present.values()),
        "holders": [_holder(partition, held, slot) for slot in slots[:HOLDERS_MAX] if held],
    }


def _question(asked: PrefixRequest, service: Driver) -> OverlapScoresRequest:
    question = OverlapScoresRequest(
        model_name=asked.model_name,
        tenant_id=asked.tenant_id,
        lora_name=asked.lora_name,
        cache_salt=asked.cache_salt,
    )
    if asked.token_ids is not None:
        question.token_ids = pack_tokens(asked.token_ids)
    elif asked.block_hashes:
        hashes = pack_u64([_read_hash(at, text) for at, text in enumerate(asked.block_hashes)])
        question.block_hashes, question.sequence_hashes = hashes, sequence_hashes(hashes)
        block_size = service.core.reader.usable(question).index.block_size
        question.isl_tokens = len(hashes) // HASH_BYTES * block_size
    return question


def _read_hash(at: int, text: str) -> int:
    path = f"block_hashes[{at}]"
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(U64_MASK))):
        raise InvalidField(f"{path}: not a whole number", field=path)
    value = int(text)
    if not -(1 << 63) <= value <= U64_MASK:
        raise InvalidField(f"{path}: does not fit 64 bits", field=path)
    return value


def _holders(partition: Partition, held: MatchedRows) -> list[int]:
    """Return the slots of workers that hold something, the deepest first."""
    depth = held.device + held.host + held.disk
    slots = [
        slot for worker in partition.fleet_slots.present.values() for slot in worker.slots.values()
    ]
    taken = np.array(slots, dtype=np.int64)
    taken = taken[depth[taken] > 0]
    found: list[int] = taken[np.argsort(-depth[taken], kind="stable")].tolist()
    return found


def _holder(partition: Partition, held: MatchedRows, slot: int) -> dict[str, Any]:
    worker, dp_rank = partition.fleet_slots.rank_at(slot)
    ranges, start = [], 0
    for tier, column in zip(_TIERS, held, strict=True):
        end = start + int(column[slot])
        if end > start:
            ranges.append([tier, start, end])
        start = end
    return {
        "worker_id": str(worker.worker_id),
        "dp_rank": dp_rank,
        "endpoint": worker.spec.endpoint,
        "ranges": ranges,  # [tier, first block, end)
    }
