"""Every invariant of the index as an assertion with its text; for tests, never on the hot path.

`KvIndex.check` runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.node import (
    EDGE_BLOCKS_MAX,
    NO_CHILDREN,
    Coverage,
    Node,
    OrphanRoot,
    all_ones,
    bits,
)
from indexer.core.packing import numbers_in
from indexer.types import HASH_BYTES, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.holder import Holder
    from indexer.core.radix_tree import RadixTree

_LOCATED_ONE_BY_ONE: Final = 16
"""Runs up to this length are searched name by name. In a longer one a search costs microseconds per
name; and if every position is held and no name occurs twice, only the right one can be found."""


def audit(tree: RadixTree, holders: Sequence[Holder], retired: Sequence[Holder]) -> None:
    """Assert that tree, coverage and books agree. O(everything)."""
    nodes = _audit_shape(tree)
    for node in nodes:
        _audit_coverage(tree, node)
        _audit_aliases(tree, node)
    for holder in holders:
        _audit_books(tree, holder, nodes)
        _audit_counts(holder)
        if holder.limiting is not None:
            holder.limiting.check()
    _audit_orphans(tree, holders, retired)
    assert not NO_CHILDREN, "the dict that all leaves share stays empty"
    assert all(node.parent is not None and node in nodes for node in tree.dust), (
        "only nodes of the tree wait for a merge"
    )


def audit_masks(tree: RadixTree, holders: Sequence[Holder], *, below: int, unproven: int) -> None:
    """Assert that the masks of an index speak of its attached ranks."""
    assert tree.live | unproven == sum(holder.bit for holder in holders), (
        "exactly the attached ranks are live, or wait to be proven"
    )
    assert not tree.live & unproven, "what is not proven is not seen"
    for holder in holders:
        assert not any(holder.blocks[1:]) or (below | unproven) & holder.bit, (
            "holders below the device are asked there"
        )


def _audit_shape(tree: RadixTree) -> dict[Node, None]:
    nodes: dict[Node, None] = {}
    orphan_blocks = 0
    for root in (tree.root, *tree.orphan_roots):
        assert root.edge == b"", "a root stands before all blocks"
        assert root.parent is None, "a root has no parent"
        assert not root.everyone() | root.members, "a root has no holder"
        pending = list(root.children.items())
        assert all(child.parent is root for _, child in pending), "children know their root"
        while pending:
            key, node = pending.pop()
            assert node not in nodes, "each node hangs in one place"
            nodes[node] = None
            assert 0 < node.size <= EDGE_BLOCKS_MAX, "edges are neither empty nor too long"
            assert len(node.edge) % HASH_BYTES == 0, "edges are whole blocks"
            assert node.edge.startswith(key), "a child is filed under its first block"
            assert node.orphaned == root.orphaned, "orphans and matchable blocks do not mix"
            for child in node.children.values():
                assert child.parent is node, "children know their parent"
                assert child.namespace == node.namespace, "children inherit the namespace"
            if not node.children:
                assert node.children is NO_CHILDREN, "leaves share one empty dict"
                reach = max(c.reach(all_ones(node.size)) for c in node.tiers())
                assert reach == node.size, "each leaf's last block has a holder"
            orphan_blocks += node.size * node.orphaned
            pending.extend(node.children.items())
    assert len(nodes) == tree.nodes, "nodes are counted"
    assert sum(node.size for node in nodes) == tree.blocks, "blocks are counted"
    assert orphan_blocks == tree.orphan_blocks, "orphaned blocks are counted"
    return nodes


def _audit_coverage(tree: RadixTree, node: Node) -> None:
    ones = all_ones(node.size)
    everyone = 0
    for coverage in node.tiers():
        _audit_patterns(coverage, ones)
        everyone |= coverage.everyone()
    assert everyone & ~node.members == 0, "holders are members"
    for holder_id in bits(node.members):
        holder = tree.holders[holder_id]
        assert holder is not None, "members exist"
        assert node in holder.runs, "members have names for the node"
        assert len(holder.runs[node]) <= len(node.edge), "names do not reach beyond the edge"
    if node.lower is not None:
        assert any(c.full or c.partial for c in node.lower), "unused tiers are let go"


def _audit_patterns(coverage: Coverage, ones: int) -> None:
    assert (coverage.partial is None) == (coverage.patterns is None), "both or none"
    assert coverage.partial != {}, "nothing is kept without holders"
    seen: dict[int, int] = {}
    for holder_id, positions in (coverage.partial or {}).items():
        assert 0 < positions < ones, "a part is neither nothing nor everything"
        assert not coverage.full >> holder_id & 1, "no holder holds in full and in part"
        seen[positions] = seen.get(positions, 0) | 1 << holder_id
    assert seen == (coverage.patterns or {}), "patterns group the holders of parts"


def _audit_aliases(tree: RadixTree, node: Node) -> None:
    assert node.aliases != {}, "nothing is kept for no alias"
    for holder_id, places in (node.aliases or {}).items():
        assert places, "nothing is kept for no alias"
        holder = tree.holder(holder_id)
        for position, names in places.items():
            assert len(names) > 1, "a single name is no alias"
            tiers = 0
            for name, on in names.items():
                assert on, "each name holds the position on some tier"
                tiers |= on
                assert not tree.live & holder.bit or holder.where[name] is node, "names are filed"
            for tier in Tier:
                held = node.held_on(holder_id, tier) >> position & 1
                assert held == tiers >> tier & 1, "a position is covered while a name holds it"


def _audit_books(tree: RadixTree, holder: Holder, nodes: dict[Node, None]) -> None:
    me, where = holder.holder_id, holder.where.get
    assert tree.holders[me] is holder, "holders are found by their id"
    filed = 0
    blocks = [0] * len(Tier)
    for node, run in holder.runs.items():
        assert node in nodes, "books speak of nodes in the tree"
        assert node.members & holder.bit, "nodes know which holders name them"
        held = node.held_anywhere(me)
        assert held or any(child in holder.runs for child in node.children.values()), (
            "old names stay only above blocks that are held"
        )
        for tier in Tier:
            blocks[tier] += node.held_on(me, tier).bit_count()
        assert held.bit_length() * HASH_BYTES <= len(run), "every held block has a name"
        names = numbers_in(run)
        places = node.names_at(me) or {}
        if len(names) > _LOCATED_ONE_BY_ONE and not places and held == all_ones(len(names)):
            assert len(set(names)) == len(names), "each name has one position"
            assert holder.where.is_filed(names, node), "held names are filed for their node"
            for position in (0, len(names) - 1):
                assert holder.locate(node, names[position]) == position, "and found there"
            filed += len(names)
            continue
        for position, name in enumerate(names):
            if held >> position & 1:
                called = places.get(position, {name: 0})
                filed += len(called)
                for each in called:
                    assert where(each) is node, "held names are filed for their node"
                    assert holder.locate(node, each) == position, "and found at their position"
    assert filed == len(holder.where), "no name is filed for a block that is not held"
    assert blocks == holder.blocks, "held blocks are counted per tier"


def _audit_counts(holder: Holder) -> None:
    for counts in holder.counts:
        if counts is None:
            continue
        for name, copies in counts.copies.items():
            assert name in holder.where, "only held blocks are counted"
            assert copies > 0 or (copies == -1 and name in counts.foreign), (
                "counts never go below zero"
            )
        for name, groups in counts.foreign.items():
            assert name in holder.where, "only held blocks are counted"
            assert groups, "no count, no entry"
            assert all(n > 0 for n in groups.values()), "counts never go below zero"
            assert holder.home not in groups, "the home group is counted apart"


def _audit_orphans(tree: RadixTree, holders: Sequence[Holder], retired: Sequence[Holder]) -> None:
    roots: dict[OrphanRoot, None] = {}
    for holder in (*holders, *retired):
        for parent_hash, root in holder.waiting.items():
            roots[root] = None
            assert root.children, "something waits behind every orphan root"
            assert root.parent_hash == parent_hash, "orphans wait for one block"
            assert root.holder_id == holder.holder_id, "orphans belong to one rank"
            node = holder.where.get(parent_hash)
            while node is not None and node.parent is not None:
                node = node.parent
            is_spared = holder in retired or parent_hash in holder.late  # being healed
            assert node is None or node is root or is_spared, (
                "nothing waits for a block that is there"
            )
    assert roots.keys() == tree.orphan_roots.keys(), "each orphan root has its holder"
