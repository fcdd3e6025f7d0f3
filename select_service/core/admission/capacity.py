"""The cap N + Q of each worker: N requests in flight, Q waiting, and not one more.

N is hard: a worker with N requests in flight is no candidate. Q bounds the wait: a request whose
candidates are all full takes a place with one of them, and the caller lets it wait. No clock and no
queue is kept here; columns by slot let routing skip full workers at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

    from select_service.core.columns import Rows, Slots

DEFAULT_MAX_QUEUED: Final = 16
UNLIMITED: Final = 1 << 62


class WorkerCap:
    """One worker's requests in flight and waiting, and the limits of both.

    `max_inflight` is N, at least 1; None: no cap, no request ever waits for this worker.
    `max_queued` is Q, at least 0; it has no effect without N.

    Raises:
        ValueError: a number below that.
    """

    __slots__ = ("inflight", "max_inflight", "max_queued", "queued", "slots")

    def __init__(
        self, max_inflight: int | None = None, max_queued: int = DEFAULT_MAX_QUEUED
    ) -> None:
        if max_inflight is not None and max_inflight < 1:
            raise ValueError("max_inflight must be at least 1")
        if max_queued < 0:
            raise ValueError("max_queued must be at least 0")
        self.max_inflight = UNLIMITED if max_inflight is None else max_inflight
        self.max_queued = max_queued
        self.inflight = 0
        self.queued = 0
        self.slots: tuple[int, ...] = ()

    @property
    def full(self) -> bool:
        """Whether no further request may be sent to it."""
        return self.inflight >= self.max_inflight

    @property
    def is_capped(self) -> bool:
        """Whether it can be full at all."""
        return self.max_inflight != UNLIMITED

    @property
    def room(self) -> int:
        """How many more requests may wait for it."""
        return self.max_queued - self.queued


class WorkerCaps:
    """The caps of all workers of a partition: which slots are full, and where requests may wait."""

    def __init__(self) -> None:
        self.full: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.room: Slots = np.zeros(0, dtype=np.int64)
        """Waiting places left with the worker of each slot."""
        self.slots: set[int] = set()
        """The slots of full workers."""
        self.waiting = 0
        self._caps: dict[int, WorkerCap] = {}
        self._owner: list[int] = []  # by slot; meaningless for an empty slot

    @property
    def full_slots(self) -> int:
        """Slots of full workers."""
        return len(self.slots)

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = capacity - len(self.full)
        if missing > 0:
            self.full = np.concatenate([self.full, np.zeros(missing, dtype=np.bool_)])
            self.room = np.concatenate([self.room, np.zeros(missing, dtype=np.int64)])
            self._owner += [-1] * missing

    def __getitem__(self, worker_id: int) -> WorkerCap:
        return self._caps[worker_id]

    def attach(
        self,
        worker_id: int,
        slots: Collection[int],
        max_inflight: int | None,
        max_queued: int = DEFAULT_MAX_QUEUED,
    ) -> None:
        """Add a worker or update its record; its requests in flight and waiting are kept.

        Raises:
            ValueError: as `WorkerCap`.
        """
        fresh = WorkerCap(max_inflight, max_queued)
        known = self._caps.get(worker_id)
        if known is not None:
            fresh.inflight, fresh.queued = known.inflight, known.queued
            self._clear(known)
        fresh.slots = tuple(slots)
        self.ensure(max(fresh.slots, default=-1) + 1)
        self._caps[worker_id] = fresh
        for slot in fresh.slots:
            self._owner[slot] = worker_id
        self._write(fresh)

    def detach(self, worker_id: int) -> int:
        """Remove a worker; return how many requests held a place with it and need another."""
        cap = self._caps.pop(worker_id, None)
        if cap is None:
            return 0
        self._clear(cap)
        self.waiting -= cap.queued
        return cap.queued

    def note(self, worker_id: int, inflight: int) -> None:
        """Update the requests in flight on a worker, from the ledger.

        Must be called when they increase, and when those of a full worker decrease.
        """
        cap = self._caps[worker_id]
        most = cap.max_inflight
        was_full = cap.inflight >= most
        cap.inflight = inflight
        if (inflight >= most) != was_full:
            self._write(cap)

    def _clear(self, cap: WorkerCap) -> None:
        self.slots.difference_update(cap.slots)
        for slot in cap.slots:
            self.full[slot], self.room[slot] = False, 0

    def _write(self, cap: WorkerCap) -> None:
        change = self.slots.update if cap.full else self.slots.difference_update
        change(cap.slots)
        for slot in cap.slots:
            self.full[slot], self.room[slot] = cap.full, cap.room

    def lowest_limit(self) -> float:
        """Return the requests on one slot below which no worker is full.

        It is 0 if a capped worker has several ranks: it may be full whatever one of them carries.
        """
        caps = self._caps.values()
        limits = (cap.max_inflight if len(cap.slots) == 1 else 0 for cap in caps if cap.is_capped)
        return min(limits, default=math.inf)

    def inflight_most(self, rows: Rows) -> int:
        """Return how many requests the workers of these slots take together, N of each.

        A worker without a cap alone takes more than anybody asks for.
        """
        slots = range(rows.start or 0, rows.stop) if isinstance(rows, slice) else rows.tolist()
        owners = {self._owner[slot] for slot in slots}
        caps = [self._caps[owner] for owner in owners if owner in self._caps]
        return sum(cap.max_inflight for cap in caps) if caps else UNLIMITED

    def all_full(self, rows: Rows) -> bool:
        """Tell whether every candidate is full.

        O(1) unless as many slots are full as candidates.
        """
        candidates = rows.stop if isinstance(rows, slice) else len(rows)
        if len(self.slots) < candidates or not candidates:
            return False
        return bool(self.full[rows].all())

    def open_rows(self, rows: Rows) -> Rows:
        """Return the candidates that may take one more request, ascending."""
        if not self.slots:
            return rows
        full = self.full[rows]
        if not full.any():
            return rows
        return np.flatnonzero(~full) if isinstance(rows, slice) else rows[~full]

    def has_place(self, rows: Rows) -> bool:
        """Tell whether one more request may wait for any of these rows."""
        return bool((self.room[rows] > 0).any())

    def take_place(self, rows: Rows) -> int | None:
        """Take a waiting place with the candidate that has the most room; None: there is none.

        Returns:
            The worker's id, for `leave_place`.
        """
        room = self.room[rows]
        if not len(room):
            return None
        best = int(room.argmax())
        if room[best] <= 0:
            return None
        worker_id = self._owner[best if isinstance(rows, slice) else int(rows[best])]
        cap = self._caps[worker_id]
        cap.queued += 1
        self.waiting += 1
        self._write(cap)
        return worker_id

    def leave_place(self, worker_id: int) -> None:
        """Return a waiting place: the request was placed or refused, or its client left."""
        cap = self._caps.get(worker_id)
        if cap is not None and cap.queued:
            cap.queued -= 1
            self.waiting -= 1
            self._write(cap)

    def check(self) -> None:
        """Assert that columns and counts follow from the caps."""
        caps = self._caps.values()
        assert self.waiting == sum(cap.queued for cap in caps)
        full = {slot for cap in caps if cap.full for slot in cap.slots}
        assert set(np.flatnonzero(self.full).tolist()) == full
        assert self.slots == full
        for worker_id, cap in self._caps.items():
            assert cap.inflight >= 0
            assert cap.queued >= 0
            for slot in cap.slots:
                assert self._owner[slot] == worker_id
                assert self.room[slot] == cap.room
