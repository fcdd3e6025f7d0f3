# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Prices a fleet and picks the cheapest, and says how full it is.

Optional: built when there is a C compiler, left out when not (`indexer/compiled.py`). The plain
twin is `plain_pricer.py`; both give the same to the last bit, so nothing may be contracted here
(`-ffp-contract=off`).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport INFINITY, exp
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

ABI = 2  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    LANES = 8  # of a sum


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

        `preference` has a factor for the price of each row, NULL: 1.0; at a `temperature` one is drawn
        by `rng`, as `picking.pick` does.
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
                    price[at] *= preference[row]
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
                price[at] *= preference[row]
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
