"""Which stores are reports: engines that also report what a prompt found in their cache.

For a request with `kv_cache_report_mode: "full"` vLLM reports the blocks that the prompt found as
if they were stored: one event per cache group, without a parent, that names every block up to the
end of the match, also those that windows and states do not keep. What it computes behind a match
has a parent. So a store without one is a report, or the prompt found nothing; and what there was
to find, the index knows. Both kinds come as one event per group, one behind the other.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Final

from indexer.core.event_hashes import (
    COLOURED_SLICE_BLOCKS,
    SLICE_BLOCKS,
    has_extra_keys,
    local_hashes,
    slices_of,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from indexer.core.cache_groups import GroupRule
    from indexer.core.events import BlockStored, Names
    from indexer.core.index import KvIndex
    from indexer.types import Namespace, Tier, WorkerRank


STEP_COST_BLOCKS: Final = SLICE_BLOCKS // 2
"""Cost of looking up a slice of names, in blocks that are stored."""

NO_GROUP: Final = -1


class FullReports:
    """Tells the reports of one stream from its other stores."""

    __slots__ = ("_groups", "_index", "_is_report", "_kinds", "_rules", "_span")

    def __init__(
        self, index: KvIndex, kinds: Mapping[int, bool], rules: Mapping[int, GroupRule]
    ) -> None:
        self._index = index
        self._kinds = kinds  # group → whether the tree has its blocks
        self._rules = rules  # of the others that limit what a prompt finds
        self._span: tuple[object, ...] = ()  # of the last store that was judged
        self._groups: set[int] = set()  # groups
        self._is_report = False

    def judge(
        self, event: BlockStored, rank: WorkerRank, batch: int | None, namespace: Namespace
    ) -> Generator[int, None, bool]:
        """Return whether a store without a parent is a report; yield the cost of each step.

        `batch` is the number of its batch, and `namespace` that of its blocks.
        """
        self._index.groups.needs_whole_prompts = True
        tokens = event.token_ids
        # groups of smaller blocks also report what is behind the last of the others
        whole = len(tokens) - len(tokens) % self._index.block_size or len(tokens)
        span = (rank, event.tier, batch, whole, tokens[0], tokens[whole - 1])
        if span == self._span and event.group not in self._groups:
            self._groups.add(event.group)
            return self._is_report
        is_prompt, is_report = self._is_whole_prompt(event, rank, batch, namespace), False
        if event.is_whole:
            is_report = yield from self._is_found(event, rank, is_prompt=is_prompt)
        self._span, self._groups, self._is_report = span, {event.group}, is_report
        return is_report

    def lacking(self, event: BlockStored, rank: WorkerRank) -> list[int]:
        """Return which blocks a group that limits matches has, by a report, and did not name.

        It names all blocks of the match, and has the last ones.
        """
        assert event.tier is not None
        need = self._rules[event.group].blocks
        need *= max(1, self._index.block_size // max(1, event.block_size))
        names = event.block_hashes[-need:]
        return self._index.groups.lacking(rank, event.tier, event.group, names)

    def _is_found(
        self, event: BlockStored, rank: WorkerRank, *, is_prompt: bool
    ) -> Generator[int, None, bool]:
        """Return whether the engine would have found these blocks, or some of the first."""
        index, tier, rule = self._index, event.tier, self._rules.get(event.group)
        assert tier is not None
        if rule is not None and event.group not in index.groups.rules(rank):
            return False  # it is the first that this group reports
        names: Names = event.block_hashes
        if rule is not None and event.block_size > index.block_size:
            # the blocks between are not named: only this group's own can be looked up
            return not index.groups.lacking(rank, tier, event.group, names[-rule.blocks :])
        if event.block_size < index.block_size:
            ratio = index.block_size // event.block_size
            names = names[ratio - 1 :: ratio]
        held, main = len(names), event.group
        if rule is not None:
            main = next((group for group, is_main in self._kinds.items() if is_main), NO_GROUP)
        if main != NO_GROUP:
            held = yield from _held(index, rank, tier, main, names)
        found = yield from index.groups.longest(rank, tier, names, held)
        if found < len(names) or not is_prompt:
            return found > 0  # where events were lost, less is known than was found
        # its last block is computed anew: it found what ends before, if anything does
        return (yield from index.groups.longest(rank, tier, names, found - 1)) > 0

    def _is_whole_prompt(
        self, event: BlockStored, rank: WorkerRank, batch: int | None, namespace: Namespace
    ) -> bool:
        """Return whether a prompt is known that ends so; one event may be it."""
        is_told = event.is_whole and event.block_size == self._index.block_size
        if has_extra_keys(event) and not is_told:
            return False  # which blocks of the partition they belong to is unknown
        last = len(event.token_ids) // self._index.block_size
        try:
            end = local_hashes(self._index, event, namespace, max(last - 2, 0), last)
        except ValueError:  # a token beyond 32 bits
            return False
        return self._index.groups.is_whole_prompt(end, rank, batch)


def _held(
    index: KvIndex, rank: WorkerRank, tier: Tier, group: int, names: Names
) -> Generator[int, None, int]:
    """Return how many of the first blocks a group holds on a tier."""
    for start, some in slices_of(names):
        held = index.holder(rank).held(tier, group, some)
        if held < len(some):
            return start + held
        yield STEP_COST_BLOCKS
    return len(names)


def store_lacking(
    index: KvIndex, rank: WorkerRank, event: BlockStored, namespace: Namespace
) -> Generator[int, None, int]:
    """Store those blocks of a report that the engine has not reported; return how many.

    The caller heals what waited for them.

    Raises:
        ValueError: a token beyond 32 bits.
    """
    tier, names, stored = event.tier, event.block_hashes, 0
    assert tier is not None
    for start in range(0, len(names), COLOURED_SLICE_BLOCKS):
        is_sure = partial(index.holder(rank).is_sure, tier, event.group)
        places = range(start, min(start + COLOURED_SLICE_BLOCKS, len(names)))
        for is_told, run in groupby(places, lambda at: is_sure(names[at])):  # noqa: B023 - at once
            if is_told:
                continue
            first, *rest = run
            end = rest[-1] + 1 if rest else first + 1
            stored += index.store(
                rank,
                tier,
                names[first - 1] if first else None,
                list(names[first:end]),
                local_hashes(index, event, namespace, first, end),
                namespace=namespace,
                group=event.group,
                heals=False,
            )
        yield COLOURED_SLICE_BLOCKS
    return stored
