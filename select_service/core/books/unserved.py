"""Demand for scopes without workers: how often each was asked for.

A scope without workers is dropped after a while, and its counters with it. An operator who has
scaled a fleet to zero must learn of the first request that comes again: it is counted here. Only
scopes that once had workers are counted, because names are cheap to make up. `verbs/reading.py`
adds to it, `edge/metrics/demand.py` exports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from indexer.types import Scope

__all__ = ["UNSERVED_MAX", "Unserved"]

UNSERVED_MAX: Final = 64
"""Scopes, as many as have series of their own by default; the oldest is evicted first."""


class Unserved:
    """Requests by scope; a count only grows while its scope is in it. O(1)."""

    def __init__(self) -> None:
        self._counts: dict[Scope, int] = {}

    def note(self, scope: Scope) -> None:
        """Count one more request for a scope."""
        counts = self._counts
        if scope not in counts and len(counts) >= UNSERVED_MAX:
            del counts[next(iter(counts))]
        counts[scope] = counts.get(scope, 0) + 1

    def rows(self) -> list[tuple[Scope, int]]:
        """Return the counts by scope."""
        return list(self._counts.items())
