"""Ends of reservations that no call ends: not renewed, or their lease or rank has gone.

In slices, for housekeeping; each end keeps ledger, ids, counters and replicas in step.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

from select_service.core.ledger.freed_ids import key_of
from select_service.core.ledger.leases import Leases
from select_service.core.ledger.ledger import BLOCKS_PER_STEP
from select_service.core.ledger.reservation_ids import LiveReservation, ReservationIds
from select_service.core.reservations.predictions import learn_ttft
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.core.tenancy.tenant_memory import TenantMemory, with_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.core.counters import Counters
    from select_service.core.effects import Effects
    from select_service.core.ledger.reservation import Lease, LedgerReservation
    from select_service.core.membership import Lost
    from select_service.core.observers import ReservationRecorder
    from select_service.core.partition import Partition
    from select_service.core.replication.announcer import Announcer
    from select_service.core.reservations.sessions import Sessions
    from select_service.types import CoreLimits


class ReservationEnds:
    """Live reservations and their leases, and how they end by themselves."""

    def __init__(
        self,
        limits: CoreLimits,
        counters: Counters,
        shares: Shares,
        announcer: Announcer,
        recorder: ReservationRecorder | None,
    ) -> None:
        self.bookings = ReservationIds(freed_ids_max=limits.freed_ids_max, shares=shares)
        self.leases = Leases(limits, shares)
        self.announcer = announcer
        self.sessions: Sessions | None = None  # set where requests may name their session
        self.on_ended: Callable[[LiveReservation, float], None] | None = None
        """Called with every reservation that ends before its rank does."""
        self._expired_ids = ExpiredIds(shares)
        self._counters = counters
        self._recorder = recorder

    def expire(self, partition: Partition, limit: int, now: float, effects: Effects) -> int:
        """End reservations untouched for their TTL; return the number of steps.

        Takes about `limit` steps. Only the process that booked a reservation tells the replicas.
        """
        steps = 0
        for reservation in partition.ledger.expired(now, limit):
            if not self.announcer.expires(reservation):
                partition.ledger.touch(reservation, now)
                steps += 1
                continue
            self._expired_ids.note(reservation)
            steps += self._end(partition, reservation, now, effects, "expired")
            self._counters.reservations_expired += 1
            if steps >= limit:
                break
        return steps

    def clear_leases(
        self, limit: int, now: float, effects: Effects, lease: Lease | None = None
    ) -> tuple[int, set[Partition]]:
        """End what an ended lease (None: any ended lease) left behind, in about `limit` steps.

        Returns:
            (steps, partitions): steps taken, 0 when nothing is left; partitions that lost load.
        """
        lighter: set[Partition] = set()
        steps = 0
        while steps < limit and (reservation := self.leases.left_behind(lease)) is not None:
            if not reservation.live:  # its rank has gone; the sweep will forget it
                self.leases.leave(reservation)
                steps += 1
                continue
            partition = self.bookings.get(reservation.reservation_id).partition
            ended = reservation.lease
            if ended is not None and self.leases.ending(ended.lease_id) == "expired":
                self._expired_ids.note(reservation)
            steps += self._end(partition, reservation, now, effects, "lease_ended")
            lighter.add(partition)
            self._counters.reservations_lease_ended += 1
        return steps, lighter

    def _end(
        self,
        partition: Partition,
        reservation: LedgerReservation,
        now: float,
        effects: Effects,
        why: str,
    ) -> int:
        """End a reservation that was not renewed; return the cost in steps."""
        booking = self.bookings.get(reservation.reservation_id)
        if reservation.origin != "local":
            return self.let_go(booking, now, why)
        if self.announcer.is_on:
            effects.published.append(self.announcer.expired(partition, reservation, now))
        return self._release_counted(booking, now, why)

    def let_go(self, booking: LiveReservation, now: float, why: str = "told") -> int:
        """End an orphan that was not renewed; return the cost in steps."""
        self.announcer.orphan_expired(booking.partition, booking.reservation)
        return self._release_counted(booking, now, why)

    def _release_counted(self, booking: LiveReservation, now: float, why: str) -> int:
        blocks = booking.partition.ledger.blocks
        before = blocks.blocks
        self.release(booking, now, why)
        return 1 + (before - blocks.blocks) // BLOCKS_PER_STEP

    def dropped(self, lost: Iterable[Lost]) -> None:
        """Count reservations that lost their rank; `sweep` clears them away."""
        for partition, slot, count in lost:
            self.bookings.expect_dropped(partition, slot, count)
            self._counters.reservations_dropped += count

    def sweep(self, partition: Partition, limit: int, now: float) -> int:
        """Forget up to `limit` reservations whose rank has gone; return how many were forgotten."""
        swept = partition.ledger.sweep(limit)
        for reservation in swept:
            self._forget_dropped(reservation, now)
            if reservation.session_id is not None and self.sessions is not None:
                self.sessions.rest(partition, reservation.session_id, now)
        return len(swept)

    def _forget_dropped(self, reservation: LedgerReservation, now: float) -> None:
        if self._recorder is not None:
            self._recorder.lived("dropped", reservation.reservation_id, now)
        self.leases.leave(reservation)
        self.bookings.forget_dropped(reservation, now)
        self.announcer.dropped(reservation, now)

    def release(self, booking: LiveReservation, now: float, why: str = "told") -> None:
        """Remove a live reservation from the ledger; its id counts as freed.

        `why` is for the recorder: "freed", "expired", "lease_ended", or "told" by a replica.
        """
        reservation = booking.reservation
        if self._recorder is not None:
            blocks = reservation.whole_outputs + reservation.faded_outputs
            self._recorder.lived(why, reservation.reservation_id, now, blocks)
        if self.on_ended is not None:
            self.on_ended(booking, now)
        if reservation.first_token is not None:
            learn_ttft(booking, now)
        booking.partition.ledger.free(reservation)
        if reservation.lease is not None:
            self.leases.leave(reservation)
        self.bookings.forget(reservation, now)
        if reservation.session_id is not None and self.sessions is not None:
            self.sessions.rest(booking.partition, reservation.session_id, now)


# Reservations that ended by silence, and which of them turned out to be alive. A call for a
# reservation that has ended by silence proves that its request outlived its time to live: its load
# was removed while it ran, and its worker was given more. Callers that never free leave no such
# proof.

LAPSED_MAX: Final = 4096
"""Reservations remembered, newest first: enough to detect the problem, not to count every case."""


class ExpiredIds:
    """Names of reservations that ended by silence, until they are called once more."""

    __slots__ = ("_names",)

    def __init__(self, shares: Shares | None = None) -> None:
        shares = shares or Shares()
        self._names: TenantMemory[str, tuple[tuple[str, ...], int]] = TenantMemory(
            shares, "lapsed_ids", lambda: LAPSED_MAX, by_prefix=True, size_of=itemgetter(1)
        )
        """By the key of a name: all names of its reservation, which takes one place."""

    def note(self, reservation: LedgerReservation) -> None:
        """Note a reservation that was silent for its time to live, or that of its lease."""
        given = reservation.reservation_id, reservation.selection_id, reservation.pair
        names = with_places(*given)
        called = tuple(name for name, _ in names)
        for name, places in names:
            self.discard(name)  # of a predecessor, all names go: some take no place of the bound
            self._names.put(prefix_in(name), key_of(name), (called, places))

    def discard(self, name: str) -> bool:
        """Tell whether a call is the first one for a reservation that has ended by silence."""
        if not self._names:  # the usual case
            return False
        called = self._forget(name)
        if called is None:
            return False
        for one in called:
            self._forget(one)
        return True

    def _forget(self, name: str) -> tuple[str, ...] | None:
        return (self._names.pop(prefix_in(name), key_of(name)) or (None, 0))[0]

    def __len__(self) -> int:
        return len(self._names)
