"""Models without full attention: their engines name the end of a prompt, and match by it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core.checkpoint import CheckpointRun
from indexer.core.dump import DumpEvent
from indexer.core.dump_reader import load_event
from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.types import StreamLimits, WorkerRank
from tests.effort import examples
from tests.indexer.core.indices import swept
from tests.indexer.core.streams import stream_of
from tests.indexer.core.test_cache_groups import SIZE, full, prompt_of, sliding
from tests.indexer.encoding import CLEARED, encode_batch, message, removed, stored
from tests.indexer.golden import golden

RANK = WorkerRank(1, 0)
WINDOW = sliding(0, 9)  # two blocks of four tokens


class Rank:
    """A stream of one rank into an index."""

    def __init__(self, index: KvIndex | None = None, first: int = 0) -> None:
        self.index = KvIndex(SIZE) if index is None else index
        self.stream = stream_of(self.index)
        self.seq = itertools.count(first)

    def tell(self, *events: dict[str, Any]) -> None:
        seq = next(self.seq)
        payload = encode_batch([*events], ts=float(seq))
        self.stream.on_live(message(seq, payload), 0.0)
        while self.stream.is_busy:
            self.stream.resume(0.0)
        self.index.check()

    def matched(self, prompt: list[int]) -> tuple[int, ...]:
        hashes = block_hashes(prompt, self.index.block_size)
        return self.index.find_matches(hashes).rows().get(0, (0, 0, 0))

    @property
    def blocks(self) -> int:
        return swept(self.index).stats.blocks


def told(names: list[int], tokens: list[int], parent: int | None = None, **more: Any) -> Any:
    """An event that spans more blocks than it names."""
    return stored(names, tokens, parent, **({"block_size": SIZE} | WINDOW | more))


def test_a_prompt_that_fills_its_last_block_is_kept_without_it() -> None:
    rank = Rank()
    rank.tell(told([101], prompt_of(2)))
    assert rank.matched(prompt_of(2)) == (1, 0, 0), "or there would be a name more"
    rank.tell(told([201, 202], prompt_of(6, first=100)))
    assert rank.matched(prompt_of(6, first=100)) == (6, 0, 0), "a guess"
    rank.tell(told([], prompt_of(1, first=120), 202))
    assert rank.matched(prompt_of(6, first=100)) == (5, 0, 0), "the sixth comes behind 202"


def test_a_name_that_stands_for_a_block_already_tells_where_others_are() -> None:
    rank = Rank()
    rank.tell(told([103, 104], prompt_of(4)))
    rank.tell(told([104, 105], prompt_of(6)))  # the prompt fills its last block: 104 is the fourth
    assert rank.matched(prompt_of(6)) == (5, 0, 0)
    assert rank.matched(prompt_of(4)) == (4, 0, 0)


def test_a_chunk_that_nobody_went_on_with_is_forgotten() -> None:
    rank = Rank()
    rank.tell(told([], prompt_of(4)))
    rank.tell(told([701], prompt_of(1, first=700)))
    rank.tell(told([205, 206], prompt_of(2, first=600), 204))
    assert rank.matched(prompt_of(4) + prompt_of(2, first=600)) == (0, 0, 0)
    assert rank.blocks == 1, "what comes behind an unknown block is left out"


def test_a_long_prefix_comes_and_goes_in_steps() -> None:
    rank = Rank()
    prompt = prompt_of(3000)
    rank.tell(told([1, 2], prompt))
    assert rank.matched(prompt) == (3000, 0, 0)
    rank.tell(removed([2, 1], group_idx=0))
    assert rank.blocks == 0


def test_lower_tiers_hold_what_their_groups_hold() -> None:
    rank = Rank()
    rank.tell(told([103, 104], prompt_of(4)))
    rank.tell(stored([103, 104], [], medium="CPU", **WINDOW) | {"block_size": 0})
    rank.tell(removed([104, 103], group_idx=0))
    assert rank.matched(prompt_of(4)) == (0, 4, 0)
    rank.tell(removed([104], group_idx=0, medium="CPU"))
    assert rank.matched(prompt_of(4)) == (0, 0, 0)
    rank.tell(removed([103], group_idx=0, medium="CPU"))
    assert rank.blocks == 0


def test_a_clear_and_another_engine_begin_anew() -> None:
    rank = Rank()
    rank.tell(told([107, 108], prompt_of(8)))
    rank.tell(CLEARED)
    assert rank.matched(prompt_of(8)) == (0, 0, 0)
    rank.tell(told([107, 108], prompt_of(8)))
    assert rank.matched(prompt_of(8)) == (8, 0, 0)
    rank.seq = itertools.count()  # restarted with full attention
    rank.tell(full([1, 2]))
    assert rank.matched(prompt_of(2)) == (2, 0, 0)


def test_what_cannot_be_placed_is_credited_nowhere() -> None:
    rank = Rank()
    rank.tell(told([1, 2], prompt_of(5), block_size=3, **WINDOW))
    rank.tell(told([3, 4], prompt_of(5), extra_keys=[[["ab" * 32, 0]], None]))
    rank.tell(told([5, 6], prompt_of(5)[:-1]))
    rank.tell(told([7, 8], [1 << 40] * 4 * SIZE))
    assert rank.blocks == 0
    small = Rank(KvIndex(SIZE, limits=StreamLimits(source_blocks_max=10)))
    small.tell(told([1, 2], prompt_of(11)))
    assert small.matched(prompt_of(11)) == (0, 0, 0)


def thawed(index: KvIndex) -> KvIndex:
    encoded = msgspec.msgpack.encode([*index.freeze(RANK)])
    other = KvIndex(SIZE)
    thaw = other.thaw(RANK, index.holder(RANK).home)
    for run in msgspec.msgpack.decode(encoded, type=list[CheckpointRun]):
        thaw.add(run)
    other.credit(RANK)
    return other


def loaded(index: KvIndex) -> KvIndex:
    other = KvIndex(SIZE)
    for event in filter(None, index.dump()):
        load_event(other, msgspec.json.decode(msgspec.json.encode(event), type=DumpEvent))
    return other


@pytest.mark.parametrize("copy", [thawed, loaded])
def test_prefixes_travel(copy: Any) -> None:
    before = Rank()
    before.tell(told([107, 108], prompt_of(8)), told([202, 203], prompt_of(3, first=700)))
    rank = Rank(copy(before.index), first=1)
    assert rank.index.groups.is_sparse(RANK)
    assert rank.index.groups.needs_whole_prompts
    assert rank.matched(prompt_of(8)) == (8, 0, 0)
    assert rank.matched(prompt_of(7)) == (0, 0, 0)
    rank.tell(told([109, 110], prompt_of(2, first=33), 108), removed([203], group_idx=0))
    assert rank.matched(prompt_of(10)) == (10, 0, 0)
    assert rank.matched(prompt_of(3, first=700)) == (0, 0, 0)
    rank.tell(removed([202, 107, 108, 109, 110], group_idx=0))
    assert rank.blocks == 0


RECORDED = [one for one in golden("groups/vllm_0.32.0.json")["models"] if "only" in one["name"]]


@pytest.mark.parametrize("model", RECORDED, ids=lambda model: model["name"])
def test_predictions_equal_what_the_engine_had_cached(model: Any) -> None:
    """As long as the service knows which prompts fill their last block: it has sent them."""
    size = model["block_size"]
    rank = Rank(KvIndex(size))
    for step in model["steps"]:
        if "events" in step:
            rank.tell(*step["events"])
            continue
        prompt = step["prompt"]
        whole = (len(prompt) - 1) // size * size  # an engine computes the last token itself
        assert rank.matched(prompt[:whole])[0] * size == step["cached_tokens"]
        if len(prompt) % size == 0:
            rank.index.groups.note_whole_prompt(block_hashes(prompt, size))


class Engine:
    """An engine with one sliding window, in a few lines: prefixes are what its blocks are."""

    def __init__(self, need: int) -> None:
        self.need = need
        self.held: dict[tuple[int, ...], int] = {}  # prefix → name
        self.names: dict[tuple[int, ...], int] = {}

    @staticmethod
    def prefixes(prompt: list[int]) -> list[tuple[int, ...]]:
        return [tuple(prompt[:end]) for end in range(SIZE, len(prompt) + 1, SIZE)]

    def cached(self, prompt: list[int]) -> int:
        blocks = self.prefixes(prompt[:-1])
        for n in range(len(blocks), 0, -1):
            if all(block in self.held for block in blocks[max(0, n - self.need) : n]):
                return n
        return 0

    def compute(self, prompt: list[int], hit: int) -> list[dict[str, Any]]:
        """Compute what is not cached; return the events."""
        blocks, end = self.prefixes(prompt), (len(prompt) - 1) // SIZE
        if len(blocks) == hit:
            return []
        kept = blocks[max(hit, end - self.need) : end]
        # second copies, of which the first go at once here
        again = [removed([self.held[one]], group_idx=0) for one in kept if one in self.held]
        for block in kept:
            self.held[block] = self.names.setdefault(block, len(self.names) + 1)
        parent = self.names[blocks[hit - 1]] if hit else None
        tokens = prompt[hit * SIZE : len(blocks) * SIZE]
        spec = sliding(0, (self.need - 1) * SIZE + 2)
        return [*again, told([self.held[one] for one in kept], tokens, parent, **spec)]


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32))
def test_matches_are_those_of_an_engine_with_one_window(seed: int) -> None:
    """Prompts, conversations and evictions in any order."""
    chance = random.Random(seed)
    rank, engine = Rank(), Engine(chance.randint(1, 4))
    asked: list[list[int]] = [[]]
    for _ in range(chance.randint(3, 25)):
        if engine.held and chance.random() < 0.3:
            gone = chance.sample(sorted(engine.held), chance.randint(1, len(engine.held)))
            rank.tell(removed([engine.held.pop(block) for block in gone], group_idx=0))
            continue
        old = chance.choice(asked)
        prompt = old[: chance.randint(0, len(old))]
        prompt = prompt + [chance.randrange(1, 100) for _ in range(chance.randint(1, 30))]
        asked.append(prompt)
        hit = engine.cached(prompt)
        assert rank.matched(prompt[:-1])[0] == hit
        events = engine.compute(prompt, hit)
        if events and len(prompt) % SIZE == 0:
            rank.index.groups.note_whole_prompt(block_hashes(prompt, SIZE))
        rank.tell(*events)
    rank.tell(removed(list(engine.held.values()), group_idx=0))
    assert rank.blocks == 0
