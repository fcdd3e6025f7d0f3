"""What a pool has computed and finished so far, and how long that took: growing totals.

The ledger writes them, a handful of additions per request; `drain_meter.py` reads them now and then
and turns their differences into rates.

The time taken comes from the ranks' own reports: each computed prompt counts for the time since its
rank's last report, or since it was booked if that was later. The clock alone could not tell a
hanging rank: a prompt that is never computed, or never reported, would keep a rank computing on
paper, and make all others look slow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from select_service.core.columns import Floats

SILENCE_S: Final = 30.0
"""A rank with something to compute that reports nothing for longer may not be computing."""

SLOWER_MAX: Final = 32.0
"""It also must have taken this many times as long as others for what it has begun before it seems
to hang: a degraded engine is slower by a factor of ten."""


class WorkDone:
    """Totals of one pool of ranks, and the time of each rank's last report, by slot."""

    __slots__ = (
        "_span_marks",
        "_spoke",
        "_unsure",
        "at",
        "computed",
        "computing",
        "ended",
        "resumed_at",
        "said_seconds",
        "stayed_s",
        "stirred",
        "unheard",
    )

    def __init__(self) -> None:
        self.at = 0.0
        """Time of the last booking or computed prompt; nothing is known to compute after it."""
        self.computed = 0
        """Prefill tokens; prompts that were given up do not count."""
        self.ended = 0
        """Requests."""
        self.stayed_s = 0.0
        """For how long ended requests were in flight, together, as far as `at` tells."""
        self.computing = 0
        """Ranks that have something to compute."""
        self.said_seconds = 0.0
        """Rank-seconds that computed prompts took."""
        self.unheard = 0
        """The part of `computed`, in tokens, whose duration is unknown."""
        self.resumed_at = -math.inf
        """When prompts from before a restart were booked again; when these were begun is
        unknown."""
        self.stirred: list[float] = []
        """When a request with a computed prompt last ended on a slot: an engine without room for
        another prompt spends its time on those it has, and a hanging engine ends nothing."""
        self._spoke: list[float] = []
        """When a rank with something to compute last reported a computed prompt, or got its first
        one."""
        self._unsure: set[int] = set()
        """Slots where a prompt was given up since: the next report may not be for the expected
        prompt."""
        self._span_marks = 0.0  # Σ ends - Σ beginnings of times in which any rank computes

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = [0.0] * (capacity - len(self._spoke))
        self._spoke += missing
        self.stirred += missing

    def starts(self, slot: int) -> None:
        """Note that an idle rank has something to compute."""
        if not self.computing:
            self._span_marks -= self.at
        self.computing += 1
        self._spoke[slot] = self.at

    def hear(self, slot: int, tokens: int, booked_at: float) -> None:
        """Note a computed prompt: it took the time since the last report, or since it was booked.

        A prompt booked later overtook something that was not reported: before it the rank may have
        been idle. After a long silence in which a prompt was given up it is unknown what the rank
        did, and likewise how much was left of work begun before a restart.
        """
        since, at = self._spoke[slot], self.at
        self._spoke[slot] = at
        self.computed += tokens
        if slot in self._unsure:
            self._unsure.discard(slot)
            if at - since > SILENCE_S:
                self.unheard += tokens
                return
        if booked_at <= self.resumed_at:
            self.unheard += tokens
            return
        self.said_seconds += at - max(since, booked_at)

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

        Args:
            now: seconds, monotonic.
            prefill: tokens to compute, by slot.
            ahead: the part of them that may have been begun.
            tokens_per_s: speed of a rank.
        """
        allowed = np.maximum(SILENCE_S, ahead * (SLOWER_MAX / tokens_per_s))
        quiet = now - np.maximum(self._spoke, self.stirred) > allowed
        return int(np.count_nonzero(quiet & (prefill > 0.0)))

    def check(self, prefill_left: list[int]) -> None:
        """Assert the invariants, given the tokens left by slot."""
        assert self.computing == sum(tokens > 0 for tokens in prefill_left)
        assert 0 <= self.unheard <= self.computed
        assert self.said_seconds >= 0.0
        for slot, tokens in enumerate(prefill_left):
            assert self._spoke[slot] <= self.at
            assert tokens or slot not in self._unsure
