# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled decoder of plain KV events: bytes to events, and the hashes of their blocks.

Optional. `core/wire.py`, `core/plain_walk.py` and `core/hashing.py` are its twins and define what is
right. This module only reads plain messages (see `_events.h`) and leaves everything else to them.
`_ingest.pyx`, the compiled path into the tree, reads messages into `scratch`.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort, realloc
from libc.string cimport memcpy
from cpython cimport array
from indexer._events cimport (
    KV_CLEARED, KV_MAP, KV_MORE, KV_READ, KV_REFUSED, KV_REMOVED, KV_STORED, ascii_text, kv_batch,
    kv_begin, kv_event, kv_go_on, kv_media, kv_read, kv_reader, kv_trim, kv_walk,
)

import array as _array

from indexer.core.events import (
    JOINED_BLOCKS_MAX,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from indexer.core.plain_walk import NESTING_MAX
from indexer.core.writer import SLICE_BLOCKS
from indexer.types import Tier

ABI = 2  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef extern from "Python.h":
    object PyLong_FromUnsignedLongLong(unsigned long long value)

cdef extern from "_xxh3.h" nogil:
    enum: XXH3_SECRET_BYTES, XXH3_MEDIUM_MAX
    void xxh3_derive(uint8_t *secret, uint64_t seed)
    uint64_t xxh3(const uint8_t *data, size_t len, uint64_t seed, const uint8_t *derived)

cdef extern from *:
    """
    static int by_number(const void *a, const void *b) {
        uint64_t one, other; /* they follow 4-byte tokens, so they may be unaligned */
        memcpy(&one, a, sizeof one);
        memcpy(&other, b, sizeof other);
        return (one > other) - (one < other);
    }
    """
    int by_number(const void *a, const void *b) noexcept nogil

cdef enum:
    HASH = 8  # bytes
    LISTED = 4  # up to this many names are passed on as a list
    SLICE = 512  # SLICE_BLOCKS, checked below
    NESTING = 1000  # NESTING_MAX, likewise

cdef size_t joined_max = JOINED_BLOCKS_MAX
cdef array.array u32_array = _array.array("I")
cdef array.array u64_array = _array.array("Q")
cdef list tiers = sorted(Tier)

if SLICE_BLOCKS != SLICE or NESTING_MAX != NESTING or u32_array.itemsize != 4:
    raise ImportError("compiled for other limits")


cdef class Scratch:
    """Reusable buffers into which payloads are read one after another; there is one, `scratch`."""

    def __dealloc__(self):
        free(self.batch.events)
        free(self.batch.names)
        free(self.batch.tokens)
        free(self.batch.media)

    cdef bint read(self, bytes payload) noexcept:
        """Read a payload; False if it is left to Python."""
        kv_trim(&self.batch)
        return kv_read(
            &self.batch,
            <uint8_t *>PyBytes_AS_STRING(payload),
            PyBytes_GET_SIZE(payload),
            joined_max,
        ) == KV_READ

    cdef list names(self, kv_event *e):
        """Return all names of an event."""
        return _names(&self.batch, e)

    cdef object some(self, const uint64_t *names, size_t count):
        """Return names for the index: a list if few, otherwise packed, which the index uses in place."""
        cdef size_t i
        cdef array.array packed
        if count <= LISTED:
            return [PyLong_FromUnsignedLongLong(names[i]) for i in range(count)]
        packed = array.clone(u64_array, count, False)
        memcpy(packed.data.as_voidptr, names, count * HASH)
        return packed

    cdef object events(self, size_t start, size_t end):
        """Return some of the decoded events as the batch that Python would have made of them."""
        cdef size_t i
        rank = PyLong_FromUnsignedLongLong(self.batch.rank) if self.batch.has_rank else None
        events = [_event(&self.batch, &self.batch.events[i]) for i in range(start, end)]
        form = "map" if self.batch.form == KV_MAP else "array"
        return EventBatch(events, self.batch.ts, rank, form)

    cdef int hash(
        self, kv_event *e, size_t block_size, uint64_t seed, uint64_t *hashes
    ) except -1:
        """Hash the tokens of an event's blocks, and their media items."""
        cdef uint8_t secret[XXH3_SECRET_BYTES]
        cdef size_t i, width = 4 * block_size
        cdef uint8_t *tokens = <uint8_t *>(self.batch.tokens + e.tokens_at)
        if width > XXH3_MEDIUM_MAX:
            xxh3_derive(secret, seed)
        for i in range(e.names):
            hashes[i] = xxh3(tokens + width * i, width, seed, secret)
        if e.media:
            self._hash_media(e, block_size, seed, hashes)
        return 0

    cdef int _hash_media(
        self, kv_event *e, size_t block_size, uint64_t seed, uint64_t *hashes
    ) except -1:
        """Rehash the blocks with media items, whose hashes follow the tokens in ascending order."""
        cdef uint8_t secret[XXH3_SECRET_BYTES]
        cdef kv_media *media = self.batch.media + e.media_at
        cdef size_t i = 0, first, width = 4 * block_size
        cdef uint8_t *tokens = <uint8_t *>(self.batch.tokens + e.tokens_at)
        cdef uint8_t *data = <uint8_t *>malloc(width + e.media * HASH)
        if data == NULL:
            raise MemoryError
        xxh3_derive(secret, seed)
        while i < e.media:
            first = i
            memcpy(data, tokens + width * media[first].block, width)
            while i < e.media and media[i].block == media[first].block:
                memcpy(data + width + (i - first) * HASH, &media[i].hash, HASH)
                i += 1
            qsort(data + width, i - first, HASH, by_number)
            hashes[media[first].block] = xxh3(data, width + (i - first) * HASH, seed, secret)
        free(data)
        return 0


scratch = Scratch()
cdef Scratch plain = scratch


def decode_plain(bytes payload, str form):
    """Decode a batch, or return None if that is left to `core/wire.py`.

    Token ids are an array of unsigned 32-bit numbers instead of a list.
    """
    if plain.in_use or not plain.read(payload) or plain.batch.form < 0:
        return None
    if (plain.batch.form == KV_MAP) != (form == "map"):
        return None  # the decoder must learn its engine's dialect
    plain.in_use = True
    try:
        return plain.events(0, plain.batch.event_count)
    finally:
        plain.in_use = False


cdef class LongBatch:
    """Decodes one long payload in pieces; afterwards it is the sequence of its events.

    Events are created on access; names and tokens of a long one are views of the decoded arrays.
    These are allocated at their upper bound and touched gradually, because growing would copy.
    """

    cdef kv_batch batch
    cdef kv_reader reader
    cdef int state
    cdef bytes payload
    cdef array.array names, tokens

    def __cinit__(self, bytes payload):
        cdef size_t size = PyBytes_GET_SIZE(payload)
        self.payload = payload
        self.names = array.clone(u64_array, size, False)  # a name takes at least one byte of payload
        self.tokens = array.clone(u32_array, size, False)
        self.batch.names, self.batch.name_room = <uint64_t *>self.names.data.as_voidptr, size + 1
        self.batch.tokens, self.batch.token_room = <uint32_t *>self.tokens.data.as_voidptr, size + 1
        self.batch.event_room = size // 16 + 16  # and an event at least 18
        self.batch.events = <kv_event *>malloc(self.batch.event_room * sizeof(kv_event))
        if self.batch.events == NULL:
            raise MemoryError
        self.reader.at = <uint8_t *>PyBytes_AS_STRING(payload)
        self.reader.end = self.reader.at + size
        self.state = kv_begin(&self.batch, &self.reader)

    def __dealloc__(self):
        free(self.batch.events)
        free(self.batch.media)

    def go_on(self, size_t values):
        """Read about `values` more values; True at the end, or if the payload is not plain."""
        cdef void *events
        if self.state != KV_MORE:
            return True
        self.state = kv_go_on(&self.batch, &self.reader, joined_max, values)
        if self.state == KV_MORE:
            return False
        if not self.batch.has_texts:
            self.payload = None
        array.resize(self.names, self.batch.name_count)
        array.resize(self.tokens, self.batch.token_count)
        events = realloc(self.batch.events, (self.batch.event_count + 1) * sizeof(kv_event))
        if events != NULL:
            self.batch.events = <kv_event *>events
        return True

    def result(self):
        """Return the batch, or None if it is left to `core/wire.py`."""
        if self.state != KV_READ or self.batch.form < 0:
            return None
        rank = PyLong_FromUnsignedLongLong(self.batch.rank) if self.batch.has_rank else None
        form = "map" if self.batch.form == KV_MAP else "array"
        return EventBatch(self, self.batch.ts, rank, form)

    def __len__(self):
        return self.batch.event_count

    def __getitem__(self, Py_ssize_t at):
        cdef kv_event *e
        if at < 0 or <size_t>at >= self.batch.event_count:
            raise IndexError(at)
        e = &self.batch.events[at]
        if e.kind == KV_CLEARED or e.names <= SLICE:
            self.batch.names = <uint64_t *>self.names.data.as_voidptr  # resizing moved the array
            self.batch.tokens = <uint32_t *>self.tokens.data.as_voidptr
            return _event(&self.batch, e)
        names = memoryview(self.names)[e.names_at : e.names_at + e.names]
        if e.kind == KV_REMOVED:
            return _removed(e, names)
        return _stored(&self.batch, e, names, memoryview(self.tokens)[e.tokens_at : e.tokens_at + e.tokens])


def walk(bytes payload, size_t at, list left, size_t fuel):
    """Skip values: see `core/plain_walk.py`."""
    cdef uint64_t levels[NESTING]
    cdef kv_reader reader
    cdef int depth = <int>PyList_GET_SIZE(left) - 1, level, state
    if depth >= NESTING or at > <size_t>PyBytes_GET_SIZE(payload):
        raise ValueError(f"nothing to be skipped at byte {at}")
    for level in range(depth + 1):
        levels[level] = left[level]
    reader.at = <uint8_t *>PyBytes_AS_STRING(payload) + at
    reader.end = <uint8_t *>PyBytes_AS_STRING(payload) + PyBytes_GET_SIZE(payload)
    state = kv_walk(&reader, levels, &depth, NESTING, &fuel, True)
    if state == KV_REFUSED:
        raise ValueError("no MessagePack, or less than it says")
    left[:] = [levels[level] for level in range(depth + 1)]
    return reader.at - <uint8_t *>PyBytes_AS_STRING(payload)


cdef list _names(kv_batch *b, kv_event *e):
    cdef size_t i
    cdef uint64_t *names = b.names + e.names_at
    return [PyLong_FromUnsignedLongLong(names[i]) for i in range(e.names)]


cdef list _media(kv_batch *b, kv_event *e):
    """Return the hashes of the media items in each block."""
    cdef size_t i
    cdef kv_media *media = b.media + e.media_at
    cdef list items = [[] for i in range(e.names)]
    for i in range(e.media):
        (<list>items[media[i].block]).append(PyLong_FromUnsignedLongLong(media[i].hash))
    return items


cdef array.array _tokens(kv_batch *b, kv_event *e):
    cdef array.array tokens = array.clone(u32_array, e.tokens, False)
    if e.tokens:  # an empty array has no data, which `memcpy` must not get even for 0 bytes
        memcpy(tokens.data.as_voidptr, b.tokens + e.tokens_at, e.tokens * 4)
    return tokens


cdef object _event(kv_batch *b, kv_event *e):
    if e.kind == KV_STORED:
        return _stored(b, e, _names(b, e), _tokens(b, e))
    if e.kind == KV_REMOVED:
        return _removed(e, _names(b, e))
    return AllBlocksCleared()


cdef object _stored(kv_batch *b, kv_event *e, object names, object tokens):
    return BlockStored(
        block_hashes=names,
        parent=PyLong_FromUnsignedLongLong(e.parent) if e.has_parent else None,
        token_ids=tokens,
        block_size=e.block_size,
        tier=tiers[e.tier],
        lora_name=ascii_text(&e.lora_name),
        has_nameless_adapter=bool(e.is_adapter_numbered and not e.lora_name.bytes),
        cache_salt=ascii_text(&e.salt),
        mm_hashes=_media(b, e) if e.media else None,
        group=e.group if e.group > 0 else 0,
        attention=ascii_text(&e.attention_kind) if e.attention else None,
        window=e.window if e.window >= 0 else None,
    )


cdef object _removed(kv_event *e, object names):
    return BlockRemoved(
        block_hashes=names,
        tier=tiers[e.tier],
        group=e.group if e.group > 0 else 0,
        events=e.joined,
    )
