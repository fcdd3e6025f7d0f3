"""Time slices: how long a long task may hold the event loop before it lets requests through."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from select_service.core.effects import Effects

T = TypeVar("T")
R = TypeVar("R")

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

    async def mapped(self, function: Callable[[T], R], values: Iterable[T]) -> list[R]:
        """Return the results of a function of many values, each some microseconds."""
        results: list[R] = []
        for one in values:
            results.append(function(one))
            await self.yield_if_due()
        return results

    async def through(self, steps: Generator[None, None, R]) -> R:
        """Run all steps, yielding to the loop whenever a slice is used up; return their result."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result: R = end.value
                return result
            await self.yield_if_due()


async def ended(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def take_steps(
    steps: Generator[Effects, float, R],
    clock: Callable[[], float],
    carry_out: Callable[[Effects], None],
    *,
    are_begun: bool = False,
) -> R:
    """Take the steps of the core, each given its time; carry out the effects of each, and yield.

    Args:
        steps: what is to be done, in parts of some microseconds.
        clock: monotonic seconds.
        carry_out: carries out the effects of a step before the next one is taken.
        are_begun: whether the first step has been taken.
    """
    slices = TimeSlices()
    now: Any = clock() if are_begun else None
    while True:
        try:
            effects = steps.send(now)
        except StopIteration as end:
            result: R = end.value
            return result
        carry_out(effects)
        await slices.yield_if_due()
        now = clock()
