"""Runs blocking disk work in its own thread, which shutdown does not wait for.

The event loop's own threads are joined before a process may exit: a thread stuck on a stalled disk
would keep the process alive until somebody kills it.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

R = TypeVar("R")

_Work: TypeAlias = "SimpleQueue[Callable[[], None] | None]"


class IoThread:
    """One thread, started on demand; jobs run one after another."""

    def __init__(self, name: str) -> None:
        """Start no thread yet; the name is for people."""
        self._name = name
        self._work: _Work | None = None

    def begin(self, what: Callable[..., R], *given: object) -> Future[R]:
        """Queue a job; the returned future may be ignored."""
        if self._work is None:
            work: _Work = SimpleQueue()
            self._work = work
            threading.Thread(target=_do, args=(work,), name=self._name, daemon=True).start()
        future: Future[R] = Future()
        self._work.put(lambda: _carry_out(future, what, given))
        return future

    async def do(self, what: Callable[..., R], *given: object) -> R:
        """Run a job and wait for it; once begun, it completes even if the caller is cancelled."""
        return await asyncio.wrap_future(self.begin(what, *given))

    def close(self) -> None:
        """Let the thread end after its queued jobs. Idempotent."""
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
    except BaseException as error:  # noqa: BLE001 - passed on to the caller
        future.set_exception(error)
