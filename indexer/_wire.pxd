from libc.stdint cimport uint64_t
from indexer._events cimport kv_batch, kv_event

cdef class Scratch:
    cdef kv_batch batch
    cdef bint in_use

    cdef bint read(self, bytes payload) noexcept
    cdef list names(self, kv_event *e)
    cdef object some(self, const uint64_t *names, size_t count)
    cdef object events(self, size_t start, size_t end)
    cdef int hash(
        self, kv_event *e, size_t block_size, uint64_t seed, uint64_t *hashes
    ) except -1
    cdef int _hash_media(
        self, kv_event *e, size_t block_size, uint64_t seed, uint64_t *hashes
    ) except -1
