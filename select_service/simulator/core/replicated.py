"""Several replicas of a counting router, as of a proxy: each learns late of the others' requests.

Requests go to them in turn, as with `CoreRouter`, so that all policies of a comparison know as
little as each other. Workers are known to all at once.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from select_service.simulator.core.routers import Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.simulator.core.kv_events import KvEvent
    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.routers import Counting, Verdict
    from select_service.simulator.core.worker import EngineWorker


class Replicated:
    """See the module; a Router."""

    def __init__(self, replicas: Sequence[Counting], sync_delay_s: float) -> None:
        self.replicas = replicas
        self._sync_delay_s = sync_delay_s
        self._turn = 0
        self._home: dict[str, Counting] = {}  # by key
        self._messages: deque[tuple[float, Counting, Callable[[Counting], None]]] = deque()

    def add(self, worker: EngineWorker, now: float) -> None:
        """See Router."""
        for replica in self.replicas:
            replica.add(worker, now)

    def drain(self, worker_id: int, now: float) -> None:
        """See Router."""
        for replica in self.replicas:
            replica.drain(worker_id, now)

    def remove(self, worker_id: int, now: float) -> None:
        """See Router."""
        for replica in self.replicas:
            replica.remove(worker_id, now)

    def route(self, key: str, request: ClientRequest, now: float) -> Verdict | None:
        """See Router."""
        self._receive(now)
        replica = self.replicas[self._turn % len(self.replicas)]
        self._turn += 1
        verdict = replica.route(key, request, now)
        if isinstance(verdict, Placed):
            self._home[key] = replica
            self._send(replica, lambda other: other.apply_booking(key, request, verdict, now), now)
        return verdict

    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        """See Router."""
        replica = self._home.get(key)
        if replica is not None:
            replica.prefilled(key, cached_tokens, now)
            self._send(replica, lambda other: other.prefilled(key, cached_tokens, now), now)

    def finished(self, key: str, now: float) -> None:
        """See Router."""
        replica = self._home.pop(key, None)
        if replica is not None:
            replica.finished(key, now)
            self._send(replica, lambda other: other.finished(key, now), now)

    def _send(self, source: Counting, apply: Callable[[Counting], None], now: float) -> None:
        self._messages.append((now + self._sync_delay_s, source, apply))

    def _receive(self, now: float) -> None:
        while self._messages and self._messages[0][0] <= now:
            _, source, apply = self._messages.popleft()
            for replica in self.replicas:
                if replica is not source:
                    apply(replica)

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        """See Router."""
        for replica in self.replicas:
            replica.apply(worker_id, events, now)

    def tick(self, now: float) -> None:
        """See Router."""
        self._receive(now)

    def next_deadline(self) -> float:
        """Return infinity: none waits."""
        return float("inf")

    def answered(self) -> list[tuple[str, Verdict]]:
        """Return nothing: none waits."""
        return []

    def check(self) -> None:
        """See Router; what has not arrived yet counts until then."""
        for replica in self.replicas:
            replica.check()
