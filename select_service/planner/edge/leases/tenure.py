"""Who may act in a Ray cluster, and until when: the actor behind `ray.py`.

It has nothing on disk. What it has forgotten when it died cannot hurt: a new one lets nobody begin
for one duration, in which whoever held the lease before renews it, or has lost it. This file is
shipped whole to a machine that may not have this package, and imports nothing of it.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Tenure"]


class Tenure:
    """The actor, and a plain object in tests."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._holder: str | None = None
        self._until = 0.0

    def hold(self, who: str, duration_s: float, *, holds: bool) -> str:
        """Take or renew it; returns who has it then, empty: nobody yet.

        Args:
            who: asks; every process is another.
            duration_s: for how long.
            holds: it has renewed it lately, here or at the actor before.
        """
        now = self._clock()
        if self._holder != who:
            if self._holder is not None and now < self._until:
                return self._holder
            if self._holder is None and not holds and now < self._began + duration_s:
                return ""  # whoever held it before may still act
        self._holder, self._until = who, now + duration_s
        return who

    def release(self, who: str) -> None:
        """It is not needed any more: the next one has it at once."""
        if self._holder == who:
            self._until = self._clock()
