"""What ranks hold of a prompt, where an estimate says more than their KV events.

`partition.py` merges the two for every decision. A rank counts with the longer of its matches, so
that the rest of the pricing sees one of each rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from indexer.core.tiers import Matches

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from indexer.core.radix_tree import Group
    from indexer.core.tiers import SlotTable
    from select_service.core.columns import Groups, Slots


class _ListedSlots:
    """Replaces the slot table of an index: masks are positions in a list."""

    def __init__(self) -> None:
        self._listed: list[Slots] = []

    def add(self, blocks: int, slots: Slots, groups: list[Group]) -> None:
        """Add a group, unless it has no slots."""
        if len(slots):
            groups.append((blocks, len(self._listed)))
            self._listed.append(slots)

    def slots(self, mask: int) -> Slots:
        """Return the slots of a group."""
        return self._listed[mask]


def estimated(matches: Matches, estimate: Groups, rows: int, fresh: dict[int, float]) -> Matches:
    """Return matches in which the estimate replaces what is shorter; it is all on the device.

    `estimate` is blocks and slots, disjoint; `rows` is the capacity of columns by slot;
    `fresh`, a factor on what the index has of slots whose events are late or lost.
    """
    held, likely = np.zeros((2, rows))
    tiers = matches.groups, matches.host, matches.disk
    for groups in tiers:
        for blocks, mask in groups:
            held[matches.slots(mask)] += blocks
    for slot, factor in fresh.items():
        held[slot] *= factor
    for blocks, slots in estimate:
        likely[slots] = blocks
    is_longer = likely > held
    if not is_longer.any():
        return matches
    table, local = _ListedSlots(), 0
    kept: tuple[list[Group], list[Group], list[Group]] = [], [], []
    for groups, rest in zip(tiers, kept, strict=True):
        within = len(groups) - matches.external
        for at, (blocks, mask) in enumerate(groups):
            slots = matches.slots(mask)
            if groups is matches.disk and at == within:
                local = len(rest)
            table.add(blocks, slots[~is_longer[slots]], rest)
    for blocks, slots in estimate:
        table.add(blocks, slots[is_longer[slots]], kept[0])
    external = len(kept[2]) - local if matches.external else 0
    longer = np.flatnonzero(is_longer)
    return Matches(cast("SlotTable", table), *kept, external=external, estimated=longer)


class _OneSlotMore:
    """The slots of masks without one slot, which has a mask of its own."""

    def __init__(self, matches: Matches, slot: int) -> None:
        self._matches = matches
        self._slot = slot
        self._alone = np.array([slot], dtype=np.int64)

    def slots(self, mask: int) -> NDArray[np.int64]:
        """Return the slots of a mask; -1 is the mask of the one slot."""
        if mask == _ALONE:
            return self._alone
        slots = self._matches.slots(mask)
        others: NDArray[np.int64] = slots[slots != self._slot]
        return others


_ALONE = -1


def expecting(matches: Matches, slot: int, blocks: int) -> Matches:
    """Return the matches once a slot holds the prompt's first blocks; at least the present ones."""
    if sum(matches.rows().get(slot, (0,))) >= blocks:
        return matches
    table = _OneSlotMore(matches, slot)
    groups = [*matches.groups, (blocks, _ALONE)]
    others = [] if matches.estimated is None else matches.estimated.tolist()
    return Matches(
        cast("SlotTable", table),
        groups,
        [*matches.host],
        [*matches.disk],
        external=matches.external,
        estimated=np.array([*others, slot], dtype=np.int64),
    )
