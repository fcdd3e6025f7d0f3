from libc.stdint cimport int64_t

cdef struct Choice:
    Py_ssize_t row
    double price
    long long blocks  # in decoding, with the prompt

cdef class Pricer:
    cdef double[::1] _prefill
    cdef double[::1] _decode
    cdef double[::1] _churn
    cdef double[::1] _context
    cdef double[::1] _heard
    cdef double[::1] _ahead
    cdef double *_scratch  # matched, shared, price and odds, a run each
    cdef Py_ssize_t _rows

    cdef int choose(
        self,
        Choice *chosen,
        const int64_t *among,
        Py_ssize_t rows,
        double isl_tokens,
        double block_size,
        double blocks,
        double scale,
        double credit,
        bint track,
        list matched,
        list shared,
        draw,
        const double *factor,
        bint is_ours,
        double decode_scale,
        double delay,
        double eviction,
        bint expects,
        double context_scale,
        double pace,
        double now,
        const double *preference,
        double temperature,
        rng,
    ) except -1
    cdef Py_ssize_t _drawn(self, double *price, Py_ssize_t count, double low, double temperature, rng) except -1
    cdef int _fill(self, double *column, list groups) except -1
