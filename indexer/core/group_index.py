"""The cache groups of all ranks of one index that limit matches, and what they know of prefixes.

`cache_groups.py` has the blocks of one rank's groups. Here is which ranks have such groups, and
which have no others: models without full attention, whose prefixes `sparse_prefixes.py` stores.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Final

from indexer.core.cache_groups import GroupRule, SparsePrefixes
from indexer.core.event_hashes import SLICE_BLOCKS
from indexer.types import HASH_BYTES, U64_MASK

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from indexer.core.cache_groups import LimitingGroups
    from indexer.core.dump import DumpGroups
    from indexer.core.events import Names
    from indexer.core.holder import Holder
    from indexer.types import PackedHashes, Tier, WorkerRank

WHOLE_PROMPTS_MAX: Final = 4096
"""Ends of whole prompts remembered, until their engines report them."""

EARLY_PROMPTS_MAX: Final = 64
"""Of them, as long as it is not known whether any engine has no full attention."""

PROMPT_END: Final = 2 * HASH_BYTES
"""Bytes of local hashes by which the end of a prompt is known again."""


class GroupIndex:
    """Cache groups beside full attention, by rank."""

    def __init__(self, ranks: Mapping[WorkerRank, Holder]) -> None:
        self._ranks = ranks
        self.limited = 0
        """Mask of holders whose cache groups limit their matches."""
        self.needs_whole_prompts = False
        """Whether any rank ever had no group of full attention, or reports in full."""
        self.whole_prompts: dict[bytes, tuple[WorkerRank, int | None] | None] = {}
        """Ends of prompts, oldest first, and where they were seen."""

    def store(
        self,
        rank: WorkerRank,
        tier: Tier,
        group: int,
        engine_hashes: Sequence[int],
        *,
        rule: GroupRule,
    ) -> int:
        """Add one reference to each block of a cache group that may limit the rank's matches.

        While the group holds anything on a tier, matches on that tier follow its rule, once `limit`
        was called. Returns the number of blocks: all, or none if the rank has too many such groups.
        """
        return self._ranks[rank].limiting_for_change().store(tier, group, engine_hashes, rule)

    def lacking(self, rank: WorkerRank, tier: Tier, group: int, names: Names) -> list[int]:
        """Return those blocks that the engine has not reported as held by a group on a tier."""
        limiting = self._ranks[rank].limiting
        if limiting is None:
            return list(names)
        return [name for name in names if not limiting.is_sure(tier, group, name)]

    def longest(
        self, rank: WorkerRank, tier: Tier, names: Names, reach: int
    ) -> Generator[int, None, int]:
        """Return the longest prefix, of at most `reach` blocks, that a rank's groups allow.

        Yields the cost of each step, in blocks. Unlike in matches, a group that holds nothing on
        the tier allows nothing: this is about the cache that all groups of an engine share.
        """
        limiting = self._ranks[rank].limiting
        if limiting is None or not limiting.is_in_force or not limiting.rules:
            return reach
        if not limiting.all_hold_some(tier):
            return 0
        rules = limiting.rules.values()
        stride = lcm(*(rule.stride for rule in rules))
        window = max(rule.blocks * rule.stride for rule in rules) + SLICE_BLOCKS
        while reach:
            # whether blocks before `start` are held matters only where less than a window is left
            start = max(reach - window, 0) // stride * stride
            found = start + limiting.reusable(tier, list(names[start:reach]), 0)
            if found == reach:
                break
            yield SLICE_BLOCKS
            reach = found
        return reach

    def remove(self, rank: WorkerRank, tier: Tier, group: int, engine_hashes: Sequence[int]) -> int:
        """Drop one reference to each block of a group; return how many existed."""
        holder = self._ranks.get(rank)
        if holder is None or holder.limiting is None:
            return 0
        return holder.limiting.remove(tier, group, engine_hashes)

    def limit(self, rank: WorkerRank) -> None:
        """Let the cache groups stored so far, and until the next clear, limit a rank's matches."""
        holder = self._ranks[rank]
        if holder.limiting is not None:
            holder.limiting.is_in_force = True
            self.limited |= holder.bit

    def rules(self, rank: WorkerRank) -> dict[int, GroupRule]:
        """Return the rules of a rank's groups that may limit its matches, by group."""
        holder = self._ranks.get(rank)
        return {} if holder is None or holder.limiting is None else holder.limiting.rules

    def forget(self, rank: WorkerRank, group: int) -> None:
        """Let a cache group no longer limit the matches of a rank."""
        holder = self._ranks.get(rank)
        if holder is not None and holder.limiting is not None:
            holder.limiting.forget(group)

    def load(self, rank: WorkerRank, tier: Tier, dumped: DumpGroups) -> int:
        """Take in what a dump has of groups; return how many blocks it changed."""
        rule = GroupRule(max(dumped.blocks, 1), max(dumped.stride, 1))
        names = [name & U64_MASK for name in dumped.block_hashes]
        limiting, accepted = self._ranks[rank].limiting_for_change(), 0
        for group in dumped.groups:
            accepted = limiting.store(tier, group, names, rule)
            if accepted:
                limiting.note_hearsay(tier, group, names)
        if dumped.without_full_attention is True:
            self._begin_sparse(limiting)
        self.limit(rank)
        return accepted

    def note_restored(self, holder: Holder) -> None:
        """Follow a holder whose groups come from a checkpoint."""
        if holder.limiting is not None and holder.limiting.is_in_force:
            self.limited |= holder.bit
            self.needs_whole_prompts |= holder.limiting.prefixes is not None

    # ---- models without full attention

    def is_sparse(self, rank: WorkerRank) -> bool:
        """Say whether a rank's groups are all that its engine has."""
        holder = self._ranks.get(rank)
        limiting = None if holder is None else holder.limiting
        return limiting is not None and limiting.prefixes is not None

    def expect_sparse(self, rank: WorkerRank) -> bool:
        """Take a rank without blocks of full attention for one whose engine has no such group.

        Returns whether it is one.
        """
        if not self.is_sparse(rank) and not self._ranks[rank].where:
            self._begin_sparse(self._ranks[rank].limiting_for_change())
            self.limit(rank)
        return self.is_sparse(rank)

    def _begin_sparse(self, limiting: LimitingGroups) -> None:
        if limiting.prefixes is None:
            limiting.prefixes = SparsePrefixes()
        self.needs_whole_prompts = True

    def note_whole_prompt(self, hashes: PackedHashes) -> None:
        """Note a prompt without a partial last block, which an engine is about to get. O(1).

        Events do not tell such a prompt from one with a few tokens more, of which an engine finds
        one block more, and keeps other blocks if it is without full attention.
        """
        if hashes:
            self.whole_prompts.pop(hashes[-PROMPT_END:], None)
            self.whole_prompts[hashes[-PROMPT_END:]] = None
            if len(self.whole_prompts) > WHOLE_PROMPTS_MAX:
                del self.whole_prompts[next(iter(self.whole_prompts))]

    def is_whole_prompt(self, hashes: PackedHashes, rank: WorkerRank, batch: int | None) -> bool:
        """Say whether a prompt that was noted ends like these blocks; one batch may tell of it."""
        end, by = hashes[-PROMPT_END:], (rank, batch)
        if not self.needs_whole_prompts or end not in self.whole_prompts:
            return False
        if self.whole_prompts[end] is None:
            self.whole_prompts[end] = by
        return self.whole_prompts[end] == by
