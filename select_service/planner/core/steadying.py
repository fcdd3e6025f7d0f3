"""From what would be right now to what is asked for: steps, patience, and no pile-up.

Up at once, but not by more than a step. Down when it is sure: to what would do even if the
forecasts of the whole time an engine takes to start were too low by as much as they usually are;
beyond that only to the most that was wanted during the stabilisation window; and not while replicas
are starting. How long a start takes is measured, not assumed; replicas that do not come are given
up, or one pod without a machine would keep all the others for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from select_service.planner.types import PoolState

__all__ = ["GIVE_UP_S", "PoolLimits", "StartTime", "Steady"]

GIVE_UP_S: Final = 1800.0
"""The longest start of an engine anybody waits for: weights of hundreds of GB, read cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Bounds of one pool."""

    least: int = 1
    most: int = 1000
    step_up: int = 8
    """Replicas added by one decision at most."""
    step_down: int = 2
    stabilisation_s: float = 300.0
    start_s: float = 120.0
    """Of a replica, until it was measured."""
    give_up_s: float = GIVE_UP_S
    """Replicas that are not there are not waited for any longer than that after the last came."""


class StartTime:
    """How long it takes from a decision to replicas that serve; smoothed over what was seen.

    A replica that was there and is not ready for a moment is waited for, too, but nobody asked for
    it: how soon it is back says nothing about starts.

    Attributes:
        seconds: what it takes.
        overdue: replicas that were given up: none has come for `give_up_s`.
    """

    def __init__(self, prior_s: float = 120.0, give_up_s: float = GIVE_UP_S) -> None:
        self.seconds = prior_s
        self.overdue = 0
        self._give_up_s = give_up_s
        self._asked_at: float | None = None  # when those that start were; None: nobody saw it
        self._waits = False
        self._moved_at = 0.0  # when more were asked for, or came
        self._before: PoolState | None = None

    def follow(self, state: PoolState, now: float) -> None:
        """Look at what is there; whoever saw a start begin and end has measured it."""
        before, self._before = self._before, state
        if not state.starting:
            if self._asked_at is not None and not self.overdue:
                self.seconds += 0.3 * (now - self._asked_at - self.seconds)
            self._asked_at, self._waits, self.overdue = None, False, 0
            return
        is_asked = before is not None and state.desired > before.desired
        has_come = before is not None and state.ready > before.ready
        if is_asked and (self._asked_at is None or self.overdue):
            self._asked_at = now
        elif has_come and self.overdue:
            self._asked_at = None  # nobody knows how long those have been under way
        if is_asked or has_come or not self._waits:
            self._moved_at = now
        self._waits = True
        is_late = now - self._moved_at >= self._give_up_s
        self.overdue = state.starting if is_late else 0


class Steady:
    """Remembers what one pool has wanted lately."""

    def __init__(self, limits: PoolLimits) -> None:
        self.limits = limits
        self._wanted: deque[tuple[float, int]] = deque()  # falling counts, oldest first

    def next(
        self, wanted: int, current: int, starting: int, now: float, sure: int | None = None
    ) -> tuple[int, str]:
        """Return (replicas to ask for, why it is not what is wanted, or nothing).

        Args:
            wanted: what would be right.
            current: asked for so far.
            starting: of them, not there yet.
            now: monotonic seconds.
            sure: what would do in any case; None: nobody knows, and the window alone decides.
        """
        limits = self.limits
        if not self._wanted:  # what was there before us was wanted, too
            self._wanted.append((now, current))
        bounded = min(max(wanted, limits.least), limits.most)
        why = "" if bounded == wanted else f"kept within {limits.least} and {limits.most}"
        self._note(bounded, now)
        if bounded > current:
            step = current + limits.step_up
            return (bounded, why) if bounded <= step else (step, f"at most {limits.step_up} more")
        patient = min(self._wanted[0][1], current)
        if sure is not None:
            patient = min(patient, max(sure, bounded))
        if patient > bounded:
            why = f"{patient} were wanted within {limits.stabilisation_s:.0f} s"
        if patient < current and starting:
            return current, f"{starting} are starting: nothing is taken away meanwhile"
        if patient < current - limits.step_down:
            return current - limits.step_down, f"at most {limits.step_down} fewer"
        return patient, why

    def _note(self, wanted: int, now: float) -> None:
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.limits.stabilisation_s:
            self._wanted.popleft()
