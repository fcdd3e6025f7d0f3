"""A pool's recent activity: how fast its ranks compute, and how fast its caches turn over.

Prices are measured by it (`pricing/cost.py`). `ledger.py` adds every booking; about once a
second old values decay, and the pace is read from a meter of its own (`drain_meter.py`). What each
rank computed is in the churn, a column of `slot_loads.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.core.ledger.drain_meter import DrainMeter

if TYPE_CHECKING:
    from select_service.core.columns import Floats
    from select_service.core.ledger.work_done import WorkDone

__all__ = ["CHURN_MEMORY_S", "LOOK_EVERY_S", "RecentActivity"]

CHURN_MEMORY_S: Final = 300.0
"""Time after which a booking counts for a third. Ranks of one fleet are compared with each other:
between a minute and a quarter of an hour the choice makes no measurable difference."""

LOOK_EVERY_S: Final = 1.0
"""Interval between two updates of the decay."""


class RecentActivity:
    """RecentActivity prefill tokens, and the pace.

    Args:
        work: totals of the pool, whose pace is measured.
        prior_tokens_per_s: the pace of one rank, until more is known.
    """

    __slots__ = ("_meter", "asked", "churned", "computed", "looked_at", "pace")

    def __init__(self, work: WorkDone, *, prior_tokens_per_s: float) -> None:
        self.asked = 0.0
        """Tokens of recently booked prompts; decays with `CHURN_MEMORY_S`, like everything here."""
        self.computed = 0.0
        """The part of them that was not cached."""
        self.churned = 0.0
        """The sum of the churn of all slots: less than `computed` if ranks have left."""
        self.looked_at = 0.0
        """When the decay was last applied, in monotonic seconds."""
        self.pace = prior_tokens_per_s
        """Tokens per second of a rank that has any to compute; measured at every `look`."""
        # its own meter: reads by others must not influence decisions
        self._meter = DrainMeter(work, prior_tokens_per_s=prior_tokens_per_s)

    @property
    def turnover(self) -> float:
        """The churn of all slots divided by the recent share of prompts found in caches, in tokens.

        It puts a rank's churn in proportion: if little is found, little of what leaves a cache
        would have been asked for again; infinite if nothing is found.
        """
        found = self.asked - self.computed
        return self.churned / (found / self.asked) if found > 0.0 else math.inf

    def look(self, churn: Floats, now: float) -> None:
        """Apply the decay, and measure the pace. O(slots), a µs for a thousand."""
        left = math.exp((self.looked_at - now) / CHURN_MEMORY_S)
        churn *= left
        self.churned = float(churn.sum())
        self.asked *= left
        self.computed *= left
        self.looked_at = now
        self.pace = self._meter.tokens_per_s

    def check(self, churn: Floats) -> None:
        """Assert the invariants, including those with the column."""
        assert self.pace > 0.0
        assert self.turnover >= self.churned, "no more is found than is asked for"
        assert math.isclose(self.churned, churn.sum(), rel_tol=1e-9, abs_tol=1e-3)
