# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled twin of `indexer.core.name_map`: 64-bit names to nodes in 16 bytes an entry.

Linear probing, no object per name. The table is split into shards by the name's hash: growing one
table of a million entries would take tens of milliseconds, growing a shard some tenths of one.

Each map has a secret that determines where a name lies. Otherwise an engine could choose names that
all collide, and a map filled in the order of another would crowd at its front; a search among n
entries would then take n steps instead of two.
"""

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree  # `tracemalloc` sees them
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from array import array
from os import urandom

ABI = 4  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef extern from * nogil:
    void __builtin_prefetch(const void *)

cdef enum:
    CAPACITY_MIN = 8
    CAPACITY_MAX = 0x7fffffff
    AHEAD = 8  # how many names ahead of the current one are prefetched


cdef inline uint64_t _mix(uint64_t name, uint64_t secret) noexcept nogil:
    # engines' hashes are mostly random, but not guaranteed to be: some engines count from 1
    name = (name ^ secret) * 0x9E3779B97F4A7C15ULL
    name ^= name >> 32
    return name * 0xC2B2AE3D27D4EB4FULL


cdef inline uint32_t _home(uint64_t mixed, uint32_t capacity) noexcept nogil:
    # the bits below those that chose the shard, scaled, so that any capacity works
    return <uint32_t>(<uint64_t><uint32_t>(mixed >> 27) * capacity >> 32)


cdef inline uint32_t _shard(uint64_t mixed) noexcept nogil:
    return <uint32_t>(mixed >> 59)


cdef class Names:
    """Names as 64-bit numbers in memory."""

    cdef Py_buffer view
    cdef const uint64_t *at
    cdef Py_ssize_t count

    def __cinit__(self, names):
        if type(names) is not list and type(names) is not tuple and PyObject_CheckBuffer(names):
            try:
                PyObject_GetBuffer(names, &self.view, PyBUF_ND | PyBUF_FORMAT)
            except BufferError:  # a view with a stride, which may have left its facts
                self.view.ndim = 0
        # as arrays of 64 bits say
        if self.view.ndim != 1 or self.view.format == NULL or self.view.format[0] != b"Q":
            PyBuffer_Release(&self.view)
            PyObject_GetBuffer(array("Q", names), &self.view, PyBUF_ND | PyBUF_FORMAT)
        self.at = <const uint64_t *>self.view.buf
        self.count = self.view.len // <Py_ssize_t>sizeof(uint64_t)

    def __dealloc__(self):
        PyBuffer_Release(&self.view)


cdef bint _resize(Shard *shard, uint32_t capacity, uint64_t secret) except -1:
    cdef Entry *entries = <Entry *>PyMem_RawCalloc(capacity, sizeof(Entry))
    cdef uint32_t i, at
    if entries == NULL:
        raise MemoryError
    for i in range(shard.capacity):
        if shard.entries[i].node != NULL:
            at = _home(_mix(shard.entries[i].name, secret), capacity)
            while entries[at].node != NULL:
                at = at + 1 if at + 1 < capacity else 0
            entries[at] = shard.entries[i]
    PyMem_RawFree(shard.entries)
    shard.entries, shard.capacity = entries, capacity
    return True


cdef class NameMap:
    """Names to nodes: the operations of a dict, and a few bulk ones."""

    def __cinit__(self):
        cdef bytes random = urandom(sizeof(uint64_t))
        memcpy(&self.secret, PyBytes_AS_STRING(random), sizeof(uint64_t))

    def __dealloc__(self):
        cdef uint32_t i, k
        for k in range(SHARDS):
            for i in range(self.shards[k].capacity):
                if self.shards[k].entries[i].node != NULL:
                    Py_DECREF(<object>self.shards[k].entries[i].node)
            PyMem_RawFree(self.shards[k].entries)

    cdef PyObject *find(self, uint64_t name) noexcept:
        """The node of a name, a borrowed reference; NULL if there is none."""
        cdef uint64_t mixed = _mix(name, self.secret)
        cdef Shard *shard = &self.shards[_shard(mixed)]
        cdef uint32_t at
        if not shard.count:
            return NULL
        at = _home(mixed, shard.capacity)
        while shard.entries[at].node != NULL:
            if shard.entries[at].name == name:
                return shard.entries[at].node
            at = at + 1 if at + 1 < shard.capacity else 0
        return NULL

    cdef bint put_new(self, uint64_t name, PyObject *node) except -1:
        """File a name that is not filed yet; False, with nothing changed, if it is."""
        cdef uint64_t mixed = _mix(name, self.secret)
        cdef Shard *shard = &self.shards[_shard(mixed)]
        cdef uint32_t at, capacity
        cdef uint64_t more
        if 5 * <uint64_t>(shard.count + 1) > 4 * <uint64_t>shard.capacity:
            more = <uint64_t>shard.capacity * 3 // 2
            if more > CAPACITY_MAX:
                raise MemoryError
            capacity = <uint32_t>more if more > CAPACITY_MIN else CAPACITY_MIN
            _resize(shard, capacity, self.secret)
        at = _home(mixed, shard.capacity)
        while shard.entries[at].node != NULL:
            if shard.entries[at].name == name:
                return False
            at = at + 1 if at + 1 < shard.capacity else 0
        Py_INCREF(<object>node)
        shard.entries[at].name, shard.entries[at].node = name, node
        shard.count += 1
        self.count += 1
        return True

    cdef bint drop(self, uint64_t name) noexcept:
        """Remove a name; False if it is not filed."""
        cdef uint64_t mixed = _mix(name, self.secret)
        cdef Shard *shard = &self.shards[_shard(mixed)]
        cdef uint32_t free_at, at, home, capacity = shard.capacity
        cdef PyObject *node
        if not shard.count:
            return False
        at = _home(mixed, capacity)
        while True:
            if shard.entries[at].node == NULL:
                return False
            if shard.entries[at].name == name:
                break
            at = at + 1 if at + 1 < capacity else 0
        node = shard.entries[at].node
        # entries that follow without a gap move up, but never before their home
        free_at = at
        while True:
            at = at + 1 if at + 1 < capacity else 0
            if shard.entries[at].node == NULL:
                break
            home = _home(_mix(shard.entries[at].name, self.secret), capacity)
            if free_at <= at:
                if free_at < home <= at:
                    continue
            elif free_at < home or home <= at:
                continue
            shard.entries[free_at] = shard.entries[at]
            free_at = at
        shard.entries[free_at].node = NULL
        shard.count -= 1
        self.count -= 1
        if capacity > CAPACITY_MIN and 4 * <uint64_t>shard.count < capacity:
            try:
                _resize(shard, max(2 * shard.count, <uint32_t>CAPACITY_MIN), self.secret)
            except MemoryError:
                pass  # the table keeps its size
        Py_DECREF(<object>node)
        return True

    # -- as a mapping

    def __len__(self):
        return self.count

    def __contains__(self, object name):
        return self.find(<uint64_t>name) != NULL

    def __getitem__(self, object name):
        cdef PyObject *node = self.find(<uint64_t>name)
        if node == NULL:
            raise KeyError(name)
        return <object>node

    def get(self, uint64_t name):
        """Return the node of a name, or None."""
        cdef PyObject *node = self.find(name)
        return None if node == NULL else <object>node

    def __setitem__(self, object name, object node):
        _put(self, <uint64_t>name, <PyObject *>node)

    def __delitem__(self, object name):
        if not self.drop(<uint64_t>name):
            raise KeyError(name)

    def __iter__(self):
        cdef uint32_t i, k
        names = []
        for k in range(SHARDS):
            for i in range(self.shards[k].capacity):
                if self.shards[k].entries[i].node != NULL:
                    names.append(self.shards[k].entries[i].name)
        return iter(names)

    # -- in bulk

    def knows_none(self, names):
        """Say whether none of these names is filed."""
        return _are_all(self, names, NULL)

    def is_filed(self, names, object node):
        """Say whether all of these names are filed for a node."""
        return _are_all(self, names, <PyObject *>node)

    def file(self, names, object node):
        """File names for a node, replacing what they were filed for."""
        cdef Names packed = Names(names)
        cdef Py_ssize_t i
        for i in range(packed.count):
            _fetch(self, packed.at, i + AHEAD, packed.count)
            _put(self, packed.at[i], <PyObject *>node)

    def file_new(self, names, object node):
        """File names for a node if none of them is filed, and none occurs twice.

        Returns whether they were filed.
        """
        cdef Names packed = Names(names)
        cdef Py_ssize_t i, done = 0
        cdef bint fits = True
        try:
            while done < packed.count and fits:
                _fetch(self, packed.at, done + AHEAD, packed.count)
                fits = self.put_new(packed.at[done], <PyObject *>node)
                done += fits
        finally:
            if done < packed.count:
                for i in range(done):
                    self.drop(packed.at[i])
        return fits

    def drop_all(self, names):
        """Remove names, all of which are filed."""
        cdef Names packed = Names(names)
        cdef Py_ssize_t i
        for i in range(packed.count):
            _fetch(self, packed.at, i + AHEAD, packed.count)
            if not self.drop(packed.at[i]):
                raise KeyError(packed.at[i])

    def drop_tail(self, names, Py_ssize_t start, bytes run not None):
        """Remove the names from `start` on that match the end of a run backwards.

        All of the run's names are filed, and its first one stays. Returns how many were removed.
        """
        cdef Names packed
        cdef const uint64_t *end = <const uint64_t *>PyBytes_AS_STRING(run)
        cdef Py_ssize_t i, most = PyBytes_GET_SIZE(run) // <Py_ssize_t>sizeof(uint64_t) - 1
        cdef Py_ssize_t count = 0
        if start < 0:
            raise ValueError("positions count from the beginning")
        end += most  # the last one; aligned, because the data of bytes objects is
        most = min(most, <Py_ssize_t>len(names) - start)
        packed = Names(names[start:start + most])
        while count < most and packed.at[count] == end[-count]:
            count += 1
        for i in range(count):
            _fetch(self, packed.at, i + AHEAD, count)
            if not self.drop(end[-i]):
                raise KeyError(end[-i])
        return count

    def pop_some(self, uint32_t count):
        """Remove `count` arbitrary names; the rest must not be looked up any more."""
        cdef Shard *shard
        cdef PyObject *node
        cdef uint32_t k = SHARDS
        while count and k:
            shard = &self.shards[k - 1]
            if not shard.capacity:
                k -= 1
                continue
            # from the end of the table, which shrinks with every entry
            shard.capacity -= 1
            node = shard.entries[shard.capacity].node
            if not shard.capacity:
                PyMem_RawFree(shard.entries)
                shard.entries = NULL
            if node != NULL:
                count -= 1
                shard.count -= 1
                self.count -= 1
                Py_DECREF(<object>node)

    @property
    def nbytes(self):
        """Size of the table in bytes."""
        cdef uint32_t k
        cdef size_t size = sizeof(self.shards)
        for k in range(SHARDS):
            size += self.shards[k].capacity * sizeof(Entry)
        return size


cdef inline void _fetch(
    NameMap where, const uint64_t *names, Py_ssize_t at, Py_ssize_t count
) noexcept:
    """Prefetch where the search for a name begins, because tables are larger than caches."""
    cdef uint64_t mixed
    cdef Shard *shard
    if at < count:
        mixed = _mix(names[at], where.secret)
        shard = &where.shards[_shard(mixed)]
        __builtin_prefetch(&shard.entries[_home(mixed, shard.capacity)])


cdef bint _are_all(NameMap where, object names, PyObject *node) except -1:
    """Whether all of these names are filed for a node, or with NULL, none of them is filed."""
    cdef Names packed = Names(names)
    cdef Py_ssize_t i = 0
    while i < packed.count and where.find(packed.at[i]) == node:
        _fetch(where, packed.at, i + AHEAD, packed.count)
        i += 1
    return i == packed.count


cdef bint _put(NameMap where, uint64_t name, PyObject *node) except -1:
    """File a name, replacing what it was filed for."""
    cdef uint64_t mixed = _mix(name, where.secret)
    cdef Shard *shard = &where.shards[_shard(mixed)]
    cdef uint32_t at
    cdef PyObject *before
    if shard.count:
        at = _home(mixed, shard.capacity)
        while shard.entries[at].node != NULL:
            if shard.entries[at].name == name:
                before = shard.entries[at].node
                Py_INCREF(<object>node)
                shard.entries[at].node = node
                Py_DECREF(<object>before)
                return True
            at = at + 1 if at + 1 < shard.capacity else 0
    return where.put_new(name, node)
