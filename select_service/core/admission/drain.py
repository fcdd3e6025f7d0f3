"""How fast the ledger drains, measured: prefill tokens and ended requests per second.

Only time in which there was something to compute counts, per computing rank: an idle night makes
nobody slow, and one busy rank of many tells what all of them could do.
"""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 30.0
"""Work older than about so many busy seconds is forgotten."""
PRIOR_TOKENS_PER_S: Final = 8_000.0
"""Of one rank, until something was measured: a mid-size model on one current device."""
PRIOR_WEIGHT_S: Final = 0.5
"""The prior counts like so many seconds of measuring; it fades with the rest."""
TOKENS_PER_S_MIN: Final = 1.0


class DrainMeter:
    """Two exponentially weighted sums, of work and of the rank-seconds it took.

    Args:
        memory_s: busy seconds after which old work weighs 1/e.
        prior_tokens_per_s: what one rank computes, until more is known.
    """

    __slots__ = (
        "_computing",
        "_ended",
        "_ended_span",
        "_memory_s",
        "_seconds",
        "_since",
        "_tokens",
    )

    def __init__(
        self, *, memory_s: float = MEMORY_S, prior_tokens_per_s: float = PRIOR_TOKENS_PER_S
    ) -> None:
        self._memory_s = memory_s
        self._seconds = PRIOR_WEIGHT_S  # rank-seconds
        self._tokens = PRIOR_WEIGHT_S * prior_tokens_per_s
        self._computing = 0
        self._since = 0.0
        self._ended = 0.0
        self._ended_span = 0.0  # seconds with something computing

    def computing(self, ranks: int, now: float) -> None:
        """From now on so many ranks have something to compute."""
        self._pass(now)
        self._computing = ranks

    def computed(self, tokens: int, now: float) -> None:
        """So many tokens were computed."""
        self._pass(now)
        self._tokens += tokens

    def ended(self, now: float, count: int = 1) -> None:
        """So many requests ended."""
        self._pass(now)
        self._ended += count

    def _pass(self, now: float) -> None:
        passed = now - self._since
        if passed <= 0.0:
            return
        self._since = now
        if not self._computing:
            return
        fade = math.exp(-passed / self._memory_s)
        self._seconds = self._seconds * fade + passed * self._computing
        self._tokens *= fade
        self._ended_span = self._ended_span * fade + passed
        self._ended *= fade

    @property
    def tokens_per_s(self) -> float:
        """Prefill tokens per second of one computing rank."""
        return max(TOKENS_PER_S_MIN, self._tokens / self._seconds)

    @property
    def requests_per_s(self) -> float:
        """Requests that end per busy second, all ranks together; 0 until one has ended."""
        return self._ended / self._ended_span if self._ended_span > 0.0 else 0.0
