"""Which sets of ranks hold which blocks: removing a set loses what no other rank holds.

Read-only and in slices: an index of millions of blocks must not block anybody. Changes made
meanwhile may or may not be seen; the result is an estimate of one moment. `KvIndex.held_together`
offers it to the advice on scaling down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.core.node import all_ones, bits

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from indexer.core.holder import Holder
    from indexer.core.node import Node

NODES_PER_SLICE: Final = 128
MEMBERS_PER_SLICE: Final = 512
"""Members of one node whose tiers are compared per slice."""


class HeldTogether(NamedTuple):
    """Blocks by the exact set of their holders."""

    blocks: dict[int, int]
    """Mask of holders → blocks that each of these holds, on any tier, and no other."""
    copies: dict[int, int]
    """Holder id → its extra copies of blocks on a second, third or fourth tier, if any."""


def held_together(
    holders: Iterable[Holder], live: int, most: int
) -> Generator[None, None, HeldTogether]:
    """Count findable blocks by the set of their holders; yields between two slices.

    O(nodes of all holders). Memory grows with the number of masks: at most one for each node and
    each of its cuts, and at most the sets of up to `most` holders.

    `live` is the mask of the holders that are present. Blocks with more than `most` holders are
    left out: the caller removes no more ranks than that.
    """
    together: dict[int, int] = {}
    copies: dict[int, int] = {}
    visited = 0
    for holder in list(holders):
        bit = holder.bit
        for node in list(holder.runs):
            visited += 1
            if not visited % NODES_PER_SLICE:
                yield
            there = 0 if node.orphaned else node.members & live
            if there & -there != bit:
                continue  # another of its holders visits it, or none is left
            if node.lower is None and node.patterns is None:
                mask = node.full & live
                if mask and mask.bit_count() <= most:
                    together[mask] = together.get(mask, 0) + node.size
                continue
            if node.lower is not None:
                yield from _count_copies(node, there, copies)
            yield from _count_cells(node, live, most, together)
    return HeldTogether(together, copies)


def _count_copies(node: Node, there: int, copies: dict[int, int]) -> Generator[None, None, None]:
    for number, holder_id in enumerate(bits(there), 1):
        if not number % MEMBERS_PER_SLICE:
            yield
        ones = all_ones(node.size)
        held = sum(one.held(holder_id, ones).bit_count() for one in node.tiers())
        more = held - node.held_anywhere(holder_id).bit_count()
        if more > 0:
            copies[holder_id] = copies.get(holder_id, 0) + more


def _count_cells(
    node: Node, live: int, most: int, together: dict[int, int]
) -> Generator[None, None, None]:
    """Cut the node where its holders change; yields after every cut."""
    # copied before the first yield: the node may change while we cut
    parts = [(all_ones(node.size), one.full & live) for one in node.tiers() if one.full & live]
    for one in node.tiers():
        parts += [(where, mask & live) for where, mask in (one.patterns or {}).items()]
    cells = [(all_ones(node.size), 0)]
    for positions, mask in parts:
        cut = []
        for where, held_by in cells:
            inside, outside = where & positions, where & ~positions
            if inside and (held_by | mask).bit_count() <= most:
                cut.append((inside, held_by | mask))
            if outside:
                cut.append((outside, held_by))
        cells = cut
        yield
    for where, held_by in cells:
        if held_by:
            together[held_by] = together.get(held_by, 0) + where.bit_count()
