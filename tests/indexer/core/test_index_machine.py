"""The index against its naive twin, step by step, with `check()` after each step."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import indexer.core.radix_tree as tree_module
from indexer.core import holdings
from indexer.core.checkpoint import CheckpointRestore, CheckpointRun
from indexer.core.dump import TIER_OF, DumpEvent
from indexer.core.dump_reader import load_event
from indexer.core.index import KvIndex
from indexer.core.packing import pack_u64
from indexer.types import Tier, WorkerRank
from tests.effort import examples, share_of
from tests.models.index_twin import ROOT, Content, IndexTwin, RankTwin
from tests.sliced import answer_of

RANKS = [WorkerRank(1, 0), WorkerRank(1, 1), WorkerRank(2, 0)]
ranks = st.sampled_from(RANKS)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, *Tier])
groups = st.sampled_from([0, 0, 0, 1])
names = st.integers(1, 14)
locals_ = st.integers(1, 2)


_encode = msgspec.msgpack.Encoder().encode


def told(names: Sequence[int]) -> Sequence[int]:
    """These names, as objects or packed in memory: it makes no difference."""
    return array("Q", names) if sum(names) % 2 else names


class IndexMachine(RuleBasedStateMachine):
    edge_blocks_max = 512

    @initialize()
    def begin(self) -> None:
        self.before = vars(holdings)["EDGE_BYTES_MAX"]
        for module in (tree_module, holdings):
            vars(module)["EDGE_BYTES_MAX"] = self.edge_blocks_max * 8
        self.index = KvIndex(16)
        self.twin = IndexTwin()
        for rank in RANKS:
            self.index.attach(rank)
            self.twin.ranks[rank] = RankTwin()
        self.dump: Iterator[DumpEvent] | None = None
        self.seen: Counter[tuple[WorkerRank, Tier, int]] = Counter()
        self.stayed: set[tuple[WorkerRank, Tier, int, Content]] = set()
        self.ever: set[tuple[WorkerRank, Tier, int]] = set()
        self.moving: WorkerRank | None = None  # on its way to a file and back
        self.freezing: Iterator[CheckpointRun] | None = None
        self.frozen: list[CheckpointRun] = []
        self.thaw: CheckpointRestore | None = None

    def teardown(self) -> None:
        if hasattr(self, "before"):
            for module in (tree_module, holdings):
                vars(module)["EDGE_BYTES_MAX"] = self.before

    # ---- events

    def _store(
        self,
        rank: WorkerRank,
        tier: Tier,
        parent: int | None,
        run: list[tuple[int, int]],
        group: int,
    ) -> None:
        self._settle(rank)
        own = [name for name, _ in run]
        local = [block for _, block in run]
        expected = self.twin.ranks[rank].store(tier, parent, own, local, group)
        found = self.index.store(rank, tier, parent, told(own), pack_u64(local), group=group)
        assert found == expected

    @rule(
        rank=ranks,
        tier=tiers,
        parent=st.none() | names,
        run=st.lists(st.tuples(names, locals_), max_size=6),
        group=groups,
    )
    def store_anything(
        self,
        rank: WorkerRank,
        tier: Tier,
        parent: int | None,
        run: list[tuple[int, int]],
        group: int,
    ) -> None:
        self._store(rank, tier, parent, run, group)

    @rule(
        rank=ranks,
        tier=tiers,
        length=st.integers(1, 9),
        start=st.integers(0, 8),
        group=groups,
        base=st.sampled_from([100, 100, 300]),
    )
    def store_as_an_engine_would(
        self, rank: WorkerRank, tier: Tier, length: int, start: int, group: int, base: int
    ) -> None:
        """One long sequence: prefixes, suffixes, gaps, copies on tiers, under one of two names."""
        run = [(base + i, 1 + i % 2) for i in range(start, start + length)]
        self._store(rank, tier, base - 1 + start if start else None, run, group)

    @rule(
        rank=ranks,
        tier=tiers,
        at=st.integers(0, 5),
        length=st.integers(1, 4),
        base=st.sampled_from([100, 100, 300]),
    )
    def branch(self, rank: WorkerRank, tier: Tier, at: int, length: int, base: int) -> None:
        run = [(base + 100 + 10 * at + i, 2 - i % 2 + 1) for i in range(length)]
        self._store(rank, tier, base + at, run, 0)

    @rule(rank=ranks, data=st.data())
    def append(self, rank: WorkerRank, data: st.DataObject) -> None:
        known = sorted(self.twin.ranks[rank].content)
        if known:
            parent = data.draw(st.sampled_from(known))
            self._store(rank, data.draw(tiers), parent, [(parent + 1000, data.draw(locals_))], 0)

    @rule(rank=ranks, tier=tiers, group=groups, data=st.data())
    def remove(self, rank: WorkerRank, tier: Tier, group: int, data: st.DataObject) -> None:
        self._settle(rank)
        twin = self.twin.ranks[rank]
        pool = sorted(twin.names(tier)) or [0]
        chosen = data.draw(st.lists(st.sampled_from(pool) | names, max_size=6))
        expected = twin.remove(tier, chosen, group)
        assert self.index.remove(rank, tier, told(chosen), group=group) == expected

    @rule(rank=ranks, tier=tiers)
    def evict_tier_leaf_first(self, rank: WorkerRank, tier: Tier) -> None:
        self._settle(rank)
        twin = self.twin.ranks[rank]
        chosen = sorted(twin.names(tier), key=lambda name: -len(twin.content[name]))[:5]
        assert self.index.remove(rank, tier, told(chosen)) == twin.remove(tier, chosen, 0)

    @rule(
        rank=ranks,
        tier=tiers,
        group=groups,
        start=st.integers(0, 8),
        length=st.integers(1, 9),
        is_backwards=st.booleans(),
        base=st.sampled_from([100, 100, 300]),
    )
    def evict_neighbours(
        self,
        rank: WorkerRank,
        tier: Tier,
        group: int,
        start: int,
        length: int,
        is_backwards: bool,
        base: int,
    ) -> None:
        """Part of the long sequence, from its end or its beginning, with what is gone already."""
        chosen = [base + i for i in range(start, start + length)]
        if is_backwards:
            chosen.reverse()
        self._settle(rank)
        expected = self.twin.ranks[rank].remove(tier, chosen, group)
        assert self.index.remove(rank, tier, told(chosen), group=group) == expected

    @rule(rank=ranks, tier=tiers, chosen=st.lists(names | st.integers(100, 108), max_size=4))
    def mark(self, rank: WorkerRank, tier: Tier, chosen: list[int]) -> None:
        self._settle(rank)
        expected = self.twin.ranks[rank].mark(tier, chosen, 0)
        assert self.index.mark_on_tier(rank, tier, chosen) == expected

    @rule(rank=ranks)
    def clear(self, rank: WorkerRank) -> None:
        self._settle(rank)
        self.index.clear(rank)
        self.twin.ranks[rank] = RankTwin()

    @rule(rank=ranks)
    def come_and_go(self, rank: WorkerRank) -> None:
        self._settle(rank)
        self.index.detach(rank)
        assert self.index.slot_of(rank) is None
        self.index.attach(rank)
        self.twin.ranks[rank] = RankTwin()

    # ---- upkeep

    @rule(budget=st.integers(1, 5))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @rule()
    def sweep_all(self) -> None:
        while self.index.sweep(100):
            pass

    # ---- a rank goes to a file and comes back, while the others live on

    @precondition(lambda self: self.moving is None and self.dump is None)
    @rule(rank=ranks)
    def begin_to_freeze(self, rank: WorkerRank) -> None:
        self.moving, self.frozen = rank, []
        self.freezing = self.index.freeze(rank)

    @precondition(lambda self: self.moving is not None)
    @rule(steps=st.integers(1, 3))
    def move_on(self, steps: int) -> None:
        for _ in range(steps):
            self._move()

    def _move(self) -> None:
        if self.moving is None:
            return
        if self.freezing is not None:
            run = next(self.freezing, None)
            if run is not None:
                self.frozen.append(msgspec.msgpack.decode(_encode(run), type=CheckpointRun))
                return
            self.freezing = None
            home = self.index.holder(self.moving).home
            self.index.clear(self.moving)
            self.thaw = self.index.thaw(self.moving, home)
        assert self.thaw is not None
        if self.frozen:
            self.thaw.add(self.frozen.pop(0))
        if not self.frozen:
            assert self.index.is_filled_by(self.thaw)
            self.index.credit(self.moving)
            self.moving = self.thaw = None

    def _settle_all(self) -> None:
        while self.moving is not None:
            self._move()

    def _settle(self, rank: WorkerRank) -> None:
        """A rank that is moving hears no events."""
        while self.moving == rank:
            self._move()

    # ---- dumps

    @rule()
    def dump_and_load(self) -> None:
        copy = KvIndex(16)
        self._settle_all()
        for event in filter(None, self.index.dump()):
            load_event(copy, event)
        copy.check()
        for prompt in self.twin.prompts():
            assert self._rows(copy, prompt) == self.twin.rows(prompt)

    @precondition(lambda self: self.dump is None)
    @rule()
    def begin_dump(self) -> None:
        self._settle_all()
        self.dump = filter(None, self.index.dump())
        self.seen.clear()
        self.stayed = self.twin.dumpable()
        self.ever = set()

    @precondition(lambda self: self.dump is not None)
    @rule(events=st.integers(1, 4))
    def go_on_dumping(self, events: int) -> None:
        assert self.dump is not None
        for _ in range(events):
            event = next(self.dump, None)
            if event is None:
                self._end_of_dump()
                return
            self._note(event)

    @precondition(lambda self: self.dump is not None)
    @rule()
    def abandon_dump(self) -> None:
        self.dump = None

    def _note(self, event: DumpEvent) -> None:
        rank = WorkerRank(event.worker_id, event.event.dp_rank)
        change = event.event.data
        assert change != "cleared"
        assert change.stored
        for block in change.stored.blocks:
            self.seen[rank, TIER_OF[event.storage_tier], block.block_hash] += 1

    def _end_of_dump(self) -> None:
        self.dump = None
        for rank, tier, name, _ in self.stayed:
            assert self.seen[rank, tier, name] == 1, "a block that stayed is told once"
        assert set(self.seen) <= self.ever, "nothing is told that was never held"

    # ---- comparison

    @staticmethod
    def _rows(index: KvIndex, prompt: list[int]) -> dict[WorkerRank | None, tuple[int, int, int]]:
        matches = index.find_matches(pack_u64(prompt))
        rows = matches.rows()
        assert matches.empty == (not rows)
        return {index.rank_of(slot): row for slot, row in rows.items()}

    @invariant()
    def promises_hold(self) -> None:
        if hasattr(self, "index"):
            self.index.check()

    @invariant()
    def answers_agree(self) -> None:
        if not hasattr(self, "index"):
            return
        for prompt in [*self.twin.prompts(), [1, 2] * 6, [2] * 3]:
            for asked in (prompt, [*prompt, 1]):
                expected = self.twin.rows(asked)
                if self.thaw is not None:
                    expected.pop(self.thaw.holder.rank, None)  # unproven is unseen
                assert self._rows(self.index, asked) == expected
        for tier in Tier if self.thaw is None else ():
            held = sum(len(twin.on_tier(tier)) for twin in self.twin.ranks.values())
            assert self.index.stats.holdings[tier] == held

    @invariant()
    def who_holds_what_together_agrees(self) -> None:
        if not hasattr(self, "index") or self.thaw is not None:
            return
        holders: dict[Content, set[int]] = {}
        copies: Counter[int] = Counter()
        for rank, twin in self.twin.ranks.items():
            [holder] = self.index.holder_ids([rank])
            for content in (one for tier in Tier for one in twin.on_tier(tier)):
                if content[0] == ROOT[0]:  # who waits for a parent cannot be found
                    copies[holder] += holder in holders.setdefault(content, set())
                    holders[content].add(holder)
        together = Counter(sum(1 << one for one in those) for those in holders.values())
        for most in (1, 2, len(RANKS)):
            told = answer_of(self.index.held_together(most))
            expected = {who: n for who, n in together.items() if who.bit_count() <= most}
            assert told.blocks == expected
            assert told.copies == +copies

    @invariant()
    def dump_is_watched(self) -> None:
        if getattr(self, "dump", None) is not None:
            self.stayed &= self.twin.dumpable()
            for rank, twin in self.twin.ranks.items():
                self.ever |= {(rank, tier, name) for tier, _, name in twin.held}


class ShortEdgeMachine(IndexMachine):
    """The same with edges of at most three blocks: caps, chains and merges all the time."""

    edge_blocks_max = 3


TestIndex = IndexMachine.TestCase
TestShortEdges = ShortEdgeMachine.TestCase
TestIndex.settings = settings(max_examples=examples(20), stateful_step_count=40)
TestShortEdges.settings = settings(max_examples=examples(20), stateful_step_count=40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_longer_runs() -> None:
    for machine in (IndexMachine, ShortEdgeMachine):
        run_state_machine_as_test(
            machine, settings=settings(max_examples=share_of(500), stateful_step_count=60)
        )
