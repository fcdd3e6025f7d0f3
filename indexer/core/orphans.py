"""Blocks that wait for their parent: placing them when it arrives, dropping them if too many wait.

`irregular_stores.py` puts them aside; `holdings.graft` puts them into the tree.
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
"""Oldest orphan roots examined to find one of a rank that has many."""


def note_late(holder: Holder, names: Sequence[int]) -> None:
    """Note which of the new blocks others have been waiting for."""
    holder.late.extend(name for name in names if name in holder.waiting)


def heal(tree: RadixTree, holder: Holder) -> bool:
    """Place some of the blocks that waited for a parent; return whether more are left."""
    if not holder.late:
        return False
    root = holder.waiting.get(holder.late[-1])
    # the block or its orphans may be gone meanwhile: dropped, removed, or healed with another
    if root is None or root.parent_hash not in holder.where or holdings.graft(tree, holder, root):
        holder.late.pop()
    return bool(holder.late)


def drop_old(tree: RadixTree, holder: Holder, most: int, here: int, ranks: int) -> int:
    """Drop the least missed orphans until at most `most` blocks wait; return how many went.

    `holder` stored last; `here` is the mask of the `ranks` holders that have not left.
    """
    dropped = 0
    while tree.orphan_blocks > most:
        dropped += tree.drop_orphans(_least_missed(tree, holder, here, ranks))
    return dropped


def _least_missed(tree: RadixTree, holder: Holder, here: int, ranks: int) -> OrphanRoot:
    """Return the oldest orphan root of a rank that left, or that has more than its share.

    A rank that announces many must not push out the few of others.
    """
    for root in islice(tree.orphan_roots, _SCANNED):
        owner = tree.holders[root.holder_id]
        if owner is None or not here & owner.bit:
            return root
        if len(owner.waiting) * ranks >= len(tree.orphan_roots):
            return root
    return next(iter(holder.waiting.values()), None) or next(iter(tree.orphan_roots))
