"""How long to wait before trying once more; whoever tries has the clock and the timer."""

from __future__ import annotations

__all__ = ["Patience"]


class Patience:
    """Waits that double, up to a longest one, until what was tried has lasted.

    What holds longer than the longest wait sets them back; what breaks at once lets them grow.
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
        """What was tried has worked."""
        self._held_since = now

    def broke(self, now: float) -> None:
        """It works no more."""
        if now - self._held_since > self._longest_s:
            self.begin_anew()

    def begin_anew(self) -> None:
        """Wait shortly again, whatever has been."""
        self._next_s = self._first_s
