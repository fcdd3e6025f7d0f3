"""Adding blocks to a holder: which positions it covers, under which names, how often.

Called by the verbs of `index.py`, on top of the tree: each function here keeps the books of holder
and nodes in step. `removal.py` is the counterpart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.core.node import EDGE_BYTES_MAX, Node, all_ones, bits
from indexer.core.packing import pack_name, pack_names
from indexer.types import HASH_BYTES, Namespace, PackedHashes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.holder import Holder
    from indexer.core.radix_tree import RadixTree


def mark(holder: Holder, tier: int, node: Node, span: int) -> None:
    """Cover positions on a tier."""
    coverage = node.coverage_for_change(tier)
    ones = all_ones(node.size)
    old = coverage.held(holder.holder_id, ones)
    new = old | span
    if new != old:
        coverage.put(holder.holder_id, new, ones)
        holder.blocks[tier] += (new ^ old).bit_count()


def cover_run(
    holder: Holder, tier: int, group: int, place: tuple[Node, int], names: Sequence[int]
) -> None:
    """Hold consecutive blocks of one node from a position on, adding one reference each.

    The caller made sure that no name is filed for another position. Runs that are entirely new to
    the rank, or known to it under the same names, cost no loop over the blocks.
    """
    node, position = place
    count = len(names)
    span = all_ones(count) << position
    held = node.held_anywhere(holder.holder_id) if node.members & holder.bit else 0
    packed = pack_names(names)
    start = position * HASH_BYTES
    if not held & span and holder.where.file_new(names, node):
        holder.write(node, position, packed)
        mark(holder, tier, node, span)
        if group != holder.home:
            counts = holder.counts_for_change(tier)
            for name in names:
                counts.first(name, group)
    elif (
        held & span == span
        and node.names_at(holder.holder_id) is None
        and holder.runs[node].startswith(packed, start)
    ):
        cover_known(holder, tier, group, place, names)
    else:
        for i, name in enumerate(names):
            cover_block(holder, tier, group, (node, position + i), name)


def cover_known(
    holder: Holder, tier: int, group: int, place: tuple[Node, int], names: Sequence[int]
) -> None:
    """Hold blocks that the rank already has there under these names, adding one reference each."""
    node, position = place
    span = all_ones(len(names)) << position
    again = node.held_on(holder.holder_id, tier) & span
    mark(holder, tier, node, span)
    if again:
        for at in bits(again):
            _count_again(holder, tier, group, names[at - position])
    if group != holder.home:
        counts = holder.counts_for_change(tier)
        for at in bits(span & ~again):
            counts.first(names[at - position], group)


def cover_block(holder: Holder, tier: int, group: int, place: tuple[Node, int], name: int) -> None:
    """Hold one block, adding one reference."""
    if attach_name(holder, tier, place, name):
        if group != holder.home:
            holder.counts_for_change(tier).first(name, group)
    else:
        _count_again(holder, tier, group, name)


def cover_named(holder: Holder, tier: int, group: int, names: Sequence[int]) -> int:
    """Hold blocks that are known by these names on a tier as well; return how many are."""
    known = 0
    for name in names:
        place = holder.place_of(name)
        if place is not None:
            cover_block(holder, tier, group, place, name)
            known += 1
    return known


def _count_again(holder: Holder, tier: int, group: int, name: int) -> None:
    """Count one more reference to a held block, unless only a dump has reported it so far."""
    if holder.confirm(tier, name):
        if group != holder.home:
            holder.counts_for_change(tier).first(name, group)
    else:
        holder.counts_for_change(tier).again(name, group, holder.home)


def attach_name(holder: Holder, tier: int, place: tuple[Node, int], name: int) -> bool:
    """File a block under a name on a tier; return whether the name is new there."""
    node, position = place
    bit = 1 << position
    places = node.names_at(holder.holder_id)
    names = None if places is None else places.get(position)
    if name not in holder.where:
        if names is None and node.held_anywhere(holder.holder_id) & bit:
            names = _begin_alias(holder, place)
        if names is None:
            holder.write(node, position, pack_name(name))
        else:
            names[name] = 0
        holder.where[name] = node
    if names is None:
        new = not node.held_on(holder.holder_id, tier) & bit
    else:
        new = not names[name] >> tier & 1
        names[name] |= 1 << tier
    if new:
        mark(holder, tier, node, bit)
    return new


def _begin_alias(holder: Holder, place: tuple[Node, int]) -> dict[int, int]:
    """List the names of a position that is about to get its second one."""
    node, position = place
    names = {holder.last_name(node, position): node.tiers_of(holder.holder_id, position)}
    node.put_names(holder.holder_id, position, names)
    return names


def cover_new_branch(  # noqa: PLR0917 - the fields of the event
    tree: RadixTree,
    holder: Holder,
    tier: int,
    place: tuple[Node, int],
    names: Sequence[int],
    hashes: PackedHashes,
    namespace: Namespace,
) -> int | None:
    """Hold blocks where the tree has nothing yet: the fast path that nearly all stores take.

    Only for references in the home group. Returns the number of blocks, or None, having done
    nothing, if the event does not qualify.
    """
    node, position = place
    if len(names) == 1 and not tier and _append_block(tree, holder, place, names[0], hashes):
        return 1
    edge = node.edge
    if position * HASH_BYTES != len(edge) or hashes[:HASH_BYTES] in node.children or node.orphaned:
        return None
    bit = holder.bit
    grown = (
        node.full == bit == node.members
        and not (tier or node.children)
        and node.lower is None
        and len(edge) + len(hashes) <= EDGE_BYTES_MAX
    )
    if not grown:
        if not 0 < len(hashes) <= EDGE_BYTES_MAX or tree.is_own_leaf(node, holder):
            return None
        node = Node(hashes, node, node.namespace if edge else namespace)
    if not holder.where.file_new(names, node):
        return None
    count = len(names)
    holder.blocks[tier] += count
    packed = pack_names(names)
    if grown:
        tree.lengthen(node, hashes)
        holder.runs[node] += packed
    else:
        tree.hang(node)
        node.coverage_for_change(tier).full = bit
        node.members = bit
        holder.runs[node] = packed
    return count


def _append_block(
    tree: RadixTree, holder: Holder, place: tuple[Node, int], name: int, local_hash: PackedHashes
) -> bool:
    """Grow a leaf that is the rank's own by one device block, as decoding does.

    Returns whether the event qualified.
    """
    node, position = place
    edge, bit = node.edge, holder.bit
    if (
        node.full != bit
        or node.members != bit
        or node.children
        or node.lower is not None
        or node.orphaned
        or position * HASH_BYTES != len(edge)
        or len(edge) >= EDGE_BYTES_MAX
        or name in holder.where
    ):
        return False
    holder.where[name] = node
    holder.blocks[0] += 1
    holder.runs[node] += pack_name(name)
    node.edge = edge + local_hash
    tree.blocks += 1
    return True
