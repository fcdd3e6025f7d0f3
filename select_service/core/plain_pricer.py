"""Prices the fleet for the request without special wishes, and picks the cheapest.

The plain twin of `Pricer` in `_speed.pyx`: same names, same numbers to the last bit. The formula
with all its terms is in `scoring.py`; what is left of it here is what nearly every request needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from select_service.core.picking import FEW, cheapest, cheapest_of_few

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.columns import Floats, Slots

__all__ = ["Pricer"]


class Pricer:
    """Reads the first rows of two columns."""

    __slots__ = ("_decode", "_matched", "_prefill")

    def __init__(self, prefill: Floats, decode: Floats) -> None:
        if len(prefill) != len(decode):
            raise ValueError("columns of one length")
        self._prefill = prefill
        self._decode = decode
        self._matched: list[int] = []

    def cheapest(  # noqa: PLR0913, PLR0917 - every term of the formula, as the kernel has them
        self,
        rows: int,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        scale: float,
        credit: float,
        track: bool,  # noqa: FBT001
        matched: list[tuple[int, Slots]] | None,
        shared: list[tuple[int, Slots]] | None,
        draw: Callable[[], float],
        trust: Floats | None = None,
    ) -> tuple[int, float, int]:
        """Return (row, price, decode blocks) of the cheapest of the first `rows`, at least one.

        Args:
            rows: of the columns.
            isl_tokens: length of the prompt.
            block_size: tokens per block.
            blocks: of the prompt.
            scale: weight of the prefill.
            credit: of a matched block, in blocks.
            track: whether prefill counts.
            matched: (blocks, rows) on the device, disjoint; None: nothing.
            shared: (blocks, rows) with active chains, disjoint; None: nothing.
            draw: gives a number in [0, 1) when several are the cheapest.
            trust: by what the credit of each row is multiplied; None: 1.0.
        """
        if not 0 < rows <= len(self._prefill) or (trust is not None and len(trust) < rows):
            raise ValueError("rows beyond the columns")
        common = None if shared is None else self._by_row(shared)[:rows]
        self._matched = [] if matched is None else self._by_row(matched)
        if rows > FEW or trust is not None:
            bare = self._decode[:rows] + blocks
            if common is not None:
                bare -= common
            raw = self._raw_of_many(rows, isl_tokens, block_size, credit, track, trust)
            prices = scale * raw + bare
            row = cheapest(prices, draw)
            return row, float(prices[row]), int(bare[row])
        # as numbers of Python: up to so many rows there is less to fetch than with columns
        left = [held + blocks for held in self._decode[:rows].tolist()]
        if common is not None:
            left = [held - number for held, number in zip(left, common, strict=True)]
        active = self._prefill[:rows].tolist()
        if not track:
            few = [max(0.0, -credit * number) for number in self._matched[:rows] or [0] * rows]
        elif matched is None:
            few = [(booked + isl_tokens) / block_size for booked in active]
        else:
            few = []
            for booked, number in zip(active, self._matched[:rows], strict=True):
                tokens = number * block_size
                if tokens < isl_tokens:  # noqa: PLR1730 - max() is slow
                    tokens = isl_tokens
                raw_blocks = (booked + tokens) / block_size - credit * number
                few.append(max(0.0, raw_blocks))
        few = [scale * one + held for one, held in zip(few, left, strict=True)]
        row = cheapest_of_few(few, draw)
        return row, few[row], int(left[row])

    def _raw_of_many(
        self,
        rows: int,
        isl_tokens: int,
        block_size: int,
        credit: float,
        track: bool,  # noqa: FBT001
        trust: Floats | None,
    ) -> Floats:
        """Return the prefill blocks of each row, less what is credited, at least 0."""
        if not self._matched:
            return (self._prefill[:rows] + isl_tokens) / block_size if track else np.zeros(rows)
        device = np.array(self._matched[:rows], dtype=np.float64)
        raw: Floats = np.zeros(rows)
        cached, credited = device * block_size, credit * device
        if trust is not None:
            cached, credited = np.floor(cached * trust[:rows]), credited * trust[:rows]
        if track:
            raw = (self._prefill[:rows] + np.maximum(cached, isl_tokens)) / block_size
        return np.maximum(raw - credited, 0.0)

    def matched_at(self, row: int) -> int:
        """Blocks that `matched` of the last call gave a row."""
        if not 0 <= row < len(self._matched):
            raise IndexError(row)
        return self._matched[row]

    def _by_row(self, groups: list[tuple[int, Slots]]) -> list[int]:
        column = [0] * len(self._prefill)  # ranks that nobody may be sent to are matched, too
        for blocks, slots in groups:
            for slot in slots.tolist():
                if slot < 0:
                    raise IndexError(slot)
                column[slot] = blocks
        return column
