"""Removing blocks from a holder, in runs where an engine evicts neighbours together.

The counterpart of `holdings`: `index.py` decides which references are dropped; here the books of
holder and nodes follow, and blocks without holders leave the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.node import EDGE_BLOCKS_MAX, all_ones, bits
from indexer.core.packing import pack_name, pack_names
from indexer.types import HASH_BYTES, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from indexer.core.holder import Holder
    from indexer.core.node import Node
    from indexer.core.radix_tree import RadixTree


STRETCH_BLOCKS_MAX: Final = 64
"""Names of a list compared with a node's at once. Longer stretches match in several steps, and
packing names in vain stays cheap. For names that are already packed the limit is a whole node."""


def uncover_listed(tree: RadixTree, holder: Holder, tier: int, names: Sequence[int]) -> int:
    """Remove blocks that are held once each from a tier; return how many were there.

    Engines evict a sequence from its end, so a list is mostly a stretch of some node's names
    backwards. A stretch costs two comparisons and one change of the node, and per block only its
    entry in `Holder.where`.
    """
    where, me = holder.where, holder.holder_id
    done, found, total = 0, 0, len(names)
    while done < total:
        name = names[done]
        node = where.get(name)
        if node is None:
            done += 1
            continue
        count = 0 if tier else _drop_tail(tree, holder, node, names, done)
        if count:
            found += count
            done += count
            continue
        if node.aliases is not None:
            place = node, holder.locate(node, name)
            if holder.holds(tier, place, name):
                uncover(tree, holder, tier, place, name)
                found += 1
            done += 1
            continue
        start, count = holder.locate(node, name), 1
        span = 1 << start
        held = node.held_on(me, tier)
        if done + 1 < total and where.get(names[done + 1]) is node:
            first, more = _stretch(holder.runs[node], start, names, done)
            # only a held position's name in the run is current, others are old
            if held >> first & all_ones(more) == all_ones(more):
                start, count, span = first, more, all_ones(more) << first
        if held & span:
            _uncover_span(tree, holder, tier, (node, start), names[done : done + count])
            found += count
        done += count
    return found


def drop_references(
    tree: RadixTree, holder: Holder, tier: Tier, group: int, names: Sequence[int]
) -> int:
    """Drop one reference of a group per block on one tier; return how many existed."""
    found = 0
    for name in names:
        place = holder.place_of(name)
        if place is None or not holder.holds(tier, place, name):
            continue
        dropped, last = holder.drop_reference(tier, name, group)
        found += dropped
        if last:
            uncover(tree, holder, tier, place, name)
    return found


def _drop_tail(tree: RadixTree, holder: Holder, node: Node, names: Sequence[int], done: int) -> int:
    """Cut the end off a leaf that is the rank's own, on the device only, as most evictions do.

    Returns how many names from `done` on it removed; 0 if the case does not apply.
    """
    bit = holder.bit
    if (
        node.full != bit
        or node.members != bit
        or node.children
        or node.lower is not None
        or node.aliases is not None
    ):
        return 0
    run = holder.runs[node]
    if len(run) != len(node.edge):
        return 0
    count = holder.where.drop_tail(names, done, run)
    if count:
        left = len(run) - count * HASH_BYTES
        node.edge, holder.runs[node] = node.edge[:left], run[:left]
        holder.blocks[0] -= count
        tree.count_blocks(node, -count)
    return count


def _stretch(run: bytes, position: int, names: Sequence[int], done: int) -> tuple[int, int]:
    """Return the first position and the length of the stretch of names from `done` on.

    The first name is at `position`; its neighbours may follow upwards or downwards.
    """
    at = position * HASH_BYTES
    most = STRETCH_BLOCKS_MAX if type(names) is list else EDGE_BLOCKS_MAX
    most = min(most, len(names) - done)
    second = pack_name(names[done + 1])
    if position and run.startswith(second, at - HASH_BYTES):
        most = min(most, position + 1)
        backwards = pack_names(names[done : done + most][::-1])
        end = at + HASH_BYTES

        def agree(count: int) -> bool:
            size = count * HASH_BYTES
            return run.startswith(backwards[len(backwards) - size :], end - size)

        count = _longest(most, agree)
        return position + 1 - count, count
    if run.startswith(second, at + HASH_BYTES):
        most = min(most, len(run) // HASH_BYTES - position)
        forwards = pack_names(names[done : done + most])
        return position, _longest(
            most, lambda count: run.startswith(forwards[: count * HASH_BYTES], at)
        )
    return position, 1


def _longest(most: int, agree: Callable[[int], bool]) -> int:
    """Return the largest count that agrees, at least two: usually all, otherwise by bisection."""
    if agree(most):
        return most
    low, high = 2, most
    while low + 1 < high:
        middle = (low + high) // 2
        if agree(middle):
            low = middle
        else:
            high = middle
    return low


def _uncover_span(
    tree: RadixTree, holder: Holder, tier: int, place: tuple[Node, int], names: Sequence[int]
) -> None:
    """Remove neighbours that are held on a tier, in a node without aliases, from that tier."""
    node, start = place
    where, count = holder.where, len(names)
    holder.blocks[tier] -= count
    end = (start + count) * HASH_BYTES
    if (
        node.full == holder.bit == node.members
        and start
        and end == len(node.edge)
        and not node.children
        and node.lower is None
    ):
        # the tail of the rank's own leaf: the rest is held as before
        node.edge = node.edge[: start * HASH_BYTES]
        holder.runs[node] = holder.runs[node][: start * HASH_BYTES]
        tree.count_blocks(node, -count)
        where.drop_all(names)
        return
    me, size = holder.holder_id, len(node.edge)
    span, ones = all_ones(count) << start, all_ones(size // HASH_BYTES)
    coverage = node.coverage_for_change(tier)
    coverage.put(me, coverage.held(me, ones) & ~span, ones)
    if tier:
        node.drop_empty_tiers()
    held = node.held_anywhere(me)
    kept = held & span
    where.drop_all(names if not kept else _not_at(names, holder.runs[node], kept))
    if not held:
        tree.left(holder, node)
        tree.tidy(node)
    elif not node.children and (end == size or tier or node.lower is not None):
        tree.tidy(node)


def _not_at(names: Sequence[int], run: bytes, kept: int) -> list[int]:
    """Return the names that are not at one of the positions `kept`."""
    staying = {
        int.from_bytes(run[at * HASH_BYTES : (at + 1) * HASH_BYTES], "little") for at in bits(kept)
    }
    return [name for name in names if name not in staying]


def uncover(tree: RadixTree, holder: Holder, tier: int, place: tuple[Node, int], name: int) -> None:
    """Remove a block held on a tier under this name, and everything that becomes empty."""
    node, position = place
    places = node.names_at(holder.holder_id)
    if places is not None and position in places:
        if _drop_alias(holder, tier, place, name):
            return
        aliased = True
    else:
        aliased = False
    coverage = node.coverage_for_change(tier)
    ones = all_ones(node.size)
    coverage.put(holder.holder_id, coverage.held(holder.holder_id, ones) & ~(1 << position), ones)
    holder.blocks[tier] -= 1
    if tier:
        node.drop_empty_tiers()
    held = node.held_anywhere(holder.holder_id)
    if not aliased and not held >> position & 1:
        del holder.where[name]
    if not held:
        tree.left(holder, node)
        tree.tidy(node)
    elif not node.children:
        tree.tidy(node)


def _drop_alias(holder: Holder, tier: int, place: tuple[Node, int], name: int) -> bool:
    """Drop a name's tier; return whether another name still holds the position there."""
    node, position = place
    assert node.aliases is not None, "the caller saw an alias"
    places = node.aliases[holder.holder_id]
    names = places[position]
    names[name] ^= 1 << tier
    if not names[name]:
        del names[name]
        del holder.where[name]
    still = any(tiers >> tier & 1 for tiers in names.values())
    if len(names) == 1:
        holder.write(node, position, pack_name(next(iter(names))))
        del places[position]
        if not places:
            del node.aliases[holder.holder_id]
            node.aliases = node.aliases or None
    return still


def forget(tree: RadixTree, holder: Holder, name: int) -> None:
    """Forget a name on every tier, however often it is held."""
    place = holder.place_of(name)
    assert place is not None, "what is forgotten was known"
    tiers = [tier for tier in Tier if holder.holds(tier, place, name)]
    holder.forget(name)
    for tier in tiers:
        uncover(tree, holder, tier, place, name)
