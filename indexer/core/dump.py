"""The index as a portable list of events, in the reference's shape.

The device tier comes first, parents before children, one event per run and rank; then the lower
tiers, one event per block. The walk is lazy and the index may change between two events: each node
is read once, in one go, and its parts are immutable values. `dump_reader.py` reads them back.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from msgspec import UNSET, Raw, Struct, UnsetType

from indexer.core.node import Node, OrphanRoot, bits, leading_run
from indexer.core.packing import unpack_u64
from indexer.types import HASH_BYTES, Namespace, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.holder import Holder
    from indexer.core.radix_tree import RadixTree

NODES_PER_STEP: Final = 64
"""Nodes visited between two yields, at some 3 µs each; most have nothing on the lower tiers."""

_NULL: Final = Raw(b"null")


class DumpBlock(Struct, frozen=True):
    """One block: its engine's name for it and the hash of its content."""

    block_hash: int
    tokens_hash: int
    mm_extra_info: Raw = _NULL  # media are already part of tokens_hash


class DumpGroups(Struct, frozen=True):
    """Blocks in cache groups that limit what can be reused, see `cache_groups.GroupRule`."""

    groups: list[int]
    blocks: int
    stride: int
    block_hashes: list[int]
    without_full_attention: bool | UnsetType = UNSET  # whether the rank has no other groups


class DumpStored(Struct, frozen=True):
    """Consecutive blocks behind `parent_hash`.

    The namespace is our extension (importers ignore unknown keys). It is written if the blocks have
    one, so that children announced later are hashed like their parents.
    """

    blocks: list[DumpBlock]
    parent_hash: int | None = None
    start_position: Raw = _NULL
    lora_name: str | UnsetType = UNSET
    cache_salt: str | UnsetType = UNSET
    cache_groups: DumpGroups | UnsetType = UNSET  # ours as well; such an event has no blocks


class DumpRemoved(Struct, frozen=True):
    """Blocks that were removed; never dumped, but accepted on import."""

    block_hashes: list[int]


class DumpChange(Struct, frozen=True):
    """Exactly one of the two is set."""

    stored: DumpStored | UnsetType = UNSET
    removed: DumpRemoved | UnsetType = UNSET


class DumpKvEvent(Struct, frozen=True):
    """The event as its rank would have sent it."""

    data: DumpChange | Literal["cleared"]
    event_id: int = 0
    dp_rank: int = 0


TierName = Literal["device", "host_pinned", "disk", "external"]
_TIER_NAMES: Final[tuple[TierName, ...]] = get_args(TierName)
TIER_OF: Final = dict(zip(_TIER_NAMES, Tier, strict=True))


class DumpEvent(Struct, frozen=True):
    """One element of `events` in GET /dump."""

    worker_id: int
    event: DumpKvEvent
    storage_tier: TierName = "device"


_Run = tuple[int | None, list[DumpBlock]]


_Names = list[tuple[int, int]]
"""A rank's names for one position: (name, mask of the tiers that hold it under that name)."""


class _View(NamedTuple):
    """One holder's share of one node, frozen."""

    holder: Holder
    namespace: Namespace
    edge: bytes
    run: bytes
    on_tier: int  # positions held on the tier being dumped
    known: int  # positions held on any tier
    dumped: int  # leading positions that the device part of the dump contains
    aliases: dict[int, _Names]
    before: list[int | None]  # parent of the first block, as `parents` returns it

    def names(self, position: int, tier: Tier) -> list[int]:
        """Return the names under which the tier holds a position."""
        if position in self.aliases:
            return [name for name, tiers in self.aliases[position] if tiers >> tier & 1]
        return [_hash_at(self.run, position)]

    def parents(self, position: int) -> list[int | None]:
        """Return the parent of a position as a list of one; empty if it is unknown."""
        if not position:
            return self.before
        position -= 1
        if position in self.aliases:
            return [_dumped_first(self.aliases[position], on_device=position < self.dumped)]
        name = _hash_at(self.run, position)
        if self.known >> position & 1 or (name and name not in self.holder.where):
            return [name]
        return []

    def block(self, position: int, name: int) -> DumpBlock:
        """Return a block as it is dumped."""
        return DumpBlock(block_hash=name, tokens_hash=_hash_at(self.edge, position))


def _dumped_first(names: _Names, *, on_device: bool) -> int:
    """Return the name that comes first in the dump, so that a reader knows the parent first."""

    def order(entry: tuple[int, int]) -> int:
        tiers = entry[1] if on_device else entry[1] & ~1
        return tiers & -tiers or 1 << len(Tier)

    return min(names, key=order)[0]


def dump_tier(tree: RadixTree, tier: Tier) -> Iterator[DumpEvent | None]:
    """Yield the events of one tier, and None after `NODES_PER_STEP` nodes without one.

    A block that does not move during the walk is dumped exactly once. Blocks that cannot match are
    left out: device blocks behind a hole, and blocks whose parent's name is lost.
    """
    event_ids = count()
    for view in _views(tree, tier):
        if view is None:
            yield None
            continue
        runs = _device_runs(view) if tier is Tier.DEVICE else _single_blocks(view, tier)
        for parent, blocks in runs:
            if not tree.live & view.holder.bit:
                break
            stored = DumpStored(
                blocks=blocks,
                parent_hash=parent,
                lora_name=view.namespace.lora_name or UNSET,
                cache_salt=view.namespace.cache_salt or UNSET,
            )
            yield _event(view.holder, tier, next(event_ids), stored)


def dump_groups(tree: RadixTree) -> Iterator[DumpEvent | None]:
    """Yield the blocks of cache groups that limit matches, and None in between."""
    event_ids = count()
    for holder_id in bits(tree.live):
        holder = tree.holders[holder_id]
        limiting = None if holder is None else holder.limiting
        yield None
        if holder is None or limiting is None or not limiting.is_in_force:
            continue
        for frozen in limiting.frozen():
            if not tree.live & holder.bit:
                break
            names = unpack_u64(frozen.names)
            groups = DumpGroups(frozen.groups, *frozen.rule, [*names], frozen.is_all or UNSET)
            stored = DumpStored(blocks=[], cache_groups=groups)
            yield _event(holder, frozen.tier, next(event_ids), stored)


def _event(holder: Holder, tier: int, number: int, stored: DumpStored) -> DumpEvent:
    worker_id, dp_rank = holder.rank
    event = DumpKvEvent(DumpChange(stored), event_id=number, dp_rank=dp_rank)
    return DumpEvent(worker_id, event, storage_tier=_TIER_NAMES[tier])


def _views(tree: RadixTree, tier: Tier) -> Iterator[_View | None]:
    """Yield the shares of all nodes: of the device those of holders of the whole path to a node."""
    live, roots, visited = tree.live, list(tree.root.children.values()), 0
    pending: list[tuple[Node, int]] = []
    while roots or pending:
        if not pending:
            pending.append((roots.pop(), live))
        visited += 1
        if not visited % NODES_PER_STEP:
            yield None
        # A node pruned after it was queued has neither members nor children left.
        node, alive = pending.pop()
        here = _views_of(tree, node, tier, alive)
        alive &= node.full
        if alive or tier:
            pending.extend((child, alive) for child in node.children.values())
        yield from here
    if not tier:
        return
    waiting = [child for root in tree.orphan_roots for child in root.children.values()]
    seen: set[Node] = set()
    while waiting:
        visited += 1
        if not visited % NODES_PER_STEP:
            yield None
        node = waiting.pop()
        # An orphan moves when its parent arrives: to where the walk has been, or to where it will
        # go.
        if node.parent is not None and node.orphaned and node not in seen:
            seen.add(node)
            here = _views_of(tree, node, tier, 0)
            waiting.extend(node.children.values())
            yield from here


def _views_of(tree: RadixTree, node: Node, tier: Tier, alive: int) -> list[_View]:
    if tier:
        coverage = node.coverage(tier)
        holders = 0 if coverage is None else coverage.everyone()
    else:
        holders = alive & node.members
    return [_view(tree, holder_id, node, tier, alive) for holder_id in bits(holders & tree.live)]


def _view(tree: RadixTree, holder_id: int, node: Node, tier: Tier, alive: int) -> _View:
    """Freeze a holder's share; `alive`: the holders that hold the whole path on the device."""
    holder = tree.holder(holder_id)
    reached = bool(alive >> holder_id & 1)
    places = node.names_at(holder_id) or {}
    return _View(
        holder=holder,
        namespace=node.namespace,
        edge=node.edge,
        run=holder.runs[node],
        on_tier=node.held_on(holder_id, tier),
        known=node.held_anywhere(holder_id),
        dumped=leading_run(node.held_on(holder_id, Tier.DEVICE)) if reached else 0,
        aliases={position: list(names.items()) for position, names in places.items()},
        before=_before(holder, node, on_device=reached),
    )


def _before(holder: Holder, node: Node, *, on_device: bool) -> list[int | None]:
    parent = node.parent
    assert parent is not None, "roots hold nothing"
    if isinstance(parent, OrphanRoot):
        return [parent.parent_hash]
    if not parent.edge:
        return [None]
    last = parent.size - 1
    names = (parent.names_at(holder.holder_id) or {}).get(last)
    if names is not None:
        return [_dumped_first([*names.items()], on_device=on_device)]
    name = holder.name_at(parent, last)
    return [] if name is None else [name]


def _device_runs(view: _View) -> Iterator[_Run]:
    """Yield the blocks before the first hole as one run, further names of a block one by one."""
    positions = range(leading_run(view.on_tier))
    if not view.aliases:  # true of nearly every node, and several times faster than block by block
        for parent in view.before if positions else ():
            end = len(positions) * HASH_BYTES
            blocks = zip(unpack_u64(view.run[:end]), unpack_u64(view.edge[:end]), strict=True)
            yield parent, [DumpBlock(*block) for block in blocks]
        return
    for parent in view.before if positions else ():
        names = [view.names(position, Tier.DEVICE) for position in positions]
        yield parent, [view.block(position, names[position][0]) for position in positions]
    for position in sorted(view.aliases):
        for name in view.names(position, Tier.DEVICE)[1:] if position in positions else ():
            for parent in view.parents(position):
                yield parent, [view.block(position, name)]


def _single_blocks(view: _View, tier: Tier) -> Iterator[_Run]:
    for position in bits(view.on_tier):
        for parent in view.parents(position):
            for name in view.names(position, tier):
                yield parent, [view.block(position, name)]


def _hash_at(packed: bytes, position: int) -> int:
    start = position * HASH_BYTES
    return int.from_bytes(packed[start : start + HASH_BYTES], "little")
