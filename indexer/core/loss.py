"""Which blocks would be held by nobody if some ranks went: what their loss costs the fleet.

Read-only and in slices: a rank of a hundred thousand nodes must not hold anybody up. What changes
meanwhile is seen or not, it is an estimate of one moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.node import all_ones

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from indexer.core.holder import Holder
    from indexer.core.node import Node

__all__ = ["sole_blocks"]

NODES_PER_SLICE: Final = 128


def sole_blocks(leaving: Iterable[Holder], gone: int, live: int) -> Generator[None, None, int]:
    """Count blocks that only the leaving ranks hold, on any tier; yields between two slices.

    Args:
        leaving: ranks of one worker.
        gone: mask of holders that are taken to be gone already.
        live: mask of holders that are there.
    """
    ours = gone
    holders = list(leaving)
    for one in holders:
        ours |= one.bit
    others = live & ~ours
    count, visited = 0, 0
    seen: set[Node] = set()
    for holder in holders:
        for node in list(holder.runs):
            visited += 1
            if not visited % NODES_PER_SLICE:
                yield
            if node.members & holder.bit and node not in seen:
                seen.add(node)
                count += _sole(node, holders, others)
    return count


def _sole(node: Node, holders: list[Holder], others: int) -> int:
    held = 0
    for one in holders:
        held |= node.held_anywhere(one.holder_id)
    if node.members & others:
        ones = all_ones(node.size)
        for coverage in node.tiers():
            if coverage.full & others:
                return 0
            for positions, mask in (coverage.patterns or {}).items():
                if mask & others:
                    held &= ones & ~positions
    return held.bit_count()
