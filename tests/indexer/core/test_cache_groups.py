"""Ranks whose engine has more cache groups than full attention: what they match, and why."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core.cache_groups import GroupRule, LimitingGroups, rule_of
from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.types import StreamLimits, WorkerRank
from tests.effort import examples
from tests.indexer.core.indices import CPU, GPU, pack, rows, swept
from tests.indexer.core.streams import stream_of
from tests.indexer.encoding import CLEARED, encode_batch, message, removed, stored
from tests.indexer.golden import golden
from tests.indexer.naive_index import NaiveIndex

RANK, OTHER = WorkerRank(1, 0), WorkerRank(2, 0)
SIZE = 4  # tokens of a block
FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def sliding(group: int, window: int) -> dict[str, Any]:
    return {
        "group_idx": group,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": window,
    }


def mamba(group: int) -> dict[str, Any]:
    return {"group_idx": group, "kv_cache_spec_kind": "mamba"}


def prompt_of(blocks: int, first: int = 1) -> list[int]:
    return list(range(first, first + blocks * SIZE))


class Harness:
    """A stream into the real index, and one into the naive."""

    def __init__(self, *, knows_groups: bool = True) -> None:
        self.index, self.naive = KvIndex(SIZE), NaiveIndex(SIZE)
        self.streams = [stream_of(index) for index in (self.index, self.naive)]
        self.seq = itertools.count()
        if knows_groups:  # one batch tells of full attention, and of a group beside it
            self.tell(full([1 << 40], first=1 << 20), side([], mamba(60)))

    def tell(self, *events: dict[str, Any]) -> None:
        seq = next(self.seq)
        payload = encode_batch([{"block_size": SIZE} | event for event in events], ts=float(seq))
        for stream in self.streams:
            stream.on_live(message(seq, payload), 0.0)
            while stream.is_busy:
                stream.resume(0.0)
            stream.check()
        self.index.check()

    def row(self, prompt: list[int]) -> tuple[int, int, int]:
        hashes = block_hashes(prompt, SIZE)
        device, host, disk = self.index.find_matches(hashes).rows().get(0, (0, 0, 0))
        found = device, device + host, device + host + disk
        assert found == self.naive.row(RANK, hashes), "as the naive index says"
        return found

    def matched(self, prompt: list[int]) -> int:
        return self.row(prompt)[0]


def full(names: list[int], parent: int | None = None, first: int = 1, **more: Any) -> Any:
    event = stored(names, prompt_of(len(names), first), parent, **FULL)
    return event | {"block_size": SIZE} | more


def side(names: list[int], spec: dict[str, Any], **more: Any) -> Any:
    """Some blocks of another group: its tokens say nothing about which."""
    return stored(names, prompt_of(len(names) + 3), **spec) | {"block_size": SIZE} | more


def test_rules_follow_kind_window_and_block_size() -> None:
    assert rule_of("mamba", None, 64, 16) == GroupRule(1)
    assert rule_of("sliding_window", 128, 16, 16) == GroupRule(8)
    assert rule_of("sliding_window_mla", 130, 16, 16) == GroupRule(9)
    assert rule_of("sliding_window", 1, 16, 16) == GroupRule(1)
    assert rule_of("sliding_window", 128, 32, 16) == GroupRule(4, 2)
    assert rule_of("sliding_window", 128, 8, 16) == GroupRule(8)
    for unknown in (
        ("full_attention", None, 16, 16),
        ("chunked_local_attention", 128, 16, 16),
        ("sliding_window", None, 16, 16),
        ("sliding_window", 0, 16, 16),
        ("sliding_window", 1 << 40, 16, 16),
        ("sliding_window", 128, 24, 16),
        ("sliding_window", 128, 0, 16),
    ):
        assert rule_of(*unknown) is None


def test_a_group_may_turn_out_to_be_another() -> None:
    harness = Harness()
    harness.tell(full([101, 102, 103]), side([101], sliding(1, 5)))
    assert harness.matched(prompt_of(3)) == 1
    harness.tell(side([102, 103], sliding(1, 9)))
    assert harness.matched(prompt_of(3)) == 3
    harness.tell(side([102], {"group_idx": 1, "kv_cache_spec_kind": "unknown"}))
    assert harness.matched(prompt_of(3)) == 3
    harness.tell(removed([103], group_idx=1))
    assert harness.matched(prompt_of(3)) == 3


def test_a_long_batch_may_tell_of_both() -> None:
    harness = Harness(knows_groups=False)
    harness.tell(full([101]))
    harness.tell(full([102], 101, first=5))  # from here on the compiled path takes plain stores
    many = [full([200 + at], first=1000 + 4 * at) for at in range(40)]
    harness.tell(full([103], 102, first=9), *many, side([102], mamba(1)))
    assert harness.matched(prompt_of(3)) == 2
    orphan = full([300], 299, first=5000)
    harness.tell(orphan)
    harness.tell(full([104], 103, first=13), orphan, side([104], mamba(1)))
    assert harness.matched(prompt_of(4)) == 4


def test_other_ranks_are_not_limited() -> None:
    index = KvIndex(SIZE)
    for rank in (RANK, OTHER):
        index.attach(rank)
        index.store(rank, GPU, None, [11, 12, 13], pack(1, 2, 3))
        index.store(rank, CPU, 13, [14], pack(4))
    index.groups.store(RANK, GPU, 1, [12], rule=GroupRule(1))
    assert rows(index, 1, 2, 3) == {RANK: (3, 0, 0), OTHER: (3, 0, 0)}, "not yet"
    index.groups.limit(RANK)
    assert rows(index, 1, 2, 3, 4) == {RANK: (2, 0, 0), OTHER: (3, 1, 0)}
    index.detach(RANK)
    assert rows(swept(index), 1, 2, 3, 4) == {OTHER: (3, 1, 0)}


def test_a_block_with_two_names_is_held_under_either() -> None:
    index = KvIndex(SIZE)
    index.attach(RANK)
    index.store(RANK, GPU, None, [11, 12], pack(1, 2))
    index.store(RANK, GPU, 11, [22], pack(2))
    index.groups.store(RANK, GPU, 1, [22], rule=GroupRule(1))
    index.groups.limit(RANK)
    assert rows(index, 1, 2) == {RANK: (2, 0, 0)}


def test_blocks_of_all_groups_fill_the_budget() -> None:
    index = KvIndex(SIZE, limits=StreamLimits(source_blocks_max=10))
    index.attach(RANK)
    index.store(RANK, GPU, None, [1, 2, 3], pack(1, 2, 3))
    before = index.stats.bytes
    index.groups.store(RANK, GPU, 1, [*range(100, 105)], rule=GroupRule(1))
    assert index.room(RANK) == 2
    assert index.stats.bytes > before
    harness = Harness(knows_groups=False)
    harness.index = KvIndex(SIZE, limits=StreamLimits(source_blocks_max=10))
    stream = stream_of(harness.index)
    payload = encode_batch([full([1, 2]), side([*range(100, 109)], mamba(1))])
    stream.on_live(message(0, payload), 0.0)
    assert stream.tallies.events["stored", "map", "no_room"] == 1
    assert harness.index.room(RANK) == 8


def test_there_are_not_too_many_groups() -> None:
    groups = LimitingGroups()
    rule = GroupRule(1)
    assert [groups.store(0, group, [1], rule) for group in range(66)] == [1] * 64 + [0] * 2
    groups.check()


RECORDED = [one for one in golden("groups/vllm_0.32.0.json")["models"] if "only" not in one["name"]]


@pytest.mark.parametrize("model", RECORDED, ids=lambda model: model["name"])
def test_predictions_equal_what_the_engine_had_cached(model: Any) -> None:
    size = model["block_size"]
    index = KvIndex(size)
    stream = stream_of(index)
    seq = itertools.count()
    for step in model["steps"]:
        if "events" in step:
            number = next(seq)
            stream.on_live(message(number, encode_batch(step["events"], ts=float(number))), 0.0)
            index.check()
            continue
        prompt = step["prompt"]
        whole = (len(prompt) - 1) // size * size  # an engine computes the last token itself
        found = index.find_matches(block_hashes(prompt[:whole], size)).rows()
        assert found.get(0, (0, 0, 0))[0] * size == step["cached_tokens"]
    assert not stream.is_busy


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 2**32), st.lists(st.booleans(), min_size=2, max_size=2))
def test_matches_are_those_of_the_naive_index(seed: int, lower: list[bool]) -> None:
    """Stores, evictions and clears of every group, in any order, against sets and loops."""
    chance = random.Random(seed)
    specs = [sliding(1, chance.randint(1, 14)), sliding(2, chance.randint(1, 14)), mamba(3)]
    specs = chance.sample(specs, chance.randint(1, 3))
    widths = {id(spec): chance.choice([SIZE, SIZE, 2 * SIZE]) for spec in specs}
    harness = Harness()
    prompts = [prompt_of(10), prompt_of(4) + prompt_of(6, 500), prompt_of(7, 900)]
    named: dict[tuple[int, ...], int] = {}

    def names_of(prompt: list[int]) -> list[int]:
        ends = range(SIZE, len(prompt) + 1, SIZE)
        return [named.setdefault(tuple(prompt[:end]), len(named) + 1) for end in ends]

    for _ in range(chance.randint(3, 25)):
        prompt = chance.choice(prompts)
        names = names_of(prompt)
        tier = {"medium": "CPU"} if any(lower) and chance.random() < 0.3 else {}
        spec = chance.choice(specs)
        some = [name for name in names if chance.random() < 0.7]
        at = chance.randrange(len(names))
        match chance.choice(["full", "full", "side", "side", "side", "gone", "left", "clear"]):
            case "full":
                start = chance.choice([0, 0, at])
                parent = names[start - 1] if start else None
                if parent not in harness.naive.chains[RANK]:
                    start, parent = 0, None  # the naive index knows no orphans
                event = stored(names[start:], prompt[start * SIZE :], parent, **FULL)
                harness.tell(event | {"block_size": SIZE} | tier)
            case "side":
                harness.tell(side(some, spec, block_size=widths[id(spec)], **tier))
            case "gone":
                harness.tell(removed([names[at]], group_idx=0, **tier))
            case "left":
                few = chance.sample(names, 2)
                harness.tell(removed(few, group_idx=spec["group_idx"], **tier))
            case "clear" if chance.random() < 0.2:
                harness.tell(CLEARED)
        for one in prompts:
            harness.row(one[: chance.randint(1, len(one) // SIZE) * SIZE])


@pytest.mark.parametrize("groups", [1, 3])
def test_a_plain_rank_has_nothing_of_this(groups: int) -> None:
    harness = Harness(knows_groups=False)
    harness.tell(*(full([101, 102], group_idx=group) for group in range(groups)))
    assert all(holder.limiting is None for holder in harness.index._ranks.values())
    assert not harness.index.groups.limited
