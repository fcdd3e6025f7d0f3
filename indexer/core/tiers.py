"""From a path through the tree to blocks per rank: device, then host, disk and external.

Each tier goes on only where the one before stopped and never back (contract 5.3). Ranks are taken
in groups that stand at the same block, so a thousand ranks that share a prefix cost as much as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from indexer.core.node import LOWER_TIERS, leading_run
from indexer.types import Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from indexer.core.node import Coverage
    from indexer.core.radix_tree import Group, Segment

_CACHED_MASKS_MAX: Final = 4096
"""Masks whose slots are remembered: a few per hot prompt; all are forgotten together beyond it."""

_FEW: Final = 8
"""Up to so many holders, writing rows one by one beats numpy's fixed cost."""

_Standing = dict[tuple[int, int], int]
"""(block reached, block where this tier took over) → mask of holders."""


class SlotTable:
    """Turns masks of holders into arrays of slots."""

    def __init__(self) -> None:
        self._slot_of: NDArray[np.int64] = np.full(64, -1, dtype=np.int64)
        self._cached: dict[int, NDArray[np.int64]] = {}

    def assign(self, holder_id: int, slot: int) -> None:
        """Tell which slot a holder id stands for from now on."""
        if holder_id >= len(self._slot_of):
            more = np.full(len(self._slot_of), -1, dtype=np.int64)
            self._slot_of = np.concatenate((self._slot_of, more))
        self._slot_of[holder_id] = slot
        self._cached.clear()

    def slots(self, mask: int) -> NDArray[np.int64]:
        """Return the slots of the holders in `mask`; not to be written to."""
        found = self._cached.get(mask)
        if found is None:
            if len(self._cached) >= _CACHED_MASKS_MAX:
                self._cached.clear()
            packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
            found = self._slot_of[np.flatnonzero(np.unpackbits(packed, bitorder="little"))]
            self._cached[mask] = found
        return found


class Matches:
    """What one prompt finds, as groups of holders; valid until the index changes.

    `groups` are (device blocks > 0, mask of holders) with disjoint masks. `host` and `disk` are
    (blocks beyond the tiers before, mask); disk includes external, so a holder may occur twice.
    """

    __slots__ = ("_table", "disk", "groups", "host")

    def __init__(
        self, table: SlotTable, groups: list[Group], host: list[Group], disk: list[Group]
    ) -> None:
        self._table = table
        self.groups = groups
        self.host = host
        self.disk = disk

    @property
    def empty(self) -> bool:
        """Whether no rank holds even the first block on any tier."""
        return not (self.groups or self.host or self.disk)

    def slots(self, mask: int) -> NDArray[np.int64]:
        """Return the slots behind a mask of `groups`, `host` or `disk`."""
        return self._table.slots(mask)

    def rows(self) -> dict[int, tuple[int, int, int]]:
        """Return slot → (device, host extension, disk extension) of the ranks that match."""
        rows: dict[int, list[int]] = {}
        for column, groups in enumerate((self.groups, self.host, self.disk)):
            for blocks, mask in groups:
                for slot in self._table.slots(mask).tolist():
                    rows.setdefault(slot, [0, 0, 0])[column] += blocks
        return {slot: (row[0], row[1], row[2]) for slot, row in rows.items()}

    def fill(
        self, device: NDArray[np.float64], host: NDArray[np.float64], disk: NDArray[np.float64]
    ) -> bool:
        """Add the blocks to zeroed columns of at least `KvIndex.capacity` rows.

        Returns whether any rank extends on a tier below the device.
        """
        slots = self._table.slots
        for blocks, mask in self.groups:
            device[slots(mask)] = blocks
        for blocks, mask in self.host:
            host[slots(mask)] = blocks
        for blocks, mask in self.disk:
            disk[slots(mask)] += blocks  # disk and external
        return bool(self.host or self.disk)


def continue_below(
    groups: list[Group], path: list[Segment], candidates: int
) -> tuple[list[Group], list[Group]]:
    """Return the extensions on the host, and on disk and external, of the `candidates`."""
    standing: dict[int, int] = {}
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
    for tier in LOWER_TIERS:
        gained = host if tier is Tier.HOST_PINNED else disk
        standing = _extend(standing, path, tier, gained)
    return host, disk


def _extend(
    standing: dict[int, int], path: list[Segment], tier: Tier, gained: list[Group]
) -> dict[int, int]:
    """Let every group walk on over one tier; note who gains and return where all stand."""
    walking: _Standing = {(at, at): mask for at, mask in standing.items()}
    for node, start, size in path:
        coverage = node.coverage(tier)
        if coverage is not None and (coverage.full or coverage.patterns):
            walking = _walk_node(walking, coverage, start, size)
    reached: dict[int, int] = {}
    for (at, origin), mask in walking.items():
        reached[at] = reached.get(at, 0) | mask
        if at > origin:
            gained.append((at - origin, mask))
    return reached


def _walk_node(walking: _Standing, coverage: Coverage, start: int, size: int) -> _Standing:
    moved: _Standing = {}
    for (at, origin), mask in walking.items():
        rest = mask
        if start <= at < start + size:
            for end, some in _reach(coverage, rest, at - start, size):
                moved[start + end, origin] = moved.get((start + end, origin), 0) | some
                rest ^= some
        if rest:
            moved[at, origin] = moved.get((at, origin), 0) | rest
    return moved


def _reach(coverage: Coverage, mask: int, offset: int, size: int) -> list[Group]:
    """Return (position reached, holders) of those in `mask` that can go on from `offset`."""
    reached: list[Group] = []
    whole = mask & coverage.full
    if whole:
        reached.append((size, whole))
    if coverage.patterns is not None:
        for positions, holders in coverage.patterns.items():
            some = mask & holders
            if some and positions >> offset & 1:
                reached.append((min(offset + leading_run(positions >> offset), size), some))
    return reached
