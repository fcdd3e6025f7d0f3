cdef class Clerk:
    cdef object _desk, _room, _limits, _counters, _bookings, _freed
    cdef dict _live, _second_names, _waiting, _pairs
    cdef bint _speaks
    cdef list _parts  # of what a fingerprint is made of: a member, what is before it, its name
    cdef bytes _rest  # behind them
    cdef int _present  # members that are always there

    cdef bint may_book(self, ledger, name, second) except -1
    cdef bytes fingerprint(self, request)
    cdef object book(
        self, partition, Py_ssize_t slot, str name, bytes fingerprint, bytes chain, prefill, isl,
        second, expected, track, kept, double now,
    )
    cdef object _find(self, name)
    cdef object _relieve(self, partition, double now, effects)
    cdef int _remember(self, booking, reservation, str name, second) except -1
    cdef int _forget(self, booking, reservation, double now) except -1
    cdef int _note_freed(self, str name, double now) except -1
    cdef bytes _form_of(self, request)
