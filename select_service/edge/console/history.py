"""Metrics of the last minutes, so that a page opened after an incident is not empty.

Mostly totals, sampled every few seconds whether or not a page is open: some twenty microseconds per
sample, some tens of kilobytes in all. The page computes rates from their differences.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from select_service.edge.http.traffic import LATENCY_BUCKETS_S

if TYPE_CHECKING:
    import asyncio

    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.traffic import Traffic

HISTORY_STEP_S: Final = 5.0
"""Between two points: often enough to show a minute's peak, at no noticeable cost."""

HISTORY_POINTS: Final = 180
"""A quarter of an hour."""

_SELECTING: Final = tuple(
    ("POST", path) for path in ("/select", "/select_and_reserve", "/select_pair")
)

POINT: Final = (
    "at_ms",
    "selections",
    "failed",
    "isl_tokens",
    "prefill_tokens",
    "waiting",
    "reservations",
    "answered",
    "seconds",
    "shadow_scored",
    "shadow_agreed",
    "shadow_live_prefill_tokens",
    "shadow_own_prefill_tokens",
)
"""The fields of a point; counts by latency bucket follow."""


class History:
    """The points of the last minutes."""

    def __init__(self, service: Driver, traffic: Traffic) -> None:
        self.points: deque[bytes] = deque(maxlen=HISTORY_POINTS)  # JSON, as sent
        self._service = service
        self._traffic = traffic
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sample now and every few seconds. Repeatable."""
        if self._timer is None:
            self._note(loop)

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _note(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(HISTORY_STEP_S, self._note, loop)
        self.points.append(self.now())

    def now(self) -> bytes:
        """Return a point for this moment, as a JSON array."""
        core = self._service.core
        counters = core.counters
        seconds, buckets = 0.0, [0] * (len(LATENCY_BUCKETS_S) + 1)
        for key in _SELECTING:
            stats = self._traffic.routes.get(key)
            if stats is not None and stats.statuses:
                seconds += stats.seconds
                buckets = [a + b for a, b in zip(buckets, stats.buckets, strict=True)]
        at_ms = int(time.time() * 1000)  # noqa: TID251 - for people, who read wall clocks
        numbers = (
            at_ms,
            counters.selections,
            sum(counters.selections_failed.values()),
            counters.selected_isl_tokens,
            counters.selected_prefill_tokens,
            self._service.waiting,
            len(core.lifecycle.bookings),
            sum(buckets),
        )
        room = core.shadowing
        scored = (room.scored, room.agreed, room.live_prefill_tokens, room.own_prefill_tokens)
        text = ",".join(map(str, [*numbers, round(seconds, 6), *scored, *buckets]))
        return f"[{text}]".encode()
