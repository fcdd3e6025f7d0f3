"""Does what blocks on a disk in a thread of its own, which nobody's end waits for.

The loop's own threads are joined before a process may end: one that a disk holds which stands
still would hold the process too, until somebody kills it.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Aside"]

R = TypeVar("R")

_Work: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class Aside:
    """One thread, begun when there is something to do; one thing after another."""

    def __init__(self, name: str) -> None:
        """Have no thread yet; the name is for people."""
        self._name = name
        self._work: _Work | None = None

    def begin(self, what: Callable[..., R], *given: object) -> Future[R]:
        """Have something done; who does not care for the result need not wait."""
        if self._work is None:
            work: _Work = SimpleQueue()
            self._work = work
            threading.Thread(target=_do, args=(work,), name=self._name, daemon=True).start()
        future: Future[R] = Future()
        self._work.put(lambda: _carry_out(future, what, given))
        return future

    async def do(self, what: Callable[..., R], *given: object) -> R:
        """Wait for it; if the caller is cancelled it is done all the same, once it has begun."""
        return await asyncio.wrap_future(self.begin(what, *given))

    def close(self) -> None:
        """Let the thread end behind what it has to do. Idempotent."""
        work, self._work = self._work, None
        if work is not None:
            work.put(None)


def _do(work: _Work) -> None:
    while (job := work.get()) is not None:
        job()
        del job  # what it was given and what came of it are not ours to keep until the next one


def _carry_out(future: Future[R], what: Callable[..., R], given: tuple[object, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(what(*given))
    except BaseException as error:  # noqa: BLE001 - it is for who waits
        future.set_exception(error)
