# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled twin of `plain_expiring_map.py`: what has ended, remembered without an object of Python's.

Entries lie one behind the other in chunks of the C library's, and name each other by number. What
ends while a load goes would else take the places that the load has just left, one in each page and
one in each arena, and keep all of them from being given back; here whole chunks come and go.

Entries leave from the oldest on, but some are put anew, and some leave early. When more than half
of all is holes, each leave-taking moves a few entries out of the oldest chunk.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc  # `tracemalloc` sees them
from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object text)
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

ABI = 2  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    SHARDS = 64  # a table of a hundred thousand places would take milliseconds to grow
    BUCKETS_MIN = 8  # of a shard; powers of two
    CHUNK_MIN = 512  # bytes
    CHUNK_MAX = 65536  # an entry that is longer gets one of its own
    PLACE_BITS = 13  # of an entry in its chunk, in words of eight bytes
    PLACES = 8191
    SLOTS_MAX = 1 << 19  # of chunks: 32 GiB
    LENGTH_MAX = 0x7fffff00
    HOLES_MAX = 2 * CHUNK_MAX  # bytes, and as much again as is alive

cdef uint32_t FLAG = 0x80000000
cdef uint32_t NO_SLOT = 0xffffffff

ctypedef uint32_t Ref  # of an entry: its chunk's slot, and its place there; 0: none

cdef struct Node:
    double at
    Ref older
    Ref younger
    Ref next  # in its bucket
    uint32_t mixed
    uint32_t key_bytes  # FLAG: a text
    uint32_t value_bytes  # FLAG: it has left

cdef struct Chunk:
    uint32_t older  # slots, in the order they were begun
    uint32_t younger
    uint32_t size
    uint32_t used  # bytes, this head included
    uint32_t live  # entries
    uint32_t slot

cdef struct Shard:
    Ref *buckets
    uint32_t mask
    uint32_t count


cdef inline char *_key(Node *node) noexcept nogil:
    return <char *>(node + 1)


cdef inline Py_ssize_t _whole(Py_ssize_t content) noexcept nogil:
    """Bytes of an entry with so long a key and value."""
    return (<Py_ssize_t>sizeof(Node) + content + 7) & ~<Py_ssize_t>7


cdef inline Py_ssize_t _size(Node *node) noexcept nogil:
    return _whole(<Py_ssize_t>(node.key_bytes & ~FLAG) + (node.value_bytes & ~FLAG))


@cython.final
cdef class ExpiringMap:
    """Keys with the time they were put and a value, oldest first. All moves O(1)."""

    cdef Shard _shards[SHARDS]
    cdef Ref _oldest
    cdef Ref _youngest
    cdef Py_ssize_t _count
    cdef Py_ssize_t _bytes  # of all that is allocated
    # chunks: by slot; a free slot holds the next free one, times two, and one
    cdef Chunk **_chunks
    cdef uint32_t _slots
    cdef uint32_t _free_slot
    cdef uint32_t _first
    cdef uint32_t _last  # where entries are added
    cdef uint32_t _swept  # bytes of the first one
    cdef Py_ssize_t _chunk_bytes
    cdef Py_ssize_t _holes
    cdef object _held  # of the key looked at
    cdef const char *_data
    cdef Py_ssize_t _length
    cdef uint32_t _is_text
    cdef uint32_t _mixed

    def __cinit__(self):
        self._free_slot = self._first = self._last = NO_SLOT

    def __dealloc__(self):
        cdef uint32_t i
        for i in range(self._slots):
            if not <uintptr_t>self._chunks[i] & 1:
                PyMem_RawFree(self._chunks[i])
        PyMem_RawFree(self._chunks)
        for i in range(SHARDS):
            PyMem_RawFree(self._shards[i].buckets)

    def __len__(self):
        return self._count

    def __contains__(self, key):
        return self._find(key) != 0

    @property
    def nbytes(self):
        """Bytes of it all, without what the C library adds."""
        return self._bytes

    def at(self, key):
        """When a key was put; None: it is not remembered."""
        cdef Ref ref = self._find(key)
        return self._node(ref).at if ref else None

    def get(self, key):
        """What was put with a key; None: it is not remembered."""
        cdef Ref ref = self._find(key)
        return _value(self._node(ref)) if ref else None

    def put(self, key, double at, bytes value=b""):
        """Remember a key, as the youngest."""
        cdef Ref ref = self._find(key)
        cdef Py_ssize_t value_bytes = PyBytes_GET_SIZE(value)
        cdef Node *node
        if ref and self._node(ref).value_bytes == value_bytes:
            self._unlink(self._node(ref))
        else:
            if ref:
                self._remove(ref)
            ref = self._add(value_bytes)
        node = self._node(ref)
        node.at = at
        memcpy(_key(node) + (node.key_bytes & ~FLAG), PyBytes_AS_STRING(value), value_bytes)
        node.older, node.younger = self._youngest, 0
        if self._youngest:
            self._node(self._youngest).younger = ref
        else:
            self._oldest = ref
        self._youngest = ref

    def discard(self, key):
        """Forget a key; return whether it was remembered."""
        cdef Ref ref = self._find(key)
        if ref:
            self._remove(ref)
        return ref != 0

    def pop_oldest(self, double until):
        """Forget the oldest if it was put by then: return (key, value), else None."""
        if not self._oldest or self._node(self._oldest).at > until:
            return None
        cdef Node *node = self._node(self._oldest)
        found = _name(node), _value(node)
        self._remove(self._oldest)
        return found

    def items(self):
        """All of it, oldest first: (key, at, value). O(n)."""
        cdef Ref ref = self._oldest
        cdef Node *node
        cdef list found = []
        while ref:
            node = self._node(ref)
            found.append((_name(node), node.at, _value(node)))
            ref = node.younger
        return found

    # -- one entry -----------------------------------------------------------------------------

    cdef inline Node *_node(self, Ref ref) noexcept:
        return <Node *>(<char *>self._chunks[ref >> PLACE_BITS] + ((ref & PLACES) << 3))

    cdef Ref _find(self, key) except? 0:
        cdef Shard *shard
        cdef Node *node
        cdef Ref ref
        if not isinstance(key, str):
            self._is_text = 0
            self._held = <bytes?>key
            self._data, self._length = PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
        else:
            self._is_text = FLAG
            if PyUnicode_IS_ASCII(key):
                self._held = key
                self._data = PyUnicode_AsUTF8AndSize(key, &self._length)
            else:
                self._held = key.encode("utf-8", "surrogatepass")
                self._data = PyBytes_AS_STRING(self._held)
                self._length = PyBytes_GET_SIZE(self._held)
        if self._length > LENGTH_MAX:
            raise MemoryError
        self._mixed = <uint32_t>((<uint64_t>hash(key) * <uint64_t>0x9E3779B97F4A7C15) >> 32)
        shard = &self._shards[self._mixed >> 26]
        if not shard.count:
            return 0
        ref = shard.buckets[self._mixed & shard.mask]
        while ref:
            node = self._node(ref)
            if (
                node.mixed == self._mixed
                and node.key_bytes == (<uint32_t>self._length | self._is_text)
                and memcmp(_key(node), self._data, self._length) == 0
            ):
                return ref
            ref = node.next
        return 0

    cdef Ref _add(self, Py_ssize_t value_bytes) except 0:
        """Make an entry of the key just looked for, outside the row of all."""
        cdef Shard *shard = &self._shards[self._mixed >> 26]
        cdef Node *node
        cdef Ref ref
        cdef Ref *bucket
        if self._length + value_bytes > LENGTH_MAX:
            raise MemoryError
        if shard.buckets == NULL:
            self._resize(shard, BUCKETS_MIN)
        elif shard.count > shard.mask:
            self._resize(shard, 2 * (shard.mask + 1))
        ref = self._carve(_whole(self._length + value_bytes))
        node = self._node(ref)
        node.mixed = self._mixed
        node.key_bytes = <uint32_t>self._length | self._is_text
        node.value_bytes = <uint32_t>value_bytes
        memcpy(_key(node), self._data, self._length)
        bucket = &shard.buckets[self._mixed & shard.mask]
        node.next, bucket[0] = bucket[0], ref
        shard.count += 1
        self._count += 1
        return ref

    cdef void _unlink(self, Node *node) noexcept:
        """Take it out of the row of all."""
        if node.older:
            self._node(node.older).younger = node.younger
        else:
            self._oldest = node.younger
        if node.younger:
            self._node(node.younger).older = node.older
        else:
            self._youngest = node.older

    cdef Ref *_link_to(self, Ref ref) noexcept:
        """Where the number of an entry stands in its bucket."""
        cdef Node *node = self._node(ref)
        cdef Shard *shard = &self._shards[node.mixed >> 26]
        cdef Ref *link = &shard.buckets[node.mixed & shard.mask]
        while link[0] != ref:
            link = &self._node(link[0]).next
        return link

    cdef int _remove(self, Ref ref) except -1:
        cdef Node *node = self._node(ref)
        cdef Shard *shard = &self._shards[node.mixed >> 26]
        cdef Py_ssize_t size = _size(node)
        self._link_to(ref)[0] = node.next
        self._unlink(node)
        node.value_bytes |= FLAG
        shard.count -= 1
        self._count -= 1
        self._leave(ref >> PLACE_BITS, size)
        if not shard.count:
            self._bytes -= (shard.mask + 1) * sizeof(Ref)
            PyMem_RawFree(shard.buckets)
            shard.buckets = NULL
        elif shard.mask + 1 > BUCKETS_MIN and 8 * shard.count <= shard.mask:
            self._resize(shard, (shard.mask + 1) // 4)
        if not self._count:
            self._empty()
        elif 2 * self._holes > self._chunk_bytes + HOLES_MAX:
            self._sweep(2 * size)
        return 0

    cdef int _resize(self, Shard *shard, uint32_t count) except -1:
        cdef Ref *buckets = <Ref *>PyMem_RawCalloc(count, sizeof(Ref))
        cdef Node *node
        cdef Ref ref, following
        cdef uint32_t i, at
        if buckets == NULL:
            raise MemoryError
        if shard.buckets != NULL:
            for i in range(shard.mask + 1):
                ref = shard.buckets[i]
                while ref:
                    node = self._node(ref)
                    following = node.next
                    at = node.mixed & (count - 1)
                    node.next, buckets[at] = buckets[at], ref
                    ref = following
            self._bytes -= (shard.mask + 1) * sizeof(Ref)
            PyMem_RawFree(shard.buckets)
        self._bytes += count * sizeof(Ref)
        shard.buckets, shard.mask = buckets, count - 1
        return 0

    # -- chunks --------------------------------------------------------------------------------

    cdef Ref _carve(self, Py_ssize_t size) except 0:
        """Find room for an entry of so many bytes, behind the last."""
        cdef Chunk *chunk
        cdef uint32_t slot = self._last, before = self._last, place
        cdef Py_ssize_t room
        if slot == NO_SLOT or self._chunks[slot].used + size > self._chunks[slot].size:
            room = max(CHUNK_MIN, min(self._chunk_bytes, CHUNK_MAX)) & ~<Py_ssize_t>7
            slot = self._begin(max(room, <Py_ssize_t>sizeof(Chunk) + size))
            if before != self._last and before != NO_SLOT and not self._chunks[before].live:
                self._end(before)  # it was empty, and too small
        chunk = self._chunks[slot]
        place = chunk.used
        chunk.used += <uint32_t>size
        chunk.live += 1
        return (slot << PLACE_BITS) | (place >> 3)

    cdef uint32_t _begin(self, Py_ssize_t size) except? 0xffffffff:
        """Begin a chunk; one of more than CHUNK_MAX is one entry's, and stands in no row."""
        cdef Chunk *chunk
        cdef uint32_t slot
        if self._free_slot == NO_SLOT:
            self._more_slots()
        chunk = <Chunk *>PyMem_RawMalloc(size)
        if chunk == NULL:
            raise MemoryError
        slot = self._free_slot
        self._free_slot = <uint32_t>(<uintptr_t>self._chunks[slot] >> 1)
        self._chunks[slot] = chunk
        chunk.slot, chunk.size = slot, <uint32_t>size
        chunk.used, chunk.live = sizeof(Chunk), 0
        chunk.older = chunk.younger = NO_SLOT
        self._bytes += size
        if size > CHUNK_MAX:
            return slot
        self._chunk_bytes += size
        chunk.older = self._last
        if self._last == NO_SLOT:
            self._first, self._swept = slot, sizeof(Chunk)
        else:
            self._chunks[self._last].younger = slot
        self._last = slot
        return slot

    cdef int _more_slots(self) except -1:
        cdef uint32_t slots = 2 * self._slots if self._slots else 8
        cdef Chunk **chunks
        cdef uint32_t slot
        if slots > SLOTS_MAX:
            raise MemoryError
        chunks = <Chunk **>PyMem_RawRealloc(self._chunks, slots * sizeof(Chunk *))
        if chunks == NULL:
            raise MemoryError
        for slot in range(self._slots, slots):
            chunks[slot] = <Chunk *>((<uintptr_t>self._free_slot << 1) | 1)
            self._free_slot = slot
        self._bytes += (slots - self._slots) * sizeof(Chunk *)
        self._chunks, self._slots = chunks, slots
        return 0

    cdef void _leave(self, uint32_t slot, Py_ssize_t size) noexcept:
        """An entry of a chunk is over; with the last one the chunk is."""
        cdef Chunk *chunk = self._chunks[slot]
        chunk.live -= 1
        self._holes += 0 if chunk.size > CHUNK_MAX else size
        if chunk.live:
            return
        if slot != self._last:
            self._end(slot)
            return
        self._holes -= chunk.used - sizeof(Chunk)
        chunk.used = sizeof(Chunk)
        if slot == self._first:
            self._swept = sizeof(Chunk)

    cdef void _end(self, uint32_t slot) noexcept:
        """Give back a chunk without entries that is not the last one."""
        cdef Chunk *chunk = self._chunks[slot]
        self._bytes -= chunk.size
        if chunk.size <= CHUNK_MAX:
            self._chunk_bytes -= chunk.size
            self._holes -= chunk.used - sizeof(Chunk)
            self._chunks[chunk.younger].older = chunk.older
            if chunk.older == NO_SLOT:
                self._first, self._swept = chunk.younger, sizeof(Chunk)
            else:
                self._chunks[chunk.older].younger = chunk.younger
        PyMem_RawFree(chunk)
        self._chunks[slot] = <Chunk *>((<uintptr_t>self._free_slot << 1) | 1)
        self._free_slot = slot

    cdef void _empty(self) noexcept:
        """Nothing is remembered: the last chunk goes, and the table of all."""
        if self._last != NO_SLOT:
            PyMem_RawFree(self._chunks[self._last])
        PyMem_RawFree(self._chunks)
        self._chunks = NULL
        self._slots = 0
        self._free_slot = self._first = self._last = NO_SLOT
        self._bytes = self._chunk_bytes = self._holes = 0

    cdef int _sweep(self, Py_ssize_t budget) except -1:
        """Move entries of the first chunk behind the last one, about so many bytes."""
        cdef Chunk *chunk
        cdef Node *node
        cdef Py_ssize_t size
        cdef Ref ref, moved
        while budget > 0 and self._first != self._last:
            chunk = self._chunks[self._first]
            node = <Node *>(<char *>chunk + self._swept)
            ref = (chunk.slot << PLACE_BITS) | (self._swept >> 3)
            size = _size(node)
            if node.value_bytes & FLAG:
                self._swept += <uint32_t>size
                budget -= sizeof(Node)
                continue
            moved = self._carve(size)
            memcpy(self._node(moved), node, size)
            self._link_to(ref)[0] = moved
            if node.older:
                self._node(node.older).younger = moved
            else:
                self._oldest = moved
            if node.younger:
                self._node(node.younger).older = moved
            else:
                self._youngest = moved
            self._swept += <uint32_t>size
            budget -= size
            node.value_bytes |= FLAG
            self._leave(chunk.slot, size)
        return 0


cdef object _name(Node *node):
    cdef bytes raw = PyBytes_FromStringAndSize(_key(node), node.key_bytes & ~FLAG)
    return raw.decode("utf-8", "surrogatepass") if node.key_bytes & FLAG else raw


cdef bytes _value(Node *node):
    return PyBytes_FromStringAndSize(_key(node) + (node.key_bytes & ~FLAG), node.value_bytes)
