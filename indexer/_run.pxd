from cpython cimport array
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from indexer._events cimport kv_event
from indexer._names cimport NameMap

cdef class Run:
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
    # since the last flush
    cdef long messages, stored_events, removed_events, stored_blocks, removed_blocks
    cdef long more_blocks
    cdef long more_held[4]  # per tier
    cdef double last_ts

    cdef bint load(self) except -1
    cdef int flush(self, double now) except -1
    cdef bint is_elsewhere(self, kv_event *e) except -1
    cdef bint counts(self, kv_event *e) except -1
    cdef bint is_own_leaf(self, PyObject *node, int tier) except -1
    cdef bint is_only_on(self, PyObject *node, int tier) except -1
    cdef bint is_full(self, PyObject *node) except -1
    cdef int note_dust(self, PyObject *node) except -1
    cdef int count_stored(self, object outcome) except -1
