# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled way of plain KV events: out of the bytes, into the tree.

Optional. `core/wire.py` and `core/stream.py` are its twins and say what is right; this module only
does what is plain (see `_events.h` for messages, `Feeder` for streams) and hands everything else, a
message or one event of it, to them before anything has happened.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Contains, PyDict_Size
from cpython.list cimport PyList_GET_SIZE
from cpython.object cimport PyObject, PyObject_RichCompareBool, Py_EQ
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort, realloc
from libc.string cimport memcmp, memcpy
from cpython cimport array
from indexer._names cimport NameMap

import array as _array

from xxhash import xxh3_64_intdigest

from indexer.core import holdings, removal
from indexer.core.events import (
    JOINED_BLOCKS_MAX,
    READ_AT_ONCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
)
from indexer.core.hashing import BASE_SEED, namespace_seed
from indexer.core.index import KvIndex
from indexer.core.node import EDGE_BLOCKS_MAX, EDGE_BYTES_MAX, Coverage, Node, all_ones
from indexer.core.plain_walk import NESTING_MAX
from indexer.core.radix_tree import RadixTree
from indexer.core.writer import APPLIED, COLOURED_SLICE_BLOCKS, EVENT_COST_BLOCKS, SLICE_BLOCKS
from indexer.types import BASE_NAMESPACE, Namespace, Tier

ABI = 6  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef extern from "Python.h":
    PyObject *PyDict_GetItemWithError(object p, object key) except? NULL
    object PyLong_FromUnsignedLongLong(unsigned long long value)
    unsigned long long PyLong_AsUnsignedLongLong(object value) except? 0xffffffffffffffff
    object PyNumber_And(object a, object b)
    object PyNumber_Xor(object a, object b)
    object PyNumber_Lshift(object a, object b)
    PyObject *Py_False
    bint PyUnicode_IS_COMPACT_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    void *PyUnicode_DATA(object text)

cdef extern from "_xxh3.h" nogil:
    enum: XXH3_SECRET_BYTES, XXH3_MEDIUM_MAX
    void xxh3_derive(uint8_t *secret, uint64_t seed)
    uint64_t xxh3(const uint8_t *data, size_t len, uint64_t seed, const uint8_t *derived)

cdef extern from "_events.h" nogil:
    enum: KV_READ, KV_MORE, KV_REFUSED, KV_STORED, KV_REMOVED, KV_CLEARED, KV_MAP, KV_ARRAY
    enum: KV_ATTENTION_NONE, KV_ATTENTION_MAIN, KV_ATTENTION_OTHER
    ctypedef struct kv_ascii:
        const char *at
        size_t bytes
    ctypedef struct kv_media:
        uint64_t hash
        uint32_t block
    ctypedef struct kv_event:
        int kind, tier, attention, is_local_said, has_parent, is_adapter_numbered
        int64_t group
        uint64_t parent
        size_t names_at, names, tokens_at, tokens
        size_t media_at, media
        int64_t block_size
        kv_ascii medium, attention_kind, lora_name, salt
        size_t joined
    ctypedef struct kv_batch:
        double ts
        int has_rank, form
        uint64_t rank
        kv_event *events
        uint64_t *names
        uint32_t *tokens
        kv_media *media
        int has_texts
        size_t event_count, event_room, name_count, name_room, token_count, token_room
    ctypedef struct kv_reader:
        const uint8_t *at
        const uint8_t *end
    int kv_begin(kv_batch *b, kv_reader *r)
    int kv_go_on(kv_batch *b, kv_reader *r, size_t joined_max, size_t fuel)
    int kv_read(kv_batch *b, const uint8_t *data, size_t size, size_t joined_max)
    void kv_trim(kv_batch *b)
    int kv_walk(kv_reader *r, uint64_t *left, int *depth, int depth_max, size_t fuel)

cdef extern from *:
    """
    #include <structmember.h>

    /* Attributes in __slots__ lie at fixed places of the object: reading one there costs what the
       interpreter's own specialised code pays, a tenth of a look-up by name. */
    static Py_ssize_t slot_of(PyObject *type, const char *name) {
        Py_ssize_t offset = -1;
        PyObject *found = PyObject_GetAttrString(type, name);
        if (!found) { PyErr_Clear(); return -1; }
        if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
            PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
            if (member->type == T_OBJECT_EX) offset = member->offset;
        }
        Py_DECREF(found);
        return offset;
    }
    #define SLOT(object, offset) (*(PyObject **)((char *)(object) + (offset)))

    static void slot_put(PyObject *object, Py_ssize_t offset, PyObject *value) {
        PyObject *old = SLOT(object, offset);
        Py_INCREF(value);
        SLOT(object, offset) = value;
        Py_XDECREF(old);
    }

    static unsigned long long read_u64_big(const char *p) {
        unsigned long long value = 0;
        for (int i = 0; i < 8; i++) value = value << 8 | (unsigned char)p[i];
        return value;
    }

    static int by_number(const void *a, const void *b) {
        uint64_t one, other; /* behind tokens of four bytes, so at any multiple of these */
        memcpy(&one, a, sizeof one);
        memcpy(&other, b, sizeof other);
        return (one > other) - (one < other);
    }
    """
    Py_ssize_t slot_of(PyObject *type, const char *name)
    PyObject *SLOT(PyObject *object, Py_ssize_t offset)
    void slot_put(PyObject *object, Py_ssize_t offset, PyObject *value)
    uint64_t read_u64_big(const char *data) nogil
    int by_number(const void *a, const void *b) noexcept nogil

cdef enum:
    HASH = 8  # bytes
    LISTED = 4  # names that are handed on as a list
    SLICE = 512  # SLICE_BLOCKS, checked below
    READ_AT_ONCE = 1 << 17  # READ_AT_ONCE_BYTES, likewise
    NESTING = 1000  # NESTING_MAX, likewise

cdef kv_batch scratch
cdef bint scratch_in_use = False
cdef size_t joined_max = JOINED_BLOCKS_MAX
cdef size_t edge_bytes_max = EDGE_BYTES_MAX
cdef uint64_t base_seed = BASE_SEED
cdef long event_cost = EVENT_COST_BLOCKS
cdef array.array u32_array = _array.array("I")
cdef array.array u64_array = _array.array("Q")
cdef list tiers = sorted(Tier)
cdef object zero = 0
cdef enum:
    NOT_OURS, TOGETHER, GONE
cdef list first_ones = [all_ones(count) for count in range(EDGE_BLOCKS_MAX + 1)]
cdef list only_one = [1 << position for position in range(EDGE_BLOCKS_MAX)]
cdef object base_namespace = BASE_NAMESPACE
cdef long dear = SLICE_BLOCKS // 16  # in blocks: what Python has to do for an event

if SLICE_BLOCKS != SLICE or READ_AT_ONCE_BYTES != READ_AT_ONCE or NESTING_MAX != NESTING or EDGE_BYTES_MAX != SLICE * HASH or u32_array.itemsize != 4:
    raise ImportError("compiled for other limits")

import sys as _sys
if _sys.byteorder != "little":
    raise ImportError("compiled for little-endian machines")


cdef Py_ssize_t _slot(object owner, const char *name) except -1:
    cdef Py_ssize_t offset = slot_of(<PyObject *>owner, name)
    if offset < 0:
        raise ImportError(f"{owner.__name__}.{name.decode()} is no slot")
    return offset


cdef Py_ssize_t N_FULL = _slot(Coverage, b"full")
cdef Py_ssize_t N_ALIASES = _slot(Node, b"aliases")
cdef Py_ssize_t N_CHILDREN = _slot(Node, b"children")
cdef Py_ssize_t N_EDGE = _slot(Node, b"edge")
cdef Py_ssize_t N_LOWER = _slot(Node, b"lower")
cdef Py_ssize_t N_MEMBERS = _slot(Node, b"members")
cdef Py_ssize_t N_NAMESPACE = _slot(Node, b"namespace")
cdef Py_ssize_t N_ORPHANED = _slot(Node, b"orphaned")
cdef Py_ssize_t N_PARENT = _slot(Node, b"parent")
cdef Py_ssize_t N_PARTIAL = _slot(Coverage, b"partial")
cdef Py_ssize_t N_PATTERNS = _slot(Coverage, b"patterns")


# -- reading ---------------------------------------------------------------------------------------


cdef bint _read(bytes payload) noexcept:
    """Read a payload into the scratch arrays; False if that is for Python to do."""
    kv_trim(&scratch)
    return kv_read(
        &scratch, <uint8_t *>PyBytes_AS_STRING(payload), PyBytes_GET_SIZE(payload), joined_max
    ) == KV_READ


cdef list _names(kv_batch *b, kv_event *e):
    cdef size_t i
    cdef uint64_t *names = b.names + e.names_at
    return [PyLong_FromUnsignedLongLong(names[i]) for i in range(e.names)]


cdef object _some(const uint64_t *names, size_t count):
    """Names for the index: packed, which it compares and files as they lie, unless they are few."""
    cdef size_t i
    cdef array.array packed
    if count <= LISTED:
        return [PyLong_FromUnsignedLongLong(names[i]) for i in range(count)]
    packed = array.clone(u64_array, count, False)
    memcpy(packed.data.as_voidptr, names, count * HASH)
    return packed


cdef list _media(kv_batch *b, kv_event *e):
    """Hashes of the media items in each block."""
    cdef size_t i
    cdef kv_media *media = b.media + e.media_at
    cdef list items = [[] for i in range(e.names)]
    for i in range(e.media):
        (<list>items[media[i].block]).append(PyLong_FromUnsignedLongLong(media[i].hash))
    return items


cdef str _text(kv_ascii *text):
    return text.at[:text.bytes].decode("ascii") if text.bytes else ""


cdef array.array _tokens(kv_batch *b, kv_event *e):
    cdef array.array tokens = array.clone(u32_array, e.tokens, False)
    if e.tokens:  # an empty array has no data, and `memcpy` wants some even for nothing
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
        lora_name=_text(&e.lora_name),
        has_nameless_adapter=bool(e.is_adapter_numbered and not e.lora_name.bytes),
        cache_salt=_text(&e.salt),
        mm_hashes=_media(b, e) if e.media else None,
        group=e.group if e.group > 0 else 0,
        attention=_text(&e.attention_kind) if e.attention else None,
    )


cdef object _removed(kv_event *e, object names):
    return BlockRemoved(
        block_hashes=names,
        tier=tiers[e.tier],
        group=e.group if e.group > 0 else 0,
        events=e.joined,
    )


cdef object _batch(size_t start, size_t end):
    """Some of the events that were read, as the batch that Python would have made of them."""
    cdef size_t i
    rank = PyLong_FromUnsignedLongLong(scratch.rank) if scratch.has_rank else None
    events = [_event(&scratch, &scratch.events[i]) for i in range(start, end)]
    return EventBatch(events, scratch.ts, rank, "map" if scratch.form == KV_MAP else "array")


cdef class LongBatch:
    """Reads one long payload in pieces; then it is the sequence of its events.

    An event is made when it is asked for; names and tokens of a long one are views of what was
    read. Room for all there could be is taken at once, and touched by and by: to grow is to copy.
    """

    cdef kv_batch batch
    cdef kv_reader reader
    cdef int state
    cdef bytes payload
    cdef array.array names, tokens

    def __cinit__(self, bytes payload):
        cdef size_t size = PyBytes_GET_SIZE(payload)
        self.payload = payload
        self.names = array.clone(u64_array, size, False)  # each takes a byte of it at least
        self.tokens = array.clone(u32_array, size, False)
        self.batch.names, self.batch.name_room = <uint64_t *>self.names.data.as_voidptr, size + 1
        self.batch.tokens, self.batch.token_room = <uint32_t *>self.tokens.data.as_voidptr, size + 1
        self.batch.event_room = size // 16 + 16  # and an event 18
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
        """Read about so many values more; True if that was the end, or will not do."""
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
        """The batch, or None if it is for `core/wire.py` to say."""
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
            self.batch.names = <uint64_t *>self.names.data.as_voidptr  # it moved with the resizing
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
    state = kv_walk(&reader, levels, &depth, NESTING, fuel)
    if state == KV_REFUSED:
        raise ValueError("no MessagePack, or less than it says")
    left[:] = [levels[level] for level in range(depth + 1)]
    return reader.at - <uint8_t *>PyBytes_AS_STRING(payload)


def decode_plain(bytes payload, str form):
    """The batch in `payload`, or None if that is for `core/wire.py` to say.

    Token ids are an array of unsigned 32-bit numbers instead of a list.
    """
    global scratch_in_use
    if scratch_in_use or not _read(payload) or scratch.form < 0:
        return None
    if (scratch.form == KV_MAP) != (form == "map"):
        return None  # the decoder has to learn what its engine speaks
    scratch_in_use = True
    try:
        return _batch(0, scratch.event_count)
    finally:
        scratch_in_use = False


# -- writing ---------------------------------------------------------------------------------------


cdef bint _same(PyObject *a, object b) except -1:
    if a == <PyObject *>b:
        return True
    return a != NULL and PyObject_RichCompareBool(<object>a, b, Py_EQ)


cdef bint _says(kv_ascii *text, str name):
    """Whether a text of an event is that name."""
    return (
        PyUnicode_IS_COMPACT_ASCII(name)
        and <size_t>PyUnicode_GET_LENGTH(name) == text.bytes
        and (not text.bytes or not memcmp(PyUnicode_DATA(name), text.at, text.bytes))
    )


cdef bytes _joined(PyObject *head, const void *tail, size_t size):
    cdef Py_ssize_t length = PyBytes_GET_SIZE(<object>head)
    whole = PyBytes_FromStringAndSize(NULL, length + size)
    cdef char *out = PyBytes_AS_STRING(whole)
    memcpy(out, PyBytes_AS_STRING(<object>head), length)
    memcpy(out + length, tail, size)
    return whole


cdef class Feeder:
    """Takes the plain messages of one stream, in runs.

    Plain is a batch in order, of the stream's own rank, while nothing else is going on. Of its
    events those that append to a leaf of the rank's own, begin a leaf, take blocks off the end of
    one or say again what is known are dealt with here. Others about blocks that count are the
    index's own verbs', and `IndexWriter` is asked about the rest: then the counters of the run,
    otherwise written when it ends, are written before.
    """

    cdef object stream, index, tree, cursor, writer, decoder, tallies, rank, backlog
    cdef object holder, me, bit, runs, groups
    cdef object space  # the last namespace of a sequence's first blocks
    cdef object seeded  # and the last of which `seed` is known
    cdef uint64_t seed
    cdef long dear  # what an event cost beside its blocks
    cdef NameMap where
    cdef list blocks
    cdef dict waiting
    cdef array.array digests
    cdef size_t block_size
    cdef uint64_t expected, dp_rank
    cdef bint is_named, is_map, has_many_orphans, is_home  # group 0's references are the plain ones
    cdef int group0  # 0: does not count, 1: counts, 2: nothing was said
    cdef long turn, room
    cdef public bint is_torn  # a message was taken and, by an error, not written to its end
    # since the last flush
    cdef long messages, stored_events, removed_events, stored_blocks, removed_blocks
    cdef long more_blocks
    cdef long more_held[4]  # per tier
    cdef double last_ts

    def __init__(self, stream):
        self.stream = stream
        self.index = stream._index
        self.cursor = stream.cursor
        self.writer = stream._writer
        self.decoder = stream._decoder
        self.tallies = stream.tallies
        self.rank = stream.rank
        self.backlog = stream.backlog
        self.turn = stream._limits.blocks_per_turn
        self.tree = self.index.tree
        self.block_size = self.index.block_size
        self.dp_rank = self.rank.dp_rank
        self.space = self.seeded = BASE_NAMESPACE
        self.seed = base_seed

    @staticmethod
    def suits(stream):
        """Whether the stream is one that can be fed this way at all."""
        index = stream._index
        return (
            type(index) is KvIndex
            and type(index.tree) is RadixTree
            and not index.is_eagle
            and 0 < index.block_size <= 1 << 20
        )

    def take(self, inbox, double now):
        """Take messages from the left of a deque, one at least.

        Stops after about as many blocks as one turn may cost, or behind a message that was not
        plain.
        """
        global scratch_in_use
        cdef long budget = self.turn, cost = 1
        stream, pop = self.stream, inbox.popleft
        if scratch_in_use or not self._load():
            stream.hear(pop(), now)
            return
        scratch_in_use = True
        try:
            while budget > 0 and cost > 0 and inbox:
                frames = pop()
                cost = self._message(<list?>frames, now)
                budget -= cost
        finally:
            scratch_in_use = False
            self._flush(now)
            # it may leave meanwhile
            self.holder = self.where = self.runs = self.blocks = self.waiting = None
        if cost < 0:
            stream.hear(frames, now)

    cdef bint _load(self) except -1:
        """Note what a run builds on; False if the stream is not at rest."""
        stream, writer = self.stream, self.writer
        if (
            stream.closed
            or stream._replay is not None
            or stream._unread is not None
            or stream.is_unproven
            or writer.is_busy
            or self.backlog
        ):
            return False
        last = self.cursor.last
        if last is None:
            return False
        self.expected = last + 1
        self.digests = self.cursor._digests
        self.is_named = self.rank.dp_rank in stream._names
        self.is_map = self.decoder._form == "map"
        self.groups = writer._groups
        is_main = self.groups.get(0)
        self.group0 = 2 if is_main is None else 1 if is_main else 0
        self.holder = self.index._ranks.get(self.rank)
        if self.holder is None:
            return False
        # a store makes none, but drops some where there are too many
        self.has_many_orphans = self.tree.orphan_blocks > self.index.orphan_blocks_max
        holder = self.holder
        self.room = self.index.budget.room(len(holder.where))
        self.bit, self.me = holder.bit, holder.holder_id
        if type(holder.where) is not NameMap:
            return False
        self.where = holder.where
        self.runs = holder.runs
        self.blocks = holder.blocks
        self.waiting = holder.waiting
        home = holder.home
        self.is_home = type(home) is int and home == 0
        return True

    cdef long _message(self, list frames, double now) except? -2:
        """Take one message: what it cost, 0 if Python has still to end it, -1 if it is not plain.

        Nothing has happened if it is not.
        """
        cdef size_t k
        cdef long cost = 1
        cdef int done
        cdef kv_event *e
        cdef uint64_t digest
        if PyList_GET_SIZE(frames) != 3:
            return -1
        sequence = frames[1]
        payload = frames[2]
        if type(sequence) is not bytes or type(payload) is not bytes:
            return -1
        if PyBytes_GET_SIZE(sequence) != 8:
            return -1
        if read_u64_big(PyBytes_AS_STRING(sequence)) != self.expected or self.expected == 0:
            return -1
        if PyBytes_GET_SIZE(payload) > READ_AT_ONCE:
            return -1  # it is read in pieces
        if not _read(<bytes>payload) or scratch.form != (KV_MAP if self.is_map else KV_ARRAY):
            return -1
        if scratch.has_rank and not (self.is_named and scratch.rank == self.dp_rank):
            return -1
        digest = PyLong_AsUnsignedLongLong(xxh3_64_intdigest(payload))
        array.extend_buffer(self.digests, <char *>&digest, 1)
        self.expected += 1
        self.messages += 1
        self.last_ts = scratch.ts
        self.is_torn = True
        for k in range(scratch.event_count):
            e = &scratch.events[k]
            if e.names > SLICE or cost > 4 * SLICE:
                self._flush(now)
                self.stream._begin(_batch(k, scratch.event_count))
                self.is_torn = False
                return 0
            if e.kind == KV_CLEARED:
                done = False
            elif self._is_elsewhere(e):
                done = True
            elif e.kind == KV_STORED:
                done = self._store(e)
            else:
                done = self._remove(e)
            if not done and e.kind == KV_STORED and PyDict_Size(self.waiting):
                self._flush(now)  # it may bring many their parent, which takes its time
                self.stream._begin(_batch(k, scratch.event_count))
                self.is_torn = False
                return 0
            if not done:
                self._flush(now)
                self.stream._write(_batch(k, k + 1))
                if not self._load():
                    if k + 1 < scratch.event_count:
                        self.stream._begin(_batch(k + 1, scratch.event_count))
                    self.is_torn = False
                    return 0
                self.dear = SLICE // 4
            cost += event_cost + <long>e.names + self.dear
            self.dear = 0
        self.is_torn = False
        return cost

    cdef int _flush(self, double now) except -1:
        """Write down what was only counted so far."""
        cdef long blocks = self.more_blocks
        cdef int tier
        self.more_blocks = 0
        for tier in range(4):
            if self.more_held[tier]:
                self.blocks[tier] += self.more_held[tier]
                self.more_held[tier] = 0
        if blocks:
            self.tree.blocks += blocks
        tallies = self.tallies
        form = "map" if self.is_map else "array"
        if self.stored_events:
            tallies.count_event("stored", form, APPLIED, self.stored_events)
            tallies.blocks_stored += self.stored_blocks
            self.stored_events = self.stored_blocks = 0
        if self.removed_events:
            tallies.count_event("removed", form, APPLIED, self.removed_events)
            tallies.blocks_removed += self.removed_blocks
            self.removed_events = self.removed_blocks = 0
        if self.messages:
            tallies.messages += self.messages
            tallies.batches += self.messages
            self.messages = 0
            self.cursor.went_on(self.expected - 1)
            stream = self.stream
            stream.last_event_at = stream._quiet_since = now
            stream.last_batch_ts = self.last_ts
        return 0

    cdef bint _is_elsewhere(self, kv_event *e) except -1:
        """Count an event of a group whose blocks are known not to count, as hybrid models tell."""
        if e.group <= 0 and e.attention != KV_ATTENTION_OTHER:
            return False
        is_main = self.groups.get(e.group if e.group > 0 else 0)
        if is_main is None:
            # never told: main only as the first one, and a store that tells is to be learnt from
            if e.group <= 0 or (e.kind == KV_STORED and e.attention != KV_ATTENTION_NONE):
                return False
        elif is_main or e.attention == KV_ATTENTION_MAIN:
            return False
        kind = "stored" if e.kind == KV_STORED else "removed"
        form = "map" if self.is_map else "array"
        self.tallies.count_event(kind, form, "other_group", e.joined)
        return True

    cdef bint _counts(self, kv_event *e) except -1:
        """Whether an event is about blocks of the main group, for which the rank counts plainly."""
        if e.group > 0 or not e.names or e.attention == KV_ATTENTION_OTHER:
            return False
        if self.group0 != 1 and (self.group0 == 0 or e.attention == KV_ATTENTION_MAIN):
            return False
        return self.is_home

    cdef bint _is_own_leaf(self, PyObject *node, int tier) except -1:
        """Whether the rank alone holds a leaf, entirely, and on that tier only."""
        if not (
            SLOT(node, N_ORPHANED) == Py_False
            and PyDict_Size(<object>SLOT(node, N_CHILDREN)) == 0
            and SLOT(node, N_ALIASES) == <PyObject *>None
            and _same(SLOT(node, N_MEMBERS), self.bit)
        ):
            return False
        if tier:
            return self._is_only_on(node, tier)
        return SLOT(node, N_LOWER) == <PyObject *>None and _same(SLOT(node, N_FULL), self.bit)

    cdef bint _is_only_on(self, PyObject *node, int tier) except -1:
        """Whether the rank, if nobody else holds any of a node, holds all of it on one lower tier."""
        cdef PyObject *lower = SLOT(node, N_LOWER)
        cdef PyObject *coverage
        cdef int one
        if lower == <PyObject *>None:
            return False
        for one in range(4):
            coverage = <PyObject *>(<tuple>lower)[one - 1] if one else node
            if not _same(SLOT(coverage, N_FULL), self.bit if one == tier else zero):
                return False
            if SLOT(coverage, N_PARTIAL) != <PyObject *>None:
                return False
        return True

    cdef object _space(self, kv_event *e, object inherited):
        """Adapter and salt of the blocks, the rule of `IndexWriter`."""
        if not e.lora_name.bytes and not e.salt.bytes:
            return base_namespace if inherited is None else inherited
        if inherited is None:
            if not (_says(&e.lora_name, self.space[0]) and _says(&e.salt, self.space[1])):
                self.space = Namespace(_text(&e.lora_name), _text(&e.salt))
            return self.space
        lora_name, salt = inherited
        if (not e.lora_name.bytes or _says(&e.lora_name, lora_name)) and (
            not e.salt.bytes or _says(&e.salt, salt)
        ):
            return inherited
        return Namespace(_text(&e.lora_name) or lora_name, _text(&e.salt) or salt)

    cdef bint _store(self, kv_event *e) except -1:
        """Hold blocks; False, and nothing done, if it is for `IndexWriter` to say what they are."""
        cdef uint64_t hashes[SLICE]
        cdef PyObject *above = NULL
        if not self._counts(e):
            return False
        if not e.tokens and not e.block_size:
            self.index.mark_on_tier(self.rank, tiers[e.tier], _names(&scratch, e), group=0)
            self._count_stored("placeholder")
            return True
        if (
            e.block_size != <int64_t>self.block_size
            or e.tokens != e.names * self.block_size
            or (e.is_adapter_numbered and not e.lora_name.bytes)
            or PyDict_Size(self.waiting)
            or self.has_many_orphans
            or <long>e.names > self.room  # what then is Python's to say
        ):
            return False
        inherited = None
        if e.has_parent:
            above = self.where.find(e.parent)
            if above != NULL:
                inherited = <object>SLOT(above, N_NAMESPACE)
        space = self._space(e, inherited)
        self._hash(e, space, hashes)
        if (above != NULL or not e.has_parent) and self._grow(e, above, space, hashes):
            pass
        elif self._know(e, hashes):
            pass
        elif e.media and <long>e.names > COLOURED_SLICE_BLOCKS:
            return False  # it goes in slices, and what they refuse is counted in another way
        else:
            return self._store_any(e, space, hashes)
        self.stored_events += 1
        self.stored_blocks += e.names
        return True

    cdef int _count_stored(self, object outcome) except -1:
        self.tallies.count_event("stored", "map" if self.is_map else "array", outcome)
        return 0

    cdef bint _store_any(self, kv_event *e, object space, uint64_t *hashes) except -1:
        """Hold blocks wherever they belong."""
        cdef Py_ssize_t filed = self.where.count
        accepted = self.index.store(
            self.rank,
            tiers[e.tier],
            PyLong_FromUnsignedLongLong(e.parent) if e.has_parent else None,
            _some(scratch.names + e.names_at, e.names),
            PyBytes_FromStringAndSize(<char *>hashes, e.names * HASH),
            namespace=space,
            group=0,
            heals=False,  # nothing waits, or we would not be here
        )
        self.room -= self.where.count - filed
        self.has_many_orphans = self.tree.orphan_blocks > self.index.orphan_blocks_max
        self.dear = dear
        if accepted:
            self.stored_events += 1
            self.stored_blocks += <long>accepted
        else:
            self._count_stored("duplicate_hash")
        return True

    cdef bint _grow(
        self, kv_event *e, PyObject *node, object space, uint64_t *hashes
    ) except -1:
        """Hold new blocks; False, and nothing done, if that takes more than growing a leaf."""
        cdef uint64_t key
        cdef size_t i, count = e.names
        cdef Py_ssize_t edge_bytes = 0
        cdef uint64_t *names = scratch.names + e.names_at
        cdef PyObject *run = NULL
        cdef bint grows = False
        tree = self.tree
        if node != NULL:
            if type(<object>node) is not Node or SLOT(node, N_ALIASES) != <PyObject *>None:
                return False
            run = PyDict_GetItemWithError(self.runs, <object>node)
            if run == NULL:
                return False
            edge_bytes = PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE))
            if PyBytes_GET_SIZE(<object>run) != edge_bytes or edge_bytes < HASH:
                return False
            memcpy(&key, PyBytes_AS_STRING(<object>run) + edge_bytes - HASH, HASH)
            if key != e.parent:
                return False
            grows = self._is_own_leaf(node, e.tier)
            if not grows and not self._is_full(node):
                return False
            space = <object>SLOT(node, N_NAMESPACE)
        else:
            root = tree.root
            node = <PyObject *>root
        if SLOT(node, N_ORPHANED) != Py_False:
            return False
        if grows and edge_bytes + count * HASH > edge_bytes_max:
            if <size_t>edge_bytes != edge_bytes_max:
                return False  # this leaf is filled up first
            grows = False
        elif (
            not grows
            and edge_bytes
            and PyDict_Size(<object>SLOT(node, N_CHILDREN)) == 0
            and _same(SLOT(node, N_MEMBERS), self.bit)
        ):
            return False
        if not grows:
            first = PyBytes_FromStringAndSize(<char *>hashes, HASH)
            if PyDict_Contains(<object>SLOT(node, N_CHILDREN), first):
                return False
            leaf = Node(
                PyBytes_FromStringAndSize(<char *>hashes, count * HASH), <object>node, space
            )
        else:
            leaf = <object>node
        for i in range(count):
            if not self.where.put_new(names[i], <PyObject *>leaf):  # stands for a block already
                while i:
                    i -= 1
                    self.where.drop(names[i])
                return False
        if grows:
            edge = _joined(SLOT(node, N_EDGE), hashes, count * HASH)
            self.runs[leaf] = _joined(run, names, count * HASH)
            slot_put(node, N_EDGE, <PyObject *>edge)
            self.more_blocks += count
        else:
            tree.hang(leaf)
            coverage = leaf.coverage_for_change(e.tier) if e.tier else leaf
            slot_put(<PyObject *>coverage, N_FULL, <PyObject *>self.bit)
            slot_put(<PyObject *>leaf, N_MEMBERS, <PyObject *>self.bit)
            self.runs[leaf] = PyBytes_FromStringAndSize(<char *>names, count * HASH)
        if e.tier:
            self.index._below |= self.bit
        self.more_held[e.tier] += count
        self.room -= <long>count
        return True

    cdef bint _is_full(self, PyObject *node) except -1:
        """Whether the rank holds all of a node on the device."""
        full = <object>SLOT(node, N_FULL)
        return _same(<PyObject *>full, self.bit) or bool(PyNumber_And(full, self.bit))

    cdef bint _know(self, kv_event *e, uint64_t *hashes) except -1:
        """Hold once more, or on another tier, blocks of one node that stand there as they are told.

        False, and nothing done, if they are not of that kind.
        """
        cdef uint64_t *names = scratch.names + e.names_at
        cdef uint64_t *run
        cdef size_t i, at, held, count = e.names
        cdef PyObject *node = self.where.find(names[0])
        cdef PyObject *filed
        cdef PyObject *above
        cdef PyObject *more
        if (
            node == NULL
            or type(<object>node) is not Node
            or SLOT(node, N_ORPHANED) != Py_False
            or SLOT(node, N_ALIASES) != <PyObject *>None
            or not self._is_full(node)
        ):
            return False
        filed = PyDict_GetItemWithError(self.runs, <object>node)
        if filed == NULL:
            return False
        held = PyBytes_GET_SIZE(<object>filed) // HASH
        run = <uint64_t *>PyBytes_AS_STRING(<object>filed)
        if count > held or held * HASH != <size_t>PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE)):
            return False
        at = held - count
        while run[at] != names[0]:
            if not at:
                return False
            at -= 1
        if memcmp(run + at, names, count * HASH) or memcmp(
            PyBytes_AS_STRING(<object>SLOT(node, N_EDGE)) + at * HASH, hashes, count * HASH
        ):
            return False
        above = SLOT(node, N_PARENT)
        if at:
            if not e.has_parent or run[at - 1] != e.parent:
                return False
        elif not e.has_parent:
            root = self.tree.root
            if above != <PyObject *>root:
                return False
        else:
            if self.where.find(e.parent) != above or type(<object>above) is not Node:
                return False
            filed = PyDict_GetItemWithError(self.runs, <object>above)
            if filed == NULL or not self._is_full(above):
                return False
            held = PyBytes_GET_SIZE(<object>filed) // HASH
            if (
                held * HASH != <size_t>PyBytes_GET_SIZE(<object>SLOT(above, N_EDGE))
                or (<uint64_t *>PyBytes_AS_STRING(<object>filed))[held - 1] != e.parent
            ):
                return False
        holder, leaf = self.holder, <object>node
        if e.tier or holder.hearsay is not None:
            place = leaf, at
            holdings.cover_known(holder, tiers[e.tier], 0, place, _names(&scratch, e))
            if e.tier:
                self.index._below |= self.bit
            self.dear = dear // 2
        else:
            copies = holder.counts_for_change(0).copies
            for i in range(count):
                name = PyLong_FromUnsignedLongLong(names[i])
                more = PyDict_GetItemWithError(copies, name)
                number = 1 if more == NULL else <object>more + 1
                if number:
                    copies[name] = number
                else:
                    del copies[name]
        self._note_dust(node)
        return True

    cdef int _note_dust(self, PyObject *node) except -1:
        """Call `RadixTree.note_dust` where it may have something to note."""
        cdef PyObject *above = SLOT(node, N_PARENT)
        cdef size_t edge_bytes = PyBytes_GET_SIZE(<object>SLOT(above, N_EDGE))
        if (
            edge_bytes
            and edge_bytes + <size_t>PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE)) <= edge_bytes_max
            and PyDict_Size(<object>SLOT(above, N_CHILDREN)) == 1
        ):
            self.tree.note_dust(<object>node)
        return 0

    cdef int _hash(self, kv_event *e, object namespace, uint64_t *hashes) except -1:
        cdef uint8_t secret[XXH3_SECRET_BYTES]
        cdef uint64_t seed = base_seed
        cdef size_t i, width = 4 * self.block_size
        cdef uint8_t *tokens = <uint8_t *>(scratch.tokens + e.tokens_at)
        if namespace is not base_namespace:
            if namespace is not self.seeded:
                self.seed = PyLong_AsUnsignedLongLong(namespace_seed(namespace))
                self.seeded = namespace
            seed = self.seed
        if width > XXH3_MEDIUM_MAX:
            xxh3_derive(secret, seed)
        for i in range(e.names):
            hashes[i] = xxh3(tokens + width * i, width, seed, secret)
        if e.media:
            self._hash_media(e, seed, hashes)
        return 0

    cdef int _hash_media(self, kv_event *e, uint64_t seed, uint64_t *hashes) except -1:
        """Hash the blocks with media items again: these follow the tokens, in order of number."""
        cdef uint8_t secret[XXH3_SECRET_BYTES]
        cdef kv_media *media = scratch.media + e.media_at
        cdef size_t i = 0, first, width = 4 * self.block_size
        cdef uint8_t *tokens = <uint8_t *>(scratch.tokens + e.tokens_at)
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

    cdef bint _remove(self, kv_event *e) except -1:
        """Let go of blocks; False, and nothing done, if it is for `IndexWriter` to say which."""
        cdef size_t i, same, total = e.names, done = 0
        cdef uint64_t *names = scratch.names + e.names_at
        cdef int how
        cdef uint64_t *run = NULL
        cdef Py_ssize_t held
        cdef PyObject *node
        cdef PyObject *filed
        cdef NameMap where = self.where
        holder = self.holder
        if not self._counts(e):
            return False
        counts = (<list>holder.counts)[e.tier]
        if counts is not None and (counts.copies or counts.foreign):
            copies, foreign = counts.copies, counts.foreign
            for i in range(total):
                name = PyLong_FromUnsignedLongLong(names[i])
                if PyDict_Contains(copies, name) or PyDict_Contains(foreign, name):
                    self.index.remove(self.rank, tiers[e.tier], _names(&scratch, e), group=0)
                    self.dear = dear
                    self.removed_events += e.joined
                    self.removed_blocks += total
                    return True
        hearsay = holder.hearsay
        if hearsay is not None and hearsay[e.tier]:
            hearsay[e.tier].difference_update(_names(&scratch, e))
        while done < total:
            node = where.find(names[done])
            if node == NULL:
                done += 1
                continue
            if type(<object>node) is not Node:
                break
            filed = PyDict_GetItemWithError(self.runs, <object>node)
            if filed == NULL:
                break
            same = 0
            held = PyBytes_GET_SIZE(<object>filed) // HASH
            if (
                self._is_own_leaf(node, e.tier)
                and held * HASH == PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE))
            ):
                run = <uint64_t *>PyBytes_AS_STRING(<object>filed)
                while (
                    done + same < total
                    and <Py_ssize_t>same < held
                    and run[held - 1 - same] == names[done + same]
                ):
                    same += 1
            if not same:
                same = total - done
                how = NOT_OURS if e.tier else self._punch(node, filed, names + done, &same)
                if how == NOT_OURS:
                    break
                if how == TOGETHER:
                    self._uncover(e, done, done + same)
                done += same
                continue
            if <Py_ssize_t>same == held and held > 1:
                same -= 1  # the leaf goes with its last block, which costs Python the less
            if <Py_ssize_t>same == held:
                self._uncover(e, done, done + 1)
            else:
                leaf = <object>node
                for i in range(done, done + same):
                    where.drop(names[i])
                held -= same
                edge = PyBytes_FromStringAndSize(
                    PyBytes_AS_STRING(<object>SLOT(node, N_EDGE)), held * HASH
                )
                self.runs[leaf] = PyBytes_FromStringAndSize(<char *>run, held * HASH)
                slot_put(<PyObject *>leaf, N_EDGE, <PyObject *>edge)
                self.more_blocks -= same
                self.more_held[e.tier] -= same
            done += same
        if done < total:
            self._uncover(e, done, total)
        self.removed_events += e.joined
        self.removed_blocks += total
        return True

    cdef int _uncover(self, kv_event *e, size_t start, size_t end) except -1:
        """Let Python let go of some of an event's blocks, which are held once each."""
        rest = _some(scratch.names + e.names_at + start, end - start)
        removal.uncover_listed(self.tree, self.holder, tiers[e.tier], rest)
        self.dear = dear
        return 0

    cdef int _punch(
        self, PyObject *node, PyObject *filed, uint64_t *names, size_t *count
    ) except -1:
        """Let go of any blocks of a node that the rank alone holds, and on the device only.

        Engines that forget what was used least leave holes in a run, and cut its end now and then.
        Of `count` names it is those that are neighbours, and that is their number then. They may
        still be for Python to let go of, `TOGETHER`, or any block of the node, `NOT_OURS`.
        """
        cdef uint64_t *run = <uint64_t *>PyBytes_AS_STRING(<object>filed)
        cdef Py_ssize_t at, start, held = PyBytes_GET_SIZE(<object>filed) // HASH
        cdef Py_ssize_t size = PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE)) // HASH
        cdef Py_ssize_t i, same = 1, most = count[0]
        if (
            not _same(SLOT(node, N_MEMBERS), self.bit)
            or SLOT(node, N_ALIASES) != <PyObject *>None
            or SLOT(node, N_LOWER) != <PyObject *>None
            or held > size
        ):
            return NOT_OURS
        leaf, run_now = <object>node, <object>filed
        old = first_ones[size] if self._is_full(node) else leaf.partial[self.me]
        at = held
        while True:  # what is not held has an old name
            at -= 1
            while at >= 0 and run[at] != names[0]:
                at -= 1
            if at < 0:
                return NOT_OURS
            if PyNumber_And(old, only_one[at]):
                break
        while same < most and at + same < held and run[at + same] == names[same]:
            same += 1
        start = at
        if same == 1:
            while same < most and same <= at and run[at - same] == names[same]:
                same += 1
            start = at + 1 - same
        gone = only_one[at]
        if same > 1:
            gone = PyNumber_Lshift(first_ones[same], start)
            held_there = PyNumber_And(old, gone)
            if not _same(<PyObject *>held_there, gone):
                gone, start, same = only_one[at], at, 1
        new = PyNumber_Xor(old, gone)
        if not new and same > 1:  # all but the last one, with which the node goes
            same -= 1
            start += start < at
            gone = PyNumber_Lshift(first_ones[same], start)
            new = PyNumber_Xor(old, gone)
        count[0] = same
        if not new:
            return TOGETHER  # and perhaps nodes above it go, too
        if start + same == size and PyDict_Size(<object>SLOT(node, N_CHILDREN)) == 0:
            if SLOT(node, N_ORPHANED) != Py_False:
                return TOGETHER
            size = new.bit_length()
            edge = PyBytes_FromStringAndSize(
                PyBytes_AS_STRING(<object>SLOT(node, N_EDGE)), size * HASH
            )
            self.more_blocks -= PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE)) // HASH - size
            slot_put(<PyObject *>leaf, N_EDGE, <PyObject *>edge)
            self.runs[leaf] = run_now[: size * HASH]
        if _same(<PyObject *>new, first_ones[size]):
            partial = patterns = None
            full = self.bit
        else:
            partial, patterns, full = {self.me: new}, {new: self.bit}, zero
        slot_put(<PyObject *>leaf, N_PARTIAL, <PyObject *>partial)
        slot_put(<PyObject *>leaf, N_PATTERNS, <PyObject *>patterns)
        slot_put(<PyObject *>leaf, N_FULL, <PyObject *>full)
        for i in range(same):
            self.where.drop(names[i])
        self.more_held[0] -= same
        return GONE
