# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The life of a plain reservation at the desk, without a frame of Python.

Optional: `Desk.book`, `confirm`, `prefill_complete` and `free`, and `Bookings` are its plain twins;
the load is written by `_books.pyx`. Each step here does in the same order what its twin does, to the
same objects. What is unusual about a step (output blocks, a lease, a claim, a state directory) is
left to the twin of that step; a name that nothing live has, to the whole line.
"""

from cpython.dict cimport PyDict_Contains, PyDict_DelItem, PyDict_GetItem
from cpython.object cimport PyObject
from libc.math cimport INFINITY

from select_service._layout cimport Layout, add, get, place, put
from select_service.core._books cimport complete, enter, lengthen, take_out

from select_service._layout import layout_of
from select_service.core.books.bookings import LONG_ID_CHARS, Booking, Bookings
from select_service.core.books.demand_tally import DemandTally
from select_service.core.books.ledger import Ledger
from select_service.core.books.reservation import Lane, Reservation
from select_service.core.counters import Counters
from select_service.core.effects import NOTHING, Effects

cdef extern from "Python.h":
    bint PyUnicode_CheckExact(PyObject *one)
    bint PyUnicode_IS_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

ABI = 5  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef Py_ssize_t LONG_ID = LONG_ID_CHARS
cdef object ONE = 1


cdef enum:
    RESERVATION_ID
    SELECTION_ID
    LANE
    CREATED
    FIRST_TOKEN_AT
    PREFILL_DONE
    WHOLE_OUTPUTS
    FADED_OUTPUTS
    EXPECTED
    TRACK
    FINGERPRINT
    LEASE
    CLAIM
    PAIR

cdef Layout reservations = Layout(
    Reservation("", 0, Lane(-1), None, 0, 0.0),
    ("reservation_id", "selection_id", "lane", "created", "first_token_at", "prefill_done",
     "whole_outputs", "faded_outputs", "expected_output_tokens", "track_prefill_tokens",
     "fingerprint", "lease", "claim", "pair"),
)

cdef enum:
    LANE_IS_OPEN

cdef Layout lanes = Layout(Lane(0), ("is_open",))

cdef enum:
    LEDGER_CHANGES

cdef Layout ledgers = Layout(Ledger(), ("changes",))

cdef enum:
    BOOKING_PARTITION
    BOOKING_RESERVATION
    BOOKING_ANSWER
    BOOKING_HOLD
    BOOKING_OLDER
    BOOKING_YOUNGER
    BOOKING_IS_OWN

cdef tuple _BOOKING = (
    "partition", "reservation", "answer", "hold", "older", "younger", "is_own",
)
cdef Layout bookings = Layout(
    Booking(None, reservations.first, None),
    _BOOKING,
    [one for one in Booking.__slots__ if one not in _BOOKING],
)

cdef enum:
    KNOWN_OWN
    KNOWN_HOLD
    KNOWN_CHANGES
    KNOWN_FREED_MAX

cdef Layout knowns = Layout(
    Bookings(freed_ids_max=1), ("own", "hold", "changes", "_freed_ids_max")
)

cdef enum:
    DEMAND_FIRST_TOKENS
    DEMAND_TTFT_S
    DEMAND_ENDED
    DEMAND_REQUEST_S

cdef Layout demands = Layout(
    DemandTally(), ("first_tokens", "ttft_s", "ended", "request_s")
)

cdef enum:
    COUNT_BOOKED
    COUNT_FREED

cdef Layout counts = Layout(Counters(), ("reservations_booked", "reservations_freed"))


cdef class Clerk:
    """Does for a desk what is plain; see above.

    `prefill_complete`, `output_block` and `free` are for who has a name, the others for other kernels.
    """

    def __init__(self, desk, room, limits, counters):
        """Work at a desk.

        Args:
            desk: begins and ends reservations; it itself, no kind of it that notes what it does.
            room: lets in who waits.
            limits: of the core.
            counters: of the core.
        """
        self._desk, self._room, self._limits, self._counters = desk, room, limits, counters
        self._bookings = known = desk.bookings
        self._live, self._second_names = known._live, known._second_names
        self._waiting, self._pairs, self._freed = known._waiting, known.pairs, known._freed
        self._speaks = desk.announcer.speaks

    # -- what others ask ------------------------------------------------------------------------

    cpdef prefill_complete(self, name, double now):
        """Return effects as `Reserving.prefill_complete` does; None: that is to do it."""
        booking = self._find(name)
        if booking is None:
            return None
        reservation = get(bookings, booking, BOOKING_RESERVATION)
        partition = get(bookings, booking, BOOKING_PARTITION)
        ledger = partition.ledger
        if get(ledgers, ledger, LEDGER_CHANGES) is not None:
            return None
        if not get(reservations, reservation, PREFILL_DONE):
            demand = partition.demand
            add(demands, demand, DEMAND_FIRST_TOKENS, ONE)
            waited = now - <double>get(reservations, reservation, CREATED)
            add(demands, demand, DEMAND_TTFT_S, waited)
            put(reservations, reservation, FIRST_TOKEN_AT, now)
        complete(ledger, reservation, now)
        if (
            get(reservations, reservation, LEASE) is not None
            or get(reservations, reservation, CLAIM) is not None
            or get(knowns, self._bookings, KNOWN_CHANGES) is not None
        ):
            self._desk._cared_for(booking, now)
        effects = NOTHING
        if self._speaks:
            effects = Effects()
            effects.published.append(self._desk.announcer.completed(partition, reservation))
        return self._relieve(partition, now, effects)

    cpdef output_block(self, name, double now):
        """Do what `Reserving.output_block` does with one block and no fraction; False: it is to.
        """
        booking = self._find(name)
        if booking is None:
            return False
        reservation = get(bookings, booking, BOOKING_RESERVATION)
        ledger = get(bookings, booking, BOOKING_PARTITION).ledger
        if (
            get(ledgers, ledger, LEDGER_CHANGES) is not None
            or get(reservations, reservation, FADED_OUTPUTS)
            or reservation.output_fraction != 1.0
        ):
            return False
        lengthen(ledger, reservation, now)
        if (
            get(reservations, reservation, LEASE) is not None
            or get(reservations, reservation, CLAIM) is not None
            or get(knowns, self._bookings, KNOWN_CHANGES) is not None
        ):
            self._desk._cared_for(booking, now)
        if self._speaks:
            name = get(reservations, reservation, RESERVATION_ID)
            self._desk.announcer.claims.output(name, None, 1)
        return True

    cpdef free(self, name, double now):
        """Return effects as `Reserving.free` does; None: that is to do it."""
        booking = self._find(name)
        if booking is None:
            return None
        reservation = get(bookings, booking, BOOKING_RESERVATION)
        partition = get(bookings, booking, BOOKING_PARTITION)
        ledger = partition.ledger
        if get(ledgers, ledger, LEDGER_CHANGES) is not None:
            return None
        lease = get(reservations, reservation, LEASE)
        if lease is not None or get(reservations, reservation, CLAIM) is not None:
            self._desk._renew_lease(booking, now)
        effects = self._desk._announce_end(booking, now) if self._speaks else NOTHING
        demand = partition.demand
        add(demands, demand, DEMAND_ENDED, ONE)
        lasted = now - <double>get(reservations, reservation, CREATED)
        add(demands, demand, DEMAND_REQUEST_S, lasted)
        outputs = get(reservations, reservation, WHOLE_OUTPUTS) + get(
            reservations, reservation, FADED_OUTPUTS
        )
        if outputs:
            tokens = outputs * partition.index.block_size
            demand.tell_output(tokens, get(reservations, reservation, FIRST_TOKEN_AT), now)
        take_out(ledger, reservation)
        if lease is not None:
            self._desk.leases.leave(reservation)
        self._forget(booking, reservation, now)
        add(counts, self._counters, COUNT_FREED, ONE)
        return self._relieve(partition, now, effects)

    cdef object _find(self, name):
        """Return the live booking of a reservation_id where no id is a pair's, else None."""
        cdef PyObject *found
        if self._pairs or not PyUnicode_CheckExact(<PyObject *>name):
            return None
        found = PyDict_GetItem(self._live, name)
        if found == NULL:
            return None
        booking = <object>found
        lane = get(reservations, get(bookings, booking, BOOKING_RESERVATION), LANE)
        return booking if get(lanes, lane, LANE_IS_OPEN) is True else None

    cdef object _relieve(self, partition, double now, effects):
        if self._room._waiting:
            return self._room.relieve(partition, now, effects)
        return effects

    # -- a booking ------------------------------------------------------------------------------

    cdef bint may_book(self, ledger, name, second) except -1:
        """Whether nothing speaks against a booking, nor has to be looked at: ids, room, a gate."""
        if name is not None and (
            self._pairs or self._waiting or PyDict_Contains(self._live, name)
        ):
            return False
        if get(ledgers, ledger, LEDGER_CHANGES) is not None:
            return False
        expected = get(knowns, self._bookings, KNOWN_OWN) + len(self._waiting)
        if expected >= self._limits.reservations_max:
            return False
        cdef Py_ssize_t most = self._limits.id_length_max
        return (name is None or _is_plain(name, most)) and (
            second is None or _is_plain(second, most)
        )

    cdef object book(
        self, partition, Py_ssize_t slot, str name, bytes fingerprint, bytes chain, prefill, isl,
        second, expected, track, kept, double now,
    ):
        """Book as `Desk.book` and `confirm` do; return what is to be told, if anything.

        Args:
            partition: `may_book` holds for its ledger.
            slot: who has been chosen.
            name: its id.
            fingerprint: of its request.
            chain: its sequence hashes.
            prefill: tokens to book.
            isl: tokens of the prompt.
            second: its selection_id, or None.
            expected: tokens of output, or None.
            track: whether prefill tokens are tracked.
            kept: the answer, for who repeats the request.
            now: monotonic seconds.
        """
        ledger = partition.ledger
        ttl_s = self._limits.reservation_ttl_s
        tenant = partition.scope.tenant_id
        reservation = enter(ledger, slot, name, chain, prefill, isl, ttl_s, tenant, now)
        put(reservations, reservation, FINGERPRINT, fingerprint)
        put(reservations, reservation, TRACK, track)
        put(reservations, reservation, SELECTION_ID, second)
        put(reservations, reservation, EXPECTED, expected)
        booking = bookings.copy_of(bookings.first)
        put(bookings, booking, BOOKING_PARTITION, partition)
        put(bookings, booking, BOOKING_RESERVATION, reservation)
        put(bookings, booking, BOOKING_ANSWER, kept)
        self._remember(booking, reservation, name, second)
        add(counts, self._counters, COUNT_BOOKED, ONE)
        if not self._speaks:
            return NOTHING
        effects = Effects()
        effects.published.append(self._desk.announcer.booked(partition, reservation, kept))
        return effects

    cdef int _remember(self, booking, reservation, str name, second) except -1:
        """Do what `Bookings.add` does."""
        known = self._bookings
        if (
            get(knowns, known, KNOWN_CHANGES) is not None
            or get(knowns, known, KNOWN_HOLD) is not None
            or PyDict_Contains(self._live, name)
            or PyUnicode_GET_LENGTH(name) > LONG_ID
            or (
                second is not None
                and (
                    PyDict_Contains(self._second_names, second)
                    or PyUnicode_GET_LENGTH(second) > LONG_ID
                )
            )
        ):
            known.add(booking)
            return 0
        self._live[name] = booking
        add(knowns, known, KNOWN_OWN, ONE)
        self._freed.discard(name)
        if second is not None:
            self._second_names[second] = booking
            if second != name:
                self._freed.discard(second)
        return 0

    cdef int _forget(self, booking, reservation, double now) except -1:
        """Do what `Bookings.forget` does."""
        known = self._bookings
        cdef str name = get(reservations, reservation, RESERVATION_ID)
        second = get(reservations, reservation, SELECTION_ID)
        if (
            get(knowns, known, KNOWN_CHANGES) is not None
            or get(reservations, reservation, PAIR) is not None
            or get(bookings, booking, BOOKING_OLDER) is not None
            or get(bookings, booking, BOOKING_YOUNGER) is not None
        ):
            known.forget(reservation, now)
            return 0
        PyDict_DelItem(self._live, name)
        if get(bookings, booking, BOOKING_IS_OWN):
            add(knowns, known, KNOWN_OWN, -1)
        if second is not None:
            PyDict_DelItem(self._second_names, second)
            if second != name:
                self._note_freed(<str>second, now)
        return self._note_freed(name, now)

    cdef int _note_freed(self, str name, double now) except -1:
        """Do what `Bookings._remember_freed` does where no state is kept, and no pair is live."""
        known = self._bookings
        if PyUnicode_GET_LENGTH(name) > LONG_ID:
            known._remember_freed(name, now)
            return 0
        if PyDict_Contains(self._live, name) or PyDict_Contains(self._second_names, name):
            return 0
        self._freed.put(name, now)
        if len(self._freed) > get(knowns, known, KNOWN_FREED_MAX):
            self._freed.pop_oldest(INFINITY)
            known.freed_ids_lost += 1
        return 0


cdef bint _is_plain(text, Py_ssize_t most) except -1:
    """Whether a name is none too long, and printable."""
    cdef Py_ssize_t size, at
    cdef const char *letters
    if not PyUnicode_CheckExact(<PyObject *>text) or PyUnicode_GET_LENGTH(text) > most:
        return False
    if not PyUnicode_IS_ASCII(text):
        return text.isprintable()
    letters = PyUnicode_AsUTF8AndSize(text, &size)
    for at in range(size):
        if not c" " <= letters[at] < 127:
            return False
    return True
