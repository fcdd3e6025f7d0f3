from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

cdef enum:
    HASH_BYTES = 8
    CHUNK_BYTES = 65536
    HASH_BYTES_MAX = 4096  # `decision_record.HASH_BYTES_KEPT`

cdef enum:  # of one record to other objects, by place
    LOOKOUT
    ROWS
    COLUMNS
    MATCHED
    SHARED
    TRUST
    WEIGHTS
    SELECTION_ID
    RESERVATION_ID
    ODDS
    ASK
    SAID
    CACHE_HIT
    REFERENCES

cdef enum:
    MEMBERS_MAX = 6
    KINDS_MAX = 4  # of requests there are three

cdef struct Kind:
    void *type  # NULL: none
    Py_ssize_t offsets[MEMBERS_MAX]  # below 0: it has another way

cdef struct Chunk:
    Py_ssize_t records  # whose hashes are in it; the last of them goes with it
    char data[CHUNK_BYTES]

cdef struct Entry:
    PyObject *of[REFERENCES]
    double at
    double since
    Chunk *chunk
    Py_ssize_t offset
    Py_ssize_t hash_bytes
    Py_ssize_t blocks
    Py_ssize_t slot
    Py_ssize_t size
    uint64_t isl_tokens

cdef class Members:
    cdef tuple _names
    cdef list _types  # keeps those of `_kinds` alive
    cdef Kind _kinds[KINDS_MAX]
    cdef int _next

    cdef const Kind *of(self, object one) except NULL
    cdef const Kind *_learn(self, kind) except NULL
    cdef object get(self, object one, const Kind *kind, int which)

cdef class RecordRing:
    cdef Entry *_entries  # a place for each
    cdef Py_ssize_t _oldest, _count, _count_max
    cdef Chunk *_last  # that of the newest
    cdef Chunk *_spare
    cdef Py_ssize_t _filled  # bytes of the last chunk
    cdef Members _tickets
    cdef Members _prompts
    cdef Members _requests
    cdef Members _placements
    cdef Members _lookouts
    cdef long long _bytes_max
    cdef readonly long long bytes
    cdef readonly long long next

    cdef int keep_plain(
        self,
        bytes block_hashes,
        uint64_t isl_tokens,
        str selection_id,
        str reservation_id,
        bytes columns,
        list matched,
        list shared,
        rows,
        Py_ssize_t slot,
        double now,
        weights,
        lookout,
    ) except -1
    cdef _keep(
        self, ticket, tuple seen, rows, Py_ssize_t slot, double now, odds, cache_hit, weights,
        lookout, Py_ssize_t more,
    )
    cdef int _measure(self, Entry *entry, bytes block_hashes, Py_ssize_t more) except -1
    cdef int _add(self, Entry *entry, const char *hashes) except -1
    cdef int _write(self, Entry *entry, const char *hashes) except -1
    cdef int _drop_oldest(self) except -1
    cdef Py_ssize_t _place(self, Py_ssize_t at) noexcept
    cdef tuple _told(self, Py_ssize_t at)
