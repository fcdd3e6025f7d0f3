# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Compiled twins of what costs most in the core: pricing a fleet, records, a set of 64-bit values,
the rows of the ledger.

Optional: built when there is a C compiler, left out when not (`indexer/compiled.py`). The twins are
in `plain_pricer.py`, `plain_record_ring.py`, `plain_value_set.py` and `plain_load_rows.py`, and
give the same to the last bit.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.math cimport INFINITY, ceil, exp
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from msgspec import UNSET

cdef extern from * nogil:
    void __builtin_prefetch(const void *)

ABI = 17  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    HASH = 8  # bytes
    SLOTS_MIN = 64  # of a table; a power of two
    AHEAD = 16  # values whose places are fetched before they are looked at: memory is slow
    LANES = 8  # of a sum
    MOVED_PER_VALUE = 8  # places of an old table looked at for every value that comes or goes


@cython.final
cdef class Pricer:
    """Prices the first rows of the columns and picks the cheapest; scratch space included."""

    def __cinit__(
        self,
        double[::1] prefill not None,
        double[::1] decode not None,
        double[::1] churn not None,
        double[::1] context not None,
        double[::1] heard not None,
        double[::1] ahead not None,
    ):
        self._prefill = prefill
        self._decode = decode
        self._churn = churn
        self._context = context
        self._heard = heard
        self._ahead = ahead
        self._rows = prefill.shape[0]
        if (
            decode.shape[0] != self._rows
            or churn.shape[0] != self._rows
            or context.shape[0] != self._rows
            or heard.shape[0] != self._rows
            or ahead.shape[0] != self._rows
        ):
            raise ValueError("columns of one length")
        self._scratch = <double *>calloc(4 * self._rows + 1, sizeof(double))
        if self._scratch == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._scratch)

    def cheapest(
        self,
        rows,
        double isl_tokens,
        double block_size,
        double blocks,
        double scale,
        double credit,
        bint track,
        list matched,
        list shared,
        draw,
        trust=None,
        tuple ours=None,
        double now=0.0,
    ):
        """Return (row, price, decode blocks) of the cheapest of `rows`, at least one.

        `rows` is how many of the first, or which ones as packed int64; `matched` and `shared` are
        (blocks, rows as packed int64) or None; `draw` gives a number in [0, 1) when several are
        the cheapest; `trust` has a factor for the credit of every row of the columns, None: 1.0;
        `ours` has the weights that only `first-token` has, None: it is `kv-cost`; `now` is in
        monotonic seconds.
        """
        cdef double decode_scale = 1.0, delay = 0.0, eviction = 0.0, context_scale = 0.0, pace = 0.0
        cdef bint is_ours = ours is not None, expects = False
        if is_ours:
            decode_scale, delay, eviction, expects, context_scale, pace = ours
        cdef Py_buffer view, believed
        cdef const int64_t *among = NULL
        cdef const double *factor = NULL
        cdef Py_ssize_t count
        cdef bint is_chosen = False
        cdef Choice chosen
        if trust is not None:
            PyObject_GetBuffer(trust, &believed, PyBUF_SIMPLE)
        try:
            if trust is not None:
                if believed.len < self._rows * <Py_ssize_t>sizeof(double):
                    raise ValueError("rows beyond the columns")
                factor = <const double *>believed.buf
            if isinstance(rows, int):
                count = rows
            else:
                PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
                is_chosen = True
                among, count = <const int64_t *>view.buf, view.len // 8
            self.choose(
                &chosen, among, count, isl_tokens, block_size, blocks, scale, credit, track,
                matched, shared, draw, factor, is_ours, decode_scale, delay, eviction, expects,
                context_scale, pace, now, NULL, 0.0, None,
            )
            return chosen.row, chosen.price, chosen.blocks
        finally:
            if trust is not None:
                PyBuffer_Release(&believed)
            if is_chosen:
                PyBuffer_Release(&view)

    cdef int choose(
        self,
        Choice *chosen,
        const int64_t *among,
        Py_ssize_t rows,
        double isl_tokens,
        double block_size,
        double blocks,
        double scale,
        double credit,
        bint track,
        list matched,
        list shared,
        draw,
        const double *factor,
        bint is_ours,
        double decode_scale,
        double delay,
        double eviction,
        bint expects,
        double context_scale,
        double pace,
        double now,
        const double *preference,
        double temperature,
        rng,
    ) except -1:
        """Do what `cheapest` says, of `rows` of the first, or of those `among` has.

        `preference` has a factor for the price of each candidate, NULL: 1.0; at a `temperature`
        one is drawn by `rng`, as `picking.pick` does.
        """
        if not 0 < rows <= self._rows:
            raise ValueError("rows beyond the columns")
        cdef double *device = self._scratch
        cdef double *common = device + self._rows
        cdef double *price = common + self._rows
        cdef const double *heard = &self._heard[0]  # what is written here might lie there, else
        cdef const double *ahead = &self._ahead[0]
        cdef double raw, adjusted, low = 0.0, tokens, bare, credited, held, own, worked, most
        cdef Py_ssize_t at, row, ties = 0, best = 0, which
        if matched is not None:
            self._fill(device, matched)
        if shared is not None:
            self._fill(common, shared)
        for at in range(rows):
            row = at if among == NULL else among[at]
            if not 0 <= row < self._rows:
                raise IndexError(row)
            bare = self._decode[row] + blocks
            if shared is not None:
                bare = bare - common[row]
            if is_ours:
                tokens, held, credited = isl_tokens, 0.0, 0.0
                if matched is not None:
                    held = device[row]
                    tokens = held * block_size
                    credited = credit * held
                    if factor != NULL:
                        tokens = <double><int64_t>(tokens * factor[row])
                        credited = credited * factor[row]
                    if tokens < isl_tokens:
                        tokens = isl_tokens
                worked, most = (now - heard[row]) * pace, ahead[row]
                worked = 0.0 if worked < 0.0 else worked
                worked = most if most < worked else worked
                raw = (self._prefill[row] - worked + tokens) / block_size if track else 0.0
                own = tokens / block_size if track else 0.0
                if matched is not None:
                    raw, own = raw - credited, own - credited
                if expects and shared is not None and common[row] > held:
                    raw, own = raw - (common[row] - held), own - (common[row] - held)
                raw = raw if raw > 0.0 else 0.0
                own = own if own > 0.0 else 0.0
                price[at] = scale * (raw + (delay + eviction * self._churn[row]) * own)
                price[at] += decode_scale * bare
                price[at] += context_scale * (self._context[row] + blocks)
                if preference != NULL:
                    price[at] *= preference[at]
                if ties == 0 or price[at] < low:
                    low, best, ties = price[at], at, 1
                elif price[at] == low:
                    ties += 1
                continue
            if matched is None:
                adjusted = (self._prefill[row] + isl_tokens) / block_size if track else 0.0
            else:
                tokens = device[row] * block_size
                credited = credit * device[row]
                if factor != NULL:
                    tokens = <double><int64_t>(tokens * factor[row])  # rounded down
                    credited = credited * factor[row]
                if tokens < isl_tokens:
                    tokens = isl_tokens
                raw = (self._prefill[row] + tokens) / block_size if track else 0.0
                adjusted = raw - credited
                if adjusted < 0.0:
                    adjusted = 0.0
            price[at] = scale * adjusted + bare
            if preference != NULL:
                price[at] *= preference[at]
            if ties == 0 or price[at] < low:
                low, best, ties = price[at], at, 1
            elif price[at] == low:
                ties += 1
        if temperature != 0.0:
            best = self._drawn(price, rows, low, temperature, rng)
            low = price[best]
        elif ties > 1:
            which = <Py_ssize_t>(<double>draw() * ties)
            while which:
                best += 1
                if price[best] == low:
                    which -= 1
        row = best if among == NULL else among[best]
        bare = self._decode[row] + blocks
        if shared is not None:
            bare = bare - common[row]
        chosen.row, chosen.price, chosen.blocks = row, low, <long long>bare
        return 0

    cdef Py_ssize_t _drawn(
        self, double *price, Py_ssize_t count, double low, double temperature, rng
    ) except -1:
        """Draw a candidate by its price: what `pick` and `random.choices` do, number by number."""
        cdef double *odds = price + self._rows
        cdef double high = low, spread, total = 0.0, drawn
        cdef Py_ssize_t at
        for at in range(count):
            if price[at] > high:
                high = price[at]
        spread = (high - low) * temperature
        if not 0.0 < spread < INFINITY:
            return rng.randrange(count)
        for at in range(count):
            total += exp(-(price[at] - low) / spread)
            odds[at] = total
        drawn = <double>rng.random() * total
        for at in range(count - 1):
            if drawn < odds[at]:
                return at
        return count - 1

    def matched_at(self, Py_ssize_t row):
        """Blocks that `matched` of the last call gave a row."""
        if not 0 <= row < self._rows:
            raise IndexError(row)
        return <long long>self._scratch[row]

    def packed(self, double prefilling, double turnover, pace=None):
        """Return the columns as they are now, one behind the other, and these totals; with a pace
        also what is told of queues."""
        cdef Py_ssize_t size = self._rows * sizeof(double), whole = 4 * size + 2 * sizeof(double)
        cdef bint is_paced = pace is not None
        cdef double speed
        if is_paced:
            whole += 2 * size + sizeof(double)
        cdef bytes copy = PyBytes_FromStringAndSize(NULL, whole)
        cdef char *start = PyBytes_AS_STRING(copy)
        if size:
            memcpy(start, &self._prefill[0], size)
            memcpy(start + size, &self._decode[0], size)
            memcpy(start + 2 * size, &self._churn[0], size)
            memcpy(start + 3 * size, &self._context[0], size)
        start += 4 * size
        memcpy(start, &prefilling, sizeof(double))
        memcpy(start + sizeof(double), &turnover, sizeof(double))
        if is_paced:
            speed = pace
            start += 2 * sizeof(double)
            if size:
                memcpy(start, &self._heard[0], size)
                memcpy(start + size, &self._ahead[0], size)
            memcpy(start + 2 * size, &speed, sizeof(double))
        return copy

    cdef int _fill(self, double *column, list groups) except -1:
        cdef Py_buffer view
        cdef const int64_t *row
        cdef Py_ssize_t i
        cdef double blocks
        memset(column, 0, self._rows * sizeof(double))
        for group in groups:
            blocks = group[0]
            PyObject_GetBuffer(group[1], &view, PyBUF_SIMPLE)
            try:
                row = <const int64_t *>view.buf
                for i in range(view.len // 8):
                    if not 0 <= row[i] < self._rows:
                        raise IndexError(row[i])
                    column[row[i]] = blocks
            finally:
                PyBuffer_Release(&view)
        return 0


@cython.final
cdef class Fill:
    """How full ranks are, read from columns whose content changes."""

    cdef const double[::1] _prefill
    cdef const double[::1] _decode
    cdef const double[::1] _block_tokens
    cdef const double[::1] _floor

    def __cinit__(
        self,
        const double[::1] prefill not None,
        const double[::1] decode not None,
        const double[::1] block_tokens not None,
        const double[::1] floor not None,
    ):
        cdef Py_ssize_t rows = prefill.shape[0]
        if decode.shape[0] != rows or block_tokens.shape[0] != rows or floor.shape[0] != rows:
            raise ValueError("columns of one length")
        self._prefill, self._decode = prefill, decode
        self._block_tokens, self._floor = block_tokens, floor

    def total(self, double room):
        """Return the sum over the rows of max(prefill, decode * block_tokens, floor * room)."""
        cdef Py_ssize_t row = 0, lane, rows = self._prefill.shape[0]
        cdef double sums[LANES]  # side by side: the compiler adds several at once
        if not rows:
            return 0.0
        cdef const double *prefill = &self._prefill[0]
        cdef const double *decode = &self._decode[0]
        cdef const double *block_tokens = &self._block_tokens[0]
        cdef const double *floor = &self._floor[0]
        for lane in range(LANES):
            sums[lane] = 0.0
        while row + LANES <= rows:
            for lane in range(LANES):
                sums[lane] += fullest(
                    decode[lane] * block_tokens[lane], prefill[lane], floor[lane] * room
                )
            prefill, decode = prefill + LANES, decode + LANES
            block_tokens, floor = block_tokens + LANES, floor + LANES
            row += LANES
        for lane in range(rows - row):
            sums[lane] += fullest(
                decode[lane] * block_tokens[lane], prefill[lane], floor[lane] * room
            )
        for lane in range(1, LANES):
            sums[0] += sums[lane]
        return sums[0]


cdef inline double fullest(double one, double other, double third) noexcept nogil:
    one = other if one < other else one
    return third if one < third else one


cdef extern from "Python.h":
    bint PyUnicode_IS_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)

cdef enum:  # as in the twin, where they are explained
    CHAR_BYTES = 4
    RECORD_BYTES = 640
    GROUP_BYTES = 256
    ASKED_BYTES = 320
    HIT_BYTES = 64

cdef extern from "Python.h":
    void *Py_TYPE(object)
    ctypedef struct PyMemberDef:
        int type
        Py_ssize_t offset
    ctypedef struct PyMemberDescrObject:
        PyMemberDef *d_member

cdef extern from "structmember.h":
    enum:
        T_OBJECT_EX

@cython.final
cdef class Members:
    """Reads some members of objects of a few kinds from where they lie: `__slots__`, structs.

    A record takes ten of them: asked for by name, or handed over one by one, they were a tenth of
    what it costs. A kind that keeps a member in another way is asked by name.
    """

    def __cinit__(self, *names):
        if len(names) > MEMBERS_MAX:
            raise ValueError("too many members")
        self._names = names
        self._types = [None] * KINDS_MAX
        memset(self._kinds, 0, sizeof(self._kinds))

    cdef const Kind *of(self, object one) except NULL:
        cdef int at
        for at in range(KINDS_MAX):
            if self._kinds[at].type == Py_TYPE(one):
                return &self._kinds[at]
        return self._learn(type(one))

    cdef const Kind *_learn(self, kind) except NULL:
        cdef Kind *place = &self._kinds[self._next]
        cdef int at
        for at in range(len(self._names)):
            found = getattr(kind, self._names[at], None)
            place.offsets[at] = -1
            if type(found) is _member_descriptor:
                if (<PyMemberDescrObject *>found).d_member.type == T_OBJECT_EX:
                    place.offsets[at] = (<PyMemberDescrObject *>found).d_member.offset
        place.type = <void *>kind
        self._types[self._next] = kind
        self._next = (self._next + 1) % KINDS_MAX
        return place

    cdef object get(self, object one, const Kind *kind, int which):
        cdef PyObject *found
        if kind.offsets[which] >= 0:
            found = (<PyObject **>(<char *><PyObject *>one + kind.offsets[which]))[0]
            if found != NULL:
                return <object>found
        return getattr(one, self._names[which])


class _Slotted:
    __slots__ = ("member",)


cdef object _member_descriptor = type(_Slotted.member)

cdef inline Py_ssize_t text_bytes(str text) noexcept:
    cdef Py_ssize_t length = PyUnicode_GET_LENGTH(text)
    return length if PyUnicode_IS_ASCII(text) else CHAR_BYTES * length


@cython.final
cdef class RecordRing:
    """Keeps the last records of decisions, bounded by count and by bytes.

    A record is a row of numbers and references to what lives anyway; the hashes of its prompt are
    copied, one record's behind the other's. Objects of its own would be memory that comes cold to
    every request, because those of a thousand requests before it are still in use.
    """

    def __cinit__(self, Py_ssize_t count_max, long long bytes_max, long long first):
        self._count_max = count_max if bytes_max else 0
        self._bytes_max = bytes_max
        self.next = first
        self._tickets = Members(
            "prompt", "request", "since", "reservation_id", "asked", "said"
        )
        self._prompts = Members("block_hashes", "blocks", "isl_tokens")
        self._requests = Members("selection_id", "explain", "routing_constraints")
        self._placements = Members("seen", "slot", "weights")
        self._lookouts = Members("until", "everyone", "told")
        if self._count_max:
            self._entries = <Entry *>calloc(self._count_max, sizeof(Entry))
            if self._entries == NULL:
                raise MemoryError

    def __dealloc__(self):
        while self._count:
            self._drop_oldest()
        free(self._entries)
        free(self._last)
        free(self._spare)

    def __len__(self):
        return self._count

    def keep(
        self, ticket, tuple seen not None, rows, Py_ssize_t slot, double now, odds, cache_hit,
        weights, lookout, Py_ssize_t more,
    ):
        """Keep the record of a decision, let the oldest go; return it if it is to be told."""
        return self._keep(
            ticket, seen, rows, slot, now, odds, cache_hit, weights, lookout, more
        )

    def keep_usual(self, ticket, placement, rows, double now, cache_hit, lookout):
        """Keep the record of a decision with nothing unusual about it; False: it has something."""
        cdef const Kind *kind = self._lookouts.of(lookout)
        if (
            now >= <double>self._lookouts.get(lookout, kind, 0)
            or rows is not self._lookouts.get(lookout, kind, 1)
        ):
            return False
        told = self._lookouts.get(lookout, kind, 2)
        request = self._tickets.get(ticket, self._tickets.of(ticket), 1)
        kind = self._requests.of(request)
        if (
            self._requests.get(request, kind, 1)
            or self._requests.get(request, kind, 2) is not UNSET
        ):
            return False
        kind = self._placements.of(placement)
        seen = self._placements.get(placement, kind, 0)
        if seen is None:
            return False
        self._keep(
            ticket, <tuple?>seen, rows, self._placements.get(placement, kind, 1), now, None,
            cache_hit, self._placements.get(placement, kind, 2), told, 0
        )
        return True

    cdef _keep(
        self, ticket, tuple seen, rows, Py_ssize_t slot, double now, odds, cache_hit, weights,
        lookout, Py_ssize_t more,
    ):
        cdef const Kind *kind = self._tickets.of(ticket)
        prompt, request = self._tickets.get(ticket, kind, 0), self._tickets.get(ticket, kind, 1)
        cdef double since = self._tickets.get(ticket, kind, 2)
        cdef str reservation_id = self._tickets.get(ticket, kind, 3)
        ask, said = self._tickets.get(ticket, kind, 4), self._tickets.get(ticket, kind, 5)
        kind = self._prompts.of(prompt)
        cdef bytes block_hashes = self._prompts.get(prompt, kind, 0)
        cdef Py_ssize_t blocks = self._prompts.get(prompt, kind, 1)
        cdef uint64_t isl_tokens = self._prompts.get(prompt, kind, 2)
        kind = self._requests.of(request)
        cdef str selection_id = self._requests.get(request, kind, 0)
        cdef bint is_told = bool(self._requests.get(request, kind, 1))
        cdef bytes columns = <bytes?>seen[0]
        cdef bytes trust = <bytes?>seen[3] if seen[3] is not None else None
        cdef Entry entry
        matched, shared = seen[1], seen[2]
        entry.of[LOOKOUT] = <PyObject *>lookout
        entry.of[ROWS] = <PyObject *>rows
        entry.of[COLUMNS] = <PyObject *>columns
        entry.of[MATCHED] = <PyObject *>matched
        entry.of[SHARED] = <PyObject *>shared
        entry.of[TRUST] = <PyObject *>trust
        entry.of[WEIGHTS] = <PyObject *>weights
        entry.of[SELECTION_ID] = <PyObject *>selection_id
        entry.of[RESERVATION_ID] = <PyObject *>reservation_id
        entry.of[ODDS] = <PyObject *>odds
        entry.of[ASK] = <PyObject *>ask
        entry.of[SAID] = <PyObject *>said
        entry.of[CACHE_HIT] = <PyObject *>cache_hit
        entry.at, entry.since = now, since
        entry.blocks, entry.isl_tokens, entry.slot = blocks, isl_tokens, slot
        self._measure(&entry, block_hashes, more)
        record = None
        if is_told:
            hashes = block_hashes[:HASH_BYTES_MAX]
            record = _tuple_of(&entry, self.next, hashes)
        if self._count_max:
            self._add(&entry, PyBytes_AS_STRING(block_hashes))
        return record

    cdef int keep_plain(
        self, bytes block_hashes, uint64_t isl_tokens, str selection_id, str reservation_id,
        bytes columns, list matched, list shared, rows, Py_ssize_t slot, double now, weights, lookout,
    ) except -1:
        """Keep the record of a decision of which nothing else is to be said; for other kernels."""
        cdef Entry entry
        cdef int at
        if not self._count_max:
            return 0
        for at in range(REFERENCES):
            entry.of[at] = <PyObject *>None
        entry.of[LOOKOUT] = <PyObject *>lookout
        entry.of[ROWS] = <PyObject *>rows
        entry.of[COLUMNS] = <PyObject *>columns
        entry.of[MATCHED] = <PyObject *>matched
        entry.of[SHARED] = <PyObject *>shared
        entry.of[WEIGHTS] = <PyObject *>weights
        entry.of[SELECTION_ID] = <PyObject *>selection_id
        entry.of[RESERVATION_ID] = <PyObject *>reservation_id
        entry.at, entry.since = now, -1.0
        entry.blocks = PyBytes_GET_SIZE(block_hashes) // HASH_BYTES
        entry.isl_tokens, entry.slot = isl_tokens, slot
        self._measure(&entry, block_hashes, 0)
        return self._add(&entry, PyBytes_AS_STRING(block_hashes))

    cdef int _measure(self, Entry *entry, bytes block_hashes, Py_ssize_t more) except -1:
        """Note what the record is charged with, its columns aside."""
        cdef Py_ssize_t width = PyBytes_GET_SIZE(<bytes>entry.of[COLUMNS])
        entry.hash_bytes = min(<Py_ssize_t>HASH_BYTES_MAX, PyBytes_GET_SIZE(block_hashes))
        entry.size = RECORD_BYTES + entry.hash_bytes + more
        if <object>entry.of[MATCHED] is not None:
            entry.size += 2 * width + GROUP_BYTES * len(<object>entry.of[MATCHED])
        if <object>entry.of[SHARED] is not None:
            entry.size += width + GROUP_BYTES * len(<object>entry.of[SHARED])
        if <object>entry.of[TRUST] is not None:
            entry.size += PyBytes_GET_SIZE(<bytes>entry.of[TRUST])
        if <object>entry.of[SELECTION_ID] is not None:
            entry.size += text_bytes(<str>entry.of[SELECTION_ID])
        if <object>entry.of[RESERVATION_ID] is not None:
            entry.size += text_bytes(<str>entry.of[RESERVATION_ID])
        if <object>entry.of[ASK] is not None:
            entry.size += ASKED_BYTES + text_bytes(<str?>(<object>entry.of[ASK]).tenant_id)
        if <object>entry.of[CACHE_HIT] is not None:
            entry.size += HIT_BYTES
        return 0

    cdef int _add(self, Entry *entry, const char *hashes) except -1:
        cdef Py_ssize_t place, number
        if self._count == self._count_max:
            self._drop_oldest()
        self._write(entry, hashes)
        place = self._place(self._count)
        for number in range(REFERENCES):
            Py_INCREF(<object>entry.of[number])
        self.bytes += entry.size
        self._entries[place] = entry[0]
        # columns are charged once for a run of records with the same
        if (
            not self._count
            or self._entries[self._place(self._count - 1)].of[COLUMNS] != entry.of[COLUMNS]
        ):
            self.bytes += PyBytes_GET_SIZE(<bytes>entry.of[COLUMNS])
        self._count += 1
        self.next += 1
        while self._count and self.bytes > self._bytes_max:
            self._drop_oldest()
        return 0

    cdef int _write(self, Entry *entry, const char *hashes) except -1:
        """Copy the hashes behind those of the newest."""
        cdef Chunk *chunk = self._last
        if chunk == NULL or self._filled + entry.hash_bytes > CHUNK_BYTES:
            chunk, self._spare = self._spare, NULL
            if chunk == NULL:
                chunk = <Chunk *>malloc(sizeof(Chunk))
                if chunk == NULL:
                    raise MemoryError
            chunk.records = 0
            self._last, self._filled = chunk, 0
        entry.chunk, entry.offset = chunk, self._filled
        memcpy(chunk.data + self._filled, hashes, entry.hash_bytes)
        self._filled += entry.hash_bytes
        chunk.records += 1
        return 0

    cdef int _drop_oldest(self) except -1:
        cdef Entry gone = self._entries[self._oldest]
        cdef Py_ssize_t number
        self._oldest = self._place(1)
        self._count -= 1
        self.bytes -= gone.size
        if not self._count or self._entries[self._oldest].of[COLUMNS] != gone.of[COLUMNS]:
            self.bytes -= PyBytes_GET_SIZE(<bytes>gone.of[COLUMNS])
        gone.chunk.records -= 1
        if not gone.chunk.records:
            if gone.chunk == self._last:
                self._filled = 0
            elif self._spare == NULL:
                self._spare = gone.chunk
            else:
                free(gone.chunk)
        for number in range(REFERENCES):
            Py_DECREF(<object>gone.of[number])
        return 0

    cdef Py_ssize_t _place(self, Py_ssize_t at) noexcept:
        """Return where the record is that is so many after the oldest."""
        cdef Py_ssize_t place = self._oldest + at
        return place - self._count_max if place >= self._count_max else place

    cdef tuple _told(self, Py_ssize_t at):
        cdef Entry *entry = &self._entries[self._place(at)]
        hashes = PyBytes_FromStringAndSize(entry.chunk.data + entry.offset, entry.hash_bytes)
        return _tuple_of(entry, self.next - self._count + at, hashes)

    def numbered(self, long long number):
        """Return the record of a number, if it is there."""
        cdef long long at = number - (self.next - self._count)
        return self._told(at) if 0 <= at < self._count else None

    def numbers_of(self, names):
        """Return the numbers of the records under any of these ids, the newest first."""
        cdef Py_ssize_t at
        cdef Entry *entry
        found = []
        for at in range(self._count - 1, -1, -1):
            entry = &self._entries[self._place(at)]
            if <object>entry.of[SELECTION_ID] in names or <object>entry.of[RESERVATION_ID] in names:
                found.append(self.next - self._count + at)
        return found


cdef tuple _tuple_of(const Entry *entry, long long number, bytes hashes):
    """Return a `Record`'s members."""
    seen = (
        <object>entry.of[COLUMNS], <object>entry.of[MATCHED], <object>entry.of[SHARED],
        <object>entry.of[TRUST],
    )
    return (
        number, entry.at, entry.since, <object>entry.of[LOOKOUT], <object>entry.of[ROWS], seen,
        hashes, entry.blocks, entry.isl_tokens, <object>entry.of[WEIGHTS], entry.slot,
        <object>entry.of[SELECTION_ID], <object>entry.of[RESERVATION_ID], <object>entry.of[ODDS],
        <object>entry.of[ASK], <object>entry.of[SAID], <object>entry.of[CACHE_HIT], entry.size,
    )


@cython.final
cdef class LoadRows:
    """The rows of the load columns that a step of a reservation's life changes, all in one go."""

    def __cinit__(
        self,
        double[::1] prefill not None,
        double[::1] decode not None,
        double[::1] churn not None,
        double[::1] context not None,
        int64_t[::1] requests not None,
        int64_t[::1] computing not None,
        double[::1] heard not None,
        double[::1] ahead not None,
        double[::1] step not None,
    ):
        cdef Py_ssize_t rows = prefill.shape[0]
        if (
            decode.shape[0] != rows
            or churn.shape[0] != rows
            or context.shape[0] != rows
            or requests.shape[0] != rows
            or computing.shape[0] != rows
            or heard.shape[0] != rows
            or ahead.shape[0] != rows
            or step.shape[0] != rows
        ):
            raise ValueError("columns of one length")
        self._prefill, self._decode, self._churn, self._context = prefill, decode, churn, context
        self._requests, self._computing = requests, computing
        self._heard, self._ahead, self._step = heard, ahead, step

    cpdef book(
        self,
        Py_ssize_t slot,
        double left,
        double tokens,
        int64_t requests,
        double decode,
        double blocks,
        double now,
    ):
        """A request came; the twin says what is what."""
        if not 0 <= slot < self._prefill.shape[0]:
            raise IndexError(slot)
        if self._prefill[slot] == 0.0:
            self._heard[slot], self._ahead[slot] = now, left
        self._prefill[slot] = left
        self._churn[slot] += tokens
        self._requests[slot] = requests
        self._computing[slot] += 1
        self._decode[slot] = decode
        self._context[slot] += blocks

    cpdef complete(self, Py_ssize_t slot, double left, double head, double now):
        """A prompt is computed; the twin says what is what."""
        if not 0 <= slot < self._prefill.shape[0]:
            raise IndexError(slot)
        self._prefill[slot] = left
        self._computing[slot] -= 1
        self._heard[slot] = now
        cdef double step = self._step[slot], most = step
        if head > step and step > 0.0:
            most = ceil(head / step) * step
        self._ahead[slot] = left if left < most else most

    cdef int lengthen(self, Py_ssize_t slot, double decode, double blocks) except -1:
        """A request has become so many blocks longer; for other kernels."""
        if not 0 <= slot < self._decode.shape[0]:
            raise IndexError(slot)
        self._decode[slot] = decode
        self._context[slot] += blocks
        return 0

    cpdef free(self, Py_ssize_t slot, int64_t requests, double decode, double blocks):
        """A request whose prompt is computed went."""
        if not 0 <= slot < self._prefill.shape[0]:
            raise IndexError(slot)
        self._requests[slot] = requests
        self._decode[slot] = decode
        self._context[slot] -= blocks


cdef struct Table:
    uint64_t *places  # 0: empty
    uint64_t mask  # places - 1
    Py_ssize_t used


@cython.final
cdef class ValueSet:
    """64-bit values, entered and discarded by the packed run; 16 to 32 bytes each.

    Open addressing with linear probing. A table that is half full (or nearly empty) is followed
    by a larger (smaller) one; both are looked at while values move over, a few with every change,
    so that no change takes long. Where a value goes depends on a secret, lest a client fills one
    neighbourhood.
    """

    cdef Table _now
    cdef Table _old  # places NULL: nothing is moving
    cdef uint64_t _from  # in `_old`, everything before this place has moved
    cdef uint64_t _left  # places of `_old` yet to be looked at
    cdef uint64_t _secret
    cdef bint _zero  # whether the value 0 is in

    def __cinit__(self):
        self._secret = (<uint64_t>hash("a secret of this process")) | 1
        self._zero = False
        if _allocate(&self._now, SLOTS_MIN):
            raise MemoryError

    def __dealloc__(self):
        free(self._now.places)
        free(self._old.places)

    def __len__(self):
        return self._now.used + self._old.used + self._zero

    def __contains__(self, value):
        cdef uint64_t number = value
        if number == 0:
            return self._zero
        cdef uint64_t home = self._mixed(number)
        return self._holds(&self._now, number, home) or self._holds(&self._old, number, home)

    def __iter__(self):
        """All values; for looking at, not while they change."""
        cdef uint64_t at
        if self._zero:
            yield 0
        if self._old.places != NULL:
            for at in range(self._old.mask + 1):
                if self._old.places[at]:
                    yield self._old.places[at]
        for at in range(self._now.mask + 1):
            if self._now.places[at]:
                yield self._now.places[at]

    def enter(self, bytes packed not None):
        """Add a run of values in the machine's byte order; return how many were not in."""
        cdef uint64_t values[AHEAD]
        cdef uint64_t homes[AHEAD]
        cdef Py_ssize_t start, i, count, fresh = 0
        for start in range(0, PyBytes_GET_SIZE(packed) // HASH, AHEAD):
            count = self._fetch(packed, start, values, homes)
            for i in range(count):
                fresh += self._add(values[i], homes[i])
        return fresh

    def leave(self, bytes packed not None):
        """Discard a run of values."""
        cdef uint64_t values[AHEAD]
        cdef uint64_t homes[AHEAD]
        cdef Py_ssize_t start, i, count
        for start in range(0, PyBytes_GET_SIZE(packed) // HASH, AHEAD):
            count = self._fetch(packed, start, values, homes)
            for i in range(count):
                self._discard(values[i], homes[i])

    def discard(self, value):
        """Discard one value."""
        self._discard(value, self._mixed(value))

    # -- one value -----------------------------------------------------------------------------

    cdef inline uint64_t _mixed(self, uint64_t value) noexcept nogil:
        """Where a value belongs, in tables of any size."""
        cdef uint64_t mixed = (value ^ (value >> 32)) * self._secret
        mixed = (mixed ^ (mixed >> 29)) * <uint64_t>0xBF58476D1CE4E5B9
        return mixed ^ (mixed >> 32)

    cdef Py_ssize_t _fetch(
        self, bytes packed, Py_ssize_t start, uint64_t *values, uint64_t *homes
    ) noexcept:
        """Take the next values and have the memory of their places fetched; return how many."""
        cdef const char *raw = PyBytes_AS_STRING(packed) + start * HASH
        cdef Py_ssize_t i, count = min(AHEAD, PyBytes_GET_SIZE(packed) // HASH - start)
        for i in range(count):
            memcpy(&values[i], raw + i * HASH, HASH)
            homes[i] = self._mixed(values[i])
            __builtin_prefetch(&self._now.places[homes[i] & self._now.mask])
        return count

    cdef inline bint _holds(self, const Table *table, uint64_t value, uint64_t home) noexcept nogil:
        if table.places == NULL:
            return False
        cdef uint64_t at = home & table.mask
        while table.places[at]:
            if table.places[at] == value:
                return True
            at = (at + 1) & table.mask
        return False

    cdef inline bint _put(self, Table *table, uint64_t value, uint64_t home) noexcept nogil:
        cdef uint64_t at = home & table.mask
        while table.places[at]:
            if table.places[at] == value:
                return False
            at = (at + 1) & table.mask
        table.places[at] = value
        table.used += 1
        return True

    cdef inline bint _take(self, Table *table, uint64_t value, uint64_t whence) noexcept nogil:
        """Take a value out; what stood behind it closes up, so that no gap hides anything."""
        if table.places == NULL:
            return False
        cdef uint64_t at = whence & table.mask, behind, home
        while table.places[at] != value:
            if not table.places[at]:
                return False
            at = (at + 1) & table.mask
        behind = at
        while True:
            behind = (behind + 1) & table.mask
            if not table.places[behind]:
                break
            home = self._mixed(table.places[behind]) & table.mask
            # may stand at `at` if its home is not between there and here
            if ((behind - home) & table.mask) >= ((behind - at) & table.mask):
                table.places[at] = table.places[behind]
                at = behind
        table.places[at] = 0
        table.used -= 1
        return True

    cdef inline int _add(self, uint64_t value, uint64_t home) except -1:
        if value == 0:
            if self._zero:
                return 0
            self._zero = True
            return 1
        if self._old.places != NULL:
            self._move()
            if self._holds(&self._old, value, home):
                return 0
        if not self._put(&self._now, value, home):
            return 0
        if 2 * <uint64_t>self._now.used > self._now.mask:
            self._follow(2 * (self._now.mask + 1))
        return 1

    cdef inline int _discard(self, uint64_t value, uint64_t home) except -1:
        if value == 0:
            self._zero = False
            return 0
        if self._old.places != NULL:
            self._move()
        if not self._take(&self._now, value, home):
            self._take(&self._old, value, home)
        if not self._now.used and not self._old.used:
            return self._give_back()
        if self._now.mask >= 2 * SLOTS_MIN and 16 * <uint64_t>self._now.used < self._now.mask:
            self._follow((self._now.mask + 1) // 4)
        return 0

    # -- another table -------------------------------------------------------------------------

    cdef int _give_back(self) except -1:
        """Nothing is in: no table need be as large as it was."""
        free(self._old.places)
        self._old.places = NULL
        if self._now.mask >= 2 * SLOTS_MIN:
            free(self._now.places)
            if _allocate(&self._now, SLOTS_MIN):
                raise MemoryError
        return 0

    cdef int _follow(self, uint64_t places) except -1:
        """Begin to move to a table of another size, unless that is already going on."""
        if self._old.places != NULL:
            return 0
        cdef Table fresh
        if _allocate(&fresh, places):
            raise MemoryError
        self._old, self._now = self._now, fresh
        self._from = 0
        while self._old.places[self._from]:  # begin behind a gap: no run of values is torn apart
            self._from += 1
        self._left = self._old.mask + 1
        return 0

    cdef void _move(self) noexcept nogil:
        """Look at some places of the old table, and on to the next gap."""
        cdef Py_ssize_t looked = 0
        cdef uint64_t value
        while self._left and self._old.used:
            value = self._old.places[self._from]
            if value:
                self._old.places[self._from] = 0
                self._old.used -= 1
                self._put(&self._now, value, self._mixed(value))
            elif looked >= MOVED_PER_VALUE:
                return
            looked += 1
            self._from = (self._from + 1) & self._old.mask
            self._left -= 1
        free(self._old.places)
        self._old.places = NULL


cdef int _allocate(Table *table, uint64_t places) noexcept nogil:
    table.places = <uint64_t *>calloc(places, sizeof(uint64_t))
    table.mask = places - 1
    table.used = 0
    return table.places == NULL
