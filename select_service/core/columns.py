"""Columns of numbers, one row per slot: the form in which loads, limits and costs travel.

A slot is the small integer that the index assigns to a worker rank. Masks are Python integers, bit
= slot.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Slots: TypeAlias = npt.NDArray[np.int64]
Rows: TypeAlias = "Slots | slice[int, int, None]"
"""Rows of a column: individual slots, or a slice, which costs no copy."""

Groups: TypeAlias = "list[tuple[int, Slots]]"
"""Disjoint slots by how many blocks they have."""


def grown(column: Floats, rows: int, fill: float) -> Floats:
    """Return the column with at least `rows` rows; new rows hold `fill`. Amortised by doubling."""
    if len(column) >= rows:
        return column
    larger = np.full(max(rows, 2 * len(column), 16), fill, dtype=np.float64)
    larger[: len(column)] = column
    return larger
