# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""A set of 64-bit values, entered and discarded by the packed run.

Optional: built when there is a C compiler, left out when not (`indexer/compiled.py`). The plain
twin is `plain_value_set.py`, on Python's own set.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cdef extern from * nogil:
    void __builtin_prefetch(const void *)

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    HASH = 8  # bytes
    SLOTS_MIN = 64  # of a table; a power of two
    AHEAD = 16  # values whose places are fetched before they are looked at: memory is slow
    MOVED_PER_VALUE = 8  # places of an old table looked at for every value that comes or goes


cdef struct Table:
    uint64_t *places  # 0: empty
    uint64_t mask  # places - 1
    Py_ssize_t used


@cython.final
cdef class ValueSet:
    """64-bit values, entered and discarded by the packed run; 16 to 32 bytes each.

    Open addressing with linear probing. A table that is half full (or nearly empty) is followed
    by a larger (smaller) one; both are looked at while values move over, a few with every change,
    so that no change takes long. Where a value goes depends on a secret, lest a client fills one
    neighbourhood.
    """

    cdef Table _now
    cdef Table _old  # places NULL: nothing is moving
    cdef uint64_t _from  # in `_old`, everything before this place has moved
    cdef uint64_t _left  # places of `_old` yet to be looked at
    cdef uint64_t _secret
    cdef bint _zero  # whether the value 0 is in

    def __cinit__(self):
        self._secret = (<uint64_t>hash("a secret of this process")) | 1
        self._zero = False
        if _allocate(&self._now, SLOTS_MIN):
            raise MemoryError

    def __dealloc__(self):
        free(self._now.places)
        free(self._old.places)

    def __len__(self):
        return self._now.used + self._old.used + self._zero

    def __contains__(self, value):
        cdef uint64_t number = value
        if number == 0:
            return self._zero
        cdef uint64_t home = self._mixed(number)
        return self._holds(&self._now, number, home) or self._holds(&self._old, number, home)

    def __iter__(self):
        """All values; for looking at, not while they change."""
        cdef uint64_t at
        if self._zero:
            yield 0
        if self._old.places != NULL:
            for at in range(self._old.mask + 1):
                if self._old.places[at]:
                    yield self._old.places[at]
        for at in range(self._now.mask + 1):
            if self._now.places[at]:
                yield self._now.places[at]

    def enter(self, bytes packed not None):
        """Add a run of values in the machine's byte order; return how many were not in."""
        cdef uint64_t values[AHEAD]
        cdef uint64_t homes[AHEAD]
        cdef Py_ssize_t start, i, count, fresh = 0
        for start in range(0, PyBytes_GET_SIZE(packed) // HASH, AHEAD):
            count = self._fetch(packed, start, values, homes)
            for i in range(count):
                fresh += self._add(values[i], homes[i])
        return fresh

    def leave(self, bytes packed not None):
        """Discard a run of values."""
        cdef uint64_t values[AHEAD]
        cdef uint64_t homes[AHEAD]
        cdef Py_ssize_t start, i, count
        for start in range(0, PyBytes_GET_SIZE(packed) // HASH, AHEAD):
            count = self._fetch(packed, start, values, homes)
            for i in range(count):
                self._discard(values[i], homes[i])

    def discard(self, value):
        """Discard one value."""
        self._discard(value, self._mixed(value))

    # -- one value -----------------------------------------------------------------------------

    cdef inline uint64_t _mixed(self, uint64_t value) noexcept nogil:
        """Where a value belongs, in tables of any size."""
        cdef uint64_t mixed = (value ^ (value >> 32)) * self._secret
        mixed = (mixed ^ (mixed >> 29)) * <uint64_t>0xBF58476D1CE4E5B9
        return mixed ^ (mixed >> 32)

    cdef Py_ssize_t _fetch(
        self, bytes packed, Py_ssize_t start, uint64_t *values, uint64_t *homes
    ) noexcept:
        """Take the next values and have the memory of their places fetched; return how many."""
        cdef const char *raw = PyBytes_AS_STRING(packed) + start * HASH
        cdef Py_ssize_t i, count = min(AHEAD, PyBytes_GET_SIZE(packed) // HASH - start)
        for i in range(count):
            memcpy(&values[i], raw + i * HASH, HASH)
            homes[i] = self._mixed(values[i])
            __builtin_prefetch(&self._now.places[homes[i] & self._now.mask])
        return count

    cdef inline bint _holds(self, const Table *table, uint64_t value, uint64_t home) noexcept nogil:
        if table.places == NULL:
            return False
        cdef uint64_t at = home & table.mask
        while table.places[at]:
            if table.places[at] == value:
                return True
            at = (at + 1) & table.mask
        return False

    cdef inline bint _put(self, Table *table, uint64_t value, uint64_t home) noexcept nogil:
        cdef uint64_t at = home & table.mask
        while table.places[at]:
            if table.places[at] == value:
                return False
            at = (at + 1) & table.mask
        table.places[at] = value
        table.used += 1
        return True

    cdef inline bint _take(self, Table *table, uint64_t value, uint64_t whence) noexcept nogil:
        """Take a value out; what stood behind it closes up, so that no gap hides anything."""
        if table.places == NULL:
            return False
        cdef uint64_t at = whence & table.mask, behind, home
        while table.places[at] != value:
            if not table.places[at]:
                return False
            at = (at + 1) & table.mask
        behind = at
        while True:
            behind = (behind + 1) & table.mask
            if not table.places[behind]:
                break
            home = self._mixed(table.places[behind]) & table.mask
            # may stand at `at` if its home is not between there and here
            if ((behind - home) & table.mask) >= ((behind - at) & table.mask):
                table.places[at] = table.places[behind]
                at = behind
        table.places[at] = 0
        table.used -= 1
        return True

    cdef inline int _add(self, uint64_t value, uint64_t home) except -1:
        if value == 0:
            if self._zero:
                return 0
            self._zero = True
            return 1
        if self._old.places != NULL:
            self._move()
            if self._holds(&self._old, value, home):
                return 0
        if not self._put(&self._now, value, home):
            return 0
        if 2 * <uint64_t>self._now.used > self._now.mask:
            self._follow(2 * (self._now.mask + 1))
        return 1

    cdef inline int _discard(self, uint64_t value, uint64_t home) except -1:
        if value == 0:
            self._zero = False
            return 0
        if self._old.places != NULL:
            self._move()
        if not self._take(&self._now, value, home):
            self._take(&self._old, value, home)
        if not self._now.used and not self._old.used:
            return self._give_back()
        if self._now.mask >= 2 * SLOTS_MIN and 16 * <uint64_t>self._now.used < self._now.mask:
            self._follow((self._now.mask + 1) // 4)
        return 0

    # -- another table -------------------------------------------------------------------------

    cdef int _give_back(self) except -1:
        """Nothing is in: no table need be as large as it was."""
        free(self._old.places)
        self._old.places = NULL
        if self._now.mask >= 2 * SLOTS_MIN:
            free(self._now.places)
            if _allocate(&self._now, SLOTS_MIN):
                raise MemoryError
        return 0

    cdef int _follow(self, uint64_t places) except -1:
        """Begin to move to a table of another size, unless that is already going on."""
        if self._old.places != NULL:
            return 0
        cdef Table fresh
        if _allocate(&fresh, places):
            raise MemoryError
        self._old, self._now = self._now, fresh
        self._from = 0
        while self._old.places[self._from]:  # begin behind a gap: no run of values is torn apart
            self._from += 1
        self._left = self._old.mask + 1
        return 0

    cdef void _move(self) noexcept nogil:
        """Look at some places of the old table, and on to the next gap."""
        cdef Py_ssize_t looked = 0
        cdef uint64_t value
        while self._left and self._old.used:
            value = self._old.places[self._from]
            if value:
                self._old.places[self._from] = 0
                self._old.used -= 1
                self._put(&self._now, value, self._mixed(value))
            elif looked >= MOVED_PER_VALUE:
                return
            looked += 1
            self._from = (self._from + 1) & self._old.mask
            self._left -= 1
        free(self._old.places)
        self._old.places = NULL


cdef int _allocate(Table *table, uint64_t places) noexcept nogil:
    table.places = <uint64_t *>calloc(places, sizeof(uint64_t))
    table.mask = places - 1
    table.used = 0
    return table.places == NULL
