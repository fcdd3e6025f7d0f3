"""The number of distinct blocks that each slot holds for its active prompts, and their prefixes.

One path-compressed trie of sequence-hash chains is shared by all slots and reference-counted per
slot: a booking touches the nodes on its path, never single blocks, and compares whole edges in C.
Reservations, output blocks and prefill tokens live in `ledger.py`, the only caller, and sums of
weights in `decode_blocks.py`; `pricing/cost.py` turns shared prefixes into N.

Chained hashes never repeat, so a node normally accounts for all its blocks with one integer per
slot. `block_places.py` handles whatever else a client may send.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

from indexer.core.runs import common_blocks
from indexer.types import HASH_BYTES, PackedHashes
from select_service.core.ledger.block_places import BlockPlaces
from select_service.core.ledger.chain_nodes import ChainNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.ledger.chain_nodes import Repeat
    from select_service.core.ledger.decode_blocks import DecodeBlocks


class ActiveBlocks:
    """Reference-counted chains over slots, with the number of distinct blocks per slot.

    Complexities below are for a chain whose path has k nodes, with f blocks that are new to the
    trie.
    """

    __slots__ = (
        "__weakref__",
        "_places",
        "_weights",
        "blocks",
        "nodes",
        "root",
    )

    def __init__(self, weights: DecodeBlocks) -> None:
        self._weights = weights  # of the same slots; the ledger adds its output blocks there
        self.root = ChainNode(None, b"")  # the handle of the empty chain
        # of the root, not of us: a cycle would keep both alive
        self._places = BlockPlaces(partial(walk, self.root))
        self.nodes = 0
        self.blocks = 0  # blocks in the trie, by position

    @property
    def indexed(self) -> bool:
        """Whether the place of every value is recorded, because a client sends repeats."""
        return self._places.indexed

    # -- chains --------------------------------------------------------------------------------

    def acquire(self, chain: PackedHashes, slot: int) -> ChainNode:
        """Add a user of `chain` on `slot` and return its handle. O(k), plus O(f) in C."""
        node, position = self.root, 0
        while position < len(chain):
            first = chain[position : position + HASH_BYTES]
            child = node.children.get(first)
            if child is None:
                return self._grow(node, first, chain[position:], slot)
            if not chain.startswith(child.edge, position):
                child = self._split(child, common_blocks(child.edge, 0, chain, position))
            self._hold(child, slot)
            position += len(child.edge)
            node = child
        return node

    def release(self, end: ChainNode, slot: int) -> None:
        """Undo one `acquire`. O(k), plus the removal of unused blocks in C."""
        node = end
        while (parent := node.parent) is not None:
            # nearly all of them end like this
            if node.total == 1 and not node.faded and not node.repeats:
                self._weights.whole[slot] -= node.plain
                self._cut(node)
            else:
                self._let_go(node, slot)
                if not node.total:
                    self._cut(node)
                else:
                    self._join(node)
            node = parent

    def chain(self, end: ChainNode) -> PackedHashes:
        """Return the hashes of the chain that ends at this handle."""
        edges = [node.edge for node in _path(end)]
        edges.reverse()
        return b"".join(edges)

    def begins(self, first: bytes) -> bool:
        """Whether any active chain begins with this hash."""
        return first in self.root.children

    def shared_prefix(self, chain: PackedHashes) -> list[tuple[int, int]]:
        """Longest common prefix with any active chain, for every slot that has one.

        Returns:
            (blocks, mask of slots), blocks > 0 ascending, masks disjoint. O(k), whatever the number
            of slots and chains.
        """
        groups: list[tuple[int, int]] = []
        node, position = self.root, 0
        while position < len(chain):
            child = node.children.get(chain[position : position + HASH_BYTES])
            if child is None:
                break
            if position and (left_behind := node.mask ^ child.mask):
                groups.append((position // HASH_BYTES, left_behind))
            node = child
            if not chain.startswith(child.edge, position):
                position += HASH_BYTES * common_blocks(child.edge, 0, chain, position)
                break
            position += len(child.edge)
        if position:
            groups.append((position // HASH_BYTES, node.mask))
        return groups

    # -- weights -------------------------------------------------------------------------------

    def fade(self, end: ChainNode, slot: int, fraction: float) -> None:
        """Set the fraction of every block that only this acquired chain references on `slot`.

        References never increase downwards, so these are whole nodes at the end of the path. A
        repeat is exclusive if all its places on the slot are among them.
        """
        alone = list(takewhile(lambda node: node.refs[slot] == 1, _path(end)))
        places: Counter[Repeat] = Counter()
        for node in alone:
            self._weights.refade(node.faded, slot, node.plain, fraction)
            if node.repeats:
                places.update(node.repeats)
        for repeat, count in places.items():
            if count == repeat.held[slot]:
                self._weights.refade(repeat.faded, slot, 1, fraction)
        for node in alone:
            self._join(node)

    def _hold(self, node: ChainNode, slot: int) -> None:
        refs = node.refs.get(slot, 0)
        node.refs[slot] = refs + 1
        node.total += 1
        if refs:
            return
        node.mask |= 1 << slot
        self._weights.whole[slot] += node.plain
        for repeat in node.repeats or ():
            held = repeat.held.get(slot, 0)
            repeat.held[slot] = held + 1
            if not held:
                self._weights.whole[slot] += 1

    def _let_go(self, node: ChainNode, slot: int) -> None:
        node.total -= 1
        refs = node.refs[slot] - 1
        if refs:
            node.refs[slot] = refs
            return
        del node.refs[slot]
        node.mask ^= 1 << slot
        self._weights.add(slot, -node.plain, node.faded.pop(slot, 1.0))
        for repeat in node.repeats or ():
            held = repeat.held[slot] - 1
            if held:
                repeat.held[slot] = held
            else:
                del repeat.held[slot]
                self._weights.add(slot, -1, repeat.faded.pop(slot, 1.0))

    # -- the shape of the trie -----------------------------------------------------------------

    def _grow(self, parent: ChainNode, first: bytes, edge: PackedHashes, slot: int) -> ChainNode:
        """Add a node held by one slot."""
        node = ChainNode(parent, edge)
        blocks = node.plain
        self._places.enter(node)
        parent.children[first] = node
        self.nodes += 1
        self.blocks += blocks
        if node.repeats:
            self._hold(node, slot)
            return node
        node.refs[slot] = node.total = 1
        node.mask = 1 << slot
        self._weights.whole[slot] += blocks
        return node

    def _cut(self, node: ChainNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.edge[:HASH_BYTES]]
        self._places.leave(node)
        self.nodes -= 1
        self.blocks -= len(node.edge) // HASH_BYTES

    def _split(self, lower: ChainNode, blocks: int) -> ChainNode:
        """Move the first `blocks` blocks of a node into a new one above it; return the new one."""
        assert lower.parent is not None
        edge, cut = lower.edge, blocks * HASH_BYTES
        upper = ChainNode(lower.parent, edge[:cut])
        upper.refs = lower.refs.copy()
        upper.total, upper.mask = lower.total, lower.mask
        upper.faded = lower.faded.copy()
        lower.parent.children[edge[:HASH_BYTES]] = upper
        upper.children[edge[cut : cut + HASH_BYTES]] = lower
        lower.parent, lower.edge = upper, edge[cut:]
        self.nodes += 1
        self._places.split(upper, lower)
        return upper

    def _join(self, upper: ChainNode) -> None:
        """Undo a fork with one branch left, at which no chain ends: churn must not fragment."""
        if len(upper.children) != 1:
            return
        (lower,) = upper.children.values()
        if lower.total != upper.total or lower.faded != upper.faded:
            return
        assert upper.parent is not None
        upper.parent.children[upper.edge[:HASH_BYTES]] = lower
        lower.parent = upper.parent
        lower.edge = upper.edge + lower.edge
        upper.children.clear()  # leaves no cycle for the collector
        self.nodes -= 1
        self._places.join(upper, lower)

    # -- promises ------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert all invariants of the structure; O(everything)."""
        nodes = list(walk(self.root))
        for node in nodes:
            _check_node(node)
        assert self.nodes == len(nodes), "nodes are counted"
        assert self.blocks == sum(len(node.edge) for node in nodes) // HASH_BYTES
        self._places.check(nodes)


def walk(root: ChainNode) -> Iterator[ChainNode]:
    """Yield all nodes below one. O(nodes)."""
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _check_node(node: ChainNode) -> None:
    assert node.edge, "no empty runs"
    assert len(node.edge) % HASH_BYTES == 0
    assert node.refs, "no node without users"
    assert min(node.refs.values()) > 0
    assert node.total == sum(node.refs.values())
    assert node.mask == sum(1 << slot for slot in node.refs)
    assert node.faded.keys() <= node.refs.keys(), "a fraction dies with its block"
    assert 1.0 not in node.faded.values()
    below: Counter[int] = Counter()
    for first, child in node.children.items():
        assert child.parent is node
        assert child.edge.startswith(first)
        below.update(child.refs)
    assert all(node.refs[slot] >= count for slot, count in below.items()), "users pass downwards"
    if len(node.children) == 1 and below.total() == node.total:
        (child,) = node.children.values()
        assert child.faded != node.faded, "no fork without a reason"


def _path(end: ChainNode) -> Iterator[ChainNode]:
    """Yield the nodes of a chain from its end up, without the root."""
    node = end
    while node.parent is not None:
        yield node
        node = node.parent
