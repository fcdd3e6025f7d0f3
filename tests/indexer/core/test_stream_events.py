"""What events mean, whatever the engine: groups, parents, embeddings, lag."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.core.hashing import block_hashes
from indexer.types import Namespace
from tests.indexer.core.streams import RANK, Bench, tokens
from tests.indexer.encoding import CLEARED, encode_batch, removed, stored


def outcome(event: dict[str, Any], **options: Any) -> str:
    bench = Bench(**options)
    bench.live(0, encode_batch([event]))
    ((_, _, found),) = bench.stream.tallies.events
    return found


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (stored([1], tokens(0)), "applied"),
        (stored([1], tokens(0), locality="REMOTE"), "remote"),
        (removed([1], locality="remote"), "remote"),
        (stored([1], tokens(0), medium="TAPE"), "unknown_medium"),
        (removed([1], medium="TAPE"), "unknown_medium"),
        (stored([1], tokens(0), kv_cache_spec_kind="mamba"), "applied"),
        (stored([], tokens(0), kv_cache_spec_kind="mamba"), "empty"),
        (
            stored(
                [1],
                tokens(0) * 3,
                kv_cache_spec_kind="sliding_window",
                kv_cache_spec_sliding_window=32,
            ),
            "applied",
        ),
        (stored([1], tokens(0), kv_cache_spec_kind="sliding_window"), "other_group"),
        (stored([1], tokens(0), kv_cache_spec_kind="chunked_local_attention"), "other_group"),
        (stored([1], tokens(0), kv_cache_spec_kind="mla_attention"), "applied"),
        (stored([1], tokens(0), kv_cache_spec_kind="sink_full_attention"), "applied"),
        (stored([1], tokens(0), group_idx=1), "other_group"),
        (removed([1], group_idx=1), "other_group"),
        (stored([], []), "empty"),
        (stored([1], []) | {"block_size": 0}, "placeholder"),
        (stored([1], tokens(0), lora_id=1), "nameless_adapter"),
        (stored([1], tokens(0) * 2) | {"block_size": 32}, "other_block_size"),
        (stored([1, 2], tokens(0)), "token_count"),
        (stored([1, 1], tokens(0) * 2), "duplicate_hash"),
        (stored([1], tokens(0), 1), "duplicate_hash"),
        (stored([1], [*tokens(0)[1:], 1 << 32]), "malformed"),
        ({"type": "Ignored"}, "no_op"),
        ({"type": "Else"}, "unknown_tag"),
        (CLEARED, "applied"),
    ],
)
def test_outcomes(event: dict[str, Any], expected: str) -> None:
    assert outcome(event) == expected


def test_groups_are_remembered_until_a_restart() -> None:
    bench = Bench()
    kinds = [stored([1], tokens(0), group_idx=1, kv_cache_spec_kind="full_attention")]
    kinds += [stored([2], tokens(1), group_idx=1), removed([1], group_idx=1)]
    kinds += [stored([9], tokens(3), group_idx=0, kv_cache_spec_kind="unknown"), removed([9])]
    bench.live(0, encode_batch(kinds))
    assert bench.blocks() == {1}
    events = bench.stream.tallies.events
    assert events["stored", "map", "applied"] == 2
    assert events["removed", "map", "applied"] == 1
    assert events["removed", "map", "other_group"] == 1
    bench.stream.on_reconnect(0.0)
    bench.live(0, encode_batch([stored([1], tokens(0), group_idx=1)], ts=2.0))
    bench.reply(0, encode_batch([stored([1], tokens(0), group_idx=1)], ts=2.0))
    assert bench.blocks() == set()


def test_only_so_many_groups_are_remembered() -> None:
    bench = Bench()
    events = [
        stored([1], tokens(0), group_idx=group, kv_cache_spec_kind="full_attention")
        for group in range(100)
    ]
    bench.live(0, encode_batch([*events, removed([1], group_idx=99), removed([1], group_idx=1)]))
    while bench.busy():
        bench.stream.resume(0.0)
    assert bench.stream.tallies.events["removed", "map", "other_group"] == 1


def test_a_child_inherits_what_it_does_not_say() -> None:
    bench = Bench()
    root = stored([1], tokens(0), lora_name="a", extra_keys=[["a", "s"]])
    child = stored([2], tokens(1), 1, lora_name="a", extra_keys=[["a"]])
    bench.live(0, encode_batch([root, child, stored([3], tokens(2), 2)]))
    bench.live(1, encode_batch([stored([4], tokens(0), cache_salt="t")]))
    flat = tokens(0) + tokens(1) + tokens(2)
    full = block_hashes(flat, 16, namespace=Namespace("a", "s"))
    assert bench.index.row(RANK, full)[0] == 3
    assert bench.index.row(RANK, block_hashes(flat, 16))[0] == 0
    assert bench.index.row(RANK, block_hashes(flat, 16, namespace=Namespace("", "t")))[0] == 1


def test_pages_of_pairs_hash_like_windows() -> None:
    bench = Bench(is_eagle=True)
    flat = list(range(33))
    pairs = [[flat[at], flat[at + 1]] for at in range(32)]
    bench.live(0, encode_batch([stored([1, 2], pairs)]))
    assert bench.index.row(RANK, block_hashes(flat, 16, is_eagle=True))[0] == 2


def test_embeddings_match_nothing_but_carry_on_the_chain() -> None:
    bench = Bench()
    event = stored([1, 2], tokens(0) + tokens(1), extra_keys=[None, [b"digest"]])
    bench.live(0, encode_batch([event, stored([3], tokens(2), 2)]))
    flat = tokens(0) + tokens(1) + tokens(2)
    assert bench.index.row(RANK, block_hashes(flat, 16))[0] == 1
    assert len(bench.index.chains[RANK][3]) == 3


def test_lag_is_told_where_it_is_plausible() -> None:
    bench = Bench()
    assert bench.stream.lag(1_000.0) is None
    bench.live(0, encode_batch([], ts=1_000.0))
    assert bench.stream.lag(1_002.5) == 2.5
    assert bench.stream.lag(999.0) == 0.0
    assert bench.stream.lag(1e9) is None
