"""Blocks that wait for their parent: placing them when it arrives, dropping them if too many wait.

`irregular_stores.py` puts them aside.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from indexer.core.holdings import attach_name
from indexer.core.node import bits
from indexer.core.packing import pack_name
from indexer.types import BASE_NAMESPACE, HASH_BYTES, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.holder import Holder
    from indexer.core.node import Node, OrphanRoot
    from indexer.core.radix_tree import Place, RadixTree

ORPHANS_PER_GRAFT: Final = 128
"""Orphans moved behind their late parent in one go, about 0.15 ms."""

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
    if root is None or root.parent_hash not in holder.where or graft(tree, holder, root):
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


def graft(tree: RadixTree, holder: Holder, root: OrphanRoot) -> bool:
    """Move some of the orphans waiting for a block behind it, now that the rank announced it.

    Returns whether nothing is left to move; the rest keeps waiting, and the books are in step. A
    whole subtree moves in O(nodes) if the tree has nothing under the same content yet; existing
    content is moved block by block. Reference counts go by name and stay as they are. Nothing
    happens when the block itself waits behind `root`: such a cycle has no beginning.
    """
    if _waits_behind(root, holder.where[root.parent_hash]):
        return True
    for _ in range(ORPHANS_PER_GRAFT):
        if not root.children:
            break
        _, child = root.children.popitem()
        _graft_behind(tree, holder, root.parent_hash, child)
    if root.children:
        return False
    tree.expect_no_more(root)
    return True


def graft_child(tree: RadixTree, holder: Holder, root: OrphanRoot, child: Node) -> None:
    """Move one orphan behind the block it waits for, as `graft` does with all of them."""
    if _waits_behind(root, holder.where[root.parent_hash]):
        return
    del root.children[child.edge[:HASH_BYTES]]
    _graft_behind(tree, holder, root.parent_hash, child)
    if not root.children:
        tree.expect_no_more(root)


def _waits_behind(root: OrphanRoot, node: Node) -> bool:
    top = node
    while top.parent is not None:
        top = top.parent
    return top is root


def _graft_behind(tree: RadixTree, holder: Holder, parent: int, child: Node) -> None:
    place = tree.place_behind(holder, parent)  # each time: a previous graft may have split it
    assert place is not None, "the parent has arrived"
    _graft_subtree(tree, holder, child, place)


def _graft_subtree(tree: RadixTree, holder: Holder, top: Node, start: Place) -> None:
    pending = [(top, start)]
    while pending:
        # Depth first: a sibling's path may only split nodes where this subtree is finished.
        orphan, place = pending.pop()
        if tree.move_subtree(orphan, *place):
            continue
        children = list(orphan.children.values())
        place = _transplant(tree, holder, orphan, place)
        pending.extend((child, place) for child in children)


def _transplant(tree: RadixTree, holder: Holder, orphan: Node, place: Place) -> Place:
    """Move one orphaned node behind `place`; return the place behind its last block."""
    me = holder.holder_id
    names_of: list[dict[int, int]] = [{} for _ in range(orphan.size)]
    aliases = orphan.names_at(me) or {}
    for position in range(orphan.size):
        if position in aliases:
            names_of[position] = aliases[position]
            continue
        tiers = orphan.tiers_of(me, position)
        name = holder.last_name(orphan, position)
        if tiers or name:
            names_of[position] = {name: tiers}
    for tier in Tier:
        holder.blocks[tier] -= orphan.held_on(me, tier).bit_count()
    for names in names_of:
        for name, tiers in names.items():
            if tiers:
                del holder.where[name]
    del holder.runs[orphan]
    tree.dissolve(orphan)
    segments = tree.make_path(*place, orphan.edge, BASE_NAMESPACE, holder)
    done = 0
    for node, position, count in segments:
        for i in range(count):
            _settle(holder, (node, position + i), names_of[done + i])
        done += count
        place = (node, position + count)
    return place


def _settle(holder: Holder, place: Place, names: dict[int, int]) -> None:
    node, position = place
    if not node.members & holder.bit:
        holder.write(node, position, b"")
    for name, tiers in names.items():
        if not tiers and not node.held_anywhere(holder.holder_id) >> position & 1:
            holder.write(node, position, pack_name(name))  # an old name, see `Holder.runs`
        for tier in bits(tiers):
            attach_name(holder, tier, place, name)
