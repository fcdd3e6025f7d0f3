# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled twin of `plain_memory.py`: what has ended, remembered without an object of Python's.

Every entry is one block of the C library's. As objects they would lie among all that was there
beside them, and each keep a megabyte from being given back: an arena of Python's goes as a whole.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree, PyMem_RawMalloc  # `tracemalloc` sees them
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object text)
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size) except NULL

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    SHARDS = 64  # a table of a hundred thousand places would take milliseconds to grow
    BUCKETS_MIN = 8  # of a shard; powers of two

cdef struct Node:
    Node *older
    Node *younger
    Node *next  # in its bucket
    uint64_t mixed
    double at
    uint32_t key_bytes
    uint32_t value_bytes
    bint is_text

cdef struct Shard:
    Node **buckets
    uint32_t mask
    uint32_t count


cdef inline char *_key(Node *node) noexcept nogil:
    return <char *>(node + 1)


@cython.final
cdef class Memory:
    """Keys with the time they were put and a value, oldest first. All moves O(1)."""

    cdef Shard _shards[SHARDS]
    cdef Node *_oldest
    cdef Node *_youngest
    cdef Py_ssize_t _count
    cdef Py_ssize_t _bytes
    # of the key looked at
    cdef object _held
    cdef const char *_data
    cdef Py_ssize_t _size
    cdef bint _is_text
    cdef uint64_t _mixed

    def __dealloc__(self):
        cdef Node *node = self._oldest
        cdef Node *younger
        cdef uint32_t i
        while node != NULL:
            younger = node.younger
            PyMem_RawFree(node)
            node = younger
        for i in range(SHARDS):
            PyMem_RawFree(self._shards[i].buckets)

    def __len__(self):
        return self._count

    def __contains__(self, key):
        return self._find(key) != NULL

    @property
    def nbytes(self):
        """Bytes of it all, without what the C library adds."""
        return self._bytes

    def at(self, key):
        """When a key was put; None: it is not remembered."""
        cdef Node *node = self._find(key)
        return None if node == NULL else node.at

    def get(self, key):
        """What was put with a key; None: it is not remembered."""
        cdef Node *node = self._find(key)
        return None if node == NULL else _value(node)

    def put(self, key, double at, bytes value=b""):
        """Remember a key, as the youngest."""
        cdef Node *node = self._find(key)
        cdef Py_ssize_t value_bytes = PyBytes_GET_SIZE(value)
        if node != NULL and node.value_bytes == value_bytes:
            self._unlink(node)
        else:
            if node != NULL:
                self._remove(node)
            node = self._add(value_bytes)
        node.at = at
        memcpy(_key(node) + node.key_bytes, PyBytes_AS_STRING(value), value_bytes)
        node.older, node.younger = self._youngest, NULL
        if self._youngest == NULL:
            self._oldest = node
        else:
            self._youngest.younger = node
        self._youngest = node

    def discard(self, key):
        """Forget a key; tell whether it was remembered."""
        cdef Node *node = self._find(key)
        if node == NULL:
            return False
        self._remove(node)
        return True

    def pop_oldest(self, double until):
        """Forget the oldest if it was put by then: return (key, value), else None."""
        cdef Node *node = self._oldest
        if node == NULL or node.at > until:
            return None
        found = _name(node), _value(node)
        self._remove(node)
        return found

    def items(self):
        """All of it, oldest first: (key, at, value). O(n)."""
        cdef Node *node = self._oldest
        cdef list found = []
        while node != NULL:
            found.append((_name(node), node.at, _value(node)))
            node = node.younger
        return found

    # -- one entry -----------------------------------------------------------------------------

    cdef Node *_find(self, key) except? NULL:
        cdef Shard *shard
        cdef Node *node
        self._is_text = isinstance(key, str)
        if not self._is_text:
            self._held = <bytes?>key
            self._data, self._size = PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
        elif PyUnicode_IS_ASCII(key):
            self._held = key
            self._data = PyUnicode_AsUTF8AndSize(key, &self._size)
        else:
            self._held = key.encode("utf-8", "surrogatepass")
            self._data, self._size = PyBytes_AS_STRING(self._held), PyBytes_GET_SIZE(self._held)
        self._mixed = <uint64_t>hash(key) * <uint64_t>0x9E3779B97F4A7C15
        shard = &self._shards[self._mixed >> 58]
        if not shard.count:
            return NULL
        node = shard.buckets[(self._mixed >> 20) & shard.mask]
        while node != NULL:
            if (
                node.mixed == self._mixed
                and node.key_bytes == self._size
                and node.is_text == self._is_text
                and memcmp(_key(node), self._data, self._size) == 0
            ):
                return node
            node = node.next
        return NULL

    cdef Node *_add(self, Py_ssize_t value_bytes) except NULL:
        """Make an entry of the key just looked for, outside the row of all."""
        cdef Shard *shard = &self._shards[self._mixed >> 58]
        cdef Py_ssize_t size = sizeof(Node) + self._size + value_bytes
        cdef Node *node
        cdef Node **bucket
        if self._size + value_bytes > 0x7fffffff:
            raise MemoryError
        if shard.buckets == NULL:
            self._resize(shard, BUCKETS_MIN)
        elif shard.count > shard.mask:
            self._resize(shard, 2 * (shard.mask + 1))
        node = <Node *>PyMem_RawMalloc(size)
        if node == NULL:
            raise MemoryError
        node.mixed, node.is_text = self._mixed, self._is_text
        node.key_bytes, node.value_bytes = <uint32_t>self._size, <uint32_t>value_bytes
        memcpy(_key(node), self._data, self._size)
        bucket = &shard.buckets[(self._mixed >> 20) & shard.mask]
        node.next, bucket[0] = bucket[0], node
        shard.count += 1
        self._count += 1
        self._bytes += size
        return node

    cdef void _unlink(self, Node *node) noexcept:
        """Take it out of the row of all."""
        if node.older == NULL:
            self._oldest = node.younger
        else:
            node.older.younger = node.younger
        if node.younger == NULL:
            self._youngest = node.older
        else:
            node.younger.older = node.older

    cdef int _remove(self, Node *node) except -1:
        cdef Shard *shard = &self._shards[node.mixed >> 58]
        cdef Node **link = &shard.buckets[(node.mixed >> 20) & shard.mask]
        while link[0] != node:
            link = &link[0].next
        link[0] = node.next
        self._unlink(node)
        shard.count -= 1
        self._count -= 1
        self._bytes -= sizeof(Node) + node.key_bytes + node.value_bytes
        PyMem_RawFree(node)
        if not shard.count:
            self._bytes -= (shard.mask + 1) * sizeof(Node *)
            PyMem_RawFree(shard.buckets)
            shard.buckets = NULL
        elif shard.mask + 1 > BUCKETS_MIN and 8 * shard.count <= shard.mask:
            self._resize(shard, (shard.mask + 1) // 4)
        return 0

    cdef int _resize(self, Shard *shard, uint32_t count) except -1:
        cdef Node **buckets = <Node **>PyMem_RawCalloc(count, sizeof(Node *))
        cdef Node *node
        cdef Node *following
        cdef uint32_t i, at
        if buckets == NULL:
            raise MemoryError
        if shard.buckets != NULL:
            for i in range(shard.mask + 1):
                node = shard.buckets[i]
                while node != NULL:
                    following = node.next
                    at = (node.mixed >> 20) & (count - 1)
                    node.next, buckets[at] = buckets[at], node
                    node = following
            self._bytes -= (shard.mask + 1) * sizeof(Node *)
            PyMem_RawFree(shard.buckets)
        self._bytes += count * sizeof(Node *)
        shard.buckets, shard.mask = buckets, count - 1
        return 0


cdef object _name(Node *node):
    cdef bytes raw = PyBytes_FromStringAndSize(_key(node), node.key_bytes)
    return raw.decode("utf-8", "surrogatepass") if node.is_text else raw


cdef bytes _value(Node *node):
    return PyBytes_FromStringAndSize(_key(node) + node.key_bytes, node.value_bytes)
