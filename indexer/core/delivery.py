"""How late a stream's batches come, by the engine's own progress.

The clocks of engine and service differ by an unknown amount, either may be set at any time, and an
engine that has nothing to tell is not late. So a batch is compared with the one before: what counts
is by how much more time has passed here than there.
"""

from __future__ import annotations

from math import isfinite
from typing import Final

STEP_S: Final = 1.0
"""A batch that comes this much later than the one before did is taken for a clock that was set, or
for a pause whose end nobody saw. Delay grows with every batch while an engine is busy."""

DISORDER_S: Final = 0.01
"""A batch made by this much before the one before it was made by a clock that was set: one engine's
batches are made one after another, though perhaps by threads."""

QUIET_S: Final = 5.0
"""After so long a silence, measuring begins anew: all that was late has come, and the first batch
after it cannot tell a delay from a clock that was set meanwhile."""

BASE_S: Final = 3600.0
"""How long the fastest batch is the baseline for others: clocks drift."""


class Delivery:
    """The delay of one stream's live batches beyond that of the fastest.

    Attributes:
        offset_s: our clock when the last batch came, minus the engine's when it was made; None:
            there was none, or it had no time.
        lag_s: by how much more it was late than the fastest one; 0.0 after a step of either clock.
    """

    __slots__ = ("_at", "_base", "_base_before", "_base_until", "lag_s", "offset_s")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another engine is speaking, or none."""
        self.offset_s: float | None = None
        self.lag_s = 0.0
        self._at = 0.0
        self._base = 0.0  # the smallest offset of this hour
        self._base_before = 0.0  # and of the hour before
        self._base_until = 0.0

    def note(self, at: float, made_at: float | None) -> None:
        """Take the times of the next live batch: its arrival by our clock, and the engine's."""
        if made_at is None or not isfinite(made_at):
            self.forget()
            return
        offset, before, at_before = at - made_at, self.offset_s, self._at
        is_anew = before is None or at - at_before >= max(QUIET_S, self.lag_s)
        self.offset_s, self._at = offset, at
        if before is None or is_anew:
            self._base = self._base_before = offset
            self._base_until = at + BASE_S
        elif offset - before > STEP_S or made_at < at_before - before - DISORDER_S:
            # A clock was set; what was late before still is. What no step can be told from was the
            # network's: kept at each step, it would add up.
            late = self.lag_s if self.lag_s > STEP_S else 0.0
            self._base = self._base_before = offset - late
        if at >= self._base_until:
            self._base_before, self._base, self._base_until = self._base, offset, at + BASE_S
        elif offset < self._base:
            self._base = offset
        self.lag_s = offset - min(self._base, self._base_before)
