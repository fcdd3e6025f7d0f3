"""One node of the radix tree: a run of blocks, and which holder holds which of them.

Bits only: sets of holders and sets of positions are Python ints. `holder.py` knows what a holder's
engine calls the blocks, `radix_tree.py` how nodes are connected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.types import HASH_BYTES, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

EDGE_BLOCKS_MAX: Final = 512
"""Longest edge: keeps position masks at 64 bytes and an append's copy at 4 KiB."""

EDGE_BYTES_MAX: Final = EDGE_BLOCKS_MAX * HASH_BYTES
"""The same limit in bytes."""

LOWER_TIERS: Final = (Tier.HOST_PINNED, Tier.DISK, Tier.EXTERNAL)


_ALL_ONES: Final = tuple((1 << count) - 1 for count in range(EDGE_BLOCKS_MAX + 1))
# a table, because this is called all the time


def all_ones(count: int) -> int:
    """Return the mask of the first `count` positions."""
    return _ALL_ONES[count]


def leading_run(positions: int) -> int:
    """Return the number of consecutive set positions from 0 on."""
    free = ~positions
    return (free & -free).bit_length() - 1


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Coverage:
    """Which holders hold which positions of a node on one tier.

    `full` is the mask of holders that hold every position. The rest is kept twice: `partial`
    answers for one holder, `patterns` lets a walk treat equal holders as one (a system prompt
    that a thousand ranks hold up to the same block is one entry). Both are None when empty.
    """

    __slots__ = ("full", "partial", "patterns")

    def __init__(self) -> None:
        self.full = 0
        self.partial: dict[int, int] | None = None  # holder id → positions
        self.patterns: dict[int, int] | None = None  # positions → mask of holders

    def held(self, holder_id: int, ones: int) -> int:
        """Return the positions that the holder holds; `ones` is the mask of all positions."""
        if self.full >> holder_id & 1:
            return ones
        return 0 if self.partial is None else self.partial.get(holder_id, 0)

    def put(self, holder_id: int, positions: int, ones: int) -> None:
        """Set the positions that the holder holds."""
        bit = 1 << holder_id
        partial, patterns = self.partial, self.patterns
        if self.full & bit:
            self.full ^= bit
        elif partial is not None and patterns is not None:
            old = partial.pop(holder_id, 0)
            if old:
                rest = patterns.pop(old) ^ bit
                if rest:
                    patterns[old] = rest
        if positions == ones:
            self.full |= bit
        elif positions:
            if partial is None or patterns is None:
                partial = self.partial = {}
                patterns = self.patterns = {}
            partial[holder_id] = positions
            patterns[positions] = patterns.get(positions, 0) | bit
            return
        if not partial:
            self.partial = self.patterns = None

    def everyone(self) -> int:
        """Return the mask of holders of at least one position."""
        mask = self.full
        if self.patterns is not None:
            for holders in self.patterns.values():
                mask |= holders
        return mask

    def reach(self, ones: int) -> int:
        """Return the number of positions up to the last one held by anybody."""
        if self.full:
            return ones.bit_length()
        return max(self.patterns or (0,)).bit_length()

    def lengthen(self, ones: int) -> None:
        """Adapt to a longer node: holders of all of `ones` now hold a part."""
        full, self.full = self.full, 0
        if full:
            if self.partial is None or self.patterns is None:
                self.partial, self.patterns = {}, {}
            self.patterns[ones] = self.patterns.get(ones, 0) | full
            for holder_id in bits(full):
                self.partial[holder_id] = ones

    def shorten(self, ones: int) -> None:
        """Adapt to a node without its unheld tail: holders of everything left are now full."""
        if self.partial is None or self.patterns is None:
            return
        whole = self.patterns.pop(ones, 0)
        if whole:
            self.full |= whole
            for holder_id in bits(whole):
                del self.partial[holder_id]
            if not self.patterns:
                self.partial = self.patterns = None

    def split(self, at: int, count: int, lower: Coverage) -> None:
        """Keep the first `at` of `count` positions; the rest goes to `lower`, empty so far."""
        lower.full = self.full
        partial, self.partial, self.patterns = self.partial, None, None
        upper_ones, lower_ones = all_ones(at), all_ones(count - at)
        for holder_id, positions in (partial or {}).items():
            self.put(holder_id, positions & upper_ones, upper_ones)
            lower.put(holder_id, positions >> at, lower_ones)

    def same_all_over(self, other: Coverage) -> bool:
        """Say whether both nodes have the same holders, and each holds both in full."""
        return self.full == other.full and self.partial is None and other.partial is None


class Node(Coverage):
    """A run of blocks without a branch; also the coverage of its own device tier.

    The other tiers are rarer and live in `lower`. `members` is the mask of holders that have engine
    hashes for this node (see `Holder.runs`). A node that left the tree has no parent and no
    members.
    """

    __slots__ = (
        "aliases",
        "children",
        "edge",
        "lower",
        "members",
        "namespace",
        "orphaned",
        "parent",
    )

    def __init__(self, edge: bytes, parent: Node | None, namespace: Namespace) -> None:
        super().__init__()
        self.edge = edge
        self.parent = parent
        self.namespace = namespace
        self.children: dict[bytes, Node] = NO_CHILDREN
        self.lower: tuple[Coverage, Coverage, Coverage] | None = None
        self.members = 0
        # holder id → position → engine hash → mask of tiers. Only for positions for which a rank
        # has several names; all of those names are listed.
        self.aliases: dict[int, dict[int, dict[int, int]]] | None = None
        self.orphaned: bool = parent is not None and parent.orphaned

    @property
    def size(self) -> int:
        """Blocks on the edge."""
        return len(self.edge) // HASH_BYTES

    def coverage(self, tier: int) -> Coverage | None:
        """Return the tier's coverage; None if nothing is held there."""
        if not tier:
            return self
        return None if self.lower is None else self.lower[tier - 1]

    def coverage_for_change(self, tier: int) -> Coverage:
        """Return the tier's coverage, created on demand."""
        if not tier:
            return self
        if self.lower is None:
            self.lower = (Coverage(), Coverage(), Coverage())
        return self.lower[tier - 1]

    def tiers(self) -> tuple[Coverage, ...]:
        """Return the coverages that exist, device first."""
        return (self,) if self.lower is None else (self, *self.lower)

    def held_on(self, holder_id: int, tier: int) -> int:
        """Return the positions that the holder holds on one tier."""
        coverage = self.coverage(tier)
        return 0 if coverage is None else coverage.held(holder_id, all_ones(self.size))

    def tiers_of(self, holder_id: int, position: int) -> int:
        """Return the mask of tiers on which the holder holds a position."""
        return sum(1 << tier for tier in Tier if self.held_on(holder_id, tier) >> position & 1)

    def held_anywhere(self, holder_id: int) -> int:
        """Return the positions that the holder holds on at least one tier."""
        ones = _ALL_ONES[len(self.edge) // HASH_BYTES]
        positions = self.held(holder_id, ones)
        if self.lower is not None:
            for coverage in self.lower:
                positions |= coverage.held(holder_id, ones)
        return positions

    def place_before(self, position: int) -> tuple[Node, int] | None:
        """Return the node and position before a position; None if a sequence begins there."""
        if position:
            return self, position - 1
        above = self.parent
        return None if above is None or not above.edge else (above, above.size - 1)

    def drop_empty_tiers(self) -> None:
        """Free the lower tiers' memory once nothing is held there."""
        if self.lower is not None and not any(c.full or c.partial for c in self.lower):
            self.lower = None

    def adopt(self, child: Node) -> None:
        """Attach `child` below this node."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[child.edge[:HASH_BYTES]] = child
        child.parent = self

    def disown(self, child: Node) -> None:
        """Detach `child`."""
        del self.children[child.edge[:HASH_BYTES]]
        if not self.children:
            self.children = NO_CHILDREN
        child.parent = None

    def held_like(self, child: Node) -> bool:
        """Say whether both nodes have the same holders on the same tiers, each holding all."""
        if self.members != child.members or (self.lower is None) != (child.lower is None):
            return False
        return all(a.same_all_over(b) for a, b in zip(self.tiers(), child.tiers(), strict=True))

    def split_aliases(self, at: int, lower: Node) -> None:
        """Keep the aliases of the first `at` positions; give the rest to `lower`."""
        everything, self.aliases = self.aliases or {}, None
        for holder_id, places in everything.items():
            for position, names in places.items():
                if position < at:
                    self.put_names(holder_id, position, names)
                else:
                    lower.put_names(holder_id, position - at, names)

    def merge_aliases(self, size: int, child: Node) -> None:
        """Take over the aliases of a node that begins `size` positions further down."""
        for holder_id, places in (child.aliases or {}).items():
            for position, names in places.items():
                self.put_names(holder_id, position + size, names)

    def put_names(self, holder_id: int, position: int, names: dict[int, int]) -> None:
        """Give a position several names."""
        if self.aliases is None:
            self.aliases = {}
        self.aliases.setdefault(holder_id, {})[position] = names

    def names_at(self, holder_id: int) -> dict[int, dict[int, int]] | None:
        """Return the holder's positions with several engine hashes, if any."""
        return None if self.aliases is None else self.aliases.get(holder_id)


class OrphanRoot(Node):
    """Stands for an unannounced block; the runs stored behind it wait here."""

    __slots__ = ("holder_id", "parent_hash")

    def __init__(self, holder_id: int, parent_hash: int, namespace: Namespace) -> None:
        super().__init__(b"", None, namespace)
        self.holder_id = holder_id
        self.parent_hash = parent_hash
        self.orphaned = True


NO_CHILDREN: Final[dict[bytes, Node]] = {}
"""Shared by all leaves, never written."""
