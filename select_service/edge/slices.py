"""How long what takes long may hold the loop before it lets requests through."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["SLICE_S", "Slices"]

Told = TypeVar("Told")

SLICE_S: Final = 0.0002
"""A fifth of what a request notices."""


class Slices:
    """Lets others have their turn every so often."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until = perf_counter() + SLICE_S

    async def breathe(self) -> None:
        """Wait a turn of the loop if this one has lasted long enough."""
        if perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + SLICE_S

    async def through(self, steps: Generator[None, None, Told]) -> Told:
        """Take all steps, and let others have their turn between them every so often."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                told: Told = end.value
                return told
            await self.breathe()
