"""Which id belongs to which reservation, across all partitions, and which ids were freed lately.

The lifecycle routes carry nothing but an id, so ids are unique in the whole process. The
ledger of each partition knows the load behind an id; this room only finds it.

A rank that goes may take very many reservations with it. Their ids count as freed from that moment
(the ledger says which are live), and move to the freed ones a few at a time.
"""

from __future__ import annotations

from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_128_hexdigest

from select_service.core.changes import RESERVATION
from select_service.core.memory import Memory
from select_service.errors import ReservationConflict, ReservationNotFound, ReservationUnderWay

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

    from select_service.core.admission.queue import Ticket
    from select_service.core.books.reservation import Reservation
    from select_service.core.changes import Changes, Hold
    from select_service.core.partition import Partition
    from select_service.types import PairSelection, ReservationAnswer, Selection

FREED_MEMORY_S = 600.0  # the contract: at least ten minutes, as far as the bound allows

LONG_ID_CHARS: Final = 64
"""Of freed ids that are longer only a digest is remembered: an id may be as long as a body."""

_BY_DIGEST: Final = "freed id by its digest, xxh3_128 = "  # longer, with it, than a short id
_PREFILL: Final = ":prefill"
_DECODE: Final = ":decode"
_KEY_CHARS: Final = len(_BY_DIGEST) + 32


class Booking:
    """A live reservation, where it is booked, and the answer a repeat gets again."""

    __slots__ = ("answer", "hold", "is_own", "older", "partition", "reservation", "younger")

    def __init__(
        self,
        partition: Partition,
        reservation: Reservation,
        answer: Selection | PairSelection | ReservationAnswer | None,
    ) -> None:
        self.partition = partition
        self.reservation = reservation
        self.answer = answer  # None: learnt from a replica, nothing to compare with
        self.is_own = reservation.origin == "local"  # when it was made: later it may change hands
        self.hold: Hold | None = None  # of the wave it was made in
        self.older: Booking | None = None  # namesakes: made with the same selection_id
        self.younger: Booking | None = None


class Bookings:
    """Live ids, their second names, waiting ids and recently freed ids."""

    __slots__ = (
        "_dropped",
        "_freed",
        "_freed_ids_max",
        "_live",
        "_second_names",
        "_waiting",
        "changes",
        "freed_ids_lost",
        "hold",
        "own",
        "pairs",
    )

    def __init__(self, *, freed_ids_max: int) -> None:
        self._live: dict[str, Booking] = {}
        self._second_names: dict[str, Booking] = {}  # selection_id → the youngest made with it
        self.pairs: dict[str, list[Booking]] = {}
        """The legs of each pair that is booked."""
        self._waiting: dict[str, Ticket] = {}
        self._freed: Memory[str] = Memory()  # by `key_of` the id
        self._freed_ids_max = freed_ids_max
        self.own = 0  # of the live, those that were booked here
        self.freed_ids_lost = 0  # forgotten before their ten minutes were over
        self._dropped = 0  # of the bookings, those that are not live any more
        self.changes: Changes | None = None  # when the state is kept on disk
        self.hold: Hold | None = None  # what is booked now belongs to it

    def __len__(self) -> int:
        return len(self._live) - self._dropped

    @property
    def expected(self) -> int:
        """Reservations booked here, and requests that wait to become some."""
        return self.own + len(self._waiting)

    @property
    def freed_count(self) -> int:
        """How many freed ids are remembered."""
        return len(self._freed)

    @property
    def freed_bytes(self) -> int:
        """What they take."""
        return self._freed.nbytes

    def find(self, name: str) -> Booking | None:
        """Return the live booking of a reservation_id or, failing that, of a selection_id.

        Of several made with one selection_id it is the youngest.
        """
        booking = self._live.get(name)  # as `_find_live`, without its frame
        if booking is None or not booking.reservation.lane.is_open:
            booking = self._second_names.get(name)
            while booking is not None and not booking.reservation.live:
                booking = booking.older
        return booking

    def newest(self, limit: int) -> list[Booking]:
        """Return the live bookings made last, newest first. O(limit + those of ranks that went)."""
        live = (one for one in reversed(self._live.values()) if one.reservation.live)
        return list(islice(live, limit))

    def _find_live(self, reservation_id: str) -> Booking | None:
        booking = self._live.get(reservation_id)
        return booking if booking is not None and booking.reservation.lane.is_open else None

    def legs(self, name: str) -> list[Booking]:
        """Return the live legs of a pair, by its id or the selection_id it was made with.

        None when a reservation has that very id.
        """
        if not self.pairs or self._find_live(name) is not None:
            return []
        legs = self.pairs.get(name)
        if legs is None:
            youngest = self.find(name)
            pair = None if youngest is None else youngest.reservation.pair
            legs = [] if pair is None else self.pairs[pair]
        return [leg for leg in legs if leg.reservation.live]

    def get(self, name: str) -> Booking:
        """Return the live booking.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        booking = self.find(name)
        if booking is None:
            raise ReservationNotFound(name)
        return booking

    def may_add(self, reservation_id: str | None, most: int) -> bool:
        """Whether it is plain that nobody has an id, if it is given, and there is room for it.

        Args:
            reservation_id: of what is to be booked.
            most: as many may be booked here or waited for.
        """
        waiting = self._waiting
        if reservation_id is not None and (waiting or self.pairs or reservation_id in self._live):
            return False
        return self.own + len(waiting) < most

    def is_unknown(self, reservation_id: str) -> bool:
        """Whether it is plain that nobody has an id; if not, `repeated` and others tell."""
        return reservation_id not in self._live and not self._waiting and not self.pairs

    def repeated(self, reservation_id: str, fingerprint: bytes, prefix: str = "") -> Booking | None:
        """Return the live booking when this is the same request again, None when the id is unused.

        Raises:
            ReservationConflict: the id is live with another body or route.
            ReservationUnderWay: a wave has booked it that may yet take it back.
        """
        booking = self._find_live(reservation_id)
        if booking is None and self.pairs:
            booking = next(iter(self._legs_of(reservation_id)), None)
        if booking is None:
            return None
        if booking.answer is not None and booking.reservation.fingerprint == fingerprint:
            hold = booking.hold
            if hold is not None and hold.is_open and hold is not self.hold:
                raise ReservationUnderWay(reservation_id, prefix)
            return booking
        worker, dp_rank = booking.partition.seating.rank_at(booking.reservation.slot)
        raise ReservationConflict(
            f"{prefix}Request {reservation_id} already exists (assigned to worker "
            f"WorkerWithDpRank {{ worker_id: {worker.worker_id}, dp_rank: {dp_rank} }})",
            field="reservation_id",
        )

    def _legs_of(self, pair: str) -> list[Booking]:
        return [leg for leg in self.pairs.get(pair, ()) if leg.reservation.live]

    def add(self, booking: Booking) -> None:
        """Remember a new live booking; its id must be unused."""
        reservation = booking.reservation
        booking.hold = self.hold
        before = self._live.get(reservation.reservation_id)
        if before is not None:
            self.forget_dropped(before.reservation, reservation.created)
        self._live[reservation.reservation_id] = booking
        self.own += booking.is_own
        self._recall(reservation.reservation_id)
        if self.changes is not None and reservation.origin == "local":
            if booking.answer is None:  # acknowledged long ago, and back again
                self.changes.mark(RESERVATION, reservation.reservation_id)
            else:
                self.changes.booked(reservation.reservation_id, self.hold)
        if reservation.pair is not None:
            self.pairs.setdefault(reservation.pair, []).append(booking)
            self._recall(reservation.pair)
        second = reservation.selection_id
        if second is not None:
            booking.older = self._second_names.get(second)
            if booking.older is not None:
                booking.older.younger = booking
            self._second_names[second] = booking
            if second != reservation.reservation_id:
                self._recall(second)

    def _recall(self, name: str) -> None:
        """An id is in use again."""
        key = name if len(name) <= LONG_ID_CHARS else key_of(name)
        if self._freed.discard(key):
            self._changed(key)

    def forget(self, reservation: Reservation, now: float) -> None:
        """Move a booking from live to recently freed; its load has left the ledger."""
        name, second = reservation.reservation_id, reservation.selection_id
        booking = self._live.pop(name)
        self.own -= booking.is_own
        if self.changes is not None:
            self.changes.ended(name)
        if second is not None:
            if booking.older is None and booking.younger is None:  # as a rule
                del self._second_names[second]
            else:
                self._part_from_namesakes(booking, second)
            if second != name:
                self._remember_freed(second, now)
        self._remember_freed(name, now)
        if reservation.pair is not None:
            self._part_from_pair(booking, reservation.pair, now)

    def _part_from_pair(self, booking: Booking, pair: str, now: float) -> None:
        legs = self.pairs[pair]
        legs.remove(booking)
        if legs:
            return
        del self.pairs[pair]
        is_ours = booking.reservation.origin == "local"
        if is_ours or all(self.was_freed(name) for name in leg_ids(pair)):
            self._remember_freed(pair, now)  # else there may be a leg that we have yet to hear of

    def _part_from_namesakes(self, booking: Booking, second: str) -> None:
        older, younger = booking.older, booking.younger
        if older is not None:
            older.younger = younger
        if younger is not None:
            younger.older = older
        elif older is not None:
            self._second_names[second] = older
        else:
            del self._second_names[second]

    def expect_dropped(self, count: int) -> None:
        """So many bookings are not live from now on; `forget_dropped` will name each."""
        self._dropped += count

    def forget_dropped(self, reservation: Reservation, now: float) -> None:
        """Forget a booking whose rank has gone, unless its id was booked anew and it went then."""
        booking = self._live.get(reservation.reservation_id)
        if booking is not None and booking.reservation is reservation:
            self.forget(reservation, now)
            self._dropped -= 1

    def _remember_freed(self, name: str, now: float) -> None:
        if name in self._live or name in self._second_names or name in self.pairs:
            return  # somebody else's by now
        key = name if len(name) <= LONG_ID_CHARS else key_of(name)
        freed = self._freed
        freed.put(key, now)
        if self.changes is not None:
            self._changed(key)
        if len(freed) > self._freed_ids_max:
            lost = self._freed.pop_oldest(inf)
            assert lost is not None, "there is one more than there may be"
            self._changed(lost[0])
            self.freed_ids_lost += 1

    def _changed(self, name: str) -> None:
        if self.changes is not None:
            self.changes.mark(RESERVATION, name)

    def was_freed(self, name: str) -> bool:
        """Tell whether an id that is not live was so not long ago."""
        if name in self._live or name in self._second_names or name in self.pairs:
            return True
        return key_of(name) in self._freed

    def purge_freed(self, now: float, limit: int) -> int:
        """Forget up to `limit` ids freed more than ten minutes ago; return how many went."""
        gone = 0
        while gone < limit:
            entry = self._freed.pop_oldest(now - FREED_MEMORY_S)
            if entry is None:
                break
            self._changed(entry[0])
            gone += 1
        return gone

    # -- on disk -------------------------------------------------------------------------------

    def touched(self, booking: Booking) -> None:
        """A fact of a live booking has changed."""
        if self.changes is not None and booking.reservation.origin == "local":
            self.changes.mark(RESERVATION, booking.reservation.reservation_id)

    def live(self, reservation_id: str) -> Booking | None:
        """Return the live booking of exactly this reservation_id."""
        return self._find_live(reservation_id)

    def is_remembered(self, name: str) -> bool:
        """Tell whether an id that is not live is to be remembered as freed."""
        return name in self._freed or name in self._live

    def remember(self, name: str, now: float) -> None:
        """Count an id as freed now, as it was in another life of the process."""
        self._remember_freed(name, now)

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

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with bookings; see `slimming.py`."""
        yield from (self._live, self._second_names, self.pairs, self._waiting)

    def check(self) -> None:
        """State every promise: each live id is in exactly one ledger, and the other way round."""
        for name, booking in self._live.items():
            assert booking.reservation.reservation_id == name
            if not booking.reservation.live:
                continue
            found = booking.partition.ledger.reservations_on(booking.reservation.slot)
            assert booking.reservation in list(found), "a live id without load"
        dropped = sum(not booking.reservation.live for booking in self._live.values())
        assert self._dropped == dropped, "what is dropped will be forgotten"
        named = 0
        for second, youngest in self._second_names.items():
            assert youngest.younger is None
            one: Booking | None = youngest
            while one is not None:
                assert one.reservation.selection_id == second
                assert self._live[one.reservation.reservation_id] is one
                assert one.older is None or one.older.younger is one
                named, one = named + 1, one.older
        seconds = sum(
            booking.reservation.selection_id is not None for booking in self._live.values()
        )
        assert named == seconds, "every selection_id finds its booking"
        for pair, legs in self.pairs.items():
            assert legs, "a pair ends with its last leg"
            for leg in legs:
                assert leg.reservation.pair == pair
                assert self._live[leg.reservation.reservation_id] is leg
        paired = sum(booking.reservation.pair is not None for booking in self._live.values())
        assert paired == sum(map(len, self.pairs.values())), "every leg is found by its pair"
        taken = {key_of(name) for name in (*self._live, *self._second_names, *self.pairs)}
        assert not any(name in self._freed for name in taken), "live and freed at once"
        assert len(self._freed) <= self._freed_ids_max


def leg_ids(pair: str) -> tuple[str, str]:
    """Return the reservation ids of a pair's legs: who prefills, who decodes."""
    return pair + _PREFILL, pair + _DECODE


def key_of(name: str) -> str:
    """Return what a freed id is remembered by; equal digests would only answer 200 for 404."""
    if len(name) <= LONG_ID_CHARS or (len(name) == _KEY_CHARS and name.startswith(_BY_DIGEST)):
        return name
    return _BY_DIGEST + xxh3_128_hexdigest(name.encode("utf-8", "surrogatepass"))
