"""What a pool did lately: how fast its ranks compute, and how fast its caches turn over.

Prices are measured by it (`pricing/scoring.py`). Whoever books adds to it (`ledger.py`); once in a
while it lets what is old count for less, and takes the pace from a meter of its own
(`drain_meter.py`). Which rank computed what is in the churn, a column of `slot_loads.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.core.books.drain_meter import DrainMeter

if TYPE_CHECKING:
    from select_service.core.books.work_done import WorkDone
    from select_service.core.columns import Floats

__all__ = ["CHURN_MEMORY_S", "LOOK_EVERY_S", "Recent"]

CHURN_MEMORY_S: Final = 300.0
"""After so long a booking counts for a third. What is compared are ranks of one fleet: between a
minute and a quarter of an hour it makes no difference that could be measured."""

LOOK_EVERY_S: Final = 1.0
"""Between two looks at how old it is."""


class Recent:
    """Prefill tokens of late, and the pace.

    Args:
        work: what the pool has done, whose pace is measured.
        prior_tokens_per_s: the pace of one rank, until more is known.
    """

    __slots__ = ("_meter", "asked", "churned", "computed", "looked_at", "pace")

    def __init__(self, work: WorkDone, *, prior_tokens_per_s: float) -> None:
        self.asked = 0.0
        """Tokens of the prompts booked lately; `CHURN_MEMORY_S` forgets them, as all here."""
        self.computed = 0.0
        """Of them, those that nobody had cached."""
        self.churned = 0.0
        """The sum of the churn of all slots: less than `computed` where ranks have gone."""
        self.looked_at = 0.0
        """When all of that was made to count for less, in monotonic seconds."""
        self.pace = prior_tokens_per_s
        """Tokens that a rank which has any computes in a second; measured anew at every look."""
        # its own: who else looks at a meter, and when, must not decide anything
        self._meter = DrainMeter(work, prior_tokens_per_s=prior_tokens_per_s)

    @property
    def turnover(self) -> float:
        """The churn of all slots over the share of prompts that was found lately, in tokens.

        What a rank's churn is measured by: where little is found, little of what goes out of a
        cache would have been asked for again; infinite where nothing is.
        """
        found = self.asked - self.computed
        return self.churned / (found / self.asked) if found > 0.0 else math.inf

    def look(self, churn: Floats, now: float) -> None:
        """Let what was computed count for less, and measure. O(slots), a µs for a thousand."""
        left = math.exp((self.looked_at - now) / CHURN_MEMORY_S)
        churn *= left
        self.churned = float(churn.sum())
        self.asked *= left
        self.computed *= left
        self.looked_at = now
        self.pace = self._meter.tokens_per_s

    def check(self, churn: Floats) -> None:
        """Assert what is promised, beside the column."""
        assert self.pace > 0.0
        assert self.turnover >= self.churned, "no more is found than is asked for"
        assert math.isclose(self.churned, churn.sum(), rel_tol=1e-9, abs_tol=1e-3)
