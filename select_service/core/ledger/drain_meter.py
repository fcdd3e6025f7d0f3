"""How fast the ledger drains, measured: prefill tokens and ended requests per second.

Only time with something to compute counts, per computing rank: an idle night makes nobody slow, and
one busy rank of many shows what all of them could do. Nothing is done per request: `work_done.py`
has the pool's totals, which are read on demand and at every housekeeping.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from select_service.core.ledger.work_done import WorkDone

MEMORY_S: Final = 30.0
"""Busy seconds after which work is largely forgotten."""
PRIOR_TOKENS_PER_S: Final = 8_000.0
"""Of one rank, until something has been measured: a mid-size model on one current device."""
PRIOR_WEIGHT_S: Final = 0.5
"""Weight of the prior in seconds of measurement; it decays like the rest."""
TOKENS_PER_S_MIN: Final = 1.0


class DrainMeter:
    """Exponentially weighted sums of work and of the time it took.

    Args:
        work: the totals to measure.
        memory_s: busy seconds after which old work weighs 1/e.
        prior_tokens_per_s: speed of one rank, until more is known.
    """

    __slots__ = (
        "_busy_since_said",
        "_ended",
        "_memory_s",
        "_said_seconds",
        "_seen_busy_seconds",
        "_seen_computed",
        "_seen_ended",
        "_seen_said_seconds",
        "_seen_stayed_s",
        "_seen_unheard",
        "_span",
        "_stayed_s",
        "_tokens",
        "work",
    )

    def __init__(
        self,
        work: WorkDone,
        *,
        memory_s: float = MEMORY_S,
        prior_tokens_per_s: float = PRIOR_TOKENS_PER_S,
    ) -> None:
        self.work = work
        self._memory_s = memory_s
        self._said_seconds = PRIOR_WEIGHT_S
        self._tokens = PRIOR_WEIGHT_S * prior_tokens_per_s
        self._busy_since_said = 0.0  # busy seconds since the last report
        self._ended = 0.0
        self._stayed_s = 0.0  # for how long those that ended were in flight
        self._span = 0.0  # seconds with something computing
        self._seen_computed, self._seen_unheard = work.computed, work.unheard
        self._seen_ended, self._seen_stayed_s = work.ended, work.stayed_s
        self._seen_said_seconds, self._seen_busy_seconds = work.said_seconds, work.busy_seconds

    def follow(self) -> None:
        """Add the work done since the last call. O(1).

        Everything between two calls decays as one: they should not be further apart than
        `memory_s`, or an old average persists.
        """
        busy_seconds = self.work.busy_seconds
        passed = busy_seconds - self._seen_busy_seconds
        self._seen_busy_seconds = busy_seconds
        self._follow_ends(passed)
        self._follow_words(passed)

    def _follow_ends(self, passed: float) -> None:
        if passed > 0.0:
            fade = math.exp(-passed / self._memory_s)
            self._ended *= fade
            self._stayed_s *= fade
            self._span = self._span * fade + passed
        self._ended += self.work.ended - self._seen_ended
        self._stayed_s += self.work.stayed_s - self._seen_stayed_s
        self._seen_ended, self._seen_stayed_s = self.work.ended, self.work.stayed_s

    def _follow_words(self, passed: float) -> None:
        """Add the reported work; forget at most as much time as was reported.

        So without reports nothing is learned, and nothing forgotten.
        """
        work = self.work
        self._busy_since_said += passed
        said = work.said_seconds - self._seen_said_seconds
        if said > 0.0:
            fade = math.exp(-min(self._busy_since_said, said) / self._memory_s)
            self._busy_since_said = 0.0
            self._said_seconds = self._said_seconds * fade + said
            self._tokens *= fade
        unheard = work.unheard - self._seen_unheard
        self._tokens += work.computed - self._seen_computed - unheard
        self._seen_said_seconds, self._seen_unheard = work.said_seconds, work.unheard
        self._seen_computed = work.computed

    @property
    def tokens_per_s(self) -> float:
        """Prefill tokens per second of one computing rank."""
        self.follow()
        return max(TOKENS_PER_S_MIN, self._tokens / self._said_seconds)

    def requests_per_s(self, in_flight: int) -> float:
        """Return how many of so many requests end per second; 0 until one has ended.

        As many as end while prompts are computed, and where long answers are what takes time, as
        many as are in flight, divided by how long one stays.
        """
        self.follow()
        ended = self._ended
        if self._span <= 0.0 or not ended:
            return 0.0
        computed = ended / self._span
        stayed_s = self._stayed_s
        return min(computed, in_flight * ended / stayed_s) if stayed_s > 0.0 else computed
