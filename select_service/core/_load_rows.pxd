from libc.stdint cimport int64_t

cdef class LoadRows:
    cdef double[::1] _prefill
    cdef double[::1] _decode
    cdef double[::1] _churn
    cdef double[::1] _context
    cdef int64_t[::1] _requests
    cdef int64_t[::1] _computing
    cdef double[::1] _heard
    cdef double[::1] _ahead
    cdef double[::1] _step
    cdef int64_t[::1] _seats
    cdef double[::1] _wait

    cpdef book(
        self,
        Py_ssize_t slot,
        double left,
        double tokens,
        int64_t requests,
        double decode,
        double blocks,
        double now,
    )
    cpdef complete(self, Py_ssize_t slot, double left, double head, double now)
    cpdef lengthen(self, Py_ssize_t slot, double decode, double blocks)
    cpdef give_up(self, Py_ssize_t slot, double left, double begun, int64_t prompts)
    cpdef free(self, Py_ssize_t slot, int64_t requests, double decode, double blocks)
