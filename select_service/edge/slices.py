"""How long what takes long may hold the loop before it lets requests through."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

__all__ = ["SLICE_S", "Slices"]

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
