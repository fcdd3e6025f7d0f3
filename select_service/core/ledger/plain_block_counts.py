"""How often each generation has every block value, and the weights of its distinct values.

The plain form of `BlockCounts` in `_ledger.pyx`: same names, same answers. D counts values, not
positions: a value that a client repeats, or sends at other positions, costs what any other costs.
`active_blocks.py`, the only caller, decides which runs of blocks a generation has.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from indexer.core.packing import unpack_native
from select_service.core.ledger.exact_sums import rounded_sum, units

if TYPE_CHECKING:
    from indexer.types import PackedHashes


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
