"""Which generation each slot runs in: they are opened, numbered, and closed when a rank leaves.

A slot that loses its rank may have a hundred thousand reservations. They run in a generation of
their own (`reservation.py`): closing it takes them out of every answer at once, the slot continues
in a new generation, and `Ledger.sweep` dismantles the old one a few at a time. The ledger owns the
content of a generation.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from select_service.core.ledger.active_blocks import positions_of
from select_service.core.ledger.reservation import SlotGeneration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.columns import Slots
    from select_service.core.ledger.active_blocks import BlockCounts


class SlotGenerations:
    """The generations of one ledger; a number is reused once nothing is left of its generation."""

    __slots__ = ("_count", "_counts", "_free_numbers", "by_slot", "closed", "displaced", "slots")

    def __init__(self, counts: BlockCounts) -> None:
        """Begin without generations.

        `counts` are the blocks in each generation, by number; grown with the numbers.
        """
        self._counts = counts
        self.by_slot: list[SlotGeneration] = []
        """The open generations; always the same list."""
        self.closed: deque[SlotGeneration] = deque()
        """Closed generations with reservations to sweep, oldest first."""
        self.slots: Slots = np.zeros(0, dtype=np.int64)
        """By number, the slot of a generation; -1: none."""
        self._count = 0  # number of numbers ever used
        self._free_numbers: list[
            int
        ] = []  # a heap, so that generations keep the numbers of their slots
        self.displaced = 0
        """Slots whose generation has a different number."""

    def ensure(self, capacity: int) -> None:
        """Open a generation for every slot below `capacity` that has none."""
        for slot in range(len(self.by_slot), capacity):
            self.by_slot.append(self._open(slot))
            self.displaced += self.by_slot[slot].number != slot

    def close(self, slot: int) -> None:
        """Close the generation of a slot, which has reservations, and open another one. O(1)."""
        generation = self.by_slot[slot]
        generation.is_open = False
        self.closed.append(generation)
        self.slots[generation.number] = -1
        fresh = self.by_slot[slot] = self._open(slot)
        self.displaced += (fresh.number != slot) - (generation.number != slot)

    def forget_oldest(self) -> None:
        """Free the number of the oldest closed generation, which is empty."""
        heappush(self._free_numbers, self.closed.popleft().number)

    def slots_of(self, mask: int) -> Slots:
        """Return the slots of the open generations among those with these numbers."""
        slots: Slots = np.frombuffer(positions_of(mask), np.int64)
        if self.displaced or self.closed:  # a closed generation may have a number no slot has
            slots = self.slots[slots]
            slots = slots[slots >= 0]
        return slots

    def __iter__(self) -> Iterator[SlotGeneration]:
        """Iterate over a copy of all generations, open ones first; some may go meanwhile."""
        return iter((*self.by_slot, *self.closed))

    def _open(self, slot: int) -> SlotGeneration:
        if self._free_numbers:
            number = heappop(self._free_numbers)
        else:
            number = self._count
            self._count += 1
            self._counts.ensure(self._count)
            if number == len(self.slots):
                more = np.full(max(16, number), -1, dtype=np.int64)
                self.slots = np.concatenate([self.slots, more])
        self.slots[number] = slot
        return SlotGeneration(number)

    def check(self) -> None:
        """Assert all invariants; O(everything)."""
        used = [generation.number for generation in self]
        assert sorted(used + self._free_numbers) == list(range(self._count)), "one lane a number"
        slots = [-1] * len(self.slots)
        for slot, generation in enumerate(self.by_slot):
            slots[generation.number] = slot
        assert self.slots.tolist() == slots
        displaced = sum(generation.number != slot for slot, generation in enumerate(self.by_slot))
        assert self.displaced == displaced
        for generation in self.closed:
            assert generation.reservations, "a closed lane ends with its last reservation"
            assert not generation.is_open
        for number in self._free_numbers:
            assert self._counts.count(number) == 0, "nothing is inherited"
