"""What /ready waits for besides a worker: recoveries that run alongside requests.

Each recovery registers a name and a predicate, which every probe evaluates. The total wait is
bounded, and some have a shorter time of their own: a replica that can never recover is better than
none.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("select_service")

WORKER: Final = "schedulable_worker"
INDEX_RECOVERY: Final = "index_recovery"
REPLICA_LEDGERS: Final = "replica_ledgers"
INDEX_SNAPSHOT: Final = "index_snapshot"
DISCOVERY: Final = "discovery"
PAST_EVENTS: Final = "past_events"
LEAVING: Final = "leaving"


class _Gate(NamedTuple):
    is_there: Callable[[], bool]
    limit_s: float
    after: tuple[str, ...]


class ReadinessGate:
    """What is still missing, until it is there or the time is up.

    Attributes:
        given_up: what was still missing when the time was up.
        is_leaving: the process is leaving and will not be ready again.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        """Wait for nothing yet; `start` sets the deadline."""
        self.given_up: list[str] = []
        self.is_leaving = False
        self._timeout_s = timeout_s
        self._clock = clock
        self._started_at: float | None = None
        self._gates: dict[str, _Gate] = {}

    def start(self) -> None:
        """Start the timeout."""
        self._started_at = self._clock()

    def wait_for(
        self,
        name: str,
        is_there: Callable[[], bool],
        *,
        within_s: float | None = None,
        after: tuple[str, ...] = (),
    ) -> None:
        """Register a condition of readiness; once met, it is not checked again.

        Args:
            name: what is waited for.
            is_there: whether it is there.
            within_s: how long after the start; None: as long as for the others.
            after: it cannot be there before these others, and is not named before.
        """
        limit_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        self._gates[name] = _Gate(is_there, limit_s, after)

    def missing(self) -> list[str]:
        """Return what is still missing, in the order of registration."""
        for name in [name for name, one in self._gates.items() if one.is_there()]:
            del self._gates[name]
        if self._gates and self._started_at is not None:
            waited_s = self._clock() - self._started_at
            late = [name for name, one in self._gates.items() if waited_s >= one.limit_s]
            if late:
                self.given_up += late
                _log.warning("ready without %s: not there in time", ", ".join(late))
                for name in late:
                    del self._gates[name]
        gates = self._gates
        named = [name for name, one in gates.items() if gates.keys().isdisjoint(one.after)]
        return [LEAVING, *named] if self.is_leaving else named
