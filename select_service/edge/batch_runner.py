"""Runs batches in slices, so that they do not hold the loop.

`core/batches/batch_selection.py` defines the steps; this takes them, until a slice of time is used
up. If the client disconnects, nothing of its batch stays booked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta

from select_service.edge.cooperative import take_steps
from select_service.errors import ServiceError
from select_service.types import SelectRequest
from select_service.types.batches import SelectBatchRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from select_service.core.batches.batch_selection import RunningBatch
    from select_service.core.effects import Effects
    from select_service.edge.decision_report import DecisionReporter
    from select_service.types.batches import SelectBatchAnswer
    from select_service.types.decisions import Candidate

T = TypeVar("T")

ITEMS_MAX: Final = 1 << 16
"""Items in one body, checked before any is parsed; eight megabytes hold millions of empty ones."""


class BatchBody(SelectBatchRequest, kw_only=True):
    """The body of POST /select_batch, as far as it is read in one go."""

    requests: Annotated[list[msgspec.Raw], Meta(max_length=ITEMS_MAX)]  # type: ignore[assignment]
    """Each a `SelectBatchItem`."""


_WITH_DECISION: Final = SelectRequest(explain=True)


async def explained(
    answer: SelectBatchAnswer,
    decision_reports: DecisionReporter,
    write: Callable[[Candidate], object],
) -> SelectBatchAnswer:
    """Return an answer as it goes out, with the requested decisions rendered.

    Args:
        answer: as the batch returned it.
        decision_reports: renders decisions.
        write: as in `DecisionReporter.report`.
    """
    results = []
    for one in answer.results:
        for name in ("selection", "cache_threshold"):
            part = getattr(one, name)
            if part is not UNSET and part.decision is not UNSET:
                finished = await decision_reports.finish(part, _WITH_DECISION, write)
                one = msgspec.structs.replace(one, **{name: finished})  # noqa: PLW2901 - as it goes out
                await asyncio.sleep(0)
        results.append(one)
    return msgspec.structs.replace(answer, results=results)


class BatchRunner:
    """Takes the steps of batches.

    Args:
        carry_out: carries out their effects.
        clock: monotonic seconds.
    """

    def __init__(self, carry_out: Callable[[Effects], None], clock: Callable[[], float]) -> None:
        self._carry_out = carry_out
        self._clock = clock
        self._undoing: set[asyncio.Task[None]] = set()

    async def run(self, batch: RunningBatch) -> SelectBatchAnswer:
        """Run a batch to its end; if it breaks off (its caller disconnected), free what was booked.

        Raises:
            ServiceError: as the batch.
        """
        try:
            return await take_steps(batch.steps(self._clock()), self._clock, self._carry_out)
        except ServiceError:
            raise  # it has already cleaned up
        except BaseException:
            self.finish(batch.undo(self._clock()))
            raise

    def finish(self, steps: Generator[Effects, float, None]) -> None:
        """Take steps in the background; `close` waits for them."""
        work = take_steps(steps, self._clock, self._carry_out)
        task = asyncio.get_running_loop().create_task(work)
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def close(self) -> None:
        """Finish undoing broken-off batches."""
        await asyncio.gather(*self._undoing, return_exceptions=True)
