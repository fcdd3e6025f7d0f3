"""The recent growth of counters: over the last minute or two, from two snapshots each."""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 60.0
"""Growth is reported over the last one or two of these; what went well again is forgotten then."""


class CounterGrowth:
    """Growth of one set of counters that only go up."""

    __slots__ = ("_older", "_rotated_at", "_younger")

    def __init__(self, counts: tuple[int, ...], now: float) -> None:
        """Start to watch: what was counted before is not new."""
        self._older = self._younger = counts
        self._rotated_at = now

    def of(self, counts: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Return how much each has grown within the window."""
        if now - self._rotated_at >= WINDOW_S:
            # after a long break between two looks, earlier growth does not count
            is_long = now - self._rotated_at >= 2 * WINDOW_S
            self._older = counts if is_long else self._younger
            self._younger, self._rotated_at = counts, now
        return tuple(new - old for new, old in zip(counts, self._older, strict=True))
