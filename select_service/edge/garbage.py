"""When Python looks for cyclic garbage: not while somebody waits, and not in all there is.

By itself it looks through every object alive each time their number has grown by a quarter, which
holds the loop for 3 ms per thousand reservations, and finds nothing: what ends here ends by its
reference count. What is left are the cycles of connections and of tasks that failed; young ones
are found as ever, and all of them at a moment without requests, or at last whatever there is.
`app.py` starts this for a process of its own; who embeds the service keeps his own ways.

In quiet moments the C library gives back, too, what it keeps of memory that was freed: it does so
by itself only from the end of its heap, and after a hundred thousand reservations something always
lies there.
"""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.edge.http.traffic import Traffic

__all__ = ["GarbageCollection"]

LOOK_S: Final = 1.0
"""How often it is looked whether anybody is there; without requests for so long it is quiet."""

QUIET_FULL_S: Final = 600.0
"""After so long everything is looked through in the next quiet moment."""

LOAD: Final = 10_000
"""Or after so many requests: what Python keeps of ended objects of each kind to make the next out
of them lies all over what a load has left, and only this gives it back. 10 of 30 megabytes that
stay after a hundred thousand reservations."""

LOAD_S: Final = 60.0
"""But not sooner than this after the last time."""

FULL_S: Final = 7200.0
"""And after so long at once: a process without a quiet second still gets rid of all garbage."""

TRIM_S: Final = 10.0
"""And so often, when it is quiet, the C library gives back what it does not need: a quarter of a
millisecond per ten megabytes that it has, some microseconds when there is nothing."""

_NEVER: Final = 1 << 30


class GarbageCollection:
    """Full collections by the clock instead of by the number of objects."""

    def __init__(self, traffic: Traffic, clock: Callable[[], float]) -> None:
        """Change nothing yet.

        Args:
            traffic: tells whether requests come.
            clock: monotonic seconds.
        """
        self._traffic = traffic
        self._clock = clock
        self._collected_at = clock()
        self._collected_with = 0  # requests answered by then
        self._answered = -1
        self._before: tuple[int, int, int] | None = None
        self._trimmed_at = clock()
        self._trim: Callable[[int], int] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take over; what is alive now is taken for permanent: modules, and restored state."""
        # not collected first: to look through all modules is a tenth of a start, and what garbage
        # importing has left (some 2,000 small objects) stays the same for ever
        gc.freeze()
        self._before = gc.get_threshold()
        gc.set_threshold(*self._before[:2], _NEVER)
        gc.enable()  # nobody needs it while a process starts
        self._collected_at = self._clock()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Give it back to Python. Idempotent."""
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
        """Collect if it is time; tells whether it did."""
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
        """Have the C library give back what it keeps, where it is glibc."""
        if self._trim is None:
            self._trim = _trimmer()
        self._trim(0)
        self._trimmed_at = self._clock()


def _trimmer() -> Callable[[int], int]:
    import ctypes  # no start need wait for it

    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return lambda _: 0
    return trim
