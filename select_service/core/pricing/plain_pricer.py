"""Prices the fleet for a request without special constraints, and picks the cheapest rank.

The plain twins of `Pricer` and `Fill` in `_pricer.pyx`: same names, same numbers to the last bit.
`scoring.py` has the formula with all its terms; here is only what nearly every request needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from select_service.core.books.loads import PACE, TOTALS, worked_off
from select_service.core.pricing.picking import FEW, cheapest, cheapest_of_few

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.columns import Floats, Rows, Slots

__all__ = ["Fill", "Pricer"]

_DOUBLE = 8  # bytes
# below it doubles represent every whole number, and its fractions by a block, exactly
_WHOLE_MAX = 2.0**53
_LANES = 8
"""Parallel partial sums that make up one sum."""


class Fill:
    """How full ranks are, computed from live columns.

    Args:
        prefill: booked tokens.
        decode: blocks.
        block_tokens: tokens that fill a rank as much as one of its blocks does.
        floor: minimum fullness of a rank; 1 is full.
    """

    __slots__ = ("_block_tokens", "_decode", "_floor", "_prefill")

    def __init__(
        self, prefill: Floats, decode: Floats, block_tokens: Floats, floor: Floats
    ) -> None:
        if not len(prefill) == len(decode) == len(block_tokens) == len(floor):
            raise ValueError("columns of one length")
        self._prefill = prefill
        self._decode = decode
        self._block_tokens = block_tokens
        self._floor = floor

    def total(self, room: float) -> float:
        """Return the sum over the rows of max(prefill, decode * block_tokens, floor * room).

        Args:
            room: tokens that fill a rank.
        """
        each = np.maximum(self._decode * self._block_tokens, self._prefill)
        np.maximum(each, self._floor * room, out=each)
        lanes = np.zeros(-(-len(each) // _LANES) * _LANES)
        lanes[: len(each)] = each
        # row after row, in the order of the kernel
        sums = np.add.reduce(lanes.reshape(-1, _LANES), axis=0)
        return float(np.add.accumulate(sums)[-1])


class Pricer:
    """Reads the first rows of the columns."""

    __slots__ = (
        "_ahead",
        "_churn",
        "_context",
        "_decode",
        "_groups",
        "_heard",
        "_matched",
        "_prefill",
        "_views",
    )

    def __init__(
        self,
        prefill: Floats,
        decode: Floats,
        churn: Floats,
        context: Floats,
        heard: Floats,
        ahead: Floats,
    ) -> None:
        columns = prefill, decode, churn, context, heard, ahead
        if len({len(one) for one in columns}) > 1:
            raise ValueError("columns of one length")
        self._churn = churn
        self._context = context
        self._prefill = prefill
        self._decode = decode
        self._heard = heard
        self._ahead = ahead
        self._views = prefill.data, decode.data, churn.data, context.data
        self._groups: list[tuple[int, list[int]]] = []  # of the last call
        self._matched: list[int] | None = []  # the same by row; None: not computed yet

    def cheapest(  # noqa: C901, PLR0912 - straight on: all pay for it
        self,
        rows: int | Slots,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        scale: float,
        credit: float,
        track: bool,
        matched: list[tuple[int, Slots]] | None,
        shared: list[tuple[int, Slots]] | None,
        draw: Callable[[], float],
        trust: Floats | None = None,
        ours: tuple[float, float, float, bool, float, float] | None = None,
        now: float = 0.0,
    ) -> tuple[int, float, int]:
        """Return (row, price, decode blocks) of the cheapest of `rows`, at least one.

        Args:
            rows: how many of the first, or which ones.
            isl_tokens: length of the prompt.
            block_size: tokens per block.
            blocks: of the prompt.
            scale: weight of the prefill.
            credit: of a matched block, in blocks.
            track: whether prefill counts.
            matched: (blocks, rows) on the device, disjoint; None: nothing.
            shared: (blocks, rows) with active chains, disjoint; None: nothing.
            draw: returns a number in [0, 1); called if several are the cheapest.
            trust: factor on the credit of each row of the columns; None: 1.0.
            ours: the weights that only `first-token` has, the tail of `Weights`; None: `kv-cost`.
            now: monotonic seconds.
        """
        count = rows if type(rows) is int else len(rows)  # type: ignore[arg-type] # then a column
        is_short = trust is not None and len(trust) < len(self._prefill)
        if not 0 < count <= len(self._prefill) or is_short:
            raise ValueError("rows beyond the columns")
        if matched is None:
            self._groups, self._matched = [], []
        else:
            self._groups, self._matched = _listed(matched), None
        if shared is None and trust is None and ours is None and type(rows) is int:
            found = None
            if self._is_level(rows):
                found = self._cheapest_of_equals(
                    rows, isl_tokens, block_size, blocks, scale, credit, track, draw
                )
            elif matched is None and track and scale == 1.0 and not block_size & (block_size - 1):
                found = self._cheapest_unmatched(rows, isl_tokens, block_size, blocks, draw)
            if found is not None:
                return found
        if not isinstance(rows, int):
            self._check(rows)
        common = None if shared is None else self._by_row(_listed(shared))
        self._matched = self._column()
        if ours is not None:
            return self._cheapest_of_ours(
                *(rows, isl_tokens, block_size, blocks, scale, credit, track, common, draw, trust),
                ours,
                now,
            )
        among = slice(0, rows) if isinstance(rows, int) else rows
        if count > FEW or trust is not None:
            bare = self._decode[among] + blocks
            if common is not None:
                bare -= np.array(common, dtype=np.float64)[among]
            raw = self._raw_of_many(among, isl_tokens, block_size, credit, track, trust)
            prices = scale * raw + bare
            at = cheapest(prices, draw)
            return self._row(rows, at), float(prices[at]), int(bare[at])
        return self._cheapest_of_few(
            *(rows, isl_tokens, block_size, blocks, scale, credit, track, matched, common, draw)
        )

    def _cheapest_unmatched(
        self,
        rows: int,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        draw: Callable[[], float],
    ) -> tuple[int, float, int] | None:
        """The case without matches and with weights of 1; None: the numbers are too large.

        A price is then (P + isl) / size + (D + blocks), ordered like the whole numbers P + size *
        D: common terms change nothing, and as long as the smallest is a whole number of tokens to
        the last bit, no other is rounded down to it.
        """
        prefill, decode, *_ = self._views
        if not prefill[0] + isl_tokens + (decode[0] + blocks) * block_size < _WHOLE_MAX:
            return None  # the smallest is no larger than the first
        booked, held = self._prefill, self._decode
        if rows != len(booked):
            booked, held = booked[:rows], held[:rows]
        tokens: Floats = held * float(block_size)
        tokens += booked
        at = cheapest(tokens, draw)
        bare = decode[at] + blocks
        return at, (prefill[at] + isl_tokens) / block_size + bare, int(bare)

    def _cheapest_of_few(
        self,
        rows: int | Slots,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        scale: float,
        credit: float,
        track: bool,
        matched: list[tuple[int, Slots]] | None,
        common: list[int] | None,
        draw: Callable[[], float],
    ) -> tuple[int, float, int]:
        """The case of few rows, with Python numbers: less overhead than with columns."""
        among = slice(0, rows) if isinstance(rows, int) else rows
        left = [held + blocks for held in self._decode[among].tolist()]
        if common is not None:
            here = _of(common, rows)
            left = [held - number for held, number in zip(left, here, strict=True)]
        active = self._prefill[among].tolist()
        if not track:
            numbers = _of(self._column(), rows) if self._groups else [0] * len(left)
            few = [max(0.0, -credit * number) for number in numbers]
        elif matched is None:
            few = [(booked + isl_tokens) / block_size for booked in active]
        else:
            few = []
            for booked, number in zip(active, _of(self._column(), rows), strict=True):
                tokens = number * block_size
                if tokens < isl_tokens:  # noqa: PLR1730 - max() is slow
                    tokens = isl_tokens
                raw_blocks = (booked + tokens) / block_size - credit * number
                few.append(max(0.0, raw_blocks))
        few = [scale * one + held for one, held in zip(few, left, strict=True)]
        at = cheapest_of_few(few, draw)
        return self._row(rows, at), few[at], int(left[at])

    def _cheapest_of_ours(
        self,
        rows: int | Slots,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        scale: float,
        credit: float,
        track: bool,
        common: list[int] | None,
        draw: Callable[[], float],
        trust: Floats | None,
        ours: tuple[float, float, float, bool, float, float],
        now: float,
    ) -> tuple[int, float, int]:
        decode_scale, delay, eviction, expects, context_scale, pace = ours
        among = slice(0, rows) if isinstance(rows, int) else rows
        bare, prefill = self._decode[among] + blocks, self._prefill[among]
        device, tokens = np.zeros(len(bare)), np.full(len(bare), float(isl_tokens))
        credited = device
        if self._groups:
            device = np.array(self._column(), dtype=np.float64)[among]
            tokens, credited = device * block_size, credit * device
            if trust is not None:
                tokens, credited = np.floor(tokens * trust[among]), credited * trust[among]
            tokens = np.maximum(tokens, isl_tokens)
        prefill = prefill - worked_off(self._heard[among], self._ahead[among], pace, now)
        raw = (prefill + tokens) / block_size if track else np.zeros(len(bare))
        own = tokens / block_size if track else raw
        raw, own = raw - credited, own - credited
        if common is not None:
            booked = np.array(common, dtype=np.float64)[among]
            bare -= booked
            if expects:
                expected = np.maximum(booked - device, 0.0)
                raw, own = raw - expected, own - expected
        raw, own = np.maximum(raw, 0.0), np.maximum(own, 0.0)
        prices = scale * (raw + (delay + eviction * self._churn[among]) * own)
        prices += decode_scale * bare
        prices += context_scale * (self._context[among] + blocks)
        at = cheapest(prices, draw)
        return self._row(rows, at), float(prices[at]), int(bare[at])

    def _is_level(self, rows: int) -> bool:
        """Tell whether the first rows carry the same load, as they do while nobody books."""
        first, last = self._views[0], rows - 1
        if first[0] != first[last]:  # the usual case while somebody does
            return False
        prefill = self._prefill[:rows].tobytes()
        if prefill != prefill[:_DOUBLE] * rows:
            return False
        decode = self._decode[:rows].tobytes()
        return decode == decode[:_DOUBLE] * rows

    def _cheapest_of_equals(
        self,
        rows: int,
        isl_tokens: int,
        block_size: int,
        blocks: int,
        scale: float,
        credit: float,
        track: bool,
        draw: Callable[[], float],
    ) -> tuple[int, float, int] | None:
        """The case of equal loads, one price per group of rows; None: it does not apply."""
        booked, bare = self._views[0][0], self._views[1][0] + blocks
        best: list[int] | None = None
        low, others = 0.0, rows
        for number, group in self._groups:
            group.sort()
            if not group or group[-1] >= rows or group[0] < 0:
                return None  # includes a rank that may not be chosen
            others -= len(group)
            raw = -credit * number
            if track:
                cached = number * block_size
                if cached < isl_tokens:  # noqa: PLR1730 - max() is slow
                    cached = isl_tokens
                raw += (booked + cached) / block_size
            price = bare if raw < 0.0 else scale * raw + bare
            if best is not None and price == low:
                return None
            if best is None or price < low:
                low, best = price, group
        if others:
            price = scale * ((booked + isl_tokens) / block_size if track else 0.0) + bare
            if best is None:  # nothing is matched: draw any
                return (int(draw() * rows) if rows > 1 else 0), price, int(bare)
            if price <= low:
                return None
        assert best is not None
        return best[int(draw() * len(best)) if len(best) > 1 else 0], low, int(bare)

    def _row(self, rows: int | Slots, at: int) -> int:
        return at if isinstance(rows, int) else int(rows[at])

    def _check(self, rows: Slots) -> None:
        beyond = (rows < 0) | (rows >= len(self._prefill))
        if beyond.any():
            raise IndexError(int(rows[beyond][0]))

    def _raw_of_many(
        self,
        among: Rows,
        isl_tokens: int,
        block_size: int,
        credit: float,
        track: bool,
        trust: Floats | None,
    ) -> Floats:
        """Return the prefill blocks of each row, minus the credit, at least 0."""
        prefill = self._prefill[among]
        if not self._groups:
            return (prefill + isl_tokens) / block_size if track else np.zeros(len(prefill))
        device = np.array(self._column(), dtype=np.float64)[among]
        raw: Floats = np.zeros(len(prefill))
        cached, credited = device * block_size, credit * device
        if trust is not None:
            cached, credited = np.floor(cached * trust[among]), credited * trust[among]
        if track:
            raw = (prefill + np.maximum(cached, isl_tokens)) / block_size
        return np.maximum(raw - credited, 0.0)

    def matched_at(self, row: int) -> int:
        """Return the blocks that `matched` of the last call gave a row."""
        if self._matched is None:
            for blocks, group in self._groups:
                if row in group:
                    return blocks
        column = self._column()
        if not 0 <= row < len(column):
            raise IndexError(row)
        return column[row]

    def packed(self, prefilling: float, turnover: float, pace: float | None = None) -> bytes:
        """Return the current columns, concatenated, and these totals.

        With a pace, the queues are included, too.
        """
        loads = b"".join((*self._views, TOTALS.pack(prefilling, turnover)))
        if pace is None:
            return loads
        return b"".join((loads, self._heard.data, self._ahead.data, PACE.pack(pace)))

    def _column(self) -> list[int]:
        column = self._matched
        if column is None:
            column = self._matched = self._by_row(self._groups)
        return column

    def _by_row(self, groups: list[tuple[int, list[int]]]) -> list[int]:
        column = [0] * len(self._prefill)  # includes ranks that may not be chosen
        for blocks, slots in groups:
            for slot in slots:
                if slot < 0:
                    raise IndexError(slot)
                column[slot] = blocks
        return column


def _listed(groups: list[tuple[int, Slots]]) -> list[tuple[int, list[int]]]:
    return [(blocks, slots.tolist()) for blocks, slots in groups]


def _of(column: list[int], rows: int | Slots) -> list[int]:
    """Return the chosen rows of a column."""
    return column[:rows] if isinstance(rows, int) else [column[row] for row in rows.tolist()]
