"""Engines that report in full: what a prompt finds cached is told again, and is no second block.

vLLM does for requests with `kv_cache_report_mode: "full"`. Such a report looks like a store that
begins with the prompt; what is computed twice comes with a parent, and is a second block.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.core.stream import EventStream
from indexer.types import Scope, WorkerRank
from tests.effort import examples
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


class House:
    """An engine's stream into the index, and into the naive one."""

    def __init__(self, *, reports_in_full: bool = True) -> None:
        self.index, self.naive = KvIndex(SIZE), NaiveIndex(SIZE)
        self.streams = [
            EventStream(
                Scope("m", "t"),
                RANK,
                index,  # type: ignore[arg-type]
                worker_ranks=range(1),
                has_replay=False,
                reports_in_full=reports_in_full,
            )
            for index in (self.index, self.naive)
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


PROMPT = [*range(10 * SIZE)]


@pytest.mark.parametrize(("in_full", "left"), [(True, 0), (False, 4)])
def test_a_report_is_no_second_block(in_full: bool, left: int) -> None:
    house = House(reports_in_full=in_full)
    house.tell(store([1, 2, 3, 4]))
    house.tell(store([1, 2, 3, 4]))
    house.tell(removed([1, 2, 3, 4]))
    assert house.matched(PROMPT) == left


def test_a_report_tells_what_was_not_known() -> None:
    house = House()
    house.tell(store([1, 2]))
    house.tell(store([1, 2, 3, 4]))
    assert house.matched(PROMPT) == 4
    house.tell(removed([2]))
    assert house.matched(PROMPT) == 1


def test_a_block_computed_twice_is_held_twice() -> None:
    house = House()
    house.tell(store([1, 2, 3]))
    house.tell(store([1, 2]), store([3], 2, parent=2))  # a report, and what it had to compute again
    house.tell(removed([3]))
    assert house.matched(PROMPT) == 3
    house.tell(removed([3]))
    assert house.matched(PROMPT) == 2


def test_long_reports_are_no_second_blocks() -> None:
    house, names = House(), [*range(1, 1301)]
    house.tell(store(names))
    house.tell(store(names))
    house.tell(removed(names[700:]))
    assert house.matched([*range(1300 * SIZE)]) == 700


@pytest.mark.parametrize("tier", ["GPU", "CPU"])
def test_another_tier_or_group_is_another_block(tier: str) -> None:
    house = House()
    other: dict[str, Any] = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    house.tell(store([1, 2], medium=tier, **SPECS[0]), store([1, 2], medium=tier, **other))
    house.tell(store([1, 2], medium=tier, **SPECS[0]), store([1, 2], medium=tier, **other))
    house.tell(store([1, 2], medium="CPU" if tier == "GPU" else "GPU", **SPECS[0]))
    house.tell(removed([1, 2], medium="GPU", group_idx=0))
    assert house.matched(PROMPT) == (2 if tier == "GPU" else 0), "group 2 has them still"
    house.tell(removed([1, 2], medium="GPU", group_idx=2))
    assert house.matched(PROMPT) == 0


def test_a_windows_report_names_blocks_that_it_need_not_hold() -> None:
    """The engine names every block before the window, too, and holds only the last ones."""
    house = House()
    house.tell(store([9], 90, **SPECS[0]), store([9], 90, **SPECS[1]))  # of another prompt
    house.tell(store([1, 2, 3, 4, 5, 6], **SPECS[0]), store([1, 2, 3, 4, 5, 6], **SPECS[1]))
    house.tell(removed([1, 2, 3, 4], group_idx=1))
    assert house.matched(PROMPT[: 4 * SIZE]) == 0
    house.tell(store([1, 2, 3, 4, 5, 6], **SPECS[0]), store([1, 2, 3, 4, 5, 6], **SPECS[1]))
    assert house.matched(PROMPT[: 4 * SIZE]) == 0
    assert house.matched(PROMPT) == 6
    house.tell(removed([5, 6], group_idx=1))
    assert house.matched(PROMPT) == 0


def test_a_windows_report_tells_of_all_blocks_in_the_window() -> None:
    """Whether it is a report or was computed anew: the last blocks of the window are there."""
    house = House()
    both = [store([1, 2, 3, 4, 5, 6], **spec) for spec in SPECS]
    house.tell(*both)
    house.tell(removed([5], group_idx=1))
    assert house.matched(PROMPT) == 4
    house.tell(*both)
    assert house.matched(PROMPT) == 6
    house.tell(removed([5], group_idx=1))
    assert house.matched(PROMPT) == 4


def test_a_store_without_blocks_is_no_report() -> None:
    """An engine without full attention may tell of a chunk, none of whose blocks it keeps."""
    index = KvIndex(SIZE)
    stream = EventStream(
        Scope("m", "t"),
        RANK,
        index,
        worker_ranks=range(1),
        has_replay=False,
        reports_in_full=True,
    )
    windows = [SPECS[1] | {"group_idx": group} for group in range(2)]
    for number, names in enumerate(([1, 2, 3], [])):
        payload = encode_batch([store(names, **window) for window in windows])
        stream.on_live(message(number, payload), 0.0)
    assert not stream.is_busy
    index.check()
    assert index.find_matches(block_hashes(PROMPT, SIZE)).rows()[0][0] == 3


class Engine(RuleBasedStateMachine):
    """A vLLM whose requests all ask for full reports, as a bag of blocks, and an index behind it.

    What it holds of a name is a number of physical blocks; a name is held while there is one.
    """

    @initialize()
    def begin(self) -> None:
        self.house = House()
        self.blocks: Counter[int] = Counter()
        self.chains: dict[int, tuple[int, ...]] = {}

    def name(self, chain: tuple[int, ...]) -> int:
        name = hash(chain) & ((1 << 64) - 1)
        self.chains[name] = chain
        return name

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=6), end=st.booleans())
    def prompt(self, chain: list[int], *, end: bool) -> None:
        """Blocks of two kinds; a prompt that ends with a block computes that one in any case."""
        names = [self.name(tuple(chain[: at + 1])) for at in range(len(chain))]
        hit = 0
        while hit < len(names) - end and self.blocks[names[hit]]:
            hit += 1
        if not hit and self.blocks[names[0]]:
            return  # one block alone, computed again: nothing tells it from a report
        if not hit and any(self.blocks[name] for name in names):
            names = names[: next(at for at, name in enumerate(names) if self.blocks[name])]
        events = []
        if hit:
            events.append(self._event(names[:hit], chain, 0))
        if names[hit:]:
            events.append(self._event(names[hit:], chain, hit))
        self.blocks.update(names[hit:])
        self.house.tell(*events)

    def _event(self, names: list[int], chain: list[int], first: int) -> dict[str, Any]:
        tokens = [
            kind * SIZE + at for kind in chain[first : first + len(names)] for at in range(SIZE)
        ]
        parent = self.name(tuple(chain[:first])) if first else None
        return stored(names, tokens, parent, block_size=SIZE)

    @precondition(lambda self: +self.blocks)
    @rule(pick=st.integers(0, 1 << 20))
    def evict(self, pick: int) -> None:
        held = sorted(+self.blocks)
        name = held[pick % len(held)]
        self.blocks[name] -= 1
        self.house.tell(removed([name]))

    @invariant()
    def holds_what_the_engine_holds(self) -> None:
        holder = self.house.index.holder(RANK)
        assert sorted(holder.where) == sorted(+self.blocks)
        more = {} if holder.counts[0] is None else holder.counts[0].copies
        assert more == {name: n - 1 for name, n in self.blocks.items() if n > 1}


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
