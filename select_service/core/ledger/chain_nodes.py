"""The nodes of the trie of active chains, and the values that stand at several of them.

Plain records: `active_blocks.py` makes nodes and counts who holds them, `block_places.py` knows
which values repeat.
"""

from __future__ import annotations

from indexer.types import HASH_BYTES, PackedHashes


class ChainNode:
    """A run of blocks between two forks of the trie; the last node of a chain is its handle.

    Splitting keeps the identity of the lower part, so a handle stays valid while it is acquired.
    """

    __slots__ = (
        "children",
        "edge",
        "faded",
        "mask",
        "parent",
        "plain",
        "refs",
        "repeats",
        "run",
        "total",
    )

    def __init__(self, parent: ChainNode | None, edge: PackedHashes) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[bytes, ChainNode] = {}  # by the first hash of the child's edge
        self.refs: dict[int, int] = {}  # slot → acquired chains that pass or end here
        self.total = 0  # sum of refs
        self.mask = 0  # slots in refs, as bits
        self.plain = len(edge) // HASH_BYTES  # blocks whose value occurs nowhere else
        self.faded: dict[int, float] = {}  # slot → fraction of the plain blocks, if not 1
        self.repeats: set[Repeat] | None = None  # the other values of this edge
        self.run: tuple[int, ...] | None = None  # the edge's values, as entered by `block_places`


class Repeat:
    """A value with several places, or with a different fraction from that of its only node."""

    __slots__ = ("faded", "held", "homes", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.homes: dict[ChainNode, int] = {}  # node → how often its edge has the value
        self.held: dict[int, int] = {}  # slot → homes that this slot holds
        self.faded: dict[int, float] = {}  # slot → fraction, if not 1
