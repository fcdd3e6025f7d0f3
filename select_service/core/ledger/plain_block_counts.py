"""How often each lane has every block value, and the sum of the weights of its distinct values.

The plain form of `BlockCounts` in `_ledger.pyx`: same names, same answers. D counts values, not
positions: a value that a client repeats, or sends at other positions, costs what any other costs.
`active_blocks.py`, the only caller, decides which runs of blocks a lane has.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from indexer.core.packing import unpack_native
from select_service.core.ledger.exact_sums import rounded_sum, units

if TYPE_CHECKING:
    from indexer.types import PackedHashes

__all__ = ["BlockCounts"]


class _Lane:
    """What one lane has."""

    __slots__ = ("counts", "faded", "weights", "whole")

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()  # by value
        self.weights: dict[int, float] = {}  # by value, if not 1
        self.whole = 0  # blocks of weight 1, outputs included
        self.faded = 0  # the sum of all other weights, in units of 2^-1074


class BlockCounts:
    """The values of every lane, entered and removed in packed runs. O(1) for each value."""

    __slots__ = ("_lanes",)

    def __init__(self) -> None:
        self._lanes: list[_Lane] = []

    def ensure(self, lanes: int) -> None:
        """Make room for lanes below a number; never shrinks."""
        self._lanes += [_Lane() for _ in range(len(self._lanes), lanes)]

    def enter(self, lane: int, run: PackedHashes) -> None:
        """Add the values of a run; new ones weigh 1."""
        here = self._lanes[lane]
        before = len(here.counts)
        here.counts.update(unpack_native(run))
        here.whole += len(here.counts) - before

    def leave(self, lane: int, run: PackedHashes) -> None:
        """Remove the values of a run that was entered; the weight of a value goes with it."""
        here = self._lanes[lane]
        for value in unpack_native(run):
            if left := here.counts.pop(value) - 1:
                here.counts[value] = left
            else:
                self.add(lane, -1, here.weights.pop(value, 1.0))
        if not here.counts:  # the tables of dicts that were large stay large
            here.counts, here.weights = Counter(), {}

    def count(self, lane: int) -> int:
        """Return D: the sum of the weights, rounded half up. O(1)."""
        return rounded_sum(self._lanes[lane].whole, self._lanes[lane].faded)

    def add(self, lane: int, blocks: int, weight: float = 1.0) -> None:
        """Add output blocks, which have no value (if negative: remove them). O(1)."""
        if weight == 1.0:
            self._lanes[lane].whole += blocks
        else:
            self._lanes[lane].faded += blocks * units(weight)

    def fade(self, lane: int, runs: list[PackedHashes], weight: float) -> None:
        """Set the weight of every value that the lane has only in these runs, all entered."""
        here = self._lanes[lane]
        own = Counter(value for run in runs for value in unpack_native(run))
        for value, count in own.items():
            if count == here.counts[value]:
                self.add(lane, -1, here.weights.pop(value, 1.0))
                self.add(lane, 1, weight)
                if weight != 1.0:
                    here.weights[value] = weight

    def weights(self, lane: int, run: PackedHashes) -> dict[int, float]:
        """Return the weights that are not 1, by value, of the values of an entered run."""
        weights = self._lanes[lane].weights
        return {value: weights[value] for value in unpack_native(run) if value in weights}
