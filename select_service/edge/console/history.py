"""Metrics of the last minutes, so that a page opened after an incident is not empty.

Mostly totals, sampled every few seconds whether or not a page is open: some twenty microseconds per
sample, some tens of kilobytes in all. The page computes rates from their differences.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

import orjson

from indexer.types import U64_MASK
from select_service.edge.http.traffic import LATENCY_BUCKETS_S

if TYPE_CHECKING:
    import asyncio

    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.traffic import Traffic

HISTORY_STEP_S: Final = 5.0
"""Between two points: often enough to show a minute's peak, at no noticeable cost."""

HISTORY_POINTS: Final = 180
"""A quarter of an hour."""

RANKS_EVERY: Final = 3
"""Points between two at which it is noted what each rank was chosen for."""

RANKS_MAX: Final = 256
"""Ranks of which that is noted, some ten kilobytes each time; others have it in open pages only."""

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
        self.chosen: deque[bytes] = deque(maxlen=HISTORY_POINTS // RANKS_EVERY)
        self._noted = 0
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
        if self._noted % RANKS_EVERY == 0:
            self.chosen.append(self._chosen_now())
        self._noted += 1

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
        numbers = (
            now_ms(),
            counters.selections,
            sum(counters.selections_failed.values()),
            counters.selected_isl_tokens,
            counters.selected_prefill_tokens,
            self._service.waiting,
            len(core.lifecycle.bookings),
            sum(buckets),
        )
        shadow = core.shadow_control
        scored = shadow.scored, shadow.agreed, shadow.live_prefill_tokens, shadow.own_prefill_tokens
        text = ",".join(map(str, [*numbers, round(seconds, 6), *scored, *buckets]))
        return f"[{text}]".encode()

    def _chosen_now(self) -> bytes:
        """Return what ranks were chosen for in all: the moment, then rows with the page's keys."""
        tallies = (
            (f"{worker_id}/{dp_rank}", tally)
            for partition in self._service.core.partitions.values()
            for worker_id, ranks in partition.demand.ranks.items()
            for dp_rank, tally in ranks.items()
        )
        rows = [
            (key, one.selections, min(one.isl_tokens, U64_MASK), min(one.prefill_tokens, U64_MASK))
            for key, one in islice(tallies, RANKS_MAX)
        ]
        return orjson.dumps((now_ms(), rows))


def now_ms() -> int:
    """Return the time in milliseconds, for people, who read wall clocks."""
    return int(time.time() * 1000)  # noqa: TID251 - see above
