"""The encoding, byte for byte as vLLM 0.33 encodes the same events (golden vectors)."""

from __future__ import annotations

import msgspec
import pytest

from select_service.demo.encoding import Cleared, RemovedBlocks, StoredBlocks, encode_batch

# payload of seq 2 in vectors_vllm_0.33.0.json: one block removed on the device
GOLDEN_REMOVED = bytes.fromhex(
    "93cb408f5000000000009184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573"
    "91cf7ccff90d5f991d07a66d656469756da3475055a967726f75705f6964780000"
)


def test_removed_is_vllms_own_bytes() -> None:
    payload = encode_batch(1002.0, [RemovedBlocks((8993680816715930887,))], block_size=16)
    assert payload == GOLDEN_REMOVED


@pytest.mark.parametrize("parent", [None, 7])
def test_stored_has_the_fields_of_the_engine_in_its_order(parent: int | None) -> None:
    payload = encode_batch(1.5, [StoredBlocks((2**64 - 1, 0), parent, (1, 2, 3, 4))], block_size=2)
    ts, (event,), rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (1.5, 0)
    assert list(event.items()) == [
        ("type", "BlockStored"),
        ("block_hashes", [2**64 - 1, 0]),
        ("parent_block_hash", parent),
        ("token_ids", [1, 2, 3, 4]),
        ("block_size", 2),
        ("lora_id", None),
        ("medium", "GPU"),
        ("lora_name", None),
        ("group_idx", 0),
        ("kv_cache_spec_kind", "full_attention"),
    ]


def test_cleared_and_rank() -> None:
    payload = encode_batch(0.0, [Cleared()], block_size=16, dp_rank=3)
    assert msgspec.msgpack.decode(payload) == [0.0, [{"type": "AllBlocksCleared"}], 3]
