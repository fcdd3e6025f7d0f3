# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The load of a plain reservation in the books, without a frame of Python: for other kernels.

Optional: `Ledger.book`, `prefill_complete` and `free`, `ActiveBlocks` and `BlockPlaces` are its
plain twins. Each step does in the same order what its twin does, to the same objects; what is
unusual about a step (a fork, a value that comes twice, blocks of output) is left to the twin of
that step. Where a gate follows the load (`Ledger.changes`) nobody may come here.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_DelItem, PyDict_GetItem, PyDict_New
from cpython.object cimport PyObject
from libc.string cimport memcmp

from select_service._layout cimport Layout, add, get, put
from select_service.core._load_rows cimport LoadRows

from indexer.core.runs import common_blocks
from select_service.core.books.active_blocks import ActiveBlocks, ChainNode
from select_service.core.books.decode_blocks import DecodeBlocks
from select_service.core.books.ledger import Ledger
from select_service.core.books.recent import LOOK_EVERY_S
from select_service.core.books.reservation import Lane, Reservation
from select_service.core.books.slot_loads import SlotLoads
from select_service.core.books.work_done import WorkDone

ABI = 11  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    HASH = 8  # bytes

cdef double LOOK_EVERY = LOOK_EVERY_S
cdef object ONE = 1

cdef enum:
    LEDGER_LANES
    LEDGER_BLOCKS
    LEDGER_WEIGHTS
    LEDGER_LOADS
    LEDGER_DEADLINES
    LEDGER_LIVE
    LEDGER_SEQUENCE_BLOCKS

cdef Layout ledgers = Layout(
    Ledger(),
    ("_lanes", "blocks", "_weights", "loads", "_deadlines", "live", "sequence_blocks"),
)

cdef enum:
    LOADS_ROWS
    LOADS_WORK
    LOADS_RECENT
    LOADS_PREFILL_LEFT
    LOADS_PREFILLING
    LOADS_BACKLOG
    LOADS_PACKED
    LOADS_FOLLOWS_QUEUES

cdef Layout all_loads = Layout(
    SlotLoads(),
    ("rows", "work", "recent", "prefill_left", "prefilling", "prefill_backlog", "packed",
     "follows_queues"),
)

cdef enum:
    RECENT_ASKED
    RECENT_COMPUTED
    RECENT_CHURNED
    RECENT_LOOKED_AT

cdef Layout recents = Layout(
    get(all_loads, all_loads.first, LOADS_RECENT), ("asked", "computed", "churned", "looked_at")
)

cdef enum:
    BLOCKS_ROOT
    BLOCKS_PLACES
    BLOCKS_WEIGHTS
    BLOCKS_NODES
    BLOCKS_BLOCKS

cdef Layout tries = Layout(
    ActiveBlocks(DecodeBlocks()), ("root", "_places", "_weights", "nodes", "blocks")
)

cdef enum:
    PLACES_VALUES
    PLACES_HOME
    PLACES_DUES

cdef Layout places = Layout(
    get(tries, tries.first, BLOCKS_PLACES), ("_values", "_home", "_home_dues")
)

cdef enum:
    NODE_PARENT
    NODE_EDGE
    NODE_CHILDREN
    NODE_REFS
    NODE_TOTAL
    NODE_MASK
    NODE_PLAIN
    NODE_FADED
    NODE_REPEATS

cdef tuple _NODE = (
    "parent", "edge", "children", "refs", "total", "mask", "plain", "faded", "repeats",
)
cdef Layout nodes = Layout(
    ChainNode(None, b""), _NODE, [one for one in ChainNode.__slots__ if one not in _NODE]
)

cdef enum:
    WEIGHTS_WHOLE
    WEIGHTS_FADED

cdef Layout weights_of = Layout(DecodeBlocks(), ("whole", "_faded"))

cdef enum:
    LANE_NUMBER
    LANE_RESERVATIONS
    LANE_IS_OPEN
    LANE_QUEUE

cdef Layout lanes = Layout(Lane(0), ("number", "reservations", "is_open", "queue"))

cdef enum:
    WORK_AT
    WORK_COMPUTED
    WORK_ENDED
    WORK_COMPUTING
    WORK_SPAN_MARKS
    WORK_SAID_SECONDS
    WORK_SPOKE
    WORK_UNSURE
    WORK_STIRRED
    WORK_RESUMED_AT

cdef Layout works = Layout(
    WorkDone(),
    ("at", "computed", "ended", "computing", "_span_marks", "said_seconds", "_spoke", "_unsure",
     "stirred", "resumed_at"),
)

cdef enum:
    RESERVATION_ID
    SLOT
    LANE
    CHAIN
    PREFILL_TOKENS
    PREFILL_DONE
    WHOLE_OUTPUTS
    FADED_OUTPUTS
    PROMPT_BLOCKS
    CONTEXT_BLOCKS
    CREATED
    FIRST_TOKEN_AT
    TOUCHED
    TTL_S
    DEADLINE
    FAIRNESS_ID
    ISL_TOKENS

cdef tuple _RESERVATION = (
    "reservation_id", "slot", "lane", "chain", "prefill_tokens", "prefill_done", "whole_outputs",
    "faded_outputs", "prompt_blocks", "context_blocks", "created", "first_token_at", "touched",
    "ttl_s", "deadline", "fairness_id", "isl_tokens",
)
cdef object _nobody = Reservation("", 0, Lane(-1), None, 0, 0.0)
_nobody.leave()
cdef object NOWHERE = _nobody.lane
cdef Layout reservations = Layout(
    _nobody,
    _RESERVATION,
    [one for one in Reservation.__slots__ if one not in _RESERVATION],
)


# -- the ledger -----------------------------------------------------------------------------


cdef object enter(
    ledger, Py_ssize_t slot, str name, bytes chain, prefill, isl, ttl_s, tenant,
    double now,
):
    """Do what `Ledger.book` does where no gate follows."""
    lane = (<list>get(ledgers, ledger, LEDGER_LANES))[slot]
    number = get(lanes, lane, LANE_NUMBER)
    end = _acquire(get(ledgers, ledger, LEDGER_BLOCKS), chain, number)
    reservation = reservations.copy_of(reservations.first)
    at = now
    put(reservations, reservation, RESERVATION_ID, name)
    put(reservations, reservation, SLOT, slot)
    put(reservations, reservation, LANE, lane)
    put(reservations, reservation, CHAIN, end)
    put(reservations, reservation, PREFILL_TOKENS, prefill)
    put(reservations, reservation, CREATED, at)
    put(reservations, reservation, TOUCHED, at)
    put(reservations, reservation, ISL_TOKENS, isl)
    put(reservations, reservation, FAIRNESS_ID, tenant)
    cdef dict booked = get(lanes, lane, LANE_RESERVATIONS)
    booked[name] = reservation
    add(ledgers, ledger, LEDGER_LIVE, ONE)
    loads = get(ledgers, ledger, LEDGER_LOADS)
    add(all_loads, loads, LOADS_PREFILLING, ONE)
    decode = _decode(get(ledgers, ledger, LEDGER_WEIGHTS), number)
    cdef Py_ssize_t blocks = PyBytes_GET_SIZE(chain) // HASH
    if not blocks:
        blocks = 1
    blocks += <object>get(ledgers, ledger, LEDGER_SEQUENCE_BLOCKS)
    held = blocks
    put(reservations, reservation, PROMPT_BLOCKS, held)
    put(reservations, reservation, CONTEXT_BLOCKS, held)
    put(all_loads, loads, LOADS_PACKED, b"")
    work = get(all_loads, loads, LOADS_WORK)
    if now > <double>get(works, work, WORK_AT):
        put(works, work, WORK_AT, at)
    recent = get(all_loads, loads, LOADS_RECENT)
    if now - <double>get(recents, recent, RECENT_LOOKED_AT) > LOOK_EVERY:
        recent.look(loads.churn, now)
    add(recents, recent, RECENT_COMPUTED, prefill)
    add(recents, recent, RECENT_ASKED, isl)
    cdef list by_slot = get(all_loads, loads, LOADS_PREFILL_LEFT)
    left = by_slot[slot]
    if prefill:
        if not left:
            _starts(work, slot)
        left = left + prefill
        by_slot[slot] = left
        add(all_loads, loads, LOADS_BACKLOG, prefill)
        add(recents, recent, RECENT_CHURNED, prefill)
        if get(all_loads, loads, LOADS_FOLLOWS_QUEUES):
            get(lanes, lane, LANE_QUEUE)[name] = prefill
    (<LoadRows>get(all_loads, loads, LOADS_ROWS)).book(
        slot, left, prefill, len(booked), decode, blocks, now
    )
    if ttl_s:
        deadlines = get(ledgers, ledger, LEDGER_DEADLINES)
        queue = (<dict>deadlines._queues).get(ttl_s)
        if queue is None:
            deadlines.add(reservation, ttl_s, at)
        else:
            put(reservations, reservation, TTL_S, ttl_s)
            put(reservations, reservation, DEADLINE, at + ttl_s)
            queue[reservation] = None
    return reservation


cdef int complete(ledger, reservation, double now) except -1:
    """Do what `Ledger.prefill_complete` does where no gate follows."""
    at = now
    _touch(ledger, reservation, at)
    if get(reservations, reservation, PREFILL_DONE):
        return 0
    put(reservations, reservation, PREFILL_DONE, True)
    cdef Py_ssize_t slot = get(reservations, reservation, SLOT)
    tokens = get(reservations, reservation, PREFILL_TOKENS)
    loads = get(ledgers, ledger, LEDGER_LOADS)
    add(all_loads, loads, LOADS_PREFILLING, -1)
    work = get(all_loads, loads, LOADS_WORK)
    if now > <double>get(works, work, WORK_AT):
        put(works, work, WORK_AT, at)
    cdef list by_slot = get(all_loads, loads, LOADS_PREFILL_LEFT)
    left = by_slot[slot]
    if tokens:
        _hear(work, slot, tokens, get(reservations, reservation, CREATED))
        left = left - tokens
        by_slot[slot] = left
        add(all_loads, loads, LOADS_BACKLOG, -tokens)
        if not left:
            _stops(work, slot)
    cdef double head = 0.0
    if get(all_loads, loads, LOADS_FOLLOWS_QUEUES):
        queue = get(lanes, get(reservations, reservation, LANE), LANE_QUEUE)
        queue.pop(get(reservations, reservation, RESERVATION_ID), None)
        for waits in queue.values():
            head = waits
            break
    (<LoadRows>get(all_loads, loads, LOADS_ROWS)).complete(slot, left, head, now)
    put(all_loads, loads, LOADS_PACKED, b"")
    return 0


cdef int lengthen(ledger, reservation, double now) except -1:
    """Do what `Ledger.output_block` does with a block of one that has no faded ones, without a gate.
    """
    _touch(ledger, reservation, now)
    number = get(lanes, get(reservations, reservation, LANE), LANE_NUMBER)
    add(reservations, reservation, WHOLE_OUTPUTS, ONE)
    weights = get(ledgers, ledger, LEDGER_WEIGHTS)
    cdef list whole = get(weights_of, weights, WEIGHTS_WHOLE)
    whole[number] += 1
    blocks = get(reservations, reservation, PROMPT_BLOCKS) + get(
        reservations, reservation, WHOLE_OUTPUTS
    )
    loads = get(ledgers, ledger, LEDGER_LOADS)
    (<LoadRows>get(all_loads, loads, LOADS_ROWS)).lengthen(
        get(reservations, reservation, SLOT), _decode(weights, number),
        blocks - get(reservations, reservation, CONTEXT_BLOCKS),
    )
    put(reservations, reservation, CONTEXT_BLOCKS, blocks)
    put(all_loads, loads, LOADS_PACKED, b"")
    return 0


cdef int _touch(ledger, reservation, at) except -1:
    """Do what `Ledger.touch` does without a new time to live."""
    put(reservations, reservation, TOUCHED, at)
    ttl_s = get(reservations, reservation, TTL_S)
    if ttl_s:
        deadlines = get(ledgers, ledger, LEDGER_DEADLINES)
        put(reservations, reservation, DEADLINE, at + ttl_s)
        (<dict>deadlines._queues)[ttl_s].move_to_end(reservation)
    return 0


cdef int take_out(ledger, reservation) except -1:
    """Do what `Ledger.free` does where no gate follows."""
    cdef Py_ssize_t slot = get(reservations, reservation, SLOT)
    lane = get(reservations, reservation, LANE)
    number = get(lanes, lane, LANE_NUMBER)
    cdef dict booked = get(lanes, lane, LANE_RESERVATIONS)
    PyDict_DelItem(booked, get(reservations, reservation, RESERVATION_ID))
    ttl_s = get(reservations, reservation, TTL_S)
    if ttl_s:
        deadlines = get(ledgers, ledger, LEDGER_DEADLINES)
        del (<dict>deadlines._queues)[ttl_s][reservation]
        put(reservations, reservation, TTL_S, 0.0)
    trie = get(ledgers, ledger, LEDGER_BLOCKS)
    _release(trie, get(reservations, reservation, CHAIN), number)
    put(reservations, reservation, CHAIN, get(tries, trie, BLOCKS_ROOT))
    if get(reservations, reservation, WHOLE_OUTPUTS) or get(
        reservations, reservation, FADED_OUTPUTS
    ):
        ledger._outputs.drop(reservation)
    put(reservations, reservation, LANE, NOWHERE)
    loads = get(ledgers, ledger, LEDGER_LOADS)
    work = get(all_loads, loads, LOADS_WORK)
    add(works, work, WORK_ENDED, ONE)
    add(ledgers, ledger, LEDGER_LIVE, -1)
    decode = _decode(get(ledgers, ledger, LEDGER_WEIGHTS), number)
    (<LoadRows>get(all_loads, loads, LOADS_ROWS)).free(
        slot, len(booked), decode, get(reservations, reservation, CONTEXT_BLOCKS)
    )
    put(all_loads, loads, LOADS_PACKED, b"")
    if not get(reservations, reservation, PREFILL_DONE):
        ledger._give_up(reservation, lane)
    else:
        (<list>get(works, work, WORK_STIRRED))[slot] = get(works, work, WORK_AT)
    return 0


cdef object _decode(weights, Py_ssize_t number):
    """Do what `DecodeBlocks.count` does."""
    if (<list>get(weights_of, weights, WEIGHTS_FADED))[number]:
        return weights.count(number)
    return (<list>get(weights_of, weights, WEIGHTS_WHOLE))[number]


cdef object _acquire(trie, bytes chain, number):
    """Do what `ActiveBlocks.acquire` does."""
    node = get(tries, trie, BLOCKS_ROOT)
    cdef Py_ssize_t position = 0, size = PyBytes_GET_SIZE(chain), length
    cdef const char *text = PyBytes_AS_STRING(chain)
    cdef bytes edge, first
    cdef PyObject *found
    while position < size:
        first = PyBytes_FromStringAndSize(text + position, HASH)
        found = PyDict_GetItem(<dict>get(nodes, node, NODE_CHILDREN), first)
        if found == NULL:
            return _grow(trie, node, first, chain[position:], number)
        child = <object>found
        edge = <bytes>get(nodes, child, NODE_EDGE)
        length = PyBytes_GET_SIZE(edge)
        if length > size - position or memcmp(
            PyBytes_AS_STRING(edge), text + position, length
        ):
            child = trie._split(child, common_blocks(edge, 0, chain, position))
            length = PyBytes_GET_SIZE(<bytes>get(nodes, child, NODE_EDGE))
        _hold(trie, child, number)
        position += length
        node = child
    return node


cdef int _hold(trie, node, number) except -1:
    cdef dict refs
    if get(nodes, node, NODE_REPEATS):
        trie._hold(node, number)
        return 0
    refs = get(nodes, node, NODE_REFS)
    before = refs.get(number, 0)
    refs[number] = before + 1
    add(nodes, node, NODE_TOTAL, ONE)
    if before:
        return 0
    put(nodes, node, NODE_MASK, get(nodes, node, NODE_MASK) | ONE << number)
    _weigh(trie, number, get(nodes, node, NODE_PLAIN))
    return 0


cdef int _weigh(trie, Py_ssize_t number, blocks) except -1:
    cdef list whole = get(weights_of, get(tries, trie, BLOCKS_WEIGHTS), WEIGHTS_WHOLE)
    whole[number] = whole[number] + blocks
    return 0


cdef object _grow(trie, parent, bytes first, bytes edge, number):
    """Do what `ActiveBlocks._grow` does, and `BlockPlaces.enter`."""
    cdef Py_ssize_t count = PyBytes_GET_SIZE(edge) // HASH
    blocks = count
    node = nodes.copy_of(nodes.first)
    put(nodes, node, NODE_PARENT, parent)
    put(nodes, node, NODE_EDGE, edge)
    put(nodes, node, NODE_PLAIN, blocks)
    refs, children, faded = PyDict_New(), PyDict_New(), PyDict_New()
    put(nodes, node, NODE_REFS, refs)
    put(nodes, node, NODE_CHILDREN, children)
    put(nodes, node, NODE_FADED, faded)
    values = get(tries, trie, BLOCKS_PLACES)
    add(places, values, PLACES_DUES, -count)
    cdef Py_ssize_t fresh = get(places, values, PLACES_VALUES).enter(edge)
    if fresh != count:
        values._enter_repeats(node, fresh)
    if get(places, values, PLACES_HOME) is not None:
        values._rehome(node)
    (<dict>get(nodes, parent, NODE_CHILDREN))[first] = node
    add(tries, trie, BLOCKS_NODES, ONE)
    add(tries, trie, BLOCKS_BLOCKS, blocks)
    if get(nodes, node, NODE_REPEATS):
        trie._hold(node, number)
        return node
    (<dict>refs)[number] = ONE
    put(nodes, node, NODE_TOTAL, ONE)
    put(nodes, node, NODE_MASK, ONE << number)
    _weigh(trie, number, blocks)
    return node


cdef int _release(trie, node, number) except -1:
    """Do what `ActiveBlocks.release` does."""
    while True:
        parent = get(nodes, node, NODE_PARENT)
        if parent is None:
            return 0
        if get(nodes, node, NODE_FADED) or get(nodes, node, NODE_REPEATS):
            trie._let_go(node, number)
            if get(nodes, node, NODE_TOTAL):
                trie._join(node)
            else:
                trie._cut(node)
        elif <Py_ssize_t>get(nodes, node, NODE_TOTAL) == 1:
            _weigh(trie, number, -get(nodes, node, NODE_PLAIN))
            _cut(trie, parent, node)
        else:
            _let_go(trie, node, number)
            if len(<dict>get(nodes, node, NODE_CHILDREN)) == 1:
                trie._join(node)
        node = parent


cdef int _let_go(trie, node, number) except -1:
    """Do what `ActiveBlocks._let_go` does to a node of whole blocks that others hold, too."""
    cdef dict refs = get(nodes, node, NODE_REFS)
    add(nodes, node, NODE_TOTAL, -1)
    left = refs[number] - 1
    if left:
        refs[number] = left
        return 0
    PyDict_DelItem(refs, number)
    put(nodes, node, NODE_MASK, get(nodes, node, NODE_MASK) ^ ONE << number)
    return _weigh(trie, number, -get(nodes, node, NODE_PLAIN))


cdef int _cut(trie, parent, node) except -1:
    """Do what `ActiveBlocks._cut` does to a node without repeats, and `BlockPlaces.leave`."""
    cdef bytes edge = get(nodes, node, NODE_EDGE)
    cdef bytes first = PyBytes_FromStringAndSize(PyBytes_AS_STRING(edge), HASH)
    PyDict_DelItem(<dict>get(nodes, parent, NODE_CHILDREN), first)
    values = get(tries, trie, BLOCKS_PLACES)
    if get(places, values, PLACES_HOME) is None:
        get(places, values, PLACES_VALUES).leave(edge)
    else:
        values.leave(node)
    add(tries, trie, BLOCKS_NODES, -1)
    add(tries, trie, BLOCKS_BLOCKS, -(PyBytes_GET_SIZE(edge) // HASH))
    return 0


cdef int _starts(work, Py_ssize_t slot) except -1:
    """Do what `WorkDone.starts` does."""
    at = get(works, work, WORK_AT)
    if not get(works, work, WORK_COMPUTING):
        put(works, work, WORK_SPAN_MARKS, get(works, work, WORK_SPAN_MARKS) - at)
    add(works, work, WORK_COMPUTING, ONE)
    (<list>get(works, work, WORK_SPOKE))[slot] = at
    return 0


cdef int _hear(work, Py_ssize_t slot, tokens, booked_at) except -1:
    """Do what `WorkDone.hear` does, by itself where nobody gave up, nor in another life."""
    cdef double booked = booked_at
    if <set>get(works, work, WORK_UNSURE) or booked <= <double>get(works, work, WORK_RESUMED_AT):
        work.hear(slot, tokens, booked_at)
        return 0
    cdef list spoke = get(works, work, WORK_SPOKE)
    at = get(works, work, WORK_AT)
    cdef double since = spoke[slot]
    spoke[slot] = at
    add(works, work, WORK_COMPUTED, tokens)
    add(works, work, WORK_SAID_SECONDS, <double>at - max(since, booked))
    return 0


cdef int _stops(work, Py_ssize_t slot) except -1:
    """Do what `WorkDone.stops` does."""
    if <set>get(works, work, WORK_UNSURE):
        work.stops(slot)
        return 0
    add(works, work, WORK_COMPUTING, -1)
    if not get(works, work, WORK_COMPUTING):
        add(works, work, WORK_SPAN_MARKS, get(works, work, WORK_AT))
    return 0
