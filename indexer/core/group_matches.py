"""Matches of ranks whose engine has more cache groups than full attention.

Such a rank cannot reuse all that its full-attention blocks match: see `cache_groups`. Its match on
a tier ends where every group allows it, and the next tier goes on from there. `index.py` calls it
for the ranks that reported such groups; no other rank pays for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.core.node import LOWER_TIERS, all_ones, bits, leading_run
from indexer.core.packing import numbers_in
from indexer.core.tiers import continue_below
from indexer.types import HASH_BYTES, Tier

if TYPE_CHECKING:
    from array import array
    from typing import TypeAlias

    from indexer.core.holder import Holder
    from indexer.core.node import Node
    from indexer.core.radix_tree import Group, RadixTree

    Found: TypeAlias = tuple[list[Group], list[Node], int]
    """What `RadixTree.find` returns: groups, path, and blocks of the path."""


def match_by_group(
    tree: RadixTree, found: Found, masks: tuple[int, int], most: int
) -> tuple[list[Group], list[Group], list[Group], int]:
    """Return the groups of a match on the device, the host, and disk and external.

    The last number says how many of the latter are external.

    `found` is what a walk of the tree found. `masks` are the holders with blocks below the device,
    and those whose cache groups limit their matches, which are of `most` blocks at most.
    """
    (groups, path, matched), (below, grouped) = found, masks
    plain = [(blocks, mask & ~grouped) for blocks, mask in groups if mask & ~grouped]
    reached = {
        holder_id: min(blocks, most)
        for blocks, mask in groups
        for holder_id in bits(mask & grouped)
    }
    limit = min(matched, most)
    device: dict[int, int] = {}  # blocks → mask
    lower: list[list[Group]] = [[], [], []]
    for holder_id in bits(grouped):
        blocks, holder = reached.get(holder_id, 0), tree.holder(holder_id)
        is_sparse = holder.limiting is not None and holder.limiting.prefixes is not None
        if not blocks and (is_sparse or not below & holder.bit):
            continue
        names = _names(holder, path, limit if below & holder.bit else blocks)
        n = _limited(holder, Tier.DEVICE, names, (0, blocks))
        if n:
            device[n] = device.get(n, 0) | holder.bit
        for tier in LOWER_TIERS if is_sparse or below & holder.bit else ():
            # the tree has all of a sparse prefix on the device; its groups know the tiers
            reach = blocks if is_sparse else n + _run_below(holder_id, path, limit, tier, n)
            further = _limited(holder, tier, names, (n, reach))
            if further > n:
                lower[tier - 1].append((further - n, holder.bit))
            n = further
    host: list[Group] = []
    disk: list[Group] = []
    external = 0
    if below & ~grouped:
        host, disk, external = continue_below(plain, path, matched, below & ~grouped)
    at = len(disk) - external
    disk = [*disk[:at], *lower[1], *disk[at:], *lower[2]]
    external += len(lower[2])
    return [*plain, *device.items()], [*host, *lower[0]], disk, external


class _Names:
    """A rank's names of the blocks of a path."""

    __slots__ = ("first", "others")

    def __init__(self, first: array[int], others: dict[int, list[int]]) -> None:
        self.first = first  # one per block; 0 if it has none
        self.others = others  # of blocks with several: all of them


def _names(holder: Holder, path: list[Node], blocks: int) -> _Names:
    pieces: list[bytes] = []
    others: dict[int, list[int]] = {}
    at = 0
    for node in path:
        size = min(node.size, blocks - at)
        if size <= 0:
            break
        piece = holder.runs.get(node, b"")[: size * HASH_BYTES]
        pieces.append(piece.ljust(size * HASH_BYTES, b"\0"))
        if node.aliases is not None:
            for position, names in (node.names_at(holder.holder_id) or {}).items():
                others[at + position] = [*names]
        at += size
    return _Names(numbers_in(b"".join(pieces)), others)


def _limited(holder: Holder, tier: Tier, names: _Names, span: tuple[int, int]) -> int:
    """Return where a match ends that reaches from `span[0]` to `span[1]` on a tier."""
    low, reach = span
    limiting = holder.limiting
    if limiting is None or reach <= low:
        return reach
    called = names.first[:reach]
    for at, several in names.others.items():
        if low <= at < reach:
            # whichever of its names the groups know; engines use one in all groups
            called[at] = next((one for one in several if limiting.knows(tier, one)), several[0])
    return limiting.reusable(tier, called, low)


def _run_below(holder_id: int, path: list[Node], matched: int, tier: Tier, start: int) -> int:
    """Return how many blocks from `start` on a rank holds on a tier below the device."""
    held = at = 0
    for node in path:
        size = min(node.size, matched - at)
        if node.lower is not None and at + size > start:
            held |= (node.held_on(holder_id, tier) & all_ones(size)) << at
        at += size
    return min(leading_run(held >> start), matched - start)
