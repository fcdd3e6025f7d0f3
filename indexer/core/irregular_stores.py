"""Stores that need a closer look: names partly known, moved, of a foreign group, or parentless.

`index.py` handles the plain ones before it gets here; `holdings.py` adds what is new, `removal.py`
removes what has moved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.core import holdings, orphans, removal
from indexer.types import HASH_BYTES, Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    from indexer.core.holder import Holder
    from indexer.core.radix_tree import Place, RadixTree
    from indexer.types import PackedHashes, Tier

    Stored: TypeAlias = tuple[int | None, Sequence[int], PackedHashes, Namespace]
    """A run of blocks: parent, engine hashes, local hashes, namespace."""


def store_any(tree: RadixTree, holder: Holder, tier: Tier, group: int, event: Stored) -> int | None:
    """Hold a run of blocks, whatever is known of it; return how many, None if it is refused.

    It is refused if it contains a hash twice, or its own parent.
    """
    parent, names, hashes, namespace = event
    if not names:
        return 0
    unique = set(names)
    if len(unique) < len(names) or parent in unique:
        return None
    done = 0
    while done < len(names):
        end = _seam(holder, names, done)
        cut = hashes[done * HASH_BYTES : end * HASH_BYTES]
        _join(tree, holder, parent, cut[:HASH_BYTES])
        _store_run(tree, holder, tier, group, (parent, names[done:end], cut, namespace))
        parent, done = names[end - 1], end
    return done


def _seam(holder: Holder, names: Sequence[int], start: int) -> int:
    """Return where to cut a run so that it ends with a block that others have waited for.

    Blocks announced again behind that one may be the waiting ones, which must be placed first, with
    their counts on every tier.
    """
    end = len(names)
    if not holder.waiting or holder.where.knows_none(names):
        return end
    return next((i for i in range(start + 1, end) if names[i - 1] in holder.waiting), end)


def _join(tree: RadixTree, holder: Holder, parent: int | None, first: PackedHashes) -> None:
    """Place the orphan that waits for a block and begins with `first`, if the block has arrived."""
    root = None if parent is None else holder.waiting.get(parent)
    if root is not None and root.parent_hash in holder.where and first in root.children:
        orphans.graft_child(tree, holder, root, root.children[first])


def _store_run(tree: RadixTree, holder: Holder, tier: Tier, group: int, event: Stored) -> None:
    parent, names, hashes, namespace = event
    origin = _origin_of_known(tree, holder, event)
    if not holder.where.knows_none(names):
        _forget_moved(tree, holder, origin, names, hashes)
        origin = _origin_of_known(tree, holder, event)
    if origin is None:
        assert parent is not None, "the root is always there"
        origin = tree.expect(holder, parent, namespace), 0
    before = tree.blocks
    path = tree.make_path(*origin, hashes, namespace, holder)
    known = len(names) - (tree.blocks - before)
    done = 0
    for node, position, size in path:
        run = names[done : done + size]
        holdings.cover_run(holder, tier, group, (node, position), run)
        if done < known:  # new blocks cannot make nodes alike that were not
            tree.note_dust(node)
        done += size


def _origin_of_known(tree: RadixTree, holder: Holder, event: Stored) -> Place | None:
    """Return the place behind the parent, which may be lost if the first block is known.

    An engine that lost an interior block still offloads what follows it. The parent's name no
    longer says anything, but the block's own does: if the position before it was last called
    `parent`, and the content is the same, it is the same block.
    """
    parent, names, hashes, _ = event
    place = None
    if parent is not None and parent not in holder.where:
        place = holder.place_of(names[0])
    if place is not None:
        node, position = place
        before = node.place_before(position)
        is_same = node.edge.startswith(hashes[:HASH_BYTES], position * HASH_BYTES)
        if is_same and before is not None and holder.name_at(*before) == parent:
            return place
    return tree.place_behind(holder, parent)


def _forget_moved(
    tree: RadixTree,
    holder: Holder,
    origin: Place | None,
    engine_hashes: Sequence[int],
    local_hashes: PackedHashes,
) -> None:
    """Remove names that are filed for another position than the one announced now."""
    segments = [] if origin is None else tree.follow(*origin, local_hashes)[0]
    places = [(node, at + i) for node, at, size in segments for i in range(size)]
    moved: list[int] = []
    for i, name in enumerate(engine_hashes):
        place = holder.place_of(name)
        if place is not None and (i >= len(places) or places[i] != place):
            moved.append(name)
    for name in moved:
        removal.forget(tree, holder, name)
