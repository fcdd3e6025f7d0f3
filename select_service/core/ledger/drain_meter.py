"""How fast the ledger drains, measured: prefill tokens and ended requests per second.

Only time with something to compute counts, per computing rank: an idle night makes none slow, and
one busy rank of many shows what all of them could do. Nothing is done per request: the
pool's totals are read on demand and at every housekeeping.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from select_service.core.columns import Floats

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

    def __init__(
        self,
        work: WorkDone,
        *,
        memory_s: float = MEMORY_S,
        prior_tokens_per_s: float = PRIOR_TOKENS_PER_S,
    ) -> None:
        self.work = work
        self._memory_s = memory_s
        self._reported_seconds = PRIOR_WEIGHT_S
        self._tokens = PRIOR_WEIGHT_S * prior_tokens_per_s
        self._busy_since_report = 0.0  # busy seconds since the last report
        self._ended = 0.0
        self._stayed_s = 0.0  # for how long those that ended were in flight
        self._span = 0.0  # seconds with something computing
        self._seen_computed, self._seen_untimed = work.computed, work.untimed
        self._seen_ended, self._seen_stayed_s = work.ended, work.stayed_s
        self._seen_reported_seconds, self._seen_busy_seconds = (
            work.reported_seconds,
            work.busy_seconds,
        )

    def follow(self) -> None:
        """Add the work done since the last call. O(1).

        Everything between two calls decays as one: they should not be further apart than
        `memory_s`, or an old average persists.
        """
        busy_seconds = self.work.busy_seconds
        passed = busy_seconds - self._seen_busy_seconds
        self._seen_busy_seconds = busy_seconds
        self._follow_ends(passed)
        self._follow_reports(passed)

    def _follow_ends(self, passed: float) -> None:
        if passed > 0.0:
            fade = math.exp(-passed / self._memory_s)
            self._ended *= fade
            self._stayed_s *= fade
            self._span = self._span * fade + passed
        self._ended += self.work.ended - self._seen_ended
        self._stayed_s += self.work.stayed_s - self._seen_stayed_s
        self._seen_ended, self._seen_stayed_s = self.work.ended, self.work.stayed_s

    def _follow_reports(self, passed: float) -> None:
        """Add the reported work; forget at most as much time as was reported.

        So without reports nothing is learned, and nothing forgotten.
        """
        work = self.work
        self._busy_since_report += passed
        new_seconds = work.reported_seconds - self._seen_reported_seconds
        if new_seconds > 0.0:
            fade = math.exp(-min(self._busy_since_report, new_seconds) / self._memory_s)
            self._busy_since_report = 0.0
            self._reported_seconds = self._reported_seconds * fade + new_seconds
            self._tokens *= fade
        untimed = work.untimed - self._seen_untimed
        self._tokens += work.computed - self._seen_computed - untimed
        self._seen_reported_seconds, self._seen_untimed = work.reported_seconds, work.untimed
        self._seen_computed = work.computed

    @property
    def tokens_per_s(self) -> float:
        """Prefill tokens per second of one computing rank."""
        self.follow()
        return max(TOKENS_PER_S_MIN, self._tokens / self._reported_seconds)

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


# What a pool has computed and finished so far, and how long that took: growing totals. The time
# taken comes from the ranks' own reports: each computed prompt counts for the time since its rank's
# last report, or since it was booked if that was later. The clock alone could not find a hanging
# rank: a prompt that is never computed, or never reported, would keep a rank computing on paper,
# and make all others look slow.

SILENCE_S: Final = 30.0
"""A rank with something to compute that reports nothing for longer may not be computing."""

SLOWER_MAX: Final = 32.0
"""It also must have taken this many times as long as others for what it has begun before it seems
to hang: a degraded engine is slower by a factor of ten."""


class WorkDone:
    """Totals of one pool of ranks, and the time of each rank's last report, by slot."""

    def __init__(self) -> None:
        self.at = 0.0
        """Time of the last booking or computed prompt; nothing is known to compute after it."""
        self.computed = 0
        """Prefill tokens; prompts that were given up do not count."""
        self.ended = 0
        """Requests."""
        self.stayed_s = 0.0
        """For how long ended requests were in flight, together, as far as `at` shows."""
        self.computing = 0
        """Ranks that have something to compute."""
        self.reported_seconds = 0.0
        """Rank-seconds that computed prompts took."""
        self.untimed = 0
        """The part of `computed`, in tokens, whose duration is unknown."""
        self.resumed_at = -math.inf
        """When prompts from before a restart were booked again; when these were begun is
        unknown."""
        self.stirred: list[float] = []
        """When a request with a computed prompt last ended on a slot: an engine without room for
        another prompt spends its time on those it has, and a hanging engine ends nothing."""
        self._reported_at: list[float] = []
        """When a rank with something to compute last reported a computed prompt, or got its first
        one."""
        self._unsure: set[int] = set()
        """Slots where a prompt was given up since: the next report may not be for the expected
        prompt."""
        self._span_marks = 0.0  # Σ ends - Σ beginnings of times in which any rank computes

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = [0.0] * (capacity - len(self._reported_at))
        self._reported_at += missing
        self.stirred += missing

    def starts(self, slot: int) -> None:
        """Note that an idle rank has something to compute."""
        if not self.computing:
            self._span_marks -= self.at
        self.computing += 1
        self._reported_at[slot] = self.at

    def note_computed(self, slot: int, tokens: int, booked_at: float) -> None:
        """Note a computed prompt: it took the time since the last report, or since it was booked.

        A prompt booked later overtook something that was not reported: before it the rank may have
        been idle. After a long silence in which a prompt was given up it is unknown what the rank
        did, and likewise how much was left of work begun before a restart.
        """
        since, at = self._reported_at[slot], self.at
        self._reported_at[slot] = at
        self.computed += tokens
        if slot in self._unsure:
            self._unsure.discard(slot)
            if at - since > SILENCE_S:
                self.untimed += tokens
                return
        if booked_at <= self.resumed_at:
            self.untimed += tokens
            return
        self.reported_seconds += at - max(since, booked_at)

    def doubt(self, slot: int) -> None:
        """Note that a prompt was given up, on which the rank may have spent its time."""
        self._unsure.add(slot)

    def stops(self, slot: int) -> None:
        """Note that a rank has nothing left to compute."""
        self.computing -= 1
        self._unsure.discard(slot)
        if not self.computing:
            self._span_marks += self.at

    @property
    def busy_seconds(self) -> float:
        """How long any rank has had something to compute."""
        return self._span_marks + self.at if self.computing else self._span_marks

    def silent(self, now: float, prefill: Floats, ahead: Floats, tokens_per_s: float) -> int:
        """Count ranks that have something to compute and seem to hang. O(slots).

        They have computed nothing and ended nothing for `SILENCE_S`, and for `SLOWER_MAX` times as
        long as others take for what may have been begun.

        `prefill` are tokens to compute, by slot; `ahead` is the part of them that may have
        been begun. `tokens_per_s` is the speed of a rank.
        """
        allowed = np.maximum(SILENCE_S, ahead * (SLOWER_MAX / tokens_per_s))
        quiet = now - np.maximum(self._reported_at, self.stirred) > allowed
        return int(np.count_nonzero(quiet & (prefill > 0.0)))

    def check(self, prefill_left: list[int]) -> None:
        """Assert the invariants, given the tokens left by slot."""
        assert self.computing == sum(tokens > 0 for tokens in prefill_left)
        assert 0 <= self.untimed <= self.computed
        assert self.reported_seconds >= 0.0
        for slot, tokens in enumerate(prefill_left):
            assert self._reported_at[slot] <= self.at
            assert tokens or slot not in self._unsure
