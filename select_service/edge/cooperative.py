"""Time slices: how long a long task may hold the event loop before it lets requests through."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

Told = TypeVar("Told")

SLICE_S: Final = 0.0002
"""A fifth of the delay that a request notices."""


class TimeSlices:
    """Yields to the event loop every `SLICE_S`."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = perf_counter() + SLICE_S

    async def yield_if_due(self) -> None:
        """Yield to the loop if this slice is used up."""
        if perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + SLICE_S

    async def through(self, steps: Generator[None, None, Told]) -> Told:
        """Run all steps, yielding to the loop whenever a slice is used up; return their result."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                told: Told = end.value
                return told
            await self.yield_if_due()
