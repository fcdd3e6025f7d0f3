"""Exact sums of block weights: the arithmetic behind D.

It knows numbers only; `active_blocks.py` decides which blocks are live, shared or faded. Sums are
integers, so that removing what was added leaves exactly zero, in any order and with any number of
fractions.
"""

from __future__ import annotations

from math import floor
from typing import Final

_FRACTION_BITS: Final = 1074
"""Every double in [0, 1] is a whole multiple of 2^-1074."""

_ONE: Final = 1 << _FRACTION_BITS
_HALF: Final = 0.5


def units(weight: float) -> int:
    """Return a weight in [0, 1] in units of 2^-1074."""
    numerator, denominator = weight.as_integer_ratio()
    return numerator * (_ONE // denominator)


def rounded_sum(whole: int, faded: int) -> int:
    """Return `whole` blocks of weight 1 and `faded` units, rounded half up.

    The exact sum is first rounded to the nearest double, as `math.fsum` does: five blocks of
    0.3 make 1.5 and count 2, although five times the double 0.3 is slightly less than 1.5.
    """
    return rounded(((whole << _FRACTION_BITS) + faded) / _ONE) if faded else whole


def rounded(blocks: float) -> int:
    """Round half up."""
    down = floor(blocks)
    # not floor(blocks + 0.5): that sum would itself be rounded, 0.49999999999999994 to 1
    return down + 1 if blocks - down >= _HALF else down
