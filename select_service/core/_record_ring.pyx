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
from libc.string cimport memcpy, memset

from msgspec import UNSET

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    void *Py_TYPE(object)
    ctypedef struct PyMemberDef:
        int type
        Py_ssize_t offset
    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member

cdef extern from "structmember.h":
    enum:
        T_OBJECT_EX

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
    FLEET_SNAPSHOT
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


@cython.final
cdef class Members:
    """Reads some members of objects of a few kinds from where they lie: `__slots__`, structs.

    A record takes ten of them: asked for by name, or handed over one by one, they were a tenth of
    what it costs. A kind that keeps a member in another way is asked by name.
    """

    cdef tuple _names
    cdef list _types  # keeps those of `_kinds` alive
    cdef Kind _kinds[KINDS_MAX]
    cdef int _next

    def __cinit__(self, *names):
        if len(names) > MEMBERS_MAX:
            raise ValueError("too many members")
        self._names = names
        self._types = [None] * KINDS_MAX
        memset(self._kinds, 0, sizeof(self._kinds))

    cdef const Kind *of(self, object one) except NULL:
        cdef int at
        for at in range(KINDS_MAX):
            if self._kinds[at].type == Py_TYPE(one):
                return &self._kinds[at]
        return self._learn(type(one))

    cdef const Kind *_learn(self, kind) except NULL:
        cdef Kind *place = &self._kinds[self._next]
        cdef int at
        for at in range(len(self._names)):
            found = getattr(kind, self._names[at], None)
            place.offsets[at] = -1
            if type(found) is _member_descriptor:
                if (<PyMemberDescrObject *>found).d_member.type == T_OBJECT_EX:
                    place.offsets[at] = (<PyMemberDescrObject *>found).d_member.offset
        place.type = <void *>kind
        self._types[self._next] = kind
        self._next = (self._next + 1) % KINDS_MAX
        return place

    cdef object get(self, object one, const Kind *kind, int which):
        cdef PyObject *found
        if kind.offsets[which] >= 0:
            found = (<PyObject **>(<char *><PyObject *>one + kind.offsets[which]))[0]
            if found != NULL:
                return <object>found
        return getattr(one, self._names[which])


class _Slotted:
    __slots__ = ("member",)


cdef object _member_descriptor = type(_Slotted.member)

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
    cdef Members _tickets
    cdef Members _prompts
    cdef Members _requests
    cdef Members _placements
    cdef Members _fleet_snapshots
    cdef long long _bytes_max
    cdef readonly long long bytes
    cdef readonly long long next

    def __cinit__(self, Py_ssize_t count_max, long long bytes_max, long long first):
        self._count_max = count_max if bytes_max else 0
        self._bytes_max = bytes_max
        self.next = first
        self._tickets = Members(
            "prompt", "request", "since", "reservation_id", "asked", "said"
        )
        self._prompts = Members("block_hashes", "blocks", "isl_tokens")
        self._requests = Members("selection_id", "explain", "routing_constraints")
        self._placements = Members("seen", "slot", "weights")
        self._fleet_snapshots = Members("until", "everyone", "told")
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

    def keep(
        self, ticket, tuple seen not None, rows, Py_ssize_t slot, double now, odds, cache_hit,
        weights, fleet_snapshot, Py_ssize_t more,
    ):
        """Keep the record of a decision, let the oldest go; return it if it is to be told."""
        return self._keep(
            ticket, seen, rows, slot, now, odds, cache_hit, weights, fleet_snapshot, more
        )

    def keep_usual(self, ticket, placement, rows, double now, cache_hit, fleet_snapshot):
        """Keep the record of a decision with nothing unusual about it; False: it has something."""
        cdef const Kind *kind = self._fleet_snapshots.of(fleet_snapshot)
        if (
            now >= <double>self._fleet_snapshots.get(fleet_snapshot, kind, 0)
            or rows is not self._fleet_snapshots.get(fleet_snapshot, kind, 1)
        ):
            return False
        told = self._fleet_snapshots.get(fleet_snapshot, kind, 2)
        request = self._tickets.get(ticket, self._tickets.of(ticket), 1)
        kind = self._requests.of(request)
        if (
            self._requests.get(request, kind, 1)
            or self._requests.get(request, kind, 2) is not UNSET
        ):
            return False
        kind = self._placements.of(placement)
        seen = self._placements.get(placement, kind, 0)
        if seen is None:
            return False
        self._keep(
            ticket, <tuple?>seen, rows, self._placements.get(placement, kind, 1), now, None,
            cache_hit, self._placements.get(placement, kind, 2), told, 0
        )
        return True

    cdef _keep(
        self, ticket, tuple seen, rows, Py_ssize_t slot, double now, odds, cache_hit, weights,
        fleet_snapshot, Py_ssize_t more,
    ):
        cdef const Kind *kind = self._tickets.of(ticket)
        prompt, request = self._tickets.get(ticket, kind, 0), self._tickets.get(ticket, kind, 1)
        cdef double since = self._tickets.get(ticket, kind, 2)
        cdef str reservation_id = self._tickets.get(ticket, kind, 3)
        ask, said = self._tickets.get(ticket, kind, 4), self._tickets.get(ticket, kind, 5)
        kind = self._prompts.of(prompt)
        cdef bytes block_hashes = self._prompts.get(prompt, kind, 0)
        cdef Py_ssize_t blocks = self._prompts.get(prompt, kind, 1)
        cdef uint64_t isl_tokens = self._prompts.get(prompt, kind, 2)
        kind = self._requests.of(request)
        cdef str selection_id = self._requests.get(request, kind, 0)
        cdef bint is_told = bool(self._requests.get(request, kind, 1))
        cdef bytes columns = <bytes?>seen[0]
        cdef bytes trust = <bytes?>seen[3] if seen[3] is not None else None
        cdef Entry entry
        matched, shared = seen[1], seen[2]
        entry.of[FLEET_SNAPSHOT] = <PyObject *>fleet_snapshot
        entry.of[ROWS] = <PyObject *>rows
        entry.of[COLUMNS] = <PyObject *>columns
        entry.of[MATCHED] = <PyObject *>matched
        entry.of[SHARED] = <PyObject *>shared
        entry.of[TRUST] = <PyObject *>trust
        entry.of[WEIGHTS] = <PyObject *>weights
        entry.of[SELECTION_ID] = <PyObject *>selection_id
        entry.of[RESERVATION_ID] = <PyObject *>reservation_id
        entry.of[ODDS] = <PyObject *>odds
        entry.of[ASK] = <PyObject *>ask
        entry.of[SAID] = <PyObject *>said
        entry.of[CACHE_HIT] = <PyObject *>cache_hit
        entry.at, entry.since = now, since
        entry.blocks, entry.isl_tokens, entry.slot = blocks, isl_tokens, slot
        self._measure(&entry, block_hashes, more)
        record = None
        if is_told:
            hashes = block_hashes[:HASH_BYTES_MAX]
            record = _tuple_of(&entry, self.next, hashes)
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

    cdef tuple _told(self, Py_ssize_t at):
        cdef Entry *entry = &self._entries[self._place(at)]
        hashes = PyBytes_FromStringAndSize(entry.chunk.data + entry.offset, entry.hash_bytes)
        return _tuple_of(entry, self.next - self._count + at, hashes)

    def numbered(self, long long number):
        """Return the record of a number, if it is there."""
        cdef long long at = number - (self.next - self._count)
        return self._told(at) if 0 <= at < self._count else None

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
        <object>entry.of[SELECTION_ID], <object>entry.of[RESERVATION_ID], <object>entry.of[ODDS],
        <object>entry.of[ASK], <object>entry.of[SAID], <object>entry.of[CACHE_HIT], entry.size,
    )
