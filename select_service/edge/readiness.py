"""What /ready waits for besides a worker: recoveries that run beside the requests.

Whoever has something to recover names it here with a question that is asked on every probe. The
wait as a whole is bounded: a replica that can never recover is better than none.
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


class Readiness:
    """Names of what is waited for, until each is there or the time is up.

    Attributes:
        given_up: what was still missing when the time was up.
        is_leaving: the process goes, and will not be ready again.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float]) -> None:
        """Wait for nothing yet; the time runs from the first look or `start`."""
        self.given_up: list[str] = []
        self.is_leaving = False
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline: float | None = None
        self._gates: dict[str, Callable[[], bool]] = {}

    def start(self) -> None:
        """Let the time run."""
        self._deadline = self._clock() + self._timeout_s

    def wait_for(self, name: str, is_there: Callable[[], bool]) -> None:
        """Name something that must be there first; once it was, it is not asked again."""
        self._gates[name] = is_there

    def missing(self) -> list[str]:
        """Return what is waited for now, in the order it was named."""
        for name in [name for name, is_there in self._gates.items() if is_there()]:
            del self._gates[name]
        if self._gates and self._deadline is not None and self._clock() >= self._deadline:
            self.given_up += self._gates
            _log.warning("ready without %s: not there in time", ", ".join(self._gates))
            self._gates.clear()
        return [LEAVING, *self._gates] if self.is_leaving else list(self._gates)
