"""The actor behind `ray_lease.py`: which planner may act in a Ray cluster, and until when.

It has nothing on disk. Losing its memory is harmless: a new one lets no planner begin for one
duration, in which the previous holder renews the lease, or has lost it. This file is shipped whole
to a machine that may not have this package, and imports nothing of it.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class LeaseActor:
    """The actor, and a plain object in tests."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._holder: str | None = None
        self._until = 0.0

    def hold(self, holder: str, duration_s: float, *, holds: bool) -> str:
        """Take or renew the lease; returns the holder, empty: none yet.

        Args:
            holder: the requesting process; each has its own name.
            duration_s: for how long.
            holds: it renewed the lease recently, at this actor or its predecessor.
        """
        now = self._clock()
        if self._holder != holder:
            if self._holder is not None and now < self._until:
                return self._holder
            if self._holder is None and not holds and now < self._began + duration_s:
                return ""  # the previous holder may still act
        self._holder, self._until = holder, now + duration_s
        return holder

    def release(self, holder: str) -> None:
        """Release the lease: the next one gets it at once."""
        if self._holder == holder:
            self._until = self._clock()
