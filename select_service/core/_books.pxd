cdef object enter(
    ledger, Py_ssize_t slot, str name, bytes chain, prefill, isl, ttl_s, tenant, double now
)
cdef int complete(ledger, reservation, double now) except -1
cdef int lengthen(ledger, reservation, double now) except -1
cdef int take_out(ledger, reservation) except -1
