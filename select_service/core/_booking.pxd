cdef class Clerk:
    cdef object _desk, _room, _limits, _counters, _bookings, _freed
    cdef dict _live, _second_names, _waiting, _pairs
    cdef bint _speaks

    cpdef prefill_complete(self, name, double now)
    cpdef output_block(self, name, double now)
    cpdef free(self, name, double now)
    cdef bint may_book(self, ledger, name, second) except -1
    cdef object book(
        self, partition, Py_ssize_t slot, str name, bytes fingerprint, bytes chain, prefill, isl,
        second, expected, track, kept, double now,
    )
    cdef object _find(self, name)
    cdef object _relieve(self, partition, double now, effects)
    cdef int _remember(self, booking, reservation, str name, second) except -1
    cdef int _forget(self, booking, reservation, double now) except -1
    cdef int _note_freed(self, str name, double now) except -1
