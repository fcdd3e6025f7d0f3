"""Which id belongs to which reservation, across all partitions.

The lifecycle routes carry only an id, so ids are unique in the whole process. The ledger of each
partition knows the load behind an id; this module only finds it.

A rank that leaves may take very many reservations with it. Their ids count as freed from that
moment (the ledger knows which are live), and are moved to the freed ids (`freed_ids.py`) a few at a
time. `lifecycle.py` books and frees through it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from select_service.core.changes import RESERVATION
from select_service.core.ledger.freed_ids import LONG_ID_CHARS, FreedIds
from select_service.core.tenancy.shares import Shares
from select_service.errors import ReservationConflict, ReservationNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sized

    from select_service.core.admission.queue import Ticket
    from select_service.core.changes import Changes, Hold
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.partition import Partition
    from select_service.core.tenancy.shares import Bound, Party
    from select_service.types import PairSelection, ReservationAnswer, Selection

_PREFILL: Final = ":prefill"
_DECODE: Final = ":decode"


class LiveReservation(Struct, eq=False):
    """A live reservation, its partition, and the answer that a repeated request gets."""

    partition: Partition
    reservation: LedgerReservation
    answer: Selection | PairSelection | ReservationAnswer | None
    """None: learned from a replica; see `replication/first_answers.py`."""
    is_own: bool = False  # as of when it was added: the owner may change later
    number: int = 0  # bookings added up to it, itself included
    is_compared: bool = False  # an engine has reported how much of its prompt was cached
    holders: int = 1  # answers given or about to be given for it; without any it is withdrawn
    hold: Hold | None = None  # of the batch that made it
    older: LiveReservation | None = None  # bookings made with the same selection_id
    younger: LiveReservation | None = None

    @property
    def is_current(self) -> bool:
        """Whether it is at the engine that its rank has now."""
        reservation = self.reservation
        return self.partition.ledger.is_current(reservation.slot, reservation.created)


class ReservationIds:
    """Live ids, their second names, waiting ids and recently freed ids."""

    def __init__(self, *, freed_ids_max: int, shares: Shares | None = None) -> None:
        self.by_id: dict[str, LiveReservation] = {}
        """By id, with those of ranks that have left."""
        self._second_names: dict[str, LiveReservation] = {}  # selection_id → its youngest booking
        self.pairs: dict[str, list[LiveReservation]] = {}
        """The booked legs of each pair."""
        self.waiting: dict[str, Ticket] = {}
        """By the id they will book."""
        self.freed = FreedIds(freed_ids_max, shares or Shares())
        """Ids that ended lately."""
        self.added = (
            0  # bookings ever added: distinguishes an older one from a younger one of its id
        )
        self.own = 0  # live bookings that were made here
        self.tenants: Bound | None = None
        """What each tenant holds of them, once tenants have parts; see `follow_tenants`."""
        self._foreign: dict[tuple[Partition, int], int] = {}  # live, not made here, by slot
        self._dropped = 0  # bookings in `by_id` that are no longer live
        self.changes: Changes | None = None  # set if the state is kept on disk
        self.hold: Hold | None = None  # the hold that new bookings belong to

    def __len__(self) -> int:
        return len(self.by_id) - self._dropped

    @property
    def expected(self) -> int:
        """Reservations booked here, plus requests that wait to become reservations."""
        return self.own + len(self.waiting)

    def follow_tenants(self, tenants: Bound, partitions: Iterable[Partition]) -> None:
        """Count what each tenant has booked, and remember what it freed, apart. O(ranks)."""
        if self.tenants is not None:
            return
        held: dict[Party, int] = {}
        for partition in partitions:
            tenant = partition.scope.tenant_id
            held[tenant] = held.get(tenant, 0) + partition.ledger.live
        for (partition, _), count in self._foreign.items():
            held[partition.scope.tenant_id] -= count
        for ticket in self.waiting.values():
            tenant = ticket.partition.scope.tenant_id
            held[tenant] = held.get(tenant, 0) + 1
        self.tenants = tenants
        tenants.recount(held)
        self.freed.follow_tenants()

    def find(self, name: str) -> LiveReservation | None:
        """Return the live booking of a reservation_id or, failing that, of a selection_id.

        Of several made with one selection_id it is the youngest.
        """
        booking = self.by_id.get(name)  # as `live`, without the extra frame
        if booking is None or not booking.reservation.generation.is_open:
            booking = self._second_names.get(name)
            while booking is not None and not booking.reservation.live:
                booking = booking.older
        return booking

    def newest(self, limit: int) -> list[LiveReservation]:
        """Return the newest live bookings, newest first. O(limit + bookings of ranks that left)."""
        live = (one for one in reversed(self.by_id.values()) if one.reservation.live)
        return list(islice(live, limit))

    def live(self, reservation_id: str) -> LiveReservation | None:
        """Return the live booking of exactly this reservation_id."""
        booking = self.by_id.get(reservation_id)
        return booking if booking is not None and booking.reservation.generation.is_open else None

    def legs(self, name: str) -> list[LiveReservation]:
        """Return the live legs of a pair, by its id or the selection_id it was made with.

        Empty if a reservation has that very id.
        """
        if not self.pairs or self.live(name) is not None:
            return []
        legs = self.pairs.get(name)
        if legs is None:
            youngest = self.find(name)
            pair = None if youngest is None else youngest.reservation.pair
            legs = [] if pair is None else self.pairs[pair]
        return [leg for leg in legs if leg.reservation.live]

    def get(self, name: str) -> LiveReservation:
        """Return the live booking.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        booking = self.find(name)
        if booking is None:
            raise ReservationNotFound(name)
        return booking

    def holder(self, reservation_id: str) -> LiveReservation | None:
        """Return the live booking that an id belongs to: of that id, or a leg of that pair."""
        booking = self.live(reservation_id)
        if booking is None and self.pairs:
            booking = next(iter(self.legs_of(reservation_id)), None)
        return booking

    def unswept(self, reservation: LedgerReservation) -> LiveReservation:
        """Return the booking of a reservation whose rank has left, and that is not swept yet."""
        booking = self.by_id[reservation.reservation_id]
        assert booking.reservation is reservation
        return booking

    def is_under_way(self, booking: LiveReservation) -> bool:
        """Tell whether a batch, other than the present one, may yet take a booking back."""
        hold = booking.hold
        return hold is not None and hold.is_open and hold is not self.hold

    def legs_of(self, pair: str) -> list[LiveReservation]:
        """Return the live legs of a pair."""
        return [leg for leg in self.pairs.get(pair, ()) if leg.reservation.live]

    def add(self, booking: LiveReservation) -> None:  # noqa: C901, PLR0912 - straight on: all pay for it
        """Add a new live booking; its id must be unused."""
        reservation = booking.reservation
        name, second = reservation.reservation_id, reservation.selection_id
        booking.hold, booking.is_own = self.hold, reservation.origin == "local"
        self.added = booking.number = self.added + 1
        before = self.by_id.get(name)
        if before is not None:
            self.forget_dropped(before.reservation, reservation.created)
        self.by_id[name] = booking
        if booking.is_own:
            self.own += 1
            if self.tenants is not None:
                self.tenants.take(booking.partition.scope.tenant_id)
        else:
            place = booking.partition, reservation.slot
            self._foreign[place] = self._foreign.get(place, 0) + 1
        freed = self.freed
        # ids in use are not freed ones
        for used in (name, reservation.pair, None if second == name else second):
            if used is None:
                continue
            if len(used) > LONG_ID_CHARS or freed.has_parts:
                freed.discard(used)
            elif freed.common.discard(used) and self.changes is not None:  # without the extra frame
                self.changes.mark(RESERVATION, used)
        if self.changes is not None and booking.is_own:
            if booking.answer is None:  # restored: it was acknowledged long ago
                self.changes.mark(RESERVATION, name)
            else:
                self.changes.booked(name, self.hold)
        if reservation.pair is not None:
            self.pairs.setdefault(reservation.pair, []).append(booking)
        if second is not None:
            booking.older = self._second_names.get(second)
            if booking.older is not None:
                booking.older.younger = booking
            self._second_names[second] = booking

    def _count_foreign_out(self, booking: LiveReservation) -> None:
        place = booking.partition, booking.reservation.slot
        left = self._foreign[place] - 1
        if left:
            self._foreign[place] = left
        else:
            del self._foreign[place]

    def forget(self, reservation: LedgerReservation, now: float) -> None:
        """Move a booking from live to recently freed; its load has left the ledger."""
        booking = self.by_id[reservation.reservation_id]
        if booking.is_own:
            self.own -= 1
            if self.tenants is not None:
                self.tenants.give(booking.partition.scope.tenant_id)
        else:
            self._count_foreign_out(booking)
        self._forget(booking, now)

    def _forget(self, booking: LiveReservation, now: float) -> None:
        reservation = booking.reservation
        name, second = reservation.reservation_id, reservation.selection_id
        del self.by_id[name]
        if self.changes is not None:
            self.changes.ended(name)
        if second is not None:
            if booking.older is None and booking.younger is None:  # the usual case
                del self._second_names[second]
            else:
                self._part_from_namesakes(booking, second)
            if second != name:
                self.remember(second, now)
        self.remember(name, now)
        if reservation.pair is not None:
            self._part_from_pair(booking, reservation.pair, now)

    def _part_from_pair(self, booking: LiveReservation, pair: str, now: float) -> None:
        legs = self.pairs[pair]
        legs.remove(booking)
        if legs:
            return
        del self.pairs[pair]
        is_ours = booking.reservation.origin == "local"
        if is_ours or all(self.was_freed(name) for name in leg_ids(pair)):
            # otherwise there may be a leg that we have yet to learn of
            self.remember(pair, now)

    def _part_from_namesakes(self, booking: LiveReservation, second: str) -> None:
        older, younger = booking.older, booking.younger
        if older is not None:
            older.younger = younger
        if younger is not None:
            younger.older = older
        elif older is not None:
            self._second_names[second] = older
        else:
            del self._second_names[second]

    def expect_dropped(self, partition: Partition, slot: int, count: int) -> None:
        """Note that `count` bookings of a slot, all it had, are no longer live.

        They make room at once; `forget_dropped` will name each.
        """
        self._dropped += count
        own = count - self._foreign.pop((partition, slot), 0)
        self.own -= own
        if self.tenants is not None and own:
            self.tenants.give(partition.scope.tenant_id, own)

    def forget_dropped(self, reservation: LedgerReservation, now: float) -> None:
        """Forget a booking whose rank has left, unless its id has been booked again since."""
        booking = self.by_id.get(reservation.reservation_id)
        if booking is not None and booking.reservation is reservation:
            self._forget(booking, now)
            self._dropped -= 1

    def remember(self, name: str, now: float) -> None:
        """Count an id as freed now, if nothing has it."""
        if name in self.by_id or name in self._second_names or name in self.pairs:
            return  # reused by another booking
        self.freed.put(name, now)

    def was_freed(self, name: str) -> bool:
        """Tell whether an id that is not live was live not long ago."""
        if name in self.by_id or name in self._second_names or name in self.pairs:
            return True
        return name in self.freed

    # -- on disk -------------------------------------------------------------------------------

    def touched(self, booking: LiveReservation) -> None:
        """Note that a fact of a live booking has changed."""
        if self.changes is not None and booking.reservation.origin == "local":
            self.changes.mark(RESERVATION, booking.reservation.reservation_id)

    def booked_as(self, name: str) -> list[LiveReservation]:
        """Return the live bookings of a reservation_id, or the live legs of a pair's id."""
        booking = self.live(name)
        return self.legs_of(name) if booking is None else [booking]

    def share(self, name: str, holders: int = 1) -> None:
        """Note that so many more answers are about to be given for a booking, or a pair."""
        for booking in self.booked_as(name):
            booking.holders += holders

    def is_remembered(self, name: str) -> bool:
        """Tell whether an id that is not live is remembered as freed."""
        return name in self.by_id or self.freed.has_key(name)

    # -- ids that wait -------------------------------------------------------------------------

    def join_waiting(self, reservation_id: str, fingerprint: bytes, prefix: str) -> Ticket | None:
        """Return the ticket if the same request already waits; None if the id is unused.

        Raises:
            ReservationConflict: another request waits under this id.
        """
        ticket = self.waiting.get(reservation_id)
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
        """Note that a booking request waits under its id, if it has one."""
        if ticket.reservation_id is not None:
            is_new = ticket.reservation_id not in self.waiting
            self.waiting[ticket.reservation_id] = ticket
            if self.tenants is not None and is_new:
                self.tenants.take(ticket.partition.scope.tenant_id)

    def waited(self, ticket: Ticket) -> None:
        """Note that the ticket no longer waits."""
        name = ticket.reservation_id
        if name is None or self.waiting.pop(name, None) is None:
            return
        if self.tenants is not None:
            self.tenants.give(ticket.partition.scope.tenant_id)

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with bookings; see `dict_compaction.py`."""
        yield from (self.by_id, self._second_names, self.pairs, self.waiting)

    def check(self) -> None:
        """Assert all invariants: each live id is in exactly one ledger, and vice versa."""
        for name, booking in self.by_id.items():
            assert booking.reservation.reservation_id == name
            if not booking.reservation.live:
                continue
            found = booking.partition.ledger.reservations_on(booking.reservation.slot)
            assert booking.reservation in list(found), "a live id without load"
        dropped = sum(not booking.reservation.live for booking in self.by_id.values())
        assert self._dropped == dropped, "what is dropped will be forgotten"
        named = 0
        for second, youngest in self._second_names.items():
            assert youngest.younger is None
            one: LiveReservation | None = youngest
            while one is not None:
                assert one.reservation.selection_id == second
                assert self.by_id[one.reservation.reservation_id] is one
                assert one.older is None or one.older.younger is one
                named, one = named + 1, one.older
        seconds = sum(
            booking.reservation.selection_id is not None for booking in self.by_id.values()
        )
        assert named == seconds, "every selection_id finds its booking"
        for pair, legs in self.pairs.items():
            assert legs, "a pair ends with its last leg"
            for leg in legs:
                assert leg.reservation.pair == pair
                assert self.by_id[leg.reservation.reservation_id] is leg
        paired = sum(booking.reservation.pair is not None for booking in self.by_id.values())
        assert paired == sum(map(len, self.pairs.values())), "every leg is found by its pair"
        self.freed.check((*self.by_id, *self._second_names, *self.pairs))
        live = [one for one in self.by_id.values() if one.reservation.live]
        assert self.own == sum(one.is_own for one in live)
        assert sum(self._foreign.values()) == len(live) - self.own
        if self.tenants is not None:
            where = [one.partition for one in live if one.is_own]
            where += [one.partition for one in self.waiting.values()]
            self.tenants.check(one.scope.tenant_id for one in where)
            assert self.tenants.total == self.expected


def leg_ids(pair: str) -> tuple[str, str]:
    """Return the reservation ids of a pair's legs: prefill, decode."""
    return pair + _PREFILL, pair + _DECODE
