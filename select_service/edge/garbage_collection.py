"""Decides when Python collects cyclic garbage: in quiet moments, and rarely over the whole heap.

By default a full collection runs each time the number of live objects has grown by a quarter. It
holds the loop for 3 ms per thousand reservations and finds nothing: reservations are freed by
reference count. Only connections and failed tasks leave cycles. Young ones are collected as usual,
older ones in a moment without requests, or unconditionally after `FULL_S`. `app.py` starts this for
the server process; embedded services keep the defaults of their host.

Quiet moments also return freed memory to the system: glibc does so by itself only from the end of
its heap, and after a hundred thousand reservations something always lies there.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.edge.http.traffic import Traffic

LOOK_S: Final = 1.0
"""How often to check for traffic; an interval without requests counts as quiet."""

QUIET_FULL_S: Final = 600.0
"""Run a full collection in the next quiet moment after this long."""

LOAD: Final = 10_000
"""Or after this many requests: Python's free lists are scattered all over the memory a load has
used, and only a full collection releases them. They hold 10 of the 30 megabytes that remain after a
hundred thousand reservations."""

LOAD_S: Final = 60.0
"""But not sooner than this after the last one."""

FULL_S: Final = 7200.0
"""And after this long at once, so that a process without a quiet second still frees all garbage."""

TRIM_S: Final = 10.0
"""How often malloc_trim runs while quiet: a quarter of a millisecond per ten megabytes it holds, a
few microseconds if there is nothing."""

_NEVER: Final = 1 << 30


class GarbageCollection:
    """Full collections by the clock instead of by the number of objects."""

    def __init__(self, traffic: Traffic, clock: Callable[[], float]) -> None:
        """Change nothing until `start`.

        Args:
            traffic: counts requests.
            clock: monotonic seconds.
        """
        self._traffic = traffic
        self._clock = clock
        self._collected_at = clock()
        self._collected_with = 0  # requests answered at that time
        self._answered = -1
        self._before: tuple[int, int, int] | None = None
        self._trimmed_at = clock()
        self._trim: Callable[[int], int] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take over; freeze what is alive now (modules, restored state) as permanent."""
        # No collection first: it would take a tenth of the start, and the garbage left by imports
        # (some 2,000 small objects) never grows.
        gc.freeze()
        self._before = gc.get_threshold()
        gc.set_threshold(*self._before[:2], _NEVER)
        gc.enable()  # the start itself runs without it
        self._collected_at = self._clock()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Hand control back to Python. Idempotent."""
        if self._task is not None and self._before is not None:
            self._task.cancel()
            self._task = None
            gc.set_threshold(*self._before)
            gc.unfreeze()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Collect if it is time; return whether it did."""
        answered = self._traffic.answered
        is_quiet = not self._traffic.in_flight and answered == self._answered
        self._answered = answered
        since = self._clock() - self._collected_at
        if is_quiet and self._clock() - self._trimmed_at >= TRIM_S:
            self._give_back()
        after_s = FULL_S
        if is_quiet:
            after_s = LOAD_S if answered - self._collected_with >= LOAD else QUIET_FULL_S
        if since < after_s:
            return False
        gc.collect()
        self._collected_at, self._collected_with = self._clock(), answered
        self._give_back()
        return True

    def _give_back(self) -> None:
        """Return freed memory to the system, if the C library is glibc."""
        if self._trim is None:
            self._trim = _trimmer()
        self._trim(0)
        self._trimmed_at = self._clock()


def _trimmer() -> Callable[[int], int]:
    import ctypes  # not needed at start

    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return lambda _: 0
    return trim
