"""A trace in a closed loop: so many users, each of which asks when the last answer has ended.

The trace says what is asked, in which order, and perhaps how long a user thinks first; when is up
to the fleet. Requests with the same session are asked by one user, one after another; without a
session each is its own.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from select_service.simulator.core.requests import ClientRequest, RequestOutcome


class ClosedTraceWorkload:
    """See the module; a Workload.

    Attributes:
        total: Requests that will come.
    """

    def __init__(
        self,
        requests: Sequence[ClientRequest],
        block_size: int,
        rng: random.Random,
        users: int,
        limit: int = 0,
    ) -> None:
        self.block_size = block_size
        self.total = min(limit or len(requests), len(requests))
        sessions: dict[object, deque[ClientRequest]] = {}
        for one in requests[: self.total]:
            sessions.setdefault(one.session or one.number, deque()).append(one)
        self._sessions = deque(sessions.values())  # that nobody has begun
        self._asking: dict[int, deque[ClientRequest]] = {}  # by request: the rest of its session
        # users come within a second, not all at once
        times = sorted((rng.random() for _ in range(min(users, len(sessions)))), reverse=True)
        self._first = [(now, self._sessions.popleft()) for now in reversed(times)][::-1]

    def next(self) -> ClientRequest | None:
        """See Workload."""
        return self._ask(*self._first.pop()) if self._first else None

    def after(self, outcome: RequestOutcome) -> tuple[ClientRequest, ...]:
        """See Workload: the next of the session, or of the trace."""
        rest = self._asking.pop(outcome.request.number)
        if rest:
            return (self._ask(outcome.finished + rest[0].think_s, rest),)
        return (self._ask(outcome.finished, self._sessions.popleft()),) if self._sessions else ()

    def _ask(self, now: float, session: deque[ClientRequest]) -> ClientRequest:
        request = session.popleft()
        request.arrival = now
        self._asking[request.number] = session
        return request
