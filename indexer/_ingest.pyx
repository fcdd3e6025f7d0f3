# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The compiled fast path of plain KV events into the tree.

Optional. `core/stream.py` and `core/writer.py` are its twins and define what is right. This module
only handles plain messages (see `Feeder`) and hands everything else, a message or one event of it,
to them before changing anything. `_wire.pyx` decodes the messages.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Contains, PyDict_Size
from cpython.list cimport PyList_GET_SIZE
from cpython.object cimport PyObject, PyObject_RichCompareBool, Py_EQ
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcmp, memcpy
from cpython cimport array
from indexer._events cimport (
    KV_ARRAY, KV_ATTENTION_MAIN, KV_ATTENTION_NONE, KV_ATTENTION_OTHER, KV_CLEARED, KV_MAP, KV_STORED,
    ascii_text, kv_ascii, kv_batch, kv_big_endian, kv_event,
)
from indexer._names cimport NameMap
from indexer._wire cimport Scratch

from xxhash import xxh3_64_intdigest

from indexer._wire import scratch as _scratch
from indexer.core import holdings, removal
from indexer.core.events import READ_AT_ONCE_BYTES
from indexer.core.hashing import BASE_SEED, namespace_seed
from indexer.core.index import KvIndex
from indexer.core.node import EDGE_BLOCKS_MAX, EDGE_BYTES_MAX, Coverage, Node, all_ones
from indexer.core.progress import END_MARKER
from indexer.core.radix_tree import RadixTree
from indexer.core.writer import APPLIED, COLOURED_SLICE_BLOCKS, EVENT_COST_BLOCKS, SLICE_BLOCKS
from indexer.types import BASE_NAMESPACE, Namespace, Tier

ABI = 9  # change it with every change of what is offered here: see `indexer/compiled.py`

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

cdef extern from "_node.h":
    Py_ssize_t N_ALIASES, N_CHILDREN, N_EDGE, N_FULL, N_LOWER
    Py_ssize_t N_MEMBERS, N_NAMESPACE, N_ORPHANED, N_PARENT, N_PARTIAL, N_PATTERNS
    const char *node_slots(PyObject *node, PyObject *coverage)
    PyObject *SLOT(PyObject *object, Py_ssize_t offset)
    void slot_put(PyObject *object, Py_ssize_t offset, PyObject *value)

cdef enum:
    HASH = 8  # bytes
    SLICE = 512  # SLICE_BLOCKS, checked below
    READ_AT_ONCE = 1 << 17  # READ_AT_ONCE_BYTES, likewise
cdef enum:
    NOT_OURS, TOGETHER, GONE

cdef Scratch scratch = _scratch
cdef kv_batch *read = &scratch.batch
cdef size_t edge_bytes_max = EDGE_BYTES_MAX
cdef uint64_t base_seed = BASE_SEED
cdef uint64_t end_marker = END_MARKER
cdef long event_cost = EVENT_COST_BLOCKS
cdef list tiers = sorted(Tier)
cdef object zero = 0
cdef list first_ones = [all_ones(count) for count in range(EDGE_BLOCKS_MAX + 1)]
cdef list only_one = [1 << position for position in range(EDGE_BLOCKS_MAX)]
cdef object base_namespace = BASE_NAMESPACE
cdef long dear = SLICE_BLOCKS // 16  # cost, in blocks, of an event that Python handles

if SLICE_BLOCKS != SLICE or READ_AT_ONCE_BYTES != READ_AT_ONCE or EDGE_BYTES_MAX != SLICE * HASH:
    raise ImportError("compiled for other limits")
cdef const char *missing = node_slots(<PyObject *>Node, <PyObject *>Coverage)
if missing != NULL:
    raise ImportError(f"Node.{missing.decode()} is no slot")


cdef inline bint is_same(PyObject *a, object b) except -1:
    if a == <PyObject *>b:
        return True
    return a != NULL and PyObject_RichCompareBool(<object>a, b, Py_EQ)


cdef bint _says(kv_ascii *text, str name):
    """Whether a text of an event equals a name."""
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

    A message is plain if it is the next batch, of the stream's own rank, and nothing else is going
    on. Of its events, those that append to a leaf of the rank's own, begin a leaf, cut the end off
    one or repeat what is known are handled here. Others about blocks that count go through the
    verbs of the index, the rest through `IndexWriter`; before the latter the counters of the run,
    otherwise written at its end, are flushed.
    """

    cdef object stream, index, tree, cursor, writer, decoder, tallies, rank, backlog
    cdef object holder, me, bit, runs, groups, limiting
    cdef long dear  # extra cost of an event besides its blocks
    cdef NameMap where
    cdef list blocks
    cdef dict waiting
    cdef array.array digests
    cdef size_t block_size
    cdef uint64_t expected, dp_rank
    cdef bint is_named, is_map, is_grouped, has_many_orphans, is_home  # group 0's references are the plain ones
    cdef int group0  # 0: does not count, 1: counts, 2: unknown
    cdef long turn, room
    cdef public bint is_torn  # an error left a message partly written
    cdef object space  # the last namespace of blocks without a parent
    cdef object seeded  # the namespace to which `seed` belongs
    cdef uint64_t seed
    # since the last flush
    cdef long messages, stored_events, removed_events, stored_blocks, removed_blocks, more_blocks
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
        """Whether a stream can use this path at all."""
        index = stream._index
        return (
            type(index) is KvIndex
            and type(index.tree) is RadixTree
            and not index.is_eagle
            and 0 < index.block_size <= 1 << 20
        )

    def take(self, inbox, double now):
        """Take messages from the left of a deque, at least one.

        Stops after about as many blocks as one turn may cost, or after a message that is not
        plain.
        """
        cdef long budget = self.turn, cost = 1
        stream, pop = self.stream, inbox.popleft
        if scratch.in_use or not self.load():
            stream.hear(pop(), now)
            return
        scratch.in_use = True
        try:
            while budget > 0 and cost > 0 and inbox:
                frames = pop()
                cost = self._message(<list?>frames, now)
                budget -= cost
        finally:
            scratch.in_use = False
            self.flush(now)
            # the rank may leave before the next run
            self.holder = self.where = self.runs = self.blocks = self.waiting = None
        if cost < 0:
            stream.hear(frames, now)

    cdef long _message(self, list frames, double now) except? -2:
        """Take one message; return its cost, 0 if Python must finish it, -1 if it is not plain.

        In the last case nothing has changed.
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
        if kv_big_endian(<uint8_t *>PyBytes_AS_STRING(sequence), 8) != self.expected or self.expected == 0:
            return -1
        if self.expected == end_marker:
            return -1  # it is no number, and none follows it
        if PyBytes_GET_SIZE(payload) > READ_AT_ONCE:
            return -1  # it must be read in pieces
        if not scratch.read(<bytes>payload) or read.form != (KV_MAP if self.is_map else KV_ARRAY):
            return -1
        if read.has_rank and not (self.is_named and read.rank == self.dp_rank):
            return -1
        digest = PyLong_AsUnsignedLongLong(xxh3_64_intdigest(payload))
        array.extend_buffer(self.digests, <char *>&digest, 1)
        self.expected += 1
        self.messages += 1
        self.last_ts = read.ts
        self.is_torn = True
        for k in range(read.event_count):
            e = &read.events[k]
            if e.names > SLICE or cost > 4 * SLICE:
                return self._hand_over(k, now)
            if e.kind == KV_CLEARED:
                done = False
            elif self.is_elsewhere(e):
                done = True
            elif e.kind == KV_STORED:
                done = self._store(e)
            else:
                done = self._remove(e)
            if not done and e.kind == KV_STORED and PyDict_Size(self.waiting):
                return self._hand_over(k, now)  # maybe the parent of many orphans: healing takes time
            if not done:
                self.flush(now)
                if e.attention == KV_ATTENTION_OTHER:
                    self._note_main()
                self.stream._write(scratch.events(k, k + 1))
                if not self.load():
                    if k + 1 < read.event_count:
                        self.stream._begin(scratch.events(k + 1, read.event_count))
                    self.is_torn = False
                    return 0
                self.dear = SLICE // 4
            cost += event_cost + <long>e.names + self.dear
            self.dear = 0
        self.is_torn = False
        return cost

    cdef long _hand_over(self, size_t k, double now) except? -2:
        """Leave the events from this one on to Python; return 0, the cost that ends the run."""
        self.flush(now)
        self._note_main()
        self.stream._begin(scratch.events(k, read.event_count))
        self.is_torn = False
        return 0

    cdef int _note_main(self) except -1:
        """Tell Python if events that it may not see name a group of full attention."""
        cdef size_t k
        for k in range(read.event_count):
            if read.events[k].kind == KV_STORED and read.events[k].attention == KV_ATTENTION_MAIN:
                self.writer.note_main(self.expected - 1)
                break
        return 0

    cdef object _space(self, kv_event *e, object inherited):
        """Adapter and salt of the blocks, by the rule of `IndexWriter`."""
        if not e.lora_name.bytes and not e.salt.bytes:
            return base_namespace if inherited is None else inherited
        if inherited is None:
            if not (_says(&e.lora_name, self.space[0]) and _says(&e.salt, self.space[1])):
                self.space = Namespace(ascii_text(&e.lora_name), ascii_text(&e.salt))
            return self.space
        lora_name, salt = inherited
        if (not e.lora_name.bytes or _says(&e.lora_name, lora_name)) and (
            not e.salt.bytes or _says(&e.salt, salt)
        ):
            return inherited
        return Namespace(ascii_text(&e.lora_name) or lora_name, ascii_text(&e.salt) or salt)

    cdef uint64_t _seed(self, object namespace) except? 0:
        """Seed of the block hashes of a namespace."""
        if namespace is base_namespace:
            return base_seed
        if namespace is not self.seeded:
            self.seed = PyLong_AsUnsignedLongLong(namespace_seed(namespace))
            self.seeded = namespace
        return self.seed

    cdef bint _store(self, kv_event *e) except -1:
        """Store blocks; False, with nothing changed, if the event is for `IndexWriter`."""
        cdef uint64_t hashes[SLICE]
        cdef PyObject *above = NULL
        if not self.counts(e):
            return False
        if not e.tokens and not e.block_size:
            self.index.mark_on_tier(self.rank, tiers[e.tier], scratch.names(e), group=0)
            self.count_stored("placeholder")
            return True
        if (
            e.block_size != <int64_t>self.block_size
            or e.tokens != e.names * self.block_size
            or (e.is_adapter_numbered and not e.lora_name.bytes)
            or PyDict_Size(self.waiting)
            or self.has_many_orphans
            or <long>e.names > self.room  # Python decides what to do then
        ):
            return False
        inherited = None
        if e.has_parent:
            above = self.where.find(e.parent)
            if above != NULL:
                inherited = <object>SLOT(above, N_NAMESPACE)
        space = self._space(e, inherited)
        scratch.hash(e, self.block_size, self._seed(space), hashes)
        if (above != NULL or not e.has_parent) and self._grow(e, above, space, hashes):
            pass
        elif self._know(e, hashes):
            pass
        elif e.media and <long>e.names > COLOURED_SLICE_BLOCKS:
            return False  # stored in slices, whose refusals are counted differently
        else:
            return self._store_any(e, space, hashes)
        self.stored_events += 1
        self.stored_blocks += e.names
        return True

    cdef bint _store_any(self, kv_event *e, object space, uint64_t *hashes) except -1:
        """Store blocks at any place, through the index."""
        cdef Py_ssize_t filed = self.where.count
        accepted = self.index.store(
            self.rank,
            tiers[e.tier],
            PyLong_FromUnsignedLongLong(e.parent) if e.has_parent else None,
            scratch.some(read.names + e.names_at, e.names),
            PyBytes_FromStringAndSize(<char *>hashes, e.names * HASH),
            namespace=space,
            group=0,
            heals=False,  # nothing waits: `_store` has checked
        )
        self.room -= self.where.count - filed
        self.has_many_orphans = self.tree.orphan_blocks > self.index.orphan_blocks_max
        self.dear = dear
        if accepted:
            self.stored_events += 1
            self.stored_blocks += <long>accepted
        else:
            self.count_stored("duplicate_hash")
        return True

    cdef bint _grow(
        self, kv_event *e, PyObject *node, object space, uint64_t *hashes
    ) except -1:
        """Store new blocks; False, with nothing changed, unless it only takes growing a leaf."""
        cdef uint64_t key
        cdef size_t i, count = e.names
        cdef Py_ssize_t edge_bytes = 0
        cdef uint64_t *names = read.names + e.names_at
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
            grows = self.is_own_leaf(node, e.tier)
            if not grows and not self.is_full(node):
                return False
            space = <object>SLOT(node, N_NAMESPACE)
        else:
            root = tree.root
            node = <PyObject *>root
        if SLOT(node, N_ORPHANED) != Py_False:
            return False
        if grows and edge_bytes + count * HASH > edge_bytes_max:
            if <size_t>edge_bytes != edge_bytes_max:
                return False  # the leaf must be filled up first
            grows = False
        elif (
            not grows
            and edge_bytes
            and PyDict_Size(<object>SLOT(node, N_CHILDREN)) == 0
            and is_same(SLOT(node, N_MEMBERS), self.bit)
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
            if not self.where.put_new(names[i], <PyObject *>leaf):  # the name is already taken
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

    cdef bint _know(self, kv_event *e, uint64_t *hashes) except -1:
        """Count again, or hold on another tier, blocks that one node has just as announced.

        False, with nothing changed, if the blocks do not qualify.
        """
        cdef uint64_t *names = read.names + e.names_at
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
            or not self.is_full(node)
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
            if filed == NULL or not self.is_full(above):
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
            holdings.cover_known(holder, tiers[e.tier], 0, place, scratch.names(e))
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
        self.note_dust(node)
        return True

    cdef bint _remove(self, kv_event *e) except -1:
        """Remove blocks; False, with nothing changed, if the event is for `IndexWriter`."""
        cdef size_t i, same, total = e.names, done = 0
        cdef uint64_t *names = read.names + e.names_at
        cdef int how
        cdef uint64_t *run = NULL
        cdef Py_ssize_t held
        cdef PyObject *node
        cdef PyObject *filed
        cdef NameMap where = self.where
        holder = self.holder
        if not self.counts(e):
            return False
        counts = (<list>holder.counts)[e.tier]
        if counts is not None and (counts.copies or counts.foreign):
            copies, foreign = counts.copies, counts.foreign
            for i in range(total):
                name = PyLong_FromUnsignedLongLong(names[i])
                if PyDict_Contains(copies, name) or PyDict_Contains(foreign, name):
                    self.index.remove(self.rank, tiers[e.tier], scratch.names(e), group=0)
                    self.dear = dear
                    self.removed_events += e.joined
                    self.removed_blocks += total
                    return True
        hearsay = holder.hearsay
        if hearsay is not None and hearsay[e.tier]:
            hearsay[e.tier].difference_update(scratch.names(e))
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
                self.is_own_leaf(node, e.tier)
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
                same -= 1  # the leaf goes with its last block: less work for Python
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
        """Have Python remove some of an event's blocks, which are held once each."""
        rest = scratch.some(read.names + e.names_at + start, end - start)
        removal.uncover_listed(self.tree, self.holder, tiers[e.tier], rest)
        self.dear = dear
        return 0

    cdef int _punch(
        self, PyObject *node, PyObject *filed, uint64_t *names, size_t *count
    ) except -1:
        """Remove any blocks of a node whose only holder is the rank, on the device only.

        Engines that evict the least used blocks leave holes in a run, and sometimes cut its end. Of
        `count` names it handles those that are neighbours, and sets `count` to their number. They
        may be left for Python to remove, `TOGETHER`, or the whole node may be, `NOT_OURS`.
        """
        cdef uint64_t *run = <uint64_t *>PyBytes_AS_STRING(<object>filed)
        cdef Py_ssize_t at, start, held = PyBytes_GET_SIZE(<object>filed) // HASH
        cdef Py_ssize_t size = PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE)) // HASH
        cdef Py_ssize_t i, same = 1, most = count[0]
        if (
            not is_same(SLOT(node, N_MEMBERS), self.bit)
            or SLOT(node, N_ALIASES) != <PyObject *>None
            or SLOT(node, N_LOWER) != <PyObject *>None
            or held > size
        ):
            return NOT_OURS
        leaf, run_now = <object>node, <object>filed
        old = first_ones[size] if self.is_full(node) else leaf.partial[self.me]
        at = held
        while True:  # positions that are not held have old names
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
            if not is_same(<PyObject *>held_there, gone):
                gone, start, same = only_one[at], at, 1
        new = PyNumber_Xor(old, gone)
        if not new and same > 1:  # all but the last one, which removes the node
            same -= 1
            start += start < at
            gone = PyNumber_Lshift(first_ones[same], start)
            new = PyNumber_Xor(old, gone)
        count[0] = same
        if not new:
            return TOGETHER  # nodes above it may go, too
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
        if is_same(<PyObject *>new, first_ones[size]):
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

    # -- the run: cached inputs and deferred counters, written back before Python must see them

    cdef bint load(self) except -1:
        """Cache the stream's state for a run; False if the stream is not at rest."""
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
        self.limiting = writer._limiting
        is_main = self.groups.get(0)
        self.holder = self.index._ranks.get(self.rank)
        if self.holder is None:
            return False
        # stores handled here add no orphans, but a store drops some if there are too many
        self.has_many_orphans = self.tree.orphan_blocks > self.index.orphan_blocks_max
        holder = self.holder
        self.group0 = 2 if is_main is None else 1 if is_main else 0
        # a dump may have told what the engine has not: then Python looks
        self.is_grouped = holder.limiting is not None
        if self.is_grouped and is_main is None:
            self.group0 = 0
        self.room = self.index.budget.room(holder.size)
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

    cdef int flush(self, double now) except -1:
        """Write the deferred counters back."""
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
            stream.delivery.note(now, self.last_ts)
        return 0

    cdef bint is_elsewhere(self, kv_event *e) except -1:
        """Count an event of a group whose blocks are known not to count (hybrid models)."""
        if e.group <= 0 and e.attention != KV_ATTENTION_OTHER:
            return False
        is_main = self.groups.get(e.group if e.group > 0 else 0)
        if is_main is None:
            # kind unknown: only group 0 is main; Python learns the kind from a store that names it
            if (
                self.is_grouped
                or e.group <= 0
                or (e.kind == KV_STORED and e.attention != KV_ATTENTION_NONE)
            ):
                return False
        elif is_main or e.attention == KV_ATTENTION_MAIN:
            return False
        elif (e.group if e.group > 0 else 0) in self.limiting:
            return False  # Python keeps its blocks
        kind = "stored" if e.kind == KV_STORED else "removed"
        form = "map" if self.is_map else "array"
        self.tallies.count_event(kind, form, "other_group", e.joined)
        return True

    cdef bint counts(self, kv_event *e) except -1:
        """Whether an event concerns the main group, and that group's references are the plain ones."""
        if e.group > 0 or not e.names or e.attention == KV_ATTENTION_OTHER:
            return False
        if self.group0 != 1 and (self.group0 == 0 or e.attention == KV_ATTENTION_MAIN):
            return False
        return self.is_home

    cdef bint is_own_leaf(self, PyObject *node, int tier) except -1:
        """Whether the rank is a leaf's only holder, holds all of it, and on that tier only."""
        if not (
            SLOT(node, N_ORPHANED) == Py_False
            and PyDict_Size(<object>SLOT(node, N_CHILDREN)) == 0
            and SLOT(node, N_ALIASES) == <PyObject *>None
            and is_same(SLOT(node, N_MEMBERS), self.bit)
        ):
            return False
        if tier:
            return self.is_only_on(node, tier)
        return SLOT(node, N_LOWER) == <PyObject *>None and is_same(SLOT(node, N_FULL), self.bit)

    cdef bint is_only_on(self, PyObject *node, int tier) except -1:
        """Whether the rank holds all of a node on one lower tier only, given no other holder."""
        cdef PyObject *lower = SLOT(node, N_LOWER)
        cdef PyObject *coverage
        cdef int one
        if lower == <PyObject *>None:
            return False
        for one in range(4):
            coverage = <PyObject *>(<tuple>lower)[one - 1] if one else node
            if not is_same(SLOT(coverage, N_FULL), self.bit if one == tier else zero):
                return False
            if SLOT(coverage, N_PARTIAL) != <PyObject *>None:
                return False
        return True

    cdef bint is_full(self, PyObject *node) except -1:
        """Whether the rank holds all of a node on the device."""
        full = <object>SLOT(node, N_FULL)
        return is_same(<PyObject *>full, self.bit) or bool(PyNumber_And(full, self.bit))

    cdef int note_dust(self, PyObject *node) except -1:
        """Call `RadixTree.note_dust` if it may have something to note."""
        cdef PyObject *above = SLOT(node, N_PARENT)
        cdef size_t edge_bytes = PyBytes_GET_SIZE(<object>SLOT(above, N_EDGE))
        if (
            edge_bytes
            and edge_bytes + <size_t>PyBytes_GET_SIZE(<object>SLOT(node, N_EDGE)) <= edge_bytes_max
            and PyDict_Size(<object>SLOT(above, N_CHILDREN)) == 1
        ):
            self.tree.note_dust(<object>node)
        return 0

    cdef int count_stored(self, object outcome) except -1:
        self.tallies.count_event("stored", "map" if self.is_map else "array", outcome)
        return 0
