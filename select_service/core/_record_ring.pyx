# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The last records of decisions: a ring bounded by count and by bytes.

Optional: built when there is a C compiler, left out when not (`indexer/compiled.py`). The plain
twin is `plain_record_ring.py`: same names, same records, same sizes.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from msgspec import UNSET

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)

cdef enum:  # as in the twin, where they are explained
    CHAR_BYTES = 4
    RECORD_BYTES = 640
    GROUP_BYTES = 256
    ASKED_BYTES = 320
    HIT_BYTES = 64

cdef enum:
    HASH_BYTES = 8
    CHUNK_BYTES = 65536
    HASH_BYTES_MAX = 4096  # `decision_record.HASH_BYTES_KEPT`

cdef enum:  # of one record to other objects, by place
    FLEET_SNAPSHOT, ROWS, COLUMNS, MATCHED, SHARED, TRUST, WEIGHTS, SELECTION_ID, RESERVATION_ID
    UNUSUAL, ASK, GATE_DECISION, CACHE_HIT
    REFERENCES  # their number

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


cdef inline Py_ssize_t text_bytes(str text) noexcept:
    cdef Py_ssize_t length = PyUnicode_GET_LENGTH(text)
    return length if PyUnicode_IS_ASCII(text) else CHAR_BYTES * length


@cython.final
cdef class RecordRing:
    """Keeps the last records of decisions, bounded by count and by bytes.

    A record is a row of numbers and references to what lives anyway; the hashes of its prompt are
    copied, one record's behind the other's. Objects of its own would be memory that comes cold to
    every request, because those of a thousand requests before it are still in use.
    """

    cdef Entry *_entries  # a place for each
    cdef Py_ssize_t _oldest, _count, _count_max
    cdef Chunk *_last  # that of the newest
    cdef Chunk *_spare
    cdef Py_ssize_t _filled  # bytes of the last chunk
    cdef long long _bytes_max
    cdef readonly long long bytes
    cdef readonly long long next

    def __cinit__(self, Py_ssize_t count_max, long long bytes_max, long long first):
        self._count_max = count_max if bytes_max else 0
        self._bytes_max = bytes_max
        self.next = first
        if self._count_max:
            self._entries = <Entry *>calloc(self._count_max, sizeof(Entry))
            if self._entries == NULL:
                raise MemoryError

    def __dealloc__(self):
        while self._count:
            self._drop_oldest()
        free(self._entries)
        free(self._last)
        free(self._spare)

    def __len__(self):
        return self._count

    def keep_usual(self, ticket, placement, rows, double now, cache_hit, fleet_snapshot):
        """Keep the record of a decision with nothing unusual about it; False: it has something."""
        if now >= <double>fleet_snapshot.until or rows is not fleet_snapshot.everyone:
            return False
        request, seen = ticket.request, placement.seen
        if request.explain or request.routing_constraints is not UNSET or seen is None:
            return False
        self.keep(
            ticket, <tuple?>seen, rows, placement.slot, now, None, cache_hit, placement.weights,
            fleet_snapshot.latest, 0,
        )
        return True

    cpdef keep(
        self, ticket, tuple seen, rows, Py_ssize_t slot, double now, unusual, cache_hit, weights,
        fleet_snapshot, Py_ssize_t more,
    ):
        """Keep the record of a decision, let the oldest go; return it if it is to be explained."""
        prompt, request, ask, gate_decision = ticket.prompt, ticket.request, ticket.asked, ticket.gate_decision
        cdef str reservation_id = ticket.reservation_id, selection_id = request.selection_id
        cdef bytes block_hashes = prompt.block_hashes
        cdef bytes columns, trust
        cdef Entry entry
        columns, matched, shared, trust = seen
        if columns is None or block_hashes is None:
            raise TypeError("a record has columns and hashes")
        entry.of[FLEET_SNAPSHOT] = <PyObject *>fleet_snapshot
        entry.of[ROWS] = <PyObject *>rows
        entry.of[COLUMNS] = <PyObject *>columns
        entry.of[MATCHED] = <PyObject *>matched
        entry.of[SHARED] = <PyObject *>shared
        entry.of[TRUST] = <PyObject *>trust
        entry.of[WEIGHTS] = <PyObject *>weights
        entry.of[SELECTION_ID] = <PyObject *>selection_id
        entry.of[RESERVATION_ID] = <PyObject *>reservation_id
        entry.of[UNUSUAL] = <PyObject *>unusual
        entry.of[ASK] = <PyObject *>ask
        entry.of[GATE_DECISION] = <PyObject *>gate_decision
        entry.of[CACHE_HIT] = <PyObject *>cache_hit
        entry.at, entry.since, entry.slot = now, ticket.since, slot
        entry.blocks, entry.isl_tokens = prompt.blocks, prompt.isl_tokens
        self._measure(&entry, block_hashes, more)
        record = None
        if request.explain:
            record = _tuple_of(&entry, self.next, block_hashes[:HASH_BYTES_MAX])
        if self._count_max:
            self._add(&entry, PyBytes_AS_STRING(block_hashes))
        return record

    cdef int _measure(self, Entry *entry, bytes block_hashes, Py_ssize_t more) except -1:
        """Note what the record is charged with, its columns aside."""
        cdef Py_ssize_t width = PyBytes_GET_SIZE(<bytes>entry.of[COLUMNS])
        entry.hash_bytes = min(<Py_ssize_t>HASH_BYTES_MAX, PyBytes_GET_SIZE(block_hashes))
        entry.size = RECORD_BYTES + entry.hash_bytes + more
        if <object>entry.of[MATCHED] is not None:
            entry.size += 2 * width + GROUP_BYTES * len(<object>entry.of[MATCHED])
        if <object>entry.of[SHARED] is not None:
            entry.size += width + GROUP_BYTES * len(<object>entry.of[SHARED])
        if <object>entry.of[TRUST] is not None:
            entry.size += PyBytes_GET_SIZE(<bytes>entry.of[TRUST])
        if <object>entry.of[SELECTION_ID] is not None:
            entry.size += text_bytes(<str>entry.of[SELECTION_ID])
        if <object>entry.of[RESERVATION_ID] is not None:
            entry.size += text_bytes(<str>entry.of[RESERVATION_ID])
        if <object>entry.of[ASK] is not None:
            entry.size += ASKED_BYTES + text_bytes(<str?>(<object>entry.of[ASK]).tenant_id)
        if <object>entry.of[CACHE_HIT] is not None:
            entry.size += HIT_BYTES
        return 0

    cdef int _add(self, Entry *entry, const char *hashes) except -1:
        cdef Py_ssize_t place, number
        if self._count == self._count_max:
            self._drop_oldest()
        self._write(entry, hashes)
        place = self._place(self._count)
        for number in range(REFERENCES):
            Py_INCREF(<object>entry.of[number])
        self.bytes += entry.size
        self._entries[place] = entry[0]
        # columns are charged once for a run of records with the same
        if (
            not self._count
            or self._entries[self._place(self._count - 1)].of[COLUMNS] != entry.of[COLUMNS]
        ):
            self.bytes += PyBytes_GET_SIZE(<bytes>entry.of[COLUMNS])
        self._count += 1
        self.next += 1
        while self._count and self.bytes > self._bytes_max:
            self._drop_oldest()
        return 0

    cdef int _write(self, Entry *entry, const char *hashes) except -1:
        """Copy the hashes behind those of the newest."""
        cdef Chunk *chunk = self._last
        if chunk == NULL or self._filled + entry.hash_bytes > CHUNK_BYTES:
            chunk, self._spare = self._spare, NULL
            if chunk == NULL:
                chunk = <Chunk *>malloc(sizeof(Chunk))
                if chunk == NULL:
                    raise MemoryError
            chunk.records = 0
            self._last, self._filled = chunk, 0
        entry.chunk, entry.offset = chunk, self._filled
        memcpy(chunk.data + self._filled, hashes, entry.hash_bytes)
        self._filled += entry.hash_bytes
        chunk.records += 1
        return 0

    cdef int _drop_oldest(self) except -1:
        cdef Entry gone = self._entries[self._oldest]
        cdef Py_ssize_t number
        self._oldest = self._place(1)
        self._count -= 1
        self.bytes -= gone.size
        if not self._count or self._entries[self._oldest].of[COLUMNS] != gone.of[COLUMNS]:
            self.bytes -= PyBytes_GET_SIZE(<bytes>gone.of[COLUMNS])
        gone.chunk.records -= 1
        if not gone.chunk.records:
            if gone.chunk == self._last:
                self._filled = 0
            elif self._spare == NULL:
                self._spare = gone.chunk
            else:
                free(gone.chunk)
        for number in range(REFERENCES):
            Py_DECREF(<object>gone.of[number])
        return 0

    cdef Py_ssize_t _place(self, Py_ssize_t at) noexcept:
        """Return where the record is that is so many after the oldest."""
        cdef Py_ssize_t place = self._oldest + at
        return place - self._count_max if place >= self._count_max else place

    cdef tuple _record_at(self, Py_ssize_t at):
        cdef Entry *entry = &self._entries[self._place(at)]
        hashes = PyBytes_FromStringAndSize(entry.chunk.data + entry.offset, entry.hash_bytes)
        return _tuple_of(entry, self.next - self._count + at, hashes)

    def numbered(self, long long number):
        """Return the record of a number, if it is there."""
        cdef long long at = number - (self.next - self._count)
        return self._record_at(at) if 0 <= at < self._count else None

    def numbers_of(self, names):
        """Return the numbers of the records under any of these ids, the newest first."""
        cdef Py_ssize_t at
        cdef Entry *entry
        found = []
        for at in range(self._count - 1, -1, -1):
            entry = &self._entries[self._place(at)]
            if <object>entry.of[SELECTION_ID] in names or <object>entry.of[RESERVATION_ID] in names:
                found.append(self.next - self._count + at)
        return found


cdef tuple _tuple_of(const Entry *entry, long long number, bytes hashes):
    """Return a `Record`'s members."""
    seen = (
        <object>entry.of[COLUMNS], <object>entry.of[MATCHED], <object>entry.of[SHARED],
        <object>entry.of[TRUST],
    )
    return (
        number, entry.at, entry.since, <object>entry.of[FLEET_SNAPSHOT], <object>entry.of[ROWS], seen,
        hashes, entry.blocks, entry.isl_tokens, <object>entry.of[WEIGHTS], entry.slot,
        <object>entry.of[SELECTION_ID], <object>entry.of[RESERVATION_ID], <object>entry.of[UNUSUAL],
        <object>entry.of[ASK], <object>entry.of[GATE_DECISION], <object>entry.of[CACHE_HIT], entry.size,
    )
