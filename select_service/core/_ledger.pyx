# cython: language_level=3, wraparound=False, cdivision=True, embedsignature=True
"""The ledger's blocks and numbers: the trie of booked chains, how often each generation has every block
value, and the rows of load columns.

Optional: built when there is a C compiler, left out when not (`indexer/compiled.py`). The plain
forms, which say what is what, are `plain_active_blocks.py` and `plain_load_rows.py`: same names, same
answers.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.math cimport ceil
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memcpy, memmove

from select_service.core.ledger.exact_sums import rounded_sum, units

cdef extern from * nogil:
    void __builtin_prefetch(const void *)

ABI = 3  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    HASH = 8  # bytes
    PLACES_MIN = 16  # of a table; a power of two
    AHEAD = 16  # values whose places are fetched before they are looked at: memory is slow
    MOVED_PER_VALUE = 8  # places of an old table looked at for every value that comes or goes


cdef struct Entry:  # 16 bytes: four in a line of the cache
    uint64_t value
    uint32_t count  # how often the generation has it
    uint32_t state


cdef enum:
    EMPTY = 0  # a place
    WHOLE = 1  # an entry of weight 1
    FADED = 2  # of another weight, which is in a dict: few blocks ever have one


cdef struct Places:
    Entry *places
    uint64_t mask  # places - 1
    uint64_t used


cdef struct Lane:
    # A table that fills up (or is nearly empty) is followed by a larger (smaller) one; both are
    # looked at while entries move over, a few with every change, so that no change takes long.
    Places now
    Places old  # places NULL: nothing is moving
    uint64_t start  # in `old`, everything before this place has moved
    uint64_t left  # places of `old` yet to be looked at
    int64_t whole  # blocks of weight 1, outputs included


@cython.final
cdef class BlockCounts:
    """How often each generation has every value, and the sum of their weights."""

    cdef Lane *_lanes
    cdef Py_ssize_t _count
    cdef uint64_t _secret  # lest a client fills one neighbourhood of a table
    cdef list _faded  # by generation, the exact sum of the weights that are not 1
    cdef list _weights  # by generation, these weights by value

    def __cinit__(self):
        self._secret = (<uint64_t>hash("a secret of this process")) | 1
        self._faded, self._weights = [], []

    def __dealloc__(self):
        cdef Py_ssize_t at
        for at in range(self._count):
            free(self._lanes[at].now.places)
            free(self._lanes[at].old.places)
        free(self._lanes)

    def ensure(self, Py_ssize_t lanes):
        if lanes <= self._count:
            return
        cdef Lane *more = <Lane *>realloc(self._lanes, lanes * sizeof(Lane))
        if more == NULL:
            raise MemoryError
        self._lanes = more
        while self._count < lanes:
            more = &self._lanes[self._count]
            more.whole, more.old.places = 0, NULL
            _allocate(&more.now, PLACES_MIN)
            self._faded.append(0)
            self._weights.append({})
            self._count += 1

    cpdef enter(self, Py_ssize_t generation, bytes run):
        cdef Lane *here = self._lane(generation)
        cdef uint64_t values[AHEAD]
        cdef uint64_t homes[AHEAD]
        cdef Py_ssize_t start, i, count
        cdef Entry *entry
        cdef uint64_t wanted = here.now.used + PyBytes_GET_SIZE(run) // HASH, places
        if 2 * wanted > here.now.mask and here.old.places == NULL:
            places = here.now.mask + 1
            while 2 * wanted > places:
                places *= 2
            if places > 2 * (here.now.mask + 1):  # a long prompt: not by doubling again and again
                self._follow(here, places)
        for start in range(0, PyBytes_GET_SIZE(run) // HASH, AHEAD):
            count = self._fetch(here, run, start, values, homes)
            for i in range(count):
                entry = self._put(here, values[i], homes[i])
                entry.count += 1
                here.whole += entry.count == 1

    cpdef leave(self, Py_ssize_t generation, bytes run):
        cdef Lane *here = self._lane(generation)
        cdef uint64_t values[AHEAD]
        cdef uint64_t homes[AHEAD]
        cdef Py_ssize_t start, i, count
        cdef Entry *entry
        for start in range(0, PyBytes_GET_SIZE(run) // HASH, AHEAD):
            count = self._fetch(here, run, start, values, homes)
            for i in range(count):
                entry = self._look(here, values[i], homes[i])
                entry.count -= 1
                if entry.count == 0:
                    if entry.state == WHOLE:
                        here.whole -= 1
                    else:
                        self.add(generation, -1, self._weigh(generation, entry, 1.0))
                    self._take(here, entry)

    # -- weights -------------------------------------------------------------------------------

    def count(self, Py_ssize_t generation):
        cdef Lane *here = self._lane(generation)
        faded = self._faded[generation]
        return rounded_sum(here.whole, faded) if faded else here.whole

    cpdef add(self, Py_ssize_t generation, int64_t blocks, double weight=1.0):
        if weight == 1.0:
            self._lane(generation).whole += blocks
        elif blocks:
            self._faded[generation] += blocks * units(weight)

    cpdef fade(self, Py_ssize_t generation, list runs, double weight):
        cdef double before = weight, old
        cdef int64_t moved = 0
        cdef Entry *entry
        cdef Py_ssize_t i
        self._step(generation, runs, -1)
        for run in runs:
            for i in range(PyBytes_GET_SIZE(run) // HASH):
                entry = self._find(generation, run, i)
                if entry.count == 0:
                    old = self._weigh(generation, entry, weight)
                    if old == weight:
                        continue
                    if old != before:
                        self.add(generation, -moved, before)
                        self.add(generation, moved, weight)
                        before, moved = old, 0
                    moved += 1
        self.add(generation, -moved, before)
        self.add(generation, moved, weight)
        self._step(generation, runs, 1)

    def weights(self, Py_ssize_t generation, bytes run not None):
        cdef Entry *entry
        cdef Py_ssize_t i
        found = {}
        for i in range(PyBytes_GET_SIZE(run) // HASH):
            entry = self._find(generation, run, i)
            if entry.state == FADED:
                found[entry.value] = self._weights[generation][entry.value]
        return found

    cdef double _weigh(self, Py_ssize_t generation, Entry *entry, double weight) except -1.0:
        """Give an entry another weight and return the one it had."""
        cdef dict weights = self._weights[generation]
        cdef double before = 1.0
        if entry.state == FADED:
            before = weights.pop(entry.value)
        entry.state = WHOLE
        if weight != 1.0:
            entry.state = FADED
            weights[entry.value] = weight
        return before

    cdef int _step(self, Py_ssize_t generation, list runs, int step) except -1:
        """Count the values of runs up or down; those that are down to 0 still have a place."""
        cdef Py_ssize_t i
        for run in runs:
            for i in range(PyBytes_GET_SIZE(run) // HASH):
                self._find(generation, run, i).count += step
        return 0

    # -- one value -----------------------------------------------------------------------------

    cdef Lane *_lane(self, Py_ssize_t generation) except NULL:
        if not 0 <= generation < self._count:
            raise IndexError(generation)
        return &self._lanes[generation]

    cdef inline uint64_t _mixed(self, uint64_t value) noexcept nogil:
        """Where a value belongs, in tables of any size."""
        cdef uint64_t mixed = (value ^ (value >> 32)) * self._secret
        mixed = (mixed ^ (mixed >> 29)) * <uint64_t>0xBF58476D1CE4E5B9
        return mixed ^ (mixed >> 32)

    cdef Py_ssize_t _fetch(
        self, Lane *here, bytes run, Py_ssize_t start, uint64_t *values, uint64_t *homes
    ) noexcept:
        """Take the next values and have the memory of their places fetched; return how many."""
        cdef const char *raw = PyBytes_AS_STRING(run) + start * HASH
        cdef Py_ssize_t i, count = min(AHEAD, PyBytes_GET_SIZE(run) // HASH - start)
        memcpy(values, raw, count * HASH)
        for i in range(count):
            homes[i] = self._mixed(values[i])
            __builtin_prefetch(&here.now.places[homes[i] & here.now.mask])
        return count

    cdef Entry *_find(self, Py_ssize_t generation, bytes run, Py_ssize_t at) except NULL:
        cdef uint64_t value
        memcpy(&value, PyBytes_AS_STRING(run) + at * HASH, HASH)
        return self._look(self._lane(generation), value, self._mixed(value))

    cdef inline Entry *_look(self, Lane *here, uint64_t value, uint64_t home) except NULL:
        cdef Entry *entry = _probe(&here.now, value, home)
        if entry.state == EMPTY and here.old.places != NULL:
            entry = _probe(&here.old, value, home)
        if entry.state == EMPTY:
            raise KeyError(value)
        return entry

    cdef inline Entry *_put(self, Lane *here, uint64_t value, uint64_t home) except NULL:
        """Return the entry of a value, which may be new."""
        cdef Entry *entry
        if here.old.places != NULL:
            self._move(here)
            if here.old.places != NULL:
                entry = _probe(&here.old, value, home)
                if entry.state != EMPTY:
                    return entry
        entry = _probe(&here.now, value, home)
        if entry.state != EMPTY:
            return entry
        if 8 * here.now.used > 5 * here.now.mask and here.old.places == NULL:
            self._follow(here, 2 * (here.now.mask + 1))
            entry = _probe(&here.now, value, home)
        entry.value, entry.count, entry.state = value, 0, WHOLE
        here.now.used += 1
        return entry

    cdef int _take(self, Lane *here, Entry *entry) except -1:
        """Remove an entry; what stands behind it closes up, so that no gap hides anything."""
        cdef Places *places = &here.now
        if here.old.places != NULL and not (
            places.places <= entry <= places.places + places.mask
        ):
            places = &here.old
        cdef uint64_t at = entry - places.places, behind = at, home
        while True:
            behind = (behind + 1) & places.mask
            if places.places[behind].state == EMPTY:
                break
            home = self._mixed(places.places[behind].value) & places.mask
            # may stand at `at` if its home is not between there and here
            if ((behind - home) & places.mask) >= ((behind - at) & places.mask):
                places.places[at] = places.places[behind]
                at = behind
        places.places[at].state = EMPTY
        places.used -= 1
        if here.old.places != NULL:
            self._move(here)
        if (
            here.old.places == NULL
            and here.now.mask >= 2 * PLACES_MIN
            and 16 * here.now.used < here.now.mask
        ):
            self._follow(here, (here.now.mask + 1) // 4 if here.now.used else PLACES_MIN)
            if not here.old.used:
                self._move(here)
        return 0

    cdef int _follow(self, Lane *here, uint64_t places) except -1:
        """Begin to move to places of another number."""
        cdef Places fresh
        _allocate(&fresh, places)
        here.old, here.now = here.now, fresh
        here.start = 0
        while here.old.places[here.start].state != EMPTY:  # behind a gap: no run is torn apart
            here.start += 1
        here.left = here.old.mask + 1
        return 0

    cdef void _move(self, Lane *here) noexcept nogil:
        """Look at some of the old places, and on to the next gap."""
        cdef Py_ssize_t looked = 0
        cdef Entry *entry
        while here.left and here.old.used:
            entry = &here.old.places[here.start]
            if entry.state != EMPTY:
                _probe(&here.now, entry.value, self._mixed(entry.value))[0] = entry[0]
                entry.state = EMPTY
                here.now.used += 1
                here.old.used -= 1
            elif looked >= MOVED_PER_VALUE:
                return
            looked += 1
            here.start = (here.start + 1) & here.old.mask
            here.left -= 1
        free(here.old.places)
        here.old.places = NULL


cdef inline Entry *_probe(const Places *table, uint64_t value, uint64_t home) noexcept nogil:
    """The entry of a value, or the empty place where it belongs."""
    cdef uint64_t at = home & table.mask
    while table.places[at].state != EMPTY and table.places[at].value != value:
        at = (at + 1) & table.mask
    return &table.places[at]


cdef int _allocate(Places *table, uint64_t places) except -1:
    table.places = <Entry *>calloc(places, sizeof(Entry))
    if table.places == NULL:
        raise MemoryError
    table.mask = places - 1
    table.used = 0
    return 0


cdef struct User:
    Py_ssize_t generation
    int64_t chains  # of the generation that pass or end at the node


cdef dict NO_CHILDREN = {}  # of nodes without any; never written to


@cython.final
cdef class ChainNode:
    """A run of blocks between two forks of the trie; the last node of a chain is its handle."""

    cdef readonly ChainNode parent
    cdef readonly bytes edge
    cdef readonly dict children
    cdef readonly object mask  # generations among the users, as bits
    cdef readonly int64_t total  # chains of all users
    cdef User *_users  # ascending generations
    cdef Py_ssize_t _count, _room

    def __cinit__(self, ChainNode parent, bytes edge not None):
        self.parent, self.edge = parent, edge
        self.children, self.mask = NO_CHILDREN, 0

    def __dealloc__(self):
        free(self._users)

    @property
    def refs(self):
        """By generation, the number of its chains that pass or end here; a copy."""
        return {self._users[i].generation: self._users[i].chains for i in range(self._count)}

    cdef Py_ssize_t _place(self, Py_ssize_t generation) noexcept:
        """Return where a generation is among the users, or belongs."""
        cdef Py_ssize_t low = 0, high = self._count, middle
        while low < high:
            middle = (low + high) // 2
            if self._users[middle].generation < generation:
                low = middle + 1
            else:
                high = middle
        return low

    cdef int64_t chains_of(self, Py_ssize_t generation) noexcept:
        """Return how many chains of a generation pass or end here."""
        cdef Py_ssize_t at = self._place(generation)
        return self._users[at].chains if at < self._count and self._users[at].generation == generation else 0

    cdef bint join(self, Py_ssize_t generation) except -1:
        """Add a chain of a generation; return whether it is the first one."""
        cdef Py_ssize_t at = self._place(generation)
        self.total += 1
        if at < self._count and self._users[at].generation == generation:
            self._users[at].chains += 1
            return False
        if self._count == self._room:
            self._resize(2 * self._room if self._room else 1)
        memmove(&self._users[at + 1], &self._users[at], (self._count - at) * sizeof(User))
        self._users[at].generation, self._users[at].chains = generation, 1
        self._count += 1
        return True

    cdef bint leave(self, Py_ssize_t generation) except -1:
        """Remove a chain of a generation; return whether it was the last one."""
        cdef Py_ssize_t at = self._place(generation)
        if at == self._count or self._users[at].generation != generation:
            raise KeyError(generation)
        self.total -= 1
        self._users[at].chains -= 1
        if self._users[at].chains:
            return False
        self._count -= 1
        memmove(&self._users[at], &self._users[at + 1], (self._count - at) * sizeof(User))
        return True

    cdef int take_users(self, ChainNode other) except -1:
        """Become a node with the users of another one."""
        self._resize(other._count)
        memcpy(self._users, other._users, other._count * sizeof(User))
        self._count, self.total, self.mask = other._count, other.total, other.mask
        return 0

    cdef int _resize(self, Py_ssize_t room) except -1:
        cdef User *users = <User *>realloc(self._users, room * sizeof(User))
        if users == NULL:
            raise MemoryError
        self._users, self._room = users, room
        return 0

    cdef int adopt(self, bytes first, ChainNode child) except -1:
        """Put a child below this node."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[first] = child
        return 0


@cython.final
cdef class ActiveBlocks:
    """Reference-counted chains over generations, with the number of distinct blocks per generation."""

    cdef object __weakref__
    cdef readonly BlockCounts counts
    cdef readonly ChainNode root
    cdef readonly Py_ssize_t nodes
    cdef readonly int64_t blocks

    def __cinit__(self):
        self.counts, self.root = BlockCounts(), ChainNode(None, b"")
        self.root.children = {}

    def acquire(self, bytes chain not None, Py_ssize_t generation):
        cdef ChainNode node = self.root, child
        cdef Py_ssize_t position = 0, size = PyBytes_GET_SIZE(chain), common
        cdef bytes first
        if not 0 <= generation < self.counts._count:
            raise IndexError(generation)
        while position < size:
            first = _bytes_of(chain, position, position + HASH)
            child = node.children.get(first)
            if child is None:
                child = ChainNode(node, chain if not position else _bytes_of(chain, position, size))
                node.adopt(first, child)
                self.nodes += 1
            else:
                common = _in_common(child.edge, chain, position)
                if common < PyBytes_GET_SIZE(child.edge):
                    child = self._split(child, common)
            if child.join(generation):
                child.mask |= (<object>1) << generation
                self.counts.enter(generation, child.edge)
                self.blocks += PyBytes_GET_SIZE(child.edge) // HASH
            position += PyBytes_GET_SIZE(child.edge)
            node = child
        return node

    def release(self, ChainNode end not None, Py_ssize_t generation):
        cdef ChainNode node = end, parent
        while node.parent is not None:
            parent = node.parent
            if node.leave(generation):
                node.mask ^= (<object>1) << generation
                self.counts.leave(generation, node.edge)
                self.blocks -= PyBytes_GET_SIZE(node.edge) // HASH
            if not node.total:
                del parent.children[_bytes_of(node.edge, 0, HASH)]
                self.nodes -= 1
            elif len(node.children) == 1:
                self._join(node)
            node = parent

    def chain(self, ChainNode end not None):
        edges = []
        while end.parent is not None:
            edges.append(end.edge)
            end = end.parent
        edges.reverse()
        return b"".join(edges)

    def shared_prefix(self, bytes chain not None):
        cdef ChainNode node = self.root, child
        cdef Py_ssize_t position = 0, size = PyBytes_GET_SIZE(chain), common
        cdef list groups = []
        while position < size:
            child = node.children.get(_bytes_of(chain, position, position + HASH))
            if child is None:
                break
            if position and child._count != node._count:  # the generations of a child are also here
                groups.append((position // HASH, node.mask ^ child.mask))
            node = child
            common = _in_common(child.edge, chain, position)
            position += common
            if common < PyBytes_GET_SIZE(child.edge):
                break
        if position:
            groups.append((position // HASH, node.mask))
        return groups

    def fade(self, ChainNode end not None, Py_ssize_t generation, double weight):
        cdef list alone = []
        while end.parent is not None and end.chains_of(generation) == 1:
            alone.append(end.edge)
            end = end.parent
        self.counts.fade(generation, alone, weight)

    cdef ChainNode _split(self, ChainNode lower, Py_ssize_t cut):
        """Move the first bytes of a node into a new one above it; return the new one."""
        cdef bytes edge = lower.edge
        cdef ChainNode parent = lower.parent
        cdef ChainNode upper = ChainNode(parent, _bytes_of(edge, 0, cut))
        upper.take_users(lower)
        parent.children[_bytes_of(edge, 0, HASH)] = upper
        upper.adopt(_bytes_of(edge, cut, cut + HASH), lower)
        lower.parent, lower.edge = upper, _bytes_of(edge, cut, PyBytes_GET_SIZE(edge))
        self.nodes += 1
        return upper

    cdef int _join(self, ChainNode upper) except -1:
        """Undo a fork with one branch left, at which no chain ends."""
        cdef ChainNode lower
        for lower in upper.children.values():
            pass
        if lower.total != upper.total:
            return 0
        upper.parent.children[_bytes_of(upper.edge, 0, HASH)] = lower
        lower.parent, lower.edge = upper.parent, upper.edge + lower.edge
        upper.children = NO_CHILDREN  # leaves no cycle for the collector
        self.nodes -= 1
        return 0


cdef inline bytes _bytes_of(bytes run, Py_ssize_t start, Py_ssize_t stop):
    return PyBytes_FromStringAndSize(PyBytes_AS_STRING(run) + start, stop - start)


cdef Py_ssize_t _in_common(bytes edge, bytes chain, Py_ssize_t position) noexcept:
    """Return how many bytes a chain has from there on in common with an edge: whole blocks."""
    cdef const char *one = PyBytes_AS_STRING(edge)
    cdef const char *other = PyBytes_AS_STRING(chain) + position
    cdef Py_ssize_t size = min(PyBytes_GET_SIZE(edge), PyBytes_GET_SIZE(chain) - position)
    cdef Py_ssize_t at = 0
    if memcmp(one, other, size) == 0:
        return size
    while memcmp(one + at, other + at, HASH) == 0:
        at += HASH
    return at


def positions_of(mask):
    """Return the positions of the bits of a mask, ascending: packed, eight bytes each."""
    cdef const unsigned char *raw
    cdef Py_ssize_t size = (mask.bit_length() + 7) // 8, bit, count = 0
    cdef bytes packed = mask.to_bytes(size, "little"), found
    cdef int64_t *out
    raw = <const unsigned char *>PyBytes_AS_STRING(packed)
    found = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>mask.bit_count() * 8)
    out = <int64_t *>PyBytes_AS_STRING(found)
    for bit in range(8 * size):
        if raw[bit >> 3] >> (bit & 7) & 1:
            out[count] = bit
            count += 1
    return found


@cython.final
cdef class LoadRows:
    """The rows of the load columns that a step of a reservation's life changes, all in one go."""

    cdef double[::1] _prefill, _decode, _churn, _context, _heard, _ahead, _step, _wait
    cdef int64_t[::1] _requests, _computing, _seats

    def __cinit__(self, *columns):
        if len({len(one) for one in columns}) != 1:
            raise ValueError("columns of one length")
        (
            self._prefill, self._decode, self._churn, self._context, self._requests,
            self._computing, self._heard, self._ahead, self._step, self._seats, self._wait,
        ) = columns

    def pack(self, double prefilling, double turnover, pace):
        """Return the columns of prices as one byte string."""
        cdef Py_ssize_t row, ranks = self._prefill.shape[0]
        cdef Py_ssize_t size = ranks * sizeof(double)
        cdef Py_ssize_t numbers = 4 * ranks + 2
        if pace is not None:
            numbers = (7 * ranks + 3 + 3) // 4 * 4
        cdef bytes packed = PyBytes_FromStringAndSize(NULL, numbers * sizeof(double))
        cdef double *out = <double *>PyBytes_AS_STRING(packed)
        cdef double *queues = out + 4 * ranks + 2
        if size:
            memcpy(out, &self._prefill[0], size)
            memcpy(out + ranks, &self._decode[0], size)
            memcpy(out + 2 * ranks, &self._churn[0], size)
            memcpy(out + 3 * ranks, &self._context[0], size)
            if pace is not None:
                memcpy(queues, &self._heard[0], size)
                memcpy(queues + ranks, &self._ahead[0], size)
                for row in range(ranks):
                    queues[2 * ranks + row] = self._requests[row]
        out[4 * ranks], out[4 * ranks + 1] = prefilling, turnover
        if pace is not None:
            queues[3 * ranks] = pace
            for row in range(7 * ranks + 3, numbers):
                out[row] = 0.0
        return packed

    def book(
        self,
        Py_ssize_t slot,
        double left,
        double tokens,
        int64_t requests,
        double decode,
        double blocks,
        double now,
    ):
        """Add a request."""
        if self._prefill[slot] == 0.0:
            self._heard[slot], self._ahead[slot] = now, left
        self._prefill[slot] = left
        self._churn[slot] += tokens
        self._requests[slot] = requests
        self._computing[slot] += 1
        self._decode[slot] = decode
        self._context[slot] += blocks
        if requests >= self._seats[slot]:
            self._context[slot] += self._wait[slot]

    def complete(self, Py_ssize_t slot, double left, double head, double now):
        """Complete a prefill."""
        self._prefill[slot] = left
        self._computing[slot] -= 1
        self._heard[slot] = now
        cdef double step = self._step[slot], most = step
        if head > step and step > 0.0:
            most = ceil(head / step) * step
        self._ahead[slot] = left if left < most else most

    def lengthen(self, Py_ssize_t slot, double decode, double blocks):
        """Lengthen a request."""
        self._decode[slot] = decode
        self._context[slot] += blocks

    def give_up(self, Py_ssize_t slot, double left, double begun, int64_t prompts):
        """Remove prompts that will not be computed."""
        self._prefill[slot] = left
        self._computing[slot] -= prompts
        cdef double ahead = self._ahead[slot] - begun
        if ahead < 0.0:
            ahead = 0.0
        self._ahead[slot] = left if left < ahead else ahead

    def free(self, Py_ssize_t slot, int64_t requests, double decode, double blocks):
        """Remove a request."""
        self._requests[slot] = requests
        self._decode[slot] = decode
        self._context[slot] -= blocks
        if requests >= self._seats[slot] - 1:
            self._context[slot] -= self._wait[slot]
