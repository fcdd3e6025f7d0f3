"""One role of one model between two decisions: its engines, its queue, and its plan.

A plan is a course of needs over time. At any moment the maximum need counts until engines ordered
at the next look could serve. Foreseen needs are thus ordered when due, by whichever loop looks
then, and dropped when past.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.reactive import QueueGrowth
from select_service.planner.core.stabilization_window import StabilizationWindow, StartTime
from select_service.planner.types import PoolState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.planner.core.stabilization_window import PoolSettings
    from select_service.planner.types import PoolKey

STEPS_MOST: Final = 10
"""The most intervals forecast ahead, however long engines take to start."""
SAME: Final = 1e-9
"""Rounding error tolerated above a whole number of engines."""


class NeedStretch(NamedTuple):
    """The need during one stretch of time."""

    begin: float  # monotonic seconds
    end: float
    engines: float
    least: float
    """The engines that suffice if the forecast is too high by the chance variation of a count."""
    sure: float | None
    """The engines that suffice in any case; None: unknown."""


class PlannedPool:
    """One role of one model."""

    def __init__(self, key: PoolKey, settings: PoolSettings) -> None:
        self.key = key
        self.settings = settings
        self.steady = StabilizationWindow(settings)
        self.start_time = StartTime(settings.start_s, settings.give_up_s)
        self.state = PoolState(settings.least, settings.least)
        self.held = self.state.desired
        """The most it can have: as last read, or requested since."""
        self.was_steady = False
        self.slow: int | None = None
        self.fast: int | None = None
        self.surge_why = ""
        """The reason for `fast`, as text."""
        self.prefills, self.decodes = QueueGrowth(), QueueGrowth()
        self.engines = 0.0
        self.why = ""
        """Why `slow` is not what the plan needs, as text; empty: it is."""
        self.sure: int | None = None
        self._plan: list[NeedStretch] = []
        self._has_surged = self._had_surged = False  # since the slow loop last ran, and before

    def look(self, state: PoolState, now: float) -> None:
        """Update the pool from the connector's reading."""
        self.start_time.follow(state, now)
        is_same, self.state = state == self.state, state
        self.was_steady = is_same and not self.starting
        self.held = state.desired

    @property
    def overdue(self) -> int:
        """Replicas requested so long ago that they are no longer waited for."""
        return self.start_time.overdue

    @property
    def starting(self) -> int:
        """Replicas that are waited for."""
        return self.state.starting - self.overdue

    @property
    def wanted(self) -> int:
        """The maximum of forecast and load; the load may add, and decides without a forecast."""
        known = [one for one in (self.slow, self.fast) if one is not None]
        return max(known) if known else self.state.desired

    @property
    def has_more(self) -> bool:
        """Whether the current load needs more than was planned."""
        return self.slow is not None and self.fast is not None and self.fast > self.slow

    def plan(self, courses: Sequence[NeedStretch], past_until: float | None) -> None:
        """Take over the plan of the slow loop.

        Args:
            courses: from now on.
            past_until: keep the last earlier course until this time, as its end was foreseen; None:
                drop all.
        """
        until = -math.inf if past_until is None else past_until
        past = [one._replace(end=min(one.end, until)) for one in self._plan if one.begin < until]
        self._plan = [*past[-1:], *courses]
        self._had_surged, self._has_surged = self._has_surged, False

    def hold(self, engines: int | None) -> None:
        """Without a forecast: need this many engines, or (None) as many as the load requires."""
        self._plan, self.slow, self.why = [], engines, ""
        self.engines = float(engines or 0)

    def keep(self, engines: int) -> None:
        """Keep to this many engines at this look, whatever follows from plan and load."""
        self.slow = self.sure = engines
        self.fast, self.why = None, ""
        self.engines = float(engines)

    def surge(self) -> None:
        """Note that the load exceeded the plan."""
        self._has_surged, self.sure = True, None

    def follow(self, now: float, back_s: float, ahead_s: float) -> None:
        """Set the current need from the plan.

        Args:
            now: monotonic seconds.
            back_s: how old the end of a course must be to count: arrivals since then have been
                counted.
            ahead_s: until the next look.
        """
        if not self._plan:
            return
        until = now + self.start_time.seconds + ahead_s
        seen = [one for one in self._plan if one.end > now - back_s and one.begin < until]
        seen = seen or self._plan[-1:]  # the slow loop is late: the last course goes on
        self.engines = max(one.engines for one in seen)
        # between counts that differ only by chance, keep the current one
        least = math.ceil(max(one.least for one in seen) - SAME)
        whole = math.ceil(self.engines - SAME)
        self.slow = min(max(self.state.desired, least), whole)
        self.why = ""
        if self.slow < whole:
            self.why = (
                f"{self.state.desired} are there, and {least} do where what comes is below its "
                "forecast by no more than chance"
            )
        sure = [one.sure for one in seen if one.sure is not None]
        # after a recent surprise nothing is sure
        is_sure = len(sure) == len(seen) and not (self._has_surged or self._had_surged)
        self.sure = math.ceil(max(sure) - SAME) if is_sure else None

    def steps(self, interval_s: float) -> int:
        """How many intervals ahead matter, until the next decision can take effect."""
        return min(1 + math.ceil(self.start_time.seconds / interval_s - SAME), STEPS_MOST)
