"""How long to wait before the next attempt; the caller has the clock and the timer.

`feed`, `follower` and the service's replica plane use it.
"""

from __future__ import annotations


class Backoff:
    """Waits that double up to a maximum, until an attempt has lasted.

    Success that lasts longer than the maximum wait resets them; success that breaks at once lets
    them grow.
    """

    __slots__ = ("_first_s", "_held_since", "_longest_s", "_next_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s
        self._held_since = float("-inf")

    def next_s(self) -> float:
        """Return how long to wait now; the next wait is twice as long."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s

    def holds(self, now: float) -> None:
        """Note that the attempt succeeded."""
        self._held_since = now

    def broke(self, now: float) -> None:
        """Note that it no longer works."""
        if now - self._held_since > self._longest_s:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Reset to the first, short wait."""
        self._next_s = self._first_s
