"""Which event loop an embedded service lives on, and how calls from anywhere get there.

Built where a loop runs, a service lives on that loop, and calls from there cost nothing more. Built
anywhere else, it gets a loop in a thread of its own. Calls from other threads and loops are carried
over.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class LoopOwner:
    """The loop of one service."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        try:
            self.loop = asyncio.get_running_loop()
        except RuntimeError:
            self.loop = asyncio.new_event_loop()
            running = threading.Event()
            self.loop.call_soon(running.set)
            self._thread = threading.Thread(target=self._run, name="select-service", daemon=True)
            self._thread.start()
            running.wait()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start work on the loop now, and return its result to the caller's loop.

        Cancelling the future cancels the work.

        Raises:
            RuntimeError: no loop runs here, or that of the service is closed.
        """
        try:
            here = asyncio.get_running_loop()
            if here is not self.loop:
                there = asyncio.run_coroutine_threadsafe(work, self.loop)
                return asyncio.wrap_future(there, loop=here)
        except RuntimeError:
            work.close()
            raise
        return self.keep(work)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the loop and wait for its result.

        Raises:
            RuntimeError: the loop of the service is closed.
        """
        if self._is_here() or not self.loop.is_running():
            if self.loop.is_closed():
                raise RuntimeError("Event loop is closed")
            return function()
        result: concurrent.futures.Future[T] = concurrent.futures.Future()

        def carry_out() -> None:
            try:
                result.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the caller's
                result.set_exception(error)

        self.loop.call_soon_threadsafe(carry_out)
        return result.result()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Start work before any other; on a loop of its own, it has ended on return.

        Raises:
            Exception: of the work, if it has ended.
        """
        if self._thread is None:
            return self.keep(work)

        async def end() -> asyncio.Future[T]:
            task = self.keep(work)
            await asyncio.wait([task])
            return task

        task = asyncio.run_coroutine_threadsafe(end(), self.loop).result()
        task.result()
        return task

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work on the loop, on which the caller runs; hold it until it ends."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def finish(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Close what lived on the loop, and end the loop if it is its own. Waits for nothing."""
        if self.loop.is_closed() or not self.loop.is_running():
            return  # it was ended, and what ran there cancelled

        async def last() -> None:
            try:
                await close()
            finally:
                if self._thread is not None:
                    self.loop.stop()

        self.loop.call_soon_threadsafe(lambda: self.keep(last()))

    def _is_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop
        except RuntimeError:
            return False
