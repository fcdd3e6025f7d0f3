"""From the ideal count to the requested one: in steps, with patience, and without a pile-up.

Up at once, but at most by one step. Down when it is safe: to the count that suffices even if all
forecasts for the start time of an engine were too low by the usual error; below that only to the
maximum wanted during the stabilisation window; and no serving replica while others are starting.
Those that start are given up as soon as they can no longer matter: enough are ready, or fewer have
been wanted for the whole window. Start times are measured, not assumed. Replicas that do not come
are not waited for for ever: one pod without a machine would hold all others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from select_service.planner.types import PoolState

GIVE_UP_S: Final = 1800.0
"""The longest engine start that is waited for: weights of hundreds of GB, read cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The engines of one role, and the limits of their number."""

    gpus: int = 1
    """Of one engine."""
    least: int = 1
    most: int = 1000
    step_up: int = 8
    """Maximum replicas added by one decision."""
    step_down: int = 2
    stabilisation_s: float = 300.0
    start_s: float = 120.0
    """Of a replica, until measured."""
    give_up_s: float = GIVE_UP_S
    """Missing replicas are not waited for longer than this after the last one came."""


class StartTime:
    """The time from a decision to serving replicas; smoothed over measurements.

    A running replica that is briefly not ready is waited for, too, but it was not requested: how
    soon it returns says nothing about starts.

    Attributes:
        seconds: the start time.
        overdue: replicas given up, as none has come for `give_up_s`.
    """

    def __init__(self, prior_s: float = 120.0, give_up_s: float = GIVE_UP_S) -> None:
        self.seconds = prior_s
        self.overdue = 0
        self._give_up_s = give_up_s
        self._asked_at: float | None = None  # when the starting ones were requested; None: not seen
        self._waits = False
        self._moved_at = 0.0  # when more were last requested, or came
        self._before: PoolState | None = None

    def follow(self, state: PoolState, now: float) -> None:
        """Follow the state; a start whose beginning and end were seen is a measurement."""
        before, self._before = self._before, state
        if before is not None and state.desired < before.desired:
            self._asked_at = None  # what was given up has not come
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
            self._asked_at = None  # it is unknown how long those were starting
        if is_asked or has_come or not self._waits:
            self._moved_at = now
        self._waits = True
        is_late = now - self._moved_at >= self._give_up_s
        self.overdue = state.starting if is_late else 0


class StabilizationWindow:
    """Remembers what one pool wanted recently."""

    def __init__(self, limits: PoolSettings) -> None:
        self.limits = limits
        self._wanted: deque[tuple[float, int]] = deque()  # falling counts, oldest first

    def next(
        self, wanted: int, current: int, starting: int, now: float, sure: int | None = None
    ) -> tuple[int, str]:
        """Return (replicas to request, reason if that is not `wanted`).

        Args:
            wanted: the ideal count.
            current: requested so far.
            starting: of those, not there yet.
            now: monotonic seconds.
            sure: suffices in any case; None: unknown, and the window alone decides.
        """
        limits = self.limits
        if not self._wanted:  # the count from before our start was wanted, too
            self._wanted.append((now, current))
        bounded = min(max(wanted, limits.least), limits.most)
        why = "" if bounded == wanted else f"kept within {limits.least} and {limits.most}"
        self._note(bounded, now)
        if bounded > current:
            step = current + limits.step_up
            return (bounded, why) if bounded <= step else (step, f"at most {limits.step_up} more")
        patient = longest = min(self._wanted[0][1], current)
        if sure is not None:
            patient = min(patient, max(sure, bounded))
        if patient > bounded:
            why = f"{patient} were wanted within {limits.stabilisation_s:.0f} s"
        if patient < current and starting:
            ready = current - starting
            if ready < patient < longest:
                return current, f"{starting} are starting: nothing is taken away meanwhile"
            kept = max(patient, ready)  # those that serve go later
            given_up = f"{current - kept} of {starting} that have not started are given up"
            return kept, f"{given_up}: {ready} are ready, and {patient} do"
        if patient < current - limits.step_down:
            return current - limits.step_down, f"at most {limits.step_down} fewer"
        return patient, why

    def _note(self, wanted: int, now: float) -> None:
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self.limits.stabilisation_s:
            self._wanted.popleft()
