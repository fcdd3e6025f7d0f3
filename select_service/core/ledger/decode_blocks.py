"""Exact sums of block weights per slot: the arithmetic behind D.

It knows numbers only; its two callers, `active_blocks.py` and `ledger.py`, decide which blocks are
live, shared or faded. Sums are integers, so that removing what was added leaves exactly zero, in
any order and with any number of fractions.
"""

from __future__ import annotations

from math import floor
from typing import Final

_FRACTION_BITS: Final = 1074
"""Every double in [0, 1] is a whole multiple of 2^-1074."""

_ONE: Final = 1 << _FRACTION_BITS
_HALF: Final = 0.5


class DecodeBlocks:
    """Per slot: the blocks of weight 1, and the sum of all other fractions."""

    __slots__ = ("_faded", "whole")

    def __init__(self) -> None:
        self.whole: list[int] = []
        """Blocks of weight 1 per slot; callers on the hot path add to it directly."""
        self._faded: list[int] = []  # in units of 2^-1074

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`."""
        missing = [0] * (capacity - len(self.whole))
        self.whole += missing
        self._faded += missing

    def add(self, slot: int, blocks: int, fraction: float) -> None:
        """Add `blocks` (if negative: remove) of weight `fraction` each."""
        if fraction == 1.0:
            self.whole[slot] += blocks
        else:
            numerator, denominator = fraction.as_integer_ratio()
            self._faded[slot] += blocks * numerator * (_ONE // denominator)

    def refade(self, faded: dict[int, float], slot: int, blocks: int, fraction: float) -> None:
        """Move `blocks` of a slot to another fraction and record it in `faded` (absent: 1)."""
        before = faded.get(slot, 1.0)
        if before == fraction:
            return
        self.add(slot, -blocks, before)
        self.add(slot, blocks, fraction)
        if fraction == 1.0:
            del faded[slot]
        else:
            faded[slot] = fraction

    def count(self, slot: int) -> int:
        """Return D: the sum of the weights, rounded half up.

        The exact sum is first rounded to the nearest double, as `math.fsum` does: five blocks of
        0.3 make 1.5 and count 2, although five times the double 0.3 is slightly less than 1.5.
        """
        faded = self._faded[slot]
        if not faded:
            return self.whole[slot]
        total = ((self.whole[slot] << _FRACTION_BITS) + faded) / _ONE
        return rounded(total)


def rounded(blocks: float) -> int:
    """Round half up."""
    down = floor(blocks)
    # not floor(blocks + 0.5): that sum would itself be rounded, 0.49999999999999994 to 1
    return down + 1 if blocks - down >= _HALF else down
