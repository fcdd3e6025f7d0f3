"""Which id belongs to which reservation, across all partitions, and which ids were freed lately.

The lifecycle routes carry nothing but an id, so ids are unique in the whole process (D16). The
ledger of each partition knows the load behind an id; this room only finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from select_service.errors import ReservationConflict, ReservationNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.ledger import Reservation
    from select_service.core.partition import Partition
    from select_service.core.queue import Ticket
    from select_service.types import ReservationAnswer, Selection

FREED_MEMORY_S = 600.0  # contract 4.3: at least ten minutes, as far as the bound allows


class Booking:
    """A live reservation, where it is booked, and the answer a repeat gets again."""

    __slots__ = ("answer", "partition", "reservation")

    def __init__(
        self,
        partition: Partition,
        reservation: Reservation,
        answer: Selection | ReservationAnswer | None,
    ) -> None:
        self.partition = partition
        self.reservation = reservation
        self.answer = answer  # None: learnt from a replica, nothing to compare with


class Bookings:
    """Live ids, their second names, waiting ids and recently freed ids."""

    def __init__(self, *, freed_ids_max: int) -> None:
        self._live: dict[str, Booking] = {}
        self._second_names: dict[str, str] = {}  # selection_id → reservation_id
        self._waiting: dict[str, Ticket] = {}
        self._freed: OrderedDict[str, float] = OrderedDict()
        self._freed_ids_max = freed_ids_max

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Booking]:
        return iter(self._live.values())

    @property
    def freed_count(self) -> int:
        """How many freed ids are remembered."""
        return len(self._freed)

    def find(self, name: str) -> Booking | None:
        """Return the live booking of a reservation_id or, failing that, of a selection_id."""
        booking = self._live.get(name)
        if booking is None:
            second = self._second_names.get(name)
            if second is not None:
                booking = self._live.get(second)
        return booking

    def get(self, name: str) -> Booking:
        """Return the live booking.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        booking = self.find(name)
        if booking is None:
            raise ReservationNotFound(name)
        return booking

    def repeated(self, reservation_id: str, fingerprint: bytes, prefix: str = "") -> Booking | None:
        """Return the live booking when this is the same request again, None when the id is unused.

        Raises:
            ReservationConflict: the id is live with another body or route (D14, D16).
        """
        booking = self._live.get(reservation_id)
        if booking is None:
            return None
        if booking.answer is not None and booking.reservation.fingerprint == fingerprint:
            return booking
        worker, dp_rank = booking.partition.rank_at(booking.reservation.slot)
        raise ReservationConflict(
            f"{prefix}Request {reservation_id} already exists (assigned to worker "
            f"WorkerWithDpRank {{ worker_id: {worker.worker_id}, dp_rank: {dp_rank} }})",
            field="reservation_id",
        )

    def add(self, booking: Booking) -> None:
        """Remember a new live booking; its id must be unused."""
        reservation = booking.reservation
        self._live[reservation.reservation_id] = booking
        self._freed.pop(reservation.reservation_id, None)
        if reservation.selection_id is not None:
            self._second_names[reservation.selection_id] = reservation.reservation_id
            self._freed.pop(reservation.selection_id, None)

    def forget(self, reservation: Reservation, now: float) -> None:
        """Move a booking from live to recently freed; its load has left the ledger."""
        name = reservation.reservation_id
        del self._live[name]
        self._remember_freed(name, now)
        second = reservation.selection_id
        if second is not None and self._second_names.get(second) == name:
            del self._second_names[second]
            self._remember_freed(second, now)

    def _remember_freed(self, name: str, now: float) -> None:
        self._freed[name] = now
        self._freed.move_to_end(name)
        if len(self._freed) > self._freed_ids_max:
            self._freed.popitem(last=False)

    def was_freed(self, name: str) -> bool:
        """Tell whether the id was live not long ago."""
        return name in self._freed

    def purge_freed(self, now: float, limit: int) -> int:
        """Forget up to `limit` ids freed more than ten minutes ago; return how many went."""
        gone = 0
        while gone < limit and self._freed:
            name, at = next(iter(self._freed.items()))
            if now - at < FREED_MEMORY_S:
                break
            del self._freed[name]
            gone += 1
        return gone

    # -- ids that wait -------------------------------------------------------------------------

    def join_waiting(self, reservation_id: str, fingerprint: bytes, prefix: str) -> Ticket | None:
        """Return the ticket of the same request that waits already; None when the id is unused.

        Raises:
            ReservationConflict: another request waits under this id.
        """
        ticket = self._waiting.get(reservation_id)
        if ticket is None:
            return None
        if ticket.fingerprint != fingerprint:
            raise ReservationConflict(
                f"{prefix}Request {reservation_id} already exists (waiting for a worker)",
                field="reservation_id",
            )
        ticket.holders += 1
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Remember that a booking request waits under its id, if it has one."""
        if ticket.reservation_id is not None:
            self._waiting[ticket.reservation_id] = ticket

    def waited(self, ticket: Ticket) -> None:
        """The ticket waits no longer."""
        if ticket.reservation_id is not None:
            self._waiting.pop(ticket.reservation_id, None)

    def check(self) -> None:
        """State every promise: each live id is in exactly one ledger, and the other way round."""
        for name, booking in self._live.items():
            assert booking.reservation.reservation_id == name
            found = booking.partition.ledger.reservations_on(booking.reservation.slot)
            assert booking.reservation in list(found), "a live id without load"
        for second, name in self._second_names.items():
            assert self._live[name].reservation.selection_id == second
        assert not self._freed.keys() & self._live.keys(), "live and freed at once"
        assert len(self._freed) <= self._freed_ids_max
