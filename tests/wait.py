"""The one place where tests wait: for what must happen, with a patience no busy machine exhausts.

How long something takes is not what tests are about, and a scheduler may give a process no time for
seconds. So nothing here costs time once the awaited has happened, and what has not happened after
`PATIENCE_S` does not happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from time import monotonic, sleep  # by name: tests give modules another `time.monotonic`
from typing import TypeVar

PATIENCE_S = 120.0
"""For one thing to happen: a hundred times what it takes on a quiet machine."""

SCENARIO_S = 240.0
"""For a whole test; below pytest's own limit, so that the tasks are cancelled and say where."""

POLL_S = 0.005
"""Between two looks at what cannot be awaited."""

T = TypeVar("T")


def run(play: Awaitable[T]) -> T:
    """Run a scenario on a loop of its own."""

    async def bounded() -> T:
        async with asyncio.timeout(SCENARIO_S):  # in one task: some tests count them
            return await play

    return asyncio.run(bounded())


async def until(
    holds: Callable[[], object],
    saying: Callable[[], object] | None = None,
    *,
    pause_s: float = POLL_S,
) -> None:
    """Let the loop run until it holds.

    Args:
        holds: is asked once more after the time is up.
        saying: tells in the failure how far it has come.
        pause_s: between two looks; 0: look at every turn of the loop.
    """
    for _ in _looks(holds, saying):
        await asyncio.sleep(pause_s)


def block_until(
    holds: Callable[[], object],
    saying: Callable[[], object] | None = None,
    *,
    deadline_s: float = PATIENCE_S,
) -> None:
    """Do nothing until it holds, where there is no loop; a whole engine is given more time."""
    for _ in _looks(holds, saying, deadline_s):
        sleep(POLL_S)


def eventually(
    question: Callable[[], object], expected: object, *, deadline_s: float = PATIENCE_S
) -> None:
    """Ask until the answer is right; the last answer is in the failure.

    Args:
        question: is asked once more after the time is up.
        expected: its right answer.
        deadline_s: given by the suite of faults only, which is about how long healing takes.
    """
    got: object = None

    def is_right() -> bool:
        nonlocal got
        got = question()
        return got == expected

    for _ in _looks(is_right, lambda: f"expected {expected}, still {got}", deadline_s):
        sleep(POLL_S)


def _looks(
    holds: Callable[[], object],
    saying: Callable[[], object] | None,
    deadline_s: float = PATIENCE_S,
) -> Iterator[None]:
    """One item before each pause; the last look is one after the time is up."""
    deadline = monotonic() + deadline_s
    while True:
        is_late = monotonic() > deadline
        if holds():
            return
        if is_late:
            said = saying() if saying else f"not within {deadline_s} s"
            raise said if isinstance(said, AssertionError) else AssertionError(said)
        yield
