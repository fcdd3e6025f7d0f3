"""From a path through the tree to blocks per rank: device, then host, disk and external.

Each tier continues only where the one before stopped, never further up. Ranks are handled in groups
that stand at the same block, so a thousand ranks that share a prefix cost as much as one.
`KvIndex.find_matches` calls it with the path that `radix_tree` found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from indexer.core.node import LOWER_TIERS, leading_run
from indexer.types import Tier

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from indexer.core.node import Coverage, Node
    from indexer.core.radix_tree import Group

    SlotGroup: TypeAlias = tuple[int, NDArray[np.int64]]

_CACHED_MASKS_MAX: Final = 512
"""Masks whose slots are cached, a few per hot prompt; beyond it the whole cache is dropped. With a
thousand ranks in every mask that is 4 MB."""


class SlotTable:
    """Turns masks of holders into arrays of slots."""

    def __init__(self) -> None:
        self._slot_of: NDArray[np.int64] = np.full(64, -1, dtype=np.int64)
        self._cached: dict[int, NDArray[np.int64]] = {}

    def assign(self, holder_id: int, slot: int) -> None:
        """Map a holder id to a slot from now on."""
        if holder_id >= len(self._slot_of):
            more = np.full(len(self._slot_of), -1, dtype=np.int64)
            self._slot_of = np.concatenate((self._slot_of, more))
        self._slot_of[holder_id] = slot
        self._cached.clear()

    def slots(self, mask: int) -> NDArray[np.int64]:
        """Return the slots of the holders in `mask`; read-only."""
        found = self._cached.get(mask)
        if found is None:
            if len(self._cached) >= _CACHED_MASKS_MAX:
                self._cached.clear()
            packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
            found = self._slot_of[np.flatnonzero(np.unpackbits(packed, bitorder="little"))]
            self._cached[mask] = found
        return found


class Matches(Struct, eq=False, gc=False):
    """What one prompt matches, as groups of holders; valid until the index changes.

    `groups` are (device blocks > 0, mask of holders) with disjoint masks. `host` and `disk` are
    (blocks beyond the previous tiers, mask); disk includes external, so a holder may occur twice:
    its last `external` groups are. `estimated` are the slots for which the caller has put in
    something else than the index says.
    """

    table: SlotTable
    groups: list[Group]
    host: list[Group]
    disk: list[Group]
    external: int = 0
    estimated: NDArray[np.int64] | None = None

    @property
    def empty(self) -> bool:
        """Whether no rank holds even the first block on any tier."""
        return not (self.groups or self.host or self.disk)

    def slots(self, mask: int) -> NDArray[np.int64]:
        """Return the slots behind a mask of `groups`, `host` or `disk`."""
        return self.table.slots(mask)

    def by_slot(self) -> tuple[list[SlotGroup], list[SlotGroup], list[SlotGroup]]:
        """Return `groups`, `host` and `disk` with arrays of slots in place of masks."""
        slots = self.table.slots
        return (
            [(blocks, slots(mask)) for blocks, mask in self.groups],
            [(blocks, slots(mask)) for blocks, mask in self.host] if self.host else [],
            [(blocks, slots(mask)) for blocks, mask in self.disk] if self.disk else [],
        )

    def rows(self) -> dict[int, tuple[int, int, int]]:
        """Return slot → (device, host extension, disk extension) of the ranks that match."""
        rows: dict[int, list[int]] = {}
        for column, groups in enumerate((self.groups, self.host, self.disk)):
            for blocks, mask in groups:
                for slot in self.table.slots(mask).tolist():
                    rows.setdefault(slot, [0, 0, 0])[column] += blocks
        return {slot: (row[0], row[1], row[2]) for slot, row in rows.items()}


def continue_below(
    groups: list[Group], path: list[Node], matched: int, candidates: int
) -> tuple[list[Group], list[Group], int]:
    """Return the extensions on the host, and on disk and external, of the `candidates`.

    The last number says how many of the latter are external.


    `path` are the nodes of a prompt of which `matched` blocks are known.
    """
    standing: dict[int, int] = {}  # block reached so far → mask of holders
    elsewhere = candidates
    for blocks, mask in groups:
        mine = mask & candidates
        if mine:
            standing[blocks] = standing.get(blocks, 0) | mine
            elsewhere ^= mine
    if elsewhere:
        standing[0] = elsewhere
    host: list[Group] = []
    disk: list[Group] = []
    external = 0
    below: list[tuple[int, int, tuple[Coverage, ...]]] = []
    start = 0
    for node in path:
        size = min(node.size, matched - start)  # the prompt may end inside the last edge
        if node.lower is not None:
            below.append((start, size, node.lower))
        start += size
    for tier in LOWER_TIERS if below else ():
        covered = [
            (start, size, lower[tier - 1])
            for start, size, lower in below
            if lower[tier - 1].full or lower[tier - 1].patterns is not None
        ]
        if covered:
            before = len(disk)
            standing = _extend(standing, covered, host if tier is Tier.HOST_PINNED else disk)
            external = len(disk) - before if tier is Tier.EXTERNAL else 0
    return host, disk, external


def _extend(
    standing: dict[int, int], covered: list[tuple[int, int, Coverage]], gained: list[Group]
) -> dict[int, int]:
    """Extend all holders over one tier; record their gains and return where each stands.

    Holders that meet at a block continue as one: O(stretches), plus pairs of a start and an end.
    """
    starts = sorted(standing, reverse=True)
    stops: dict[int, int] = {}
    going, end = 0, 0
    for start, size, coverage in covered:
        if start != end:
            stops[end] = stops.get(end, 0) | going
            going = 0
        end = start + size
        walkers = []
        while starts and starts[-1] < end:
            at = starts.pop()
            if at == start:
                going |= standing[at]
            elif at > start:
                walkers.append((at, standing[at]))
        if going:
            walkers.append((start, going))
        going = _walk(walkers, start, size, coverage, stops)
    stops[end] = stops.get(end, 0) | going
    return _settle(standing, stops, gained)


def _walk(
    walkers: list[Group], start: int, size: int, coverage: Coverage, stops: dict[int, int]
) -> int:
    """Return the holders that pass a whole stretch; record where the others stop."""
    going = 0
    for at, walking in walkers:
        passing = walking & coverage.full
        going |= passing
        rest = walking ^ passing
        if not rest:
            continue
        for positions, holders in (coverage.patterns or {}).items():
            some = rest & holders
            if some:
                rest ^= some
                reached = at + min(leading_run(positions >> (at - start)), start + size - at)
                if reached == start + size:
                    going |= some
                else:
                    stops[reached] = stops.get(reached, 0) | some
        if rest:
            stops[at] = stops.get(at, 0) | rest
    return going


def _settle(standing: dict[int, int], stops: dict[int, int], gained: list[Group]) -> dict[int, int]:
    settled: dict[int, int] = {}
    for origin, holders in standing.items():
        staying = holders
        for at, mask in stops.items():
            some = staying & mask
            if some and at > origin:
                gained.append((at - origin, some))
                settled[at] = settled.get(at, 0) | some
                staying ^= some
        if staying:
            settled[origin] = settled.get(origin, 0) | staying
    return settled
