# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The state of one run of a stream's plain messages: cached inputs and deferred counters.

`Run` is loaded when a run begins and flushed when it ends, or when Python must see its effects so
far; `Feeder` (`_ingest.pyx`) writes into the tree in between.
"""

from cpython.bytes cimport PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Size
from cpython.object cimport PyObject
from indexer._events cimport KV_ATTENTION_MAIN, KV_ATTENTION_NONE, KV_ATTENTION_OTHER, KV_STORED, kv_event
from indexer._names cimport NameMap
from indexer._node cimport (
    N_ALIASES, N_CHILDREN, N_EDGE, N_FULL, N_LOWER, N_MEMBERS, N_ORPHANED, N_PARENT, N_PARTIAL,
    SLOT, find_slots, is_same,
)

from indexer.core.node import EDGE_BYTES_MAX, Coverage, Node
from indexer.core.writer import APPLIED

ABI = 2  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef extern from "Python.h":
    PyObject *Py_False
    object PyNumber_And(object a, object b)

cdef size_t edge_bytes_max = EDGE_BYTES_MAX
cdef object zero = 0

find_slots(Node, Coverage)


cdef class Run:
    """Cached state of a stream during a run, and counters not yet written back."""

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
