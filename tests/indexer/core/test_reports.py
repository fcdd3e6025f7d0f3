"""Engines that report in full: what a prompt finds cached is told again, and is no second block.

vLLM does for requests with `kv_cache_report_mode: "full"`. Such a report looks like a store that
begins with the prompt; what is computed twice comes with a parent, and is a second block.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from indexer.core.cache_groups import GroupRule
from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.core.packing import numbers_in
from indexer.core.stream import EventStream
from indexer.types import WorkerRank
from tests.effort import examples
from tests.indexer.core.reporting_engine import (
    Chain,
    ReportingEngine,
    name_of,
    tokens_of,
)
from tests.indexer.core.streams import stream_of
from tests.indexer.encoding import encode_batch, message, removed, stored
from tests.indexer.naive_index import NaiveIndex

RANK = WorkerRank(1, 0)
SIZE = 4
SPECS: tuple[dict[str, Any], ...] = (
    {"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
    {
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 2 * SIZE,
    },
)


class Harness:
    """An engine's stream into the index, and into the naive one."""

    def __init__(self, *, reports_in_full: bool = True) -> None:
        self.index, self.naive = KvIndex(SIZE), NaiveIndex(SIZE)
        self.streams = [
            stream_of(index, reports_in_full=reports_in_full) for index in (self.index, self.naive)
        ]
        self.seq = 0

    def tell(self, *events: dict[str, Any]) -> None:
        payload = encode_batch([{"block_size": SIZE} | event for event in events])
        for stream in self.streams:
            stream.on_live(message(self.seq, payload), 0.0)
            while stream.is_busy:
                stream.resume(0.0)
            stream.check()
        self.seq += 1
        self.index.check()

    def matched(self, prompt: list[int]) -> int:
        """Blocks that both say are matched."""
        hashes = block_hashes(prompt, SIZE)
        found = self.index.find_matches(hashes).rows().get(0, (0, 0, 0))[0]
        assert found == self.naive.row(RANK, hashes)[0]
        return found


def store(names: list[int], first: int = 0, parent: int | None = None, **more: Any) -> Any:
    """Blocks whose tokens are numbered on from the prompt's beginning."""
    tokens = [*range(first * SIZE, (first + len(names)) * SIZE)]
    return stored(names, tokens, parent, block_size=SIZE, **more)


def test_a_report_tells_what_was_not_known() -> None:
    harness = Harness()
    harness.tell(store([1, 2]))
    harness.tell(store([1, 2, 3, 4]))
    assert harness.matched(PROMPT) == 4
    harness.tell(removed([2]))
    assert harness.matched(PROMPT) == 1


def test_long_reports_are_no_second_blocks() -> None:
    harness, names = Harness(), [*range(1, 1301)]
    harness.tell(store(names))
    harness.tell(store(names))
    harness.tell(removed(names[700:]))
    assert harness.matched([*range(1300 * SIZE)]) == 700


@pytest.mark.parametrize("tier", ["GPU", "CPU"])
def test_another_tier_or_group_is_another_block(tier: str) -> None:
    harness = Harness()
    other: dict[str, Any] = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    harness.tell(store([1, 2], medium=tier, **SPECS[0]), store([1, 2], medium=tier, **other))
    harness.tell(store([1, 2], medium=tier, **SPECS[0]), store([1, 2], medium=tier, **other))
    harness.tell(store([1, 2], medium="CPU" if tier == "GPU" else "GPU", **SPECS[0]))
    harness.tell(removed([1, 2], medium="GPU", group_idx=0))
    assert harness.matched(PROMPT) == (2 if tier == "GPU" else 0), "group 2 has them still"
    harness.tell(removed([1, 2], medium="GPU", group_idx=2))
    assert harness.matched(PROMPT) == 0


PROMPT = [*range(10 * SIZE)]


def test_a_windows_report_tells_of_all_blocks_in_the_window() -> None:
    """Whether it is a report or was computed anew: the last blocks of the window are there."""
    harness = Harness()
    both = [store([1, 2, 3, 4, 5, 6], **spec) for spec in SPECS]
    harness.tell(*both)
    harness.tell(removed([5], group_idx=1))
    assert harness.matched(PROMPT) == 4
    harness.tell(*both)
    assert harness.matched(PROMPT) == 6
    harness.tell(removed([5], group_idx=1))
    assert harness.matched(PROMPT) == 4


def test_a_prompt_computed_anew_is_one_for_groups_of_smaller_blocks_too() -> None:
    """These tell of half a block more: their verdict is the other groups' all the same."""
    harness, names, fine = Harness(), [1, 2, 3, 4], [11, 1, 12, 2, 13, 3, 14, 4, 15]
    tokens, half = PROMPT[: len(fine) * SIZE // 2], SPECS[1] | {"block_size": SIZE // 2}
    for _ in range(2):
        harness.tell(stored(fine, tokens, None, **half), store(names, **SPECS[0]))
        assert harness.matched(PROMPT) == 4
        harness.tell(removed(fine, group_idx=1))
    harness.tell(stored(fine, tokens, None, **half), store(names, **SPECS[0]))
    harness.tell(removed(names, group_idx=0))
    assert harness.matched(PROMPT) == 4, "it was computed three times"


def test_keys_of_smaller_blocks_are_not_those_of_the_partitions() -> None:
    harness, keys = Harness(), [None, None, None, [7]]
    half = SPECS[1] | {"block_size": SIZE // 2, "extra_keys": keys}
    harness.tell(
        stored([11, 1, 12, 2], PROMPT[: 2 * SIZE], None, **half), store([1, 2], **SPECS[0])
    )
    assert harness.matched(PROMPT) == 2


def _stream(index: KvIndex) -> EventStream:
    return stream_of(index, reports_in_full=True)


LAYOUTS: tuple[list[GroupRule | None], ...] = (
    [None],
    [GroupRule(2), None],
    [None, GroupRule(1)],
    [GroupRule(3), None, GroupRule(2)],
    [GroupRule(1), GroupRule(3), None, GroupRule(1)],
)


class Engine(RuleBasedStateMachine):
    """An engine whose requests all ask for full reports, and an index behind it.

    What the index has must be what the engine holds, copies included, and so must be what it
    foretells of the next prompt.
    """

    @initialize(layout=st.sampled_from(LAYOUTS), pool=st.integers(8, 40))
    def begin(self, layout: list[GroupRule | None], pool: int) -> None:
        self.engine = ReportingEngine(layout, pool)
        self.index = KvIndex(SIZE)
        self.stream = _stream(self.index)
        self.index.groups.needs_whole_prompts = True
        self.seq = 0

    def tell(self) -> None:
        events = self.engine.tell()
        if events:
            self.stream.on_live(message(self.seq, encode_batch(events)), 0.0)
            while self.stream.is_busy:
                self.stream.resume(0.0)
            self.seq += 1

    @rule(
        chain=st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple),
        is_whole=st.booleans(),
        keeps_all=st.booleans(),
        chunk=st.integers(1, 7),
    )
    def request(self, chain: Chain, *, is_whole: bool, keeps_all: bool, chunk: int) -> None:
        foretold, found = (
            self.foretold(chain, is_whole=is_whole),
            self.engine.found(chain, is_whole=is_whole),
        )
        groups = {group for group, _ in self.engine.held()}
        # matches leave out groups without blocks: connectors need not tell of all
        assert foretold == found or len(groups) < len(self.engine.groups)
        if is_whole:
            self.index.groups.note_whole_prompt(block_hashes(tokens_of(chain), SIZE))
        chunk = min(chunk, len(chain))
        self.engine.request(chain, is_whole=is_whole, keeps_all=keeps_all, chunk=chunk)
        self.tell()
        self.index.groups.whole_prompts.clear()  # the next prompts that end so are others

    def foretold(self, chain: Chain, *, is_whole: bool) -> int:
        tokens = tokens_of(chain)
        matches = self.index.find_matches(block_hashes(tokens, SIZE), len(tokens) + (not is_whole))
        return min(matches.rows().get(0, (0, 0, 0))[0], len(chain) - is_whole)

    @precondition(lambda self: self.engine.running)
    @rule(pick=st.integers(0, 1 << 20))
    def finish(self, pick: int) -> None:
        self.engine.finish(pick % len(self.engine.running))

    @precondition(lambda self: self.engine.unused)
    @rule(pick=st.integers(0, 1 << 20))
    def evict(self, pick: int) -> None:
        self.engine.evict(self.engine.unused[pick % len(self.engine.unused)])
        self.tell()

    @invariant()
    def holds_what_the_engine_holds(self) -> None:
        self.index.check()
        told: Counter[tuple[int, int]] = Counter()
        holder = self.index.holder(RANK)
        main = self.engine.groups.index(None)
        copies = {} if holder.counts[0] is None else holder.counts[0].copies
        told.update({(main, name): 1 + copies.get(name, 0) for name in holder.where})
        for frozen in () if holder.limiting is None else holder.limiting.frozen():
            for group, name in itertools.product(frozen.groups, numbers_in(frozen.names)):
                told[group, name] = 1 + frozen.more.get(group, {}).get(name, 0)
        assert told == {(group, name_of(one)): n for (group, one), n in self.engine.held().items()}


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
