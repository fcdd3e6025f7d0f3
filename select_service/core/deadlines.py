"""When reservations expire: one queue per time to live, in the order of their last sign of life.

`ledger.py` is the only caller. Whoever is touched goes to the end of its queue, so the head is
always the next to expire and nothing that has ended is left behind: a heap would keep the entries
of the freed, and clear them out in one long turn.

Few times to live are in use at once (the setting of the process, and what leases ask for); every
question looks at the head of each queue.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import merge
from itertools import islice, takewhile
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from select_service.core.reservation import Reservation


class Deadlines:
    """Reservations that can expire, by deadline; all moves O(1). `now` must not run backwards."""

    def __init__(self) -> None:
        self._queues: dict[float, OrderedDict[Reservation, None]] = {}  # by time to live

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, reservation: Reservation, ttl_s: float, now: float) -> None:
        """Let a reservation that is in no queue expire `ttl_s` > 0 after now."""
        reservation.ttl_s = ttl_s
        reservation.deadline = now + ttl_s
        queue = self._queues.get(ttl_s)
        if queue is None:
            queue = self._queues[ttl_s] = OrderedDict()
        queue[reservation] = None

    def touch(self, reservation: Reservation, now: float) -> None:
        """Its time runs anew from now."""
        if reservation.ttl_s:
            reservation.deadline = now + reservation.ttl_s
            self._queues[reservation.ttl_s].move_to_end(reservation)

    def remove(self, reservation: Reservation) -> None:
        """It cannot expire any more."""
        ttl_s = reservation.ttl_s
        if ttl_s:
            queue = self._queues[ttl_s]
            del queue[reservation]
            if not queue:
                del self._queues[ttl_s]
            reservation.ttl_s = 0.0

    def due(self, now: float, limit: int) -> list[Reservation]:
        """Return up to `limit` reservations whose time has come, earliest first."""
        heads = [takewhile(lambda one: one.deadline <= now, q) for q in self._queues.values()]
        return list(islice(merge(*heads, key=attrgetter("deadline")), limit))

    def next(self) -> float:
        """Return the earliest deadline, infinity if there is none."""
        return min((next(iter(queue)).deadline for queue in self._queues.values()), default=inf)

    def __iter__(self) -> Iterator[Reservation]:
        return (one for queue in self._queues.values() for one in queue)

    def check(self, members: Iterable[Reservation]) -> None:
        """Assert every promise, given all who can expire; O(everything)."""
        assert set(self) == set(members), "who can expire is in a queue"
        assert len(set(self)) == len(self), "and only once"
        for ttl_s, queue in self._queues.items():
            assert queue, "no empty queues"
            deadlines = [one.deadline for one in queue]
            assert deadlines == sorted(deadlines), "the head is the next to expire"
            assert all(one.ttl_s == ttl_s for one in queue)
            assert all(one.deadline == one.touched + ttl_s for one in queue)
