"""Several replicas of a counting router, as of a proxy: each hears late of the others' requests.

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
        self._news: deque[tuple[float, Counting, Callable[[Counting], None]]] = deque()

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
        self._hear(now)
        replica = self.replicas[self._turn % len(self.replicas)]
        self._turn += 1
        verdict = replica.route(key, request, now)
        if isinstance(verdict, Placed):
            self._home[key] = replica
            self._tell(replica, lambda other: other.heard(key, request, verdict, now), now)
        return verdict

    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        """See Router."""
        replica = self._home.get(key)
        if replica is not None:
            replica.prefilled(key, cached_tokens, now)
            self._tell(replica, lambda other: other.prefilled(key, cached_tokens, now), now)

    def finished(self, key: str, now: float) -> None:
        """See Router."""
        replica = self._home.pop(key, None)
        if replica is not None:
            replica.finished(key, now)
            self._tell(replica, lambda other: other.finished(key, now), now)

    def _tell(self, source: Counting, news: Callable[[Counting], None], now: float) -> None:
        self._news.append((now + self._sync_delay_s, source, news))

    def _hear(self, now: float) -> None:
        while self._news and self._news[0][0] <= now:
            _, source, news = self._news.popleft()
            for replica in self.replicas:
                if replica is not source:
                    news(replica)

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        """See Router."""
        for replica in self.replicas:
            replica.apply(worker_id, events, now)

    def tick(self, now: float) -> None:
        """See Router."""
        self._hear(now)

    def next_deadline(self) -> float:
        """Return infinity: none waits."""
        return float("inf")

    def answered(self) -> list[tuple[str, Verdict]]:
        """Return nothing: none waits."""
        return []

    def check(self) -> None:
        """See Router; what is not heard of yet counts until then."""
        for replica in self.replicas:
            replica.check()
