from cpython.object cimport PyObject
from libc.stdint cimport uint32_t, uint64_t

cdef enum:
    SHARDS = 32

cdef struct Entry:
    uint64_t name
    PyObject *node  # NULL: free

cdef struct Shard:
    Entry *entries
    uint32_t capacity, count

cdef class NameMap:
    cdef Shard shards[SHARDS]
    cdef Py_ssize_t count
    cdef uint64_t secret

    cdef PyObject *find(self, uint64_t name) noexcept
    cdef bint put_new(self, uint64_t name, PyObject *node) except -1
    cdef bint drop(self, uint64_t name) noexcept
