"""Blocks that wait for their parent: who finds its place when that comes, and who gives way.

`storing.py` puts them aside; `holdings.graft` gives them their place in the tree.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from indexer.core import holdings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.holder import Holder
    from indexer.core.node import OrphanRoot
    from indexer.core.radix_tree import RadixTree

_SCANNED: Final = 64
"""Of the oldest that wait for a parent, so many are looked at for one whose rank has many."""


def note_late(holder: Holder, names: Sequence[int]) -> None:
    """Remember which blocks have come that others waited for."""
    holder.late.extend(name for name in names if name in holder.waiting)


def heal(tree: RadixTree, holder: Holder) -> bool:
    """Give some of what waited for a block its place; return whether there is more to do."""
    if not holder.late:
        return False
    root = holder.waiting.get(holder.late[-1])
    # either may have gone meanwhile: dropped, removed again, or healed with another
    if root is None or root.parent_hash not in holder.where or holdings.graft(tree, holder, root):
        holder.late.pop()
    return bool(holder.late)


def drop_old(tree: RadixTree, holder: Holder, most: int, here: int, ranks: int) -> int:
    """Drop the least missed until no more than `most` wait; return how many blocks went.

    Args:
        tree: where they wait.
        holder: who has stored last.
        most: blocks that may wait.
        here: a mask of the holders that have not gone.
        ranks: how many those are.
    """
    dropped = 0
    while tree.orphan_blocks > most:
        dropped += tree.drop_orphans(_least_missed(tree, holder, here, ranks))
    return dropped


def _least_missed(tree: RadixTree, holder: Holder, here: int, ranks: int) -> OrphanRoot:
    """Return the oldest of a rank that has gone, or that has more of them than most.

    Whoever announces many must not push out the few of others.
    """
    for root in islice(tree.orphan_roots, _SCANNED):
        owner = tree.holders[root.holder_id]
        if owner is None or not here & owner.bit:
            return root
        if len(owner.waiting) * ranks >= len(tree.orphan_roots):
            return root
    return next(iter(holder.waiting.values()), None) or next(iter(tree.orphan_roots))
