"""The path-compressed tree of block contents: find, create paths, split, tidy up, merge.

It moves runs of blocks and keeps every holder's books in step (`Holder.where`, `Holder.runs`).
`index.py` decides what a store or a removal means; `tiers.py` matches the tiers below the device on
the path that `find` returns.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from indexer.core.holder import Holder
from indexer.core.node import (
    EDGE_BYTES_MAX,
    NO_CHILDREN,
    Coverage,
    Node,
    OrphanRoot,
    all_ones,
    bits,
    leading_run,
)
from indexer.core.runs import common_blocks
from indexer.types import BASE_NAMESPACE, HASH_BYTES, Namespace, PackedHashes

ORPHANS_PER_DROP: Final = 64
"""Nodes dropped in one go when too many wait for parents, about 0.3 ms."""

Segment = tuple[Node, int, int]
"""A stretch of a path: node, first position in it, number of blocks."""

Place = tuple[Node, int]
"""A node and a position in it, in blocks."""

Group = tuple[int, int]
"""Number of matched blocks, mask of the holders that have them."""


class RadixTree:
    """The contents of all namespaces, ranks and tiers of one index."""

    def __init__(self) -> None:
        self.root = Node(b"", None, BASE_NAMESPACE)
        self.holders: list[Holder | None] = []  # by holder id
        self.live = 0  # mask of the holders that appear in answers
        self.orphan_roots: OrderedDict[OrphanRoot, None] = OrderedDict()  # oldest first
        self.dust: dict[Node, None] = {}  # nodes that may merge with their only child
        self.nodes = 0
        self.blocks = 0
        self.orphan_blocks = 0

    # ---- reading

    def find(self, hashes: PackedHashes, alive: int) -> tuple[list[Group], list[Node], int]:
        """Return the device groups among `alive` (blocks > 0), the nodes walked and the blocks.

        One dict look-up and one comparison per node, none per block. Groups are disjoint.
        """
        groups: list[Group] = []
        path: list[Node] = []
        node, at, end = self.root, 0, len(hashes)
        while at < end:
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            path.append(child)
            edge = child.edge
            kept = alive & child.full
            if hashes.startswith(edge, at):
                if kept != alive:
                    _leave(child, alive ^ kept, at, len(edge), groups)
                    alive = kept
                at += len(edge)
                node = child
                continue
            size = common_blocks(edge, 0, hashes, at) * HASH_BYTES
            if kept != alive:
                _leave(child, alive ^ kept, at, size, groups)
                alive = kept
            at += size
            break
        if alive and at:
            groups.append((at // HASH_BYTES, alive))
        return groups, path, at // HASH_BYTES

    def follow(
        self, node: Node, offset: int, hashes: PackedHashes
    ) -> tuple[list[Segment], Node, int, int]:
        """Walk from a position as far as the content is known.

        Returns the segments, the node and position where the walk ended, and the bytes consumed.
        """
        segments: list[Segment] = []
        at, end = 0, len(hashes)
        while at < end:
            start = offset * HASH_BYTES
            if start == len(node.edge):
                child = node.children.get(hashes[at : at + HASH_BYTES])
                if child is None:
                    break
                node, offset = child, 0
                continue
            count = common_blocks(node.edge, start, hashes, at)
            if not count:
                break
            segments.append((node, offset, count))
            offset += count
            at += count * HASH_BYTES
        return segments, node, offset, at

    # ---- growing

    def make_path(
        self, node: Node, offset: int, hashes: PackedHashes, namespace: Namespace, holder: Holder
    ) -> list[Segment]:
        """Walk from a position, adding what is missing, and return where the blocks lie.

        The added blocks have no holder yet: the caller must cover them before all else.
        """
        segments, node, offset, done = self.follow(node, offset, hashes)
        if done < len(hashes):
            if offset < node.size:
                self.split(node, offset)
            rest = hashes[done:] if done else hashes
            self._append(segments, node, rest, namespace, holder)
        return segments

    def _append(
        self,
        segments: list[Segment],
        node: Node,
        hashes: PackedHashes,
        namespace: Namespace,
        holder: Holder,
    ) -> None:
        done = 0
        if self.is_own_leaf(node, holder) and len(node.edge) < EDGE_BYTES_MAX:
            size = node.size
            grown = hashes[: EDGE_BYTES_MAX - len(node.edge)]
            for coverage in node.tiers():
                coverage.lengthen(all_ones(size))
            self.lengthen(node, grown)
            done = len(grown)
            segments.append((node, size, done // HASH_BYTES))
        while done < len(hashes):
            edge = hashes[done : done + EDGE_BYTES_MAX]
            node = Node(edge, node, node.namespace if node.edge else namespace)
            self.hang(node)
            segments.append((node, 0, len(edge) // HASH_BYTES))
            done += len(edge)

    def hang(self, node: Node) -> None:
        """Attach a new leaf to its parent."""
        assert node.parent is not None, "leaves are made for a place"
        node.parent.adopt(node)
        self.nodes += 1
        self.count_blocks(node, len(node.edge) // HASH_BYTES)

    def move_subtree(self, orphan: Node, node: Node, offset: int) -> bool:
        """Move an orphaned subtree behind a position; False if its content already begins there."""
        first = orphan.edge[:HASH_BYTES]
        if offset < node.size:
            if node.edge.startswith(first, offset * HASH_BYTES):
                return False
            self.split(node, offset)
        if first in node.children:
            return False
        node.adopt(orphan)
        self.note_dust(orphan)
        if node.orphaned and node.namespace == orphan.namespace:
            # from one orphan root to another: O(1), or a chain announced backwards would be O(n²)
            return True
        pending = [orphan]
        while pending:
            moved = pending.pop()
            moved.namespace = node.namespace
            if not node.orphaned:
                moved.orphaned = False
                self.orphan_blocks -= moved.size
            pending.extend(moved.children.values())
        return True

    @staticmethod
    def is_own_leaf(node: Node, holder: Holder) -> bool:
        """Say whether the node may grow in place without affecting anybody else."""
        return node.children is NO_CHILDREN and node.members == holder.bit and bool(node.edge)

    def lengthen(self, node: Node, hashes: PackedHashes) -> None:
        """Add blocks to an edge; the caller keeps the coverage right."""
        node.edge += hashes
        self.count_blocks(node, len(hashes) // HASH_BYTES)

    def count_blocks(self, node: Node, count: int) -> None:
        """Count blocks added to or removed from a node."""
        self.blocks += count
        if node.orphaned:
            self.orphan_blocks += count

    def split(self, node: Node, at: int) -> None:
        """Cut an edge; the node keeps the upper part.

        The upper part keeps its identity even where the lower one is longer and has more engine
        hashes to re-file: a dump in progress may hold the node and must meet parents first.
        """
        size = node.size
        lower = Node(node.edge[at * HASH_BYTES :], node, node.namespace)
        lower.children = node.children
        for child in lower.children.values():
            child.parent = lower
        node.children = NO_CHILDREN
        node.edge = node.edge[: at * HASH_BYTES]
        node.adopt(lower)
        self.nodes += 1
        Coverage.split(node, at, size, lower)
        if node.lower is not None:
            lower.lower = (Coverage(), Coverage(), Coverage())
            for above, below in zip(node.lower, lower.lower, strict=True):
                above.split(at, size, below)
                # An empty tier may be left on either side; the next removal tidies it.
            node.drop_empty_tiers()
            lower.drop_empty_tiers()
        node.split_aliases(at, lower)
        halves: dict[bytes, tuple[bytes, bytes]] = {}
        for holder_id in bits(node.members):
            self._split_run(self.holder(holder_id), node, at, lower, halves)

    @staticmethod
    def _split_run(
        holder: Holder, node: Node, at: int, lower: Node, halves: dict[bytes, tuple[bytes, bytes]]
    ) -> None:
        """Split a holder's run; `halves` has those of runs split before, which it may share."""
        run = holder.runs[node]
        if run not in halves:
            halves[run] = run[: at * HASH_BYTES], run[at * HASH_BYTES :]
        holder.runs[node], tail = halves[run]
        held = lower.held_anywhere(holder.holder_id)
        if held or not holder.runs.keys().isdisjoint(lower.children.values()):
            holder.runs[lower] = tail
            lower.members |= holder.bit
            if held:
                holder.refile(holder.names_held(lower, held), lower)

    def holder(self, holder_id: int) -> Holder:
        """Return the holder of a bit in a mask."""
        holder = self.holders[holder_id]
        assert holder is not None, "masks name only holders that exist"
        return holder

    # ---- shrinking

    def left(self, holder: Holder, node: Node) -> None:
        """The holder no longer holds anything in `node`: drop its names that nothing needs.

        They stay while the holder has blocks right below, because they locate these in the chain.
        """
        current: Node | None = node
        runs = holder.runs
        while current is not None and current in runs:
            if current.held_anywhere(holder.holder_id):
                return
            if not runs.keys().isdisjoint(current.children.values()):
                return
            del runs[current]
            current.members ^= holder.bit
            current = current.parent

    def tidy(self, node: Node) -> None:
        """Cut the unheld tail of a leaf; remove leaf and parents if nothing is left."""
        while node.parent is not None and node.children is NO_CHILDREN:
            reach = 0
            for coverage in node.tiers():
                reach = max(reach, coverage.reach(all_ones(node.size)))
            if reach:
                self._trim(node, reach)
                return
            node = self._unlink(node)
        if node.edge and node.parent is not None:
            self.dust[node] = None
            if node.parent.edge:
                self.dust[node.parent] = None
        elif isinstance(node, OrphanRoot) and not node.children and node in self.orphan_roots:
            self.expect_no_more(node)

    def _trim(self, node: Node, reach: int) -> None:
        cut = node.size - reach
        if not cut:
            return
        node.edge = node.edge[: reach * HASH_BYTES]
        self.count_blocks(node, -cut)
        for coverage in node.tiers():
            coverage.shorten(all_ones(reach))
        for holder_id in bits(node.members):
            runs = self.holder(holder_id).runs
            runs[node] = runs[node][: reach * HASH_BYTES]

    def _unlink(self, node: Node) -> Node:
        parent = node.parent
        assert parent is not None, "a root is never unlinked"
        self.nodes -= 1
        self.count_blocks(node, -node.size)
        parent.disown(node)
        self.dust.pop(node, None)
        return parent

    def expel(self, holder: Holder, node: Node) -> None:
        """Remove a holder from a node, whatever it holds there; `Holder.where` is unchanged."""
        ones = all_ones(node.size)
        for coverage in node.tiers():
            coverage.put(holder.holder_id, 0, ones)
        node.drop_empty_tiers()
        if node.aliases is not None:
            node.aliases.pop(holder.holder_id, None)
            node.aliases = node.aliases or None
        holder.runs.pop(node, None)
        node.members &= ~holder.bit
        if node.parent is not None:
            self.left(holder, node.parent)
        self.tidy(node)

    def place_behind(self, holder: Holder, parent: int | None) -> Place | None:
        """Return the place behind `parent`; None if the rank knows no such block."""
        if parent is None:
            return self.root, 0
        place = holder.place_of(parent)
        if place is not None:
            return place[0], place[1] + 1
        root = holder.waiting.get(parent)
        return None if root is None else (root, 0)

    def expect(self, holder: Holder, parent_hash: int, namespace: Namespace) -> OrphanRoot:
        """Begin to wait for a block that a holder has not announced."""
        root = holder.waiting[parent_hash] = OrphanRoot(holder.holder_id, parent_hash, namespace)
        self.orphan_roots[root] = None
        return root

    def expect_no_more(self, root: OrphanRoot) -> None:
        """Remove an orphan root behind which nothing waits any more."""
        del self.orphan_roots[root]
        del self.holder(root.holder_id).waiting[root.parent_hash]

    def drop_orphans(self, root: OrphanRoot) -> int:
        """Forget some of what waits behind `root`, leaves first; return the number of blocks.

        Visits a bounded number of nodes: hundreds of thousands may wait behind one lost parent.
        """
        holder = self.holder(root.holder_id)
        before = self.orphan_blocks
        node: Node = root
        for _ in range(ORPHANS_PER_DROP):
            while node.children:
                # the youngest: a dict that loses its oldest entries is scanned from its start each
                # time
                node = next(reversed(node.children.values()))
            for name in holder.names_held(node, all_ones(node.size)):
                del holder.where[name]
                holder.forget(name)
            for tier in range(len(holder.blocks)):
                holder.blocks[tier] -= node.held_on(holder.holder_id, tier).bit_count()
            above = node.parent
            self.expel(holder, node)
            if root not in self.orphan_roots:
                break
            # continue from there, so that a long chain is not walked again; parents may be gone
            # with their child
            node = above if above is not None and above.parent is not None else root
        return before - self.orphan_blocks

    def dissolve(self, node: Node) -> None:
        """Remove a node from the books, ignoring its neighbours (they go as well)."""
        self.nodes -= 1
        self.count_blocks(node, -node.size)
        self.dust.pop(node, None)
        node.parent, node.members = None, 0

    # ---- merging

    def note_dust(self, node: Node) -> None:
        """Note a node that looks like the continuation of its parent, for a later merge."""
        above = node.parent
        if (
            above is not None
            and len(above.children) == 1
            and above.full == node.full
            and len(above.edge) + len(node.edge) <= EDGE_BYTES_MAX
            and above.edge
        ):
            self.dust[above] = None

    def merge_dust(self) -> int:
        """Merge a node with its only child if both are held alike; return the cost in nodes."""
        node, _ = self.dust.popitem()
        if node.parent is None or len(node.children) != 1:
            return 1
        child = next(iter(node.children.values()))
        if len(node.edge) + len(child.edge) > EDGE_BYTES_MAX or not node.held_like(child):
            return 1
        size = node.size
        members = [self.holder(holder_id) for holder_id in bits(child.members)]
        filed = [holder.names_held(child, all_ones(child.size)) for holder in members]
        node.children = child.children
        for grandchild in node.children.values():
            grandchild.parent = node
        node.edge += child.edge
        node.merge_aliases(size, child)
        for holder, names in zip(members, filed, strict=True):
            holder.write(node, size, holder.runs.pop(child))
            holder.refile(names, node)
        child.parent, child.members, child.children = None, 0, NO_CHILDREN
        self.dust.pop(child, None)
        self.dust[node] = None
        self.nodes -= 1
        return 1 + len(members)


def _leave(node: Node, leaving: int, at: int, size: int, groups: list[Group]) -> None:
    """Record how far holders that do not hold the whole node got; `at`, `size` in bytes."""
    if node.patterns is not None:
        for positions, holders in node.patterns.items():
            some = leaving & holders
            if some:
                matched = (at + min(leading_run(positions) * HASH_BYTES, size)) // HASH_BYTES
                if matched:
                    groups.append((matched, some))
                leaving ^= some
    if leaving and at:
        groups.append((at // HASH_BYTES, leaving))
