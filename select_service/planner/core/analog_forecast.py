"""Engine counts from what followed similar times in the past.

The slow loop forecasts intervals, the fast one sees that more comes than was forecast; neither
knows how a rise continues. Where enough of the past was counted part by part, and a trial on the
past shows that the promise can be kept, this module decides instead of both, at every look:
`similar_past.py` predicts what may come until engines have started, `marginal_value.py` what they
are worth. It abstains while traffic recurs (its course is known), jumps as quickly as engines
start, is unlike all that was learnt, or is not counted.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from select_service.planner.core.catch_up import COUNT_S, DEVIATIONS
from select_service.planner.core.marginal_value import price_of
from select_service.planner.core.parts import PARTS
from select_service.planner.core.similar_past import Past, PastPosition, tried

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.planner.core.demand import Interval
    from select_service.planner.core.marginal_value import Table
    from select_service.planner.core.profile import Floats
    from select_service.planner.core.similar_past import PastTrial
    from select_service.planner.types import PoolKey

LEARNT_MIN: Final = 60
"""Intervals that must be known part by part: an hour of one-minute ones."""
LEARNT_MOST: Final = 500
"""Intervals remembered: a day of three-minute ones."""
TRIED_EVERY: Final = 10
"""Intervals between two trials on the past."""
UNLIKE: Final = 0.2
"""Traffic this far above its expected rate, beyond chance, is unlike anything learnt."""


class AnalogForecast:
    """The similarity of one model's traffic to its past.

    Args:
        late_most: share of requests that may be late; None: nothing is promised, so abstain.
    """

    def __init__(self, late_most: float | None) -> None:
        self.is_asked = True
        """Whether a fast loop counts arrivals, and this is not switched off."""
        self.price: float | None = None
        """Late requests per second that one GPU must save; None: abstain."""
        self._late_most = late_most
        self._counts: list[float] = []  # per part
        self._dropped = 0  # parts forgotten since the place was last moved
        self._place: PastPosition | None = None
        self._trial: PastTrial | None = None
        self._untried = 0  # intervals since the last trial
        self._tables: dict[PoolKey, Table] = {}
        self._observed_at: float | None = None
        self._lately: deque[tuple[float, float, float]] = deque()  # (came, expected, seconds)

    def learn(self, one: Interval) -> None:
        """Add a finished interval."""
        if one.parts:
            self._counts += one.parts
        else:
            self._counts += [0.0 if not one.requests else math.nan] * PARTS
        self._trim()
        self._untried += 1

    def skip(self) -> None:
        """Note unknown time: what comes now does not follow on the last interval."""
        self._counts += [math.nan] * PARTS
        self._trim()
        self._place = None
        self.lose()

    def _trim(self) -> None:
        over = len(self._counts) - LEARNT_MOST * PARTS
        if over > 0:
            del self._counts[:over]
            self._dropped += over

    def observe(self, requests: float, seconds: float, end: float) -> None:
        """Add the arrivals of the seconds until `end`, monotonic."""
        place, before = self._place, self._observed_at
        self._observed_at = end
        if place is None:
            return
        place.observe(requests, seconds, seconds if before is None else max(0.0, end - before))
        self._lately.append((requests, place.rate * seconds, seconds))
        while sum(span for _, _, span in self._lately) - self._lately[0][2] >= COUNT_S:
            self._lately.popleft()

    def lose(self) -> None:
        """Note that arrivals are not being counted now."""
        self._lately.clear()

    def plan(
        self,
        part_s: float,
        lead_s: float,
        *,
        is_known: bool,
        tables_of: Callable[[Floats], Mapping[PoolKey, Table]],
    ) -> None:
        """Prepare the data that stays constant during the next interval.

        Args:
            part_s: length of a part.
            lead_s: from the end of a count until engines it orders have started, plus the next
                look.
            is_known: the course of traffic is known, so abstain.
            tables_of: the late requests for each engine count, on a grid of rates.
        """
        counted = sum(1 for one in self._counts if math.isfinite(one))
        is_used = self.is_asked and self._late_most is not None and not is_known
        if not is_used or counted < LEARNT_MIN * PARTS:
            self._place, self._trial, self.price = None, None, None
            return
        past = Past(self._counts, part_s, lead_s)
        if not past.is_smooth or past.is_surpassed:
            self._place, self._trial, self.price = None, None, None
            return
        if self._place is None:
            self._place = PastPosition(past)
            for count in self._counts[-PARTS:]:
                if math.isfinite(count):
                    self._place.observe(count, part_s, part_s)
        else:
            self._place.move_to(past, self._dropped)
        self._dropped = 0
        if self._trial is None or self._untried >= TRIED_EVERY:
            self._trial, self._untried = tried(past), 0
        self._tables = dict(tables_of(self._trial.grid))
        self.price = price_of(self._trial, list(self._tables.values()), self._late_most or 0.0)

    def engines(self, pool: PoolKey, current: int) -> int | None:
        """Return the target for a current count; None: abstain."""
        if self.price is None or self._place is None or self._trial is None or self._is_unlike:
            return None
        probabilities = self._place.most(self._trial.grid)
        return self._tables[pool].next(probabilities, self.price, current)

    def worth(self, pool: PoolKey, count: int) -> str:
        """Return what more engines than `count` would be worth, as text."""
        if self.price is None or self._place is None or self._trial is None:
            return ""
        return self._tables[pool].why(self._place.most(self._trial.grid), self.price, count)

    @property
    def why(self) -> str:
        """The current expectation, as text."""
        place, trial = self._place, self._trial
        if place is None or trial is None:
            return ""
        odds = place.most(trial.grid)
        high = float(trial.grid[min(int(odds.cumsum().searchsorted(0.9)), len(trial.grid) - 1)])
        return (
            f"{place.rate:.1f} requests/s come, and after times like this {odds @ trial.grid:.1f} "
            f"at the most until engines start, {high:.1f} one time in ten"
        )

    @property
    def _is_unlike(self) -> bool:
        """Whether more came lately than at any place it may be; fewer will be learnt in minutes."""
        seconds = sum(span for _, _, span in self._lately)
        if not self._lately:
            return True  # not being counted
        came = sum(count for count, _, _ in self._lately)
        expected = sum(count for _, count, _ in self._lately)
        chance = max(DEVIATIONS * math.sqrt(max(expected, 1.0)), UNLIKE * expected)
        return seconds >= COUNT_S and came - expected > chance
