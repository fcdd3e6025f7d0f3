"""What a pool has computed and let go so far, and how long that took: totals that only grow.

The ledger writes them, a handful of additions per request; `drain_meter.py` reads them
now and then and makes a rate of their differences. Who begins or stops computing is noted with its
time in one sum: Σ stops - Σ starts + (computing now) · t is how long ranks have computed until t,
exactly, however rarely somebody asks.

That sum knows nothing of who hangs: a prompt that is never computed, or of which nobody ever says
so, keeps a rank computing on paper. What is said counts beside it: each computed prompt for the
time since its rank last spoke, or since it was booked if that was later. Both come to the same
while every rank speaks, the second later; once one was silent for long, only the second is read.
"""

from __future__ import annotations


class WorkDone:
    """Totals of one pool of ranks."""

    __slots__ = (
        "_rank_marks",
        "_span_marks",
        "at",
        "by_word",
        "computed",
        "computing",
        "ended",
        "said_seconds",
        "unheard",
        "unsaid_seconds",
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
        """Rank-seconds that prompts took which were said to be computed."""
        self.unsaid_seconds = 0.0
        """Rank-seconds that are over, and that no computed prompt accounts for; whoever follows
        the work lets them fade."""
        self.unheard = 0
        """Of `computed`, tokens of which nobody knows how long they took."""
        self.by_word = False
        """Whether a rank was silent for long: from then on only what is said is measured."""
        self._rank_marks = 0.0
        self._span_marks = 0.0

    def starts(self) -> None:
        """A rank that had nothing to compute has something."""
        if not self.computing:
            self._span_marks -= self.at
        self.computing += 1
        self._rank_marks -= self.at

    def stops(self) -> None:
        """A rank has nothing left to compute."""
        self.computing -= 1
        self._rank_marks += self.at
        if not self.computing:
            self._span_marks += self.at

    @property
    def rank_seconds(self) -> float:
        """How long ranks have computed, all together."""
        return self._rank_marks + self.computing * self.at

    @property
    def busy_seconds(self) -> float:
        """How long any rank has computed."""
        return self._span_marks + self.at if self.computing else self._span_marks
