"""Long batches of lifecycle calls, run in slices so that they do not hold the event loop.

`driver.py` passes in the function that carries out one operation. A batch that has begun is
finished even if its client disconnects: most of its operations free load.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from select_service.types import BatchAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from select_service.types import Operation, OperationResult

BATCH_SLICE_S: Final = 0.0003
"""How long a batch may hold the loop before it lets other requests through."""


class LifecycleBatches:
    """The batches under way, including those whose clients have disconnected."""

    def __init__(
        self, operate: Callable[[Operation], OperationResult], clock: Callable[[], float]
    ) -> None:
        self._operate = operate
        self._clock = clock
        self._under_way: set[asyncio.Task[BatchAnswer]] = set()

    def begin(self, operations: Sequence[Operation]) -> BatchAnswer | asyncio.Task[BatchAnswer]:
        """Run the first slice; return the answer if that was all, else a task that will have it."""
        results: list[OperationResult] = []
        rest = iter(operations)
        if self._slice(rest, results):
            return BatchAnswer(results)
        task = asyncio.get_running_loop().create_task(self._finish(rest, results))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def close(self) -> None:
        """Finish the batches under way."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _slice(self, rest: Iterator[Operation], results: list[OperationResult]) -> bool:
        """Run one slice; return True when nothing is left."""
        until = self._clock() + BATCH_SLICE_S
        for operation in rest:
            results.append(self._operate(operation))
            if self._clock() >= until:
                return False
        return True

    async def _finish(
        self, rest: Iterator[Operation], results: list[OperationResult]
    ) -> BatchAnswer:
        while True:
            await asyncio.sleep(0)
            if self._slice(rest, results):
                return BatchAnswer(results)
