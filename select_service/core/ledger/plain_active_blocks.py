"""The plain form of `ActiveBlocks` and its nodes in `_ledger.pyx`: same names, same answers.

`active_blocks.py` says what they are and chooses one form.
"""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import TYPE_CHECKING

from msgspec import Struct, field

from indexer.core.node import bits
from indexer.core.packing import pack_u64, unpack_native
from indexer.core.runs import common_blocks
from indexer.types import HASH_BYTES, PackedHashes
from select_service.core.ledger.exact_sums import rounded_sum, units

if TYPE_CHECKING:
    from collections.abc import Iterator

# How often each generation has every block value, and the weights of its distinct values. D counts
# values, not positions: a value that a client repeats, or sends at other positions, costs what any
# other costs.


class _GenerationBlocks:
    """What one generation has."""

    __slots__ = ("counts", "faded", "weights", "whole")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()  # by value
        self.weights: dict[int, float] = {}  # by value, if not 1
        self.whole = 0  # blocks of weight 1, outputs included
        self.faded = 0  # the sum of all other weights, in units of 2^-1074


class BlockCounts:
    """The values of every generation, entered and removed in packed runs. O(1) for each value."""

    __slots__ = ("_generations",)

    def __init__(self) -> None:
        self._generations: list[_GenerationBlocks] = []

    def ensure(self, generations: int) -> None:
        """Make room for generations below a number; never shrinks."""
        self._generations += [
            _GenerationBlocks() for _ in range(len(self._generations), generations)
        ]

    def enter(self, generation: int, run: PackedHashes) -> None:
        """Add the values of a run; new ones weigh 1."""
        here = self._generations[generation]
        before = len(here.counts)
        here.counts.update(unpack_native(run))
        here.whole += len(here.counts) - before

    def leave(self, generation: int, run: PackedHashes) -> None:
        """Remove the values of a run that was entered; the weight of a value goes with it."""
        here = self._generations[generation]
        for value in unpack_native(run):
            if left := here.counts.pop(value) - 1:
                here.counts[value] = left
            else:
                self.add(generation, -1, here.weights.pop(value, 1.0))
        if not here.counts:  # the tables of dicts that were large stay large
            here.counts, here.weights = Counter(), {}

    def count(self, generation: int) -> int:
        """Return D: the sum of the weights, rounded half up. O(1)."""
        return rounded_sum(self._generations[generation].whole, self._generations[generation].faded)

    def add(self, generation: int, blocks: int, weight: float = 1.0) -> None:
        """Add output blocks, which have no value (if negative: remove them). O(1)."""
        if weight == 1.0:
            self._generations[generation].whole += blocks
        else:
            self._generations[generation].faded += blocks * units(weight)

    def fade(self, generation: int, runs: list[PackedHashes], weight: float) -> None:
        """Set the weight of every value that the generation has only in these runs, all entered."""
        here = self._generations[generation]
        own = Counter(value for run in runs for value in unpack_native(run))
        for value, count in own.items():
            if count == here.counts[value]:
                self.add(generation, -1, here.weights.pop(value, 1.0))
                self.add(generation, 1, weight)
                if weight != 1.0:
                    here.weights[value] = weight

    def weights(self, generation: int, run: PackedHashes) -> dict[int, float]:
        """Return the weights that are not 1, by value, of the values of an entered run."""
        weights = self._generations[generation].weights
        return {value: weights[value] for value in unpack_native(run) if value in weights}


class ChainNode(Struct, eq=False):
    """A run of blocks between two forks of the trie; the last node of a chain is its handle.

    Splitting keeps the identity of the lower part, so a handle stays valid while it is acquired.
    """

    parent: ChainNode | None
    edge: PackedHashes
    children: dict[bytes, ChainNode] = field(default_factory=dict)  # by their first hash
    refs: dict[int, int] = field(default_factory=dict)  # generation → chains that pass or end here
    total: int = 0  # sum of refs
    mask: int = 0  # generations in refs, as bits


class ActiveBlocks:
    """Reference-counted chains over generations, with the number of distinct blocks per generation.

    Complexities below are for a chain whose path has k nodes, with f blocks that no request in the
    generation has at that position.
    """

    __slots__ = ("__weakref__", "blocks", "counts", "nodes", "root")

    def __init__(self) -> None:
        self.counts = BlockCounts()
        """Of the values of every generation; the ledger adds its output blocks there."""
        self.root = ChainNode(None, b"")
        """The handle of the empty chain; its children begin all active chains."""
        self.nodes = 0
        self.blocks = 0
        """Blocks of all nodes, once per generation that holds them: the work to remove them."""

    # -- chains --------------------------------------------------------------------------------

    def acquire(self, chain: PackedHashes, generation: int) -> ChainNode:
        """Add a user of `chain` in a generation and return its handle. O(k), plus O(f) in C."""
        node, position = self.root, 0
        while position < len(chain):
            first = chain[position : position + HASH_BYTES]
            child = node.children.get(first)
            if child is None:
                node.children[first] = child = ChainNode(node, chain[position:])
                self.nodes += 1
            elif not chain.startswith(child.edge, position):
                child = self._split(child, common_blocks(child.edge, 0, chain, position))
            refs = child.refs.get(generation, 0)
            child.refs[generation] = refs + 1
            child.total += 1
            if not refs:
                child.mask |= 1 << generation
                self.counts.enter(generation, child.edge)
                self.blocks += len(child.edge) // HASH_BYTES
            position += len(child.edge)
            node = child
        return node

    def release(self, end: ChainNode, generation: int) -> None:
        """Undo one `acquire`. O(k), plus O(f) in C."""
        node = end
        while (parent := node.parent) is not None:
            refs = node.refs[generation]
            node.total -= 1
            if refs > 1:
                node.refs[generation] = refs - 1
            else:
                self.counts.leave(generation, node.edge)
                self.blocks -= len(node.edge) // HASH_BYTES
                del node.refs[generation]
                node.mask ^= 1 << generation
            if not node.total:
                del parent.children[node.edge[:HASH_BYTES]]
                self.nodes -= 1
            elif len(node.children) == 1:
                self._join(node)
            node = parent

    def chain(self, end: ChainNode) -> PackedHashes:
        """Return the hashes of the chain that ends at this handle."""
        edges = [node.edge for node in _path(end)]
        edges.reverse()
        return b"".join(edges)

    def shared_prefix(self, chain: PackedHashes) -> list[tuple[int, int]]:
        """Longest common prefix with any active chain, for every generation that has one.

        Returns:
            (blocks, mask of generations), blocks > 0 ascending, masks disjoint. O(k), whatever the
            number of generations and chains.
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

    def fade(self, end: ChainNode, generation: int, weight: float) -> None:
        """Set the weight of every block that only this acquired chain has in the generation.

        References never increase downwards, so the nodes it has alone are whole nodes at the end of
        its path; a block is its own if the generation has it nowhere but there. O(blocks of these
        nodes).
        """
        alone = takewhile(lambda node: node.refs[generation] == 1, _path(end))
        self.counts.fade(generation, [node.edge for node in alone], weight)

    # -- the shape of the trie -----------------------------------------------------------------

    def _split(self, lower: ChainNode, blocks: int) -> ChainNode:
        """Move the first `blocks` blocks of a node into a new one above it; return the new one."""
        assert lower.parent is not None
        edge, cut = lower.edge, blocks * HASH_BYTES
        upper = ChainNode(lower.parent, edge[:cut])
        upper.refs = lower.refs.copy()
        upper.total, upper.mask = lower.total, lower.mask
        lower.parent.children[edge[:HASH_BYTES]] = upper
        upper.children[edge[cut : cut + HASH_BYTES]] = lower
        lower.parent, lower.edge = upper, edge[cut:]
        self.nodes += 1
        return upper

    def _join(self, upper: ChainNode) -> None:
        """Undo a fork with one branch left, at which no chain ends: churn must not fragment."""
        (lower,) = upper.children.values()
        if lower.total != upper.total:
            return
        assert upper.parent is not None
        upper.parent.children[upper.edge[:HASH_BYTES]] = lower
        lower.parent = upper.parent
        lower.edge = upper.edge + lower.edge
        upper.children.clear()  # leaves no cycle for the collector
        self.nodes -= 1


def _path(end: ChainNode) -> Iterator[ChainNode]:
    """Yield the nodes of a chain from its end up, without the root."""
    node = end
    while node.parent is not None:
        yield node
        node = node.parent


def positions_of(mask: int) -> bytes:
    """Return the positions of the bits of a mask, ascending: packed, eight bytes each."""
    return pack_u64(list(bits(mask)))
