"""Runs blocking work in threads of its own, which shutdown does not wait for.

The event loop's own threads are joined before a process may exit: a thread stuck on a stalled disk,
or in the system's resolver, would keep the process alive until it is killed.
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


class IoThreads:
    """A few threads, started on demand; one alone carries out its jobs one after another."""

    def __init__(self, name: str, threads_max: int = 1) -> None:
        """Start no thread yet; the name is for people."""
        self._name = name
        self._threads_max = threads_max
        self._threads = 0
        self._work: _Work = SimpleQueue()

    def begin(self, what: Callable[..., R], *given: object) -> Future[R]:
        """Queue a job; the returned future may be ignored."""
        if self._threads < self._threads_max:
            self._threads += 1
            threading.Thread(target=_do, args=(self._work,), name=self._name, daemon=True).start()
        future: Future[R] = Future()
        self._work.put(lambda: _carry_out(future, what, given))
        return future

    async def do(self, what: Callable[..., R], *given: object) -> R:
        """Run a job and wait for it; once begun, it completes even if the caller is cancelled."""
        return await asyncio.wrap_future(self.begin(what, *given))

    def close(self) -> None:
        """Let the threads end after the queued jobs. Idempotent."""
        for _ in range(self._threads):
            self._work.put(None)
        self._threads, self._work = 0, SimpleQueue()


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
