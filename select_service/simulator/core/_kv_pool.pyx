# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled twin of `plain_kv_pool.py`: the same blocks, in a table of 16 bytes an entry.

Linear probing, no object per block. Numbers that follow one another lie side by side, eight of them
at a time: chains of most workloads are runs of such numbers, and a table is larger than caches.
Nobody but a trace's author chooses numbers, who can slow down none but his own run.
"""

from cpython cimport array
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy, memmove

import array as _array

from select_service.simulator.core.kv_events import Removed, Stored

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef extern from *:
    """
    /* a macro: of a function that does nothing else compilers say that it does nothing */
    #if defined(__GNUC__) || defined(__clang__)
    #define prefetch(at) __builtin_prefetch(at)
    #else
    #define prefetch(at) ((void)(at))
    #endif

    #ifdef __linux__
    #include <sys/mman.h>
    #endif
    #ifdef MADV_HUGEPAGE
    /* large tables are looked into everywhere: on large pages that is a walk through them less */
    static void on_large_pages(void *at, size_t bytes) {
        size_t from = ((size_t)at + 0xfff) & ~(size_t)0xfff, to = ((size_t)at + bytes) & ~(size_t)0xfff;
        if (to > from) madvise((void *)from, to - from, MADV_HUGEPAGE);
    }
    #else
    #define on_large_pages(at, bytes) ((void)(at), (void)(bytes))
    #endif
    """
    void prefetch(const void *at) nogil
    void on_large_pages(void *at, size_t bytes) nogil

cdef enum:
    SIZE_MIN = 16
    SIDE_BY_SIDE = 8
    LARGE = 1 << 22  # bytes
    AHEAD = 16  # blocks whose place is fetched while those before them are looked at
    NOTED_PER_BLOCK = 3  # as in the plain twin

cdef array.array numbers = _array.array("Q")

cdef struct Entry:
    uint64_t block
    int64_t users  # 0: free; below 0: nobody, and the mark of its release

cdef struct Note:
    uint64_t block
    int64_t mark

cdef struct Table:
    Entry *entries
    size_t size, count  # a power of two, at most half of it in use
    int shift


cdef inline size_t _home(int shift, uint64_t block) noexcept nogil:
    cdef uint64_t group = (block // SIDE_BY_SIDE) * 0x9E3779B97F4A7C15ULL
    return (group >> shift) * SIDE_BY_SIDE + block % SIDE_BY_SIDE


cdef inline int _shift_of(size_t size) noexcept nogil:
    """What leaves of 64 bits the number of one of the groups of eight in so many places."""
    cdef int shift = 64
    while size > SIDE_BY_SIDE:
        size //= 2
        shift -= 1
    return shift


cdef inline Entry *_place(const Table *table, uint64_t block) noexcept nogil:
    """Where the search for a block begins. Tables are larger than caches: it is fetched ahead."""
    return &table.entries[_home(table.shift, block)]


cdef inline Entry *_search(const Table *table, uint64_t block) noexcept nogil:
    """The entry of a block, or the free one that would be its own. There are some."""
    cdef size_t at = _home(table.shift, block)
    while table.entries[at].users and table.entries[at].block != block:
        at = (at + 1) & (table.size - 1)
    return &table.entries[at]


cdef inline Entry *_find(const Table *table, uint64_t block) noexcept nogil:
    """The entry of a block; NULL: it is not there."""
    cdef Entry *entry
    if not table.count:
        return NULL
    entry = _search(table, block)
    return entry if entry.users else NULL


cdef bint _make_room(Table *table, size_t more) except -1:
    """See to it that so many more fit."""
    cdef Table larger
    cdef size_t i
    if 2 * (table.count + more) <= table.size:
        return True
    larger.size = SIZE_MIN
    while larger.size < 2 * (table.count + more):
        larger.size *= 2
    larger.shift = _shift_of(larger.size)
    larger.entries = <Entry *>PyMem_RawCalloc(larger.size, sizeof(Entry))
    if larger.entries == NULL:
        raise MemoryError
    larger.count = table.count
    for i in range(table.size):
        if table.entries[i].users:
            _search(&larger, table.entries[i].block)[0] = table.entries[i]
    PyMem_RawFree(table.entries)
    table[0] = larger
    return True


cdef void _drop(Table *table, Entry *entry) noexcept nogil:
    """Take an entry out; what follows without a gap closes up, unless it would pass its home."""
    cdef size_t mask = table.size - 1
    cdef size_t free_at = entry - table.entries, at = free_at
    while True:
        at = (at + 1) & mask
        if not table.entries[at].users:
            break
        # it may go to the gap if that is not before its home, seen from where it is
        if ((at - _home(table.shift, table.entries[at].block)) & mask) >= ((at - free_at) & mask):
            table.entries[free_at] = table.entries[at]
            free_at = at
    table.entries[free_at].users = 0
    table.count -= 1


cdef class KvPool:
    """Blocks of one engine; see the plain twin for what each verb promises."""

    cdef readonly Py_ssize_t capacity
    cdef readonly Py_ssize_t evictions
    cdef public list events
    cdef Table held
    cdef Py_ssize_t busy, nameless
    cdef Note *notes  # of releases, oldest first, from `first` on
    cdef size_t first, last, room
    cdef int64_t mark  # of the last release

    def __init__(self, Py_ssize_t capacity):
        if capacity < 1:
            raise ValueError("a pool needs at least one block")
        self.capacity = capacity
        self.events = []

    def __dealloc__(self):
        PyMem_RawFree(self.held.entries)
        PyMem_RawFree(self.notes)

    @property
    def used(self):
        return self.busy + self.nameless

    @property
    def available(self):
        return self.capacity - self.busy - self.nameless

    @property
    def named(self):
        return self.held.count

    def match(self, array.array chain, Py_ssize_t most):
        cdef const uint64_t *blocks = chain.data.as_ulonglongs
        cdef Py_ssize_t found = 0, unused = 0
        cdef Entry *entry
        most = min(most, len(chain))
        while found < most:
            if found + AHEAD < most and self.held.count:
                prefetch(_place(&self.held, blocks[found + AHEAD]))
            entry = _find(&self.held, blocks[found])
            if entry == NULL:
                break
            found += 1
            unused += entry.users < 0
        return found, unused

    def use(self, array.array chain, Py_ssize_t count):
        cdef const uint64_t *blocks = chain.data.as_ulonglongs
        cdef Py_ssize_t i
        cdef Entry *entry
        for i in range(count):
            if i + AHEAD < count and self.held.count:
                prefetch(_place(&self.held, blocks[i + AHEAD]))
            entry = _find(&self.held, blocks[i])
            if entry == NULL:
                raise KeyError(blocks[i])
            self._hold(entry)

    cdef inline void _hold(self, Entry *entry) noexcept:
        if entry.users > 0:
            entry.users += 1
        else:
            entry.users = 1
            self.busy += 1

    def take(self, Py_ssize_t count):
        cdef Py_ssize_t short
        assert count <= self.capacity - self.busy - self.nameless, "asked before it is taken"
        short = count - (self.capacity - <Py_ssize_t>self.held.count - self.nameless)
        if short > 0:
            self.events.append(Removed(self._evict(short)))
            self.evictions += short
        self.nameless += count

    cdef array.array _evict(self, Py_ssize_t count):
        cdef array.array gone = array.clone(numbers, count, False)
        cdef Py_ssize_t done = 0
        cdef Note *note
        cdef Entry *entry
        while done < count:
            assert self.first < self.last, "who is not used can go"
            note = &self.notes[self.first]
            if self.first + AHEAD < self.last:
                prefetch(_place(&self.held, note[AHEAD].block))
            self.first += 1
            entry = _find(&self.held, note.block)
            if entry != NULL and entry.users == note.mark:
                gone.data.as_ulonglongs[done] = note.block
                done += 1
                _drop(&self.held, entry)
        return gone

    def name(self, array.array chain, Py_ssize_t start, Py_ssize_t stop):
        cdef const uint64_t *blocks = chain.data.as_ulonglongs
        cdef Py_ssize_t at, begin = start  # of the run of new ones
        cdef Entry *entry
        assert 0 <= start <= stop <= len(chain)
        self.nameless -= stop - start
        _make_room(&self.held, stop - start)
        for at in range(start, stop):
            if at + AHEAD < stop and self.held.count:
                prefetch(_place(&self.held, blocks[at + AHEAD]))
            entry = _search(&self.held, blocks[at])
            if not entry.users:
                entry.block, entry.users = blocks[at], 1
                self.held.count += 1
                self.busy += 1
            else:
                self._hold(entry)
                self._announce(chain, begin, at)
                begin = at + 1
        self._announce(chain, begin, stop)

    cdef int _announce(self, array.array chain, Py_ssize_t start, Py_ssize_t stop) except -1:
        cdef array.array run
        if start < stop:
            run = array.clone(numbers, stop - start, False)
            memcpy(run.data.as_voidptr, chain.data.as_ulonglongs + start, 8 * (stop - start))
            parent = chain.data.as_ulonglongs[start - 1] if start else None
            self.events.append(Stored(parent, run))
        return 0

    def release(self, array.array chain, Py_ssize_t named, Py_ssize_t nameless):
        cdef const uint64_t *blocks = chain.data.as_ulonglongs
        cdef Py_ssize_t at
        cdef Entry *entry
        assert named <= len(chain)
        self._make_room_for_notes(named)
        self.mark -= 1
        for at in range(named - 1, -1, -1):  # the end is needed least
            if at >= AHEAD and self.held.count:
                prefetch(_place(&self.held, blocks[at - AHEAD]))
            entry = _find(&self.held, blocks[at])
            if entry == NULL:
                raise KeyError(blocks[at])
            if entry.users > 1:
                entry.users -= 1
            else:
                entry.users = self.mark
                self.busy -= 1
                self.notes[self.last].block = blocks[at]
                self.notes[self.last].mark = self.mark
                self.last += 1
        self.nameless -= nameless

    cdef int _make_room_for_notes(self, size_t more) except -1:
        """See to it that so many more can be noted, without those that are passed over if need be."""
        cdef size_t i, kept = 0, room
        cdef Entry *entry
        cdef Note *larger
        if self.last + more <= self.room:
            return 0
        if self.last - self.first > <size_t>(NOTED_PER_BLOCK * self.capacity):
            for i in range(self.first, self.last):
                entry = _find(&self.held, self.notes[i].block)
                if entry != NULL and entry.users == self.notes[i].mark:
                    self.notes[kept] = self.notes[i]
                    kept += 1
            self.first, self.last = 0, kept
        elif self.first:
            memmove(self.notes, self.notes + self.first, (self.last - self.first) * sizeof(Note))
            self.first, self.last = 0, self.last - self.first
        if self.last + more > self.room // 4 * 3:  # else it would soon be moved again
            room = 2 * (self.last + more)
            larger = <Note *>PyMem_RawRealloc(self.notes, room * sizeof(Note))
            if larger == NULL:
                raise MemoryError
            self.notes, self.room = larger, room
        return 0

    def check(self):
        """State every promise of the pool."""
        cdef size_t i, kept = 0, unused = 0, busy = 0
        cdef Entry *entry
        for i in range(self.held.size):
            entry = &self.held.entries[i]
            busy += entry.users > 0
            unused += entry.users < 0
            assert not entry.users or _find(&self.held, entry.block) == entry, "all can be found"
        for i in range(self.first, self.last):
            entry = _find(&self.held, self.notes[i].block)
            kept += entry != NULL and entry.users == self.notes[i].mark
        assert self.nameless >= 0
        assert <size_t>self.busy == busy, "users are counted"
        assert self.held.count == busy + unused, "blocks are counted"
        assert self.nameless + <Py_ssize_t>self.held.count <= self.capacity
        assert kept == unused, "who is not used can go, once"


cdef class BlockSet:
    """Blocks that were seen, in 8 bytes a place."""

    cdef uint64_t *blocks  # a free place is 0
    cdef bint has_zero
    cdef size_t size, count
    cdef int shift

    def __dealloc__(self):
        PyMem_RawFree(self.blocks)

    cdef inline uint64_t *_place(self, uint64_t block) noexcept:
        cdef size_t at = _home(self.shift, block)
        while self.blocks[at] and self.blocks[at] != block:
            at = (at + 1) & (self.size - 1)
        return &self.blocks[at]

    cdef int _make_room(self, size_t more) except -1:
        cdef size_t i, size = self.size
        cdef uint64_t *before = self.blocks
        if 2 * (self.count + more) <= size:
            return 0
        while size < 2 * (self.count + more):
            size = 2 * size if size else SIZE_MIN
        self.blocks = <uint64_t *>PyMem_RawCalloc(size, sizeof(uint64_t))
        if self.blocks == NULL:
            self.blocks = before
            raise MemoryError
        if size * sizeof(uint64_t) >= LARGE:
            on_large_pages(self.blocks, size * sizeof(uint64_t))
        i, self.size, self.shift = self.size, size, _shift_of(size)
        while i:
            i -= 1
            if before[i]:
                self._place(before[i])[0] = before[i]
        PyMem_RawFree(before)
        return 0

    def add(self, array.array chain, Py_ssize_t most):
        cdef const uint64_t *blocks = chain.data.as_ulonglongs
        cdef Py_ssize_t i, count = len(chain), known = 0
        cdef uint64_t *place
        cdef bint seen
        self._make_room(count)
        for i in range(count):
            if i + AHEAD < count:
                prefetch(&self.blocks[_home(self.shift, blocks[i + AHEAD])])
            if blocks[i]:
                place = self._place(blocks[i])
                seen = place[0] != 0
                place[0] = blocks[i]
                self.count += not seen
            else:
                seen, self.has_zero = self.has_zero, True
            if seen and known == i and i < most:
                known += 1
        return known
