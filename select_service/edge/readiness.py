"""What /ready waits for besides a worker: recoveries that run alongside requests.

Each recovery registers a name and a predicate, which every probe evaluates. The total wait is
bounded: a replica that can never recover is better than none.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("select_service")

WORKER: Final = "schedulable_worker"
INDEX_RECOVERY: Final = "index_recovery"
REPLICA_LEDGERS: Final = "replica_ledgers"
INDEX_SNAPSHOT: Final = "index_snapshot"
STATE: Final = "state"
DISCOVERY: Final = "discovery"
LEAVING: Final = "leaving"


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
        self._deadline: float | None = None
        self._gates: dict[str, Callable[[], bool]] = {}

    def start(self) -> None:
        """Start the timeout."""
        self._deadline = self._clock() + self._timeout_s

    def wait_for(self, name: str, is_there: Callable[[], bool]) -> None:
        """Register a condition of readiness; once met, it is not checked again."""
        self._gates[name] = is_there

    def missing(self) -> list[str]:
        """Return what is still missing, in the order of registration."""
        for name in [name for name, is_there in self._gates.items() if is_there()]:
            del self._gates[name]
        if self._gates and self._deadline is not None and self._clock() >= self._deadline:
            self.given_up += self._gates
            _log.warning("ready without %s: not there in time", ", ".join(self._gates))
            self._gates.clear()
        return [LEAVING, *self._gates] if self.is_leaving else list(self._gates)
