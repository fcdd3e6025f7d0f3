"""What a pool has computed and let go so far, and how long that took: totals that only grow.

The ledger writes them, a handful of additions per request; `drain_meter.py` reads them
now and then and makes a rate of their differences.

How long it took is what ranks say themselves: each computed prompt counts for the time since its
rank last spoke, or since it was booked if that was later. The clock alone would know nothing of who
hangs: a prompt that is never computed, or of which nobody ever says so, would keep a rank computing
on paper, and make all others look slow.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from select_service.core.columns import Floats

SILENCE_S: Final = 30.0
"""A rank that has something to compute and says nothing for longer may not compute at all."""

SLOWER_MAX: Final = 32.0
"""Nor does it seem to hang before it has taken so many times as long as others for what it has
begun: an engine that is worn is slow by a factor of ten."""


class WorkDone:
    """Totals of one pool of ranks, and when each rank was last heard of, by slot."""

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
        "stirred",
        "unheard",
    )

    def __init__(self) -> None:
        self.at = 0.0
        """Of the last booking or computed prompt: later than that nothing is known to compute."""
        self.computed = 0
        """Prefill tokens; what was given up is not computed."""
        self.ended = 0
        """Requests."""
        self.computing = 0
        """Ranks that have something to compute."""
        self.said_seconds = 0.0
        """Rank-seconds that computed prompts took."""
        self.unheard = 0
        """Of `computed`, tokens of which nobody knows how long they took."""
        self.resumed_at = -math.inf
        """When prompts of another life were booked again: of what was booked until then nobody
        knows when it was begun."""
        self.stirred: list[float] = []
        """When a request whose prompt is computed last ended on a slot: an engine without room for
        another prompt has time for what it has, and one that hangs ends nothing."""
        self._spoke: list[float] = []
        """When a rank that has something to compute last said that a prompt is computed, or got
        the first it has."""
        self._unsure: set[int] = set()
        """Slots where somebody gave up since: what is said next may not be what was waited for."""
        self._span_marks = 0.0  # Σ ends - Σ beginnings of times in which any rank computes

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = [0.0] * (capacity - len(self._spoke))
        self._spoke += missing
        self.stirred += missing

    def starts(self, slot: int) -> None:
        """A rank that had nothing to compute has something."""
        if not self.computing:
            self._span_marks -= self.at
        self.computing += 1
        self._spoke[slot] = self.at

    def hear(self, slot: int, tokens: int, booked_at: float) -> None:
        """A rank says what it has computed: it took the time since it last spoke, if it was there.

        What was booked later went past something else, of which nobody says anything: until then
        the rank may have had nothing to do. After a long silence in which somebody gave up nobody
        knows what it did, nor how much of what another life has begun was left to do.
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
        """Somebody gave up a prompt there, and the rank may have spent its time on that."""
        self._unsure.add(slot)

    def stops(self, slot: int) -> None:
        """A rank has nothing left to compute."""
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
        long as what may have been begun takes others.

        Args:
            now: seconds, monotonic.
            prefill: tokens to compute, by slot.
            ahead: of them, those that may have been begun.
            tokens_per_s: what a rank computes.
        """
        allowed = np.maximum(SILENCE_S, ahead * (SLOWER_MAX / tokens_per_s))
        quiet = now - np.maximum(self._spoke, self.stirred) > allowed
        return int(np.count_nonzero(quiet & (prefill > 0.0)))

    def check(self, prefill_left: list[int]) -> None:
        """Assert what is promised of ranks with so many tokens left, by slot."""
        assert self.computing == sum(tokens > 0 for tokens in prefill_left)
        assert 0 <= self.unheard <= self.computed
        assert self.said_seconds >= 0.0
        for slot, tokens in enumerate(prefill_left):
            assert self._spoke[slot] <= self.at
            assert tokens or slot not in self._unsure
