"""The estimate of caches against lists of prompts, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from select_service.core.ledger.cache_estimate import LOOKED_AT_MAX, PASSED_MAX, CacheEstimate
from select_service.core.tenancy.shares import Shares
from select_service.types import CoreLimits
from tests.indexer.core.indices import pack

SLOTS = 2
CAPACITY = 6
TTL_S = 10.0
LIMITS = CoreLimits(kv_estimate_rank_blocks=CAPACITY, kv_estimate_ttl_s=TTL_S)
CHAINS = st.lists(st.integers(0, 3), min_size=1, max_size=8).map(tuple)
Chain = tuple[int, ...]


def common(one: Chain, other: Chain) -> int:
    """How many blocks two prompts have in common at their beginnings."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


class NaiveRank:
    """Prompts, least recent first; none is the beginning of an older one."""

    def __init__(self) -> None:
        self.prompts: list[tuple[Chain, float]] = []

    def count(self) -> int:
        return len({value for chain, _ in self.prompts for value in chain})

    def matched(self, chain: Chain) -> int:
        return max((common(chain, one) for one, _ in self.prompts), default=0)

    def computed(self, chain: Chain, now: float) -> None:
        chain = chain[:CAPACITY]
        self.prompts = [one for one in self.prompts if one[0] != chain[: len(one[0])]]
        self.prompts.append((chain, now))
        while (excess := self.count() - CAPACITY) > 0:
            chain, at = self.prompts.pop(0)
            alone = len(chain) - self.matched(chain)
            if excess < alone:
                self.prompts.insert(0, (chain[:-excess], at))

    def correct(self, chain: Chain, found: int, since: float, now: float) -> None:
        if len(chain) > found:
            gone = [
                one
                for one in self.prompts
                if one[0][: found + 1] == chain[: found + 1] and one[1] <= since
            ]
            self.prompts = [one for one in self.prompts if one not in gone]
        if self.matched(chain) < found:
            self.computed(chain[:found], now)


class AgainstTheTwin(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.bound = Shares().bound("kv_estimate_blocks_max", lambda: 1 << 30)
        self.estimate = CacheEstimate(LIMITS, bound=self.bound)
        self.ranks: dict[int, NaiveRank] = {}

    @rule(slot=st.integers(0, SLOTS - 1))
    def follow(self, slot: int) -> None:
        self.estimate.follow(slot, None, in_force=True)
        self.ranks.setdefault(slot, NaiveRank())

    @rule(slot=st.integers(0, SLOTS - 1), chain=CHAINS)
    def computed(self, slot: int, chain: Chain) -> None:
        self.now += 1.0
        self.estimate.computed(slot, pack(*chain), self.now)
        if slot in self.ranks:
            self.ranks[slot].computed(chain, self.now)

    @rule(
        slot=st.integers(0, SLOTS - 1),
        chain=CHAINS,
        found=st.integers(0, 6),
        ago=st.integers(0, 4),
    )
    def correct(self, slot: int, chain: Chain, found: int, ago: int) -> None:
        found, since = min(found, len(chain)), self.now - ago
        self.estimate.correct(slot, pack(*chain), found, since, self.now)
        if slot in self.ranks:
            self.ranks[slot].correct(chain, found, since, self.now)

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop(self, slot: int) -> None:
        self.estimate.drop(slot)
        self.ranks.pop(slot, None)

    @rule(seconds=st.integers(0, 8), limit=st.integers(1, 3))
    def keep(self, seconds: int, limit: int) -> None:
        self.now += seconds
        while self.estimate.keep(self.now, limit):
            pass
        self.estimate.keep(self.now, 100)  # those that the last round has not come to
        for rank in self.ranks.values():
            rank.prompts = [one for one in rank.prompts if one[1] >= self.now - TTL_S]

    @rule(chain=CHAINS)
    def find(self, chain: Chain) -> None:
        found = {
            int(slot): blocks
            for blocks, slots in self.estimate.find(pack(*chain))
            for slot in slots
        }
        expected = {slot: rank.matched(chain) for slot, rank in self.ranks.items()}
        assert found == {slot: blocks for slot, blocks in expected.items() if blocks}

    @invariant()
    def agree(self) -> None:
        self.estimate.check()
        for slot, rank in self.ranks.items():
            assert self.estimate.blocks_of(slot) == rank.count()
        total = sum(rank.count() for rank in self.ranks.values())
        assert self.estimate.blocks == self.bound.total == total


TestAgainstTheTwin = AgainstTheTwin.TestCase


def test_all_estimates_together_are_bounded_and_a_rank_gives_up_its_own() -> None:
    bound = Shares().bound("kv_estimate_blocks_max", lambda: 4)
    estimate = CacheEstimate(CoreLimits(), bound=bound)
    for slot in (0, 1):
        estimate.follow(slot, None, in_force=True)
    estimate.computed(0, pack(1, 2), 1.0)
    estimate.computed(1, pack(1, 2), 2.0)
    estimate.computed(0, pack(3, 4), 3.0)
    assert [int(slot) for _, slots in estimate.find(pack(1, 2)) for slot in slots] == [1]
    assert [(blocks, slots.tolist()) for blocks, slots in estimate.find(pack(3, 4, 5))] == [
        (2, [0])
    ]
    assert bound.total == 4
    assert bound.refused == {None: 1}


def test_a_rank_that_is_only_followed_matches_nothing_until_its_estimate_is_in_force() -> None:
    estimate = CacheEstimate()
    estimate.follow(7, 100, in_force=False)
    estimate.computed(7, pack(1, 2, 3), 1.0)
    assert not estimate.find(pack(1, 2, 3))
    estimate.follow(7, 2, in_force=True)  # its engine has less room than it seemed
    assert [(blocks, slots.tolist()) for blocks, slots in estimate.find(pack(1, 2, 3))] == [
        (2, [7])
    ]


def test_one_report_looks_at_so_many_prompts_and_no_more() -> None:
    """Twelve thousand newer prompts behind the block in question took 15 ms to be passed over."""
    estimate = CacheEstimate()
    estimate.follow(0, None, in_force=True)
    for number in range(LOOKED_AT_MAX + 1):
        estimate.computed(0, pack(1, 1000 + number), 1.0)
    newer = range(1, LOOKED_AT_MAX)
    for number in newer:
        estimate.computed(0, pack(1, 1000 + number), 9.0)
    last = 1000 + LOOKED_AT_MAX
    estimate.correct(0, pack(1, 2), 0, 5.0, 10.0)
    assert [blocks for blocks, _ in estimate.find(pack(1, 1000))] == [1], "the oldest"
    assert [blocks for blocks, _ in estimate.find(pack(1, last))] == [2], "behind all the newer"
    estimate.check()


@pytest.mark.parametrize("others", [LOOKED_AT_MAX + 1, PASSED_MAX + 1])
def test_prompts_of_other_ranks_do_not_keep_a_report_from_its_own(others: int) -> None:
    """Many prompts begin with the same system prompt, and most of them are at other ranks."""
    estimate = CacheEstimate()
    for slot in range(2):
        estimate.follow(slot, None, in_force=True)
    for number in range(others):
        estimate.computed(1, pack(1, 1000 + number), 1.0)
    estimate.computed(0, pack(1, 2, 3), 1.0)
    estimate.computed(0, pack(1, 4), 1.0)
    estimate.correct(0, pack(1, 2, 3, 5), 0, 5.0, 10.0)
    gone = others < PASSED_MAX  # else only the prompt of the report is
    found = [(blocks, slots.tolist()) for blocks, slots in estimate.find(pack(1, 2, 3))]
    assert found == ([(1, [1])] if gone else [(1, [0, 1])])
    estimate.check()
