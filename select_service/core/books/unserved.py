"""Who was asked for where nobody is: of scopes whose workers have all gone, how often.

A scope without workers is given up after a while, and what it was asked for with it. Who has scaled
a fleet to nothing has to hear of the first request that comes again: this is where it is counted.
Only scopes that had workers are: names are cheap to make up. `verbs/reading.py` adds to it,
`edge/metrics/demand.py` tells it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from indexer.types import Scope

__all__ = ["UNSERVED_MAX", "Unserved"]

UNSERVED_MAX: Final = 64
"""Scopes, as many as have series of their own by default; who was asked for first gives way."""


class Unserved:
    """Requests by scope; only grows while a scope is in it. O(1)."""

    def __init__(self) -> None:
        self._counts: dict[Scope, int] = {}

    def note(self, scope: Scope) -> None:
        """One more has asked for it."""
        counts = self._counts
        if scope not in counts and len(counts) >= UNSERVED_MAX:
            del counts[next(iter(counts))]
        counts[scope] = counts.get(scope, 0) + 1

    def rows(self) -> list[tuple[Scope, int]]:
        """Return what has been counted of whom."""
        return list(self._counts.items())
