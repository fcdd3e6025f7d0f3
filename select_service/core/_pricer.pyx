# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Prices the candidates of one request and picks one; and says how full a pool is.

The compiled form of `plain_pricer.py`, which says what the arguments mean: `cost.py` has the
formula and `pick.py` the choice. Both give the same to the last bit, so nothing may be
contracted here (`-ffp-contract=off`).
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport INFINITY, exp, floor
from libc.stdint cimport int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

ABI = 6  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    LANES = 8  # of a sum
    TIERS = 3


@cython.final
cdef class Pricer:
    """Reads live columns of load, by slot; scratch space included."""

    cdef double[::1] _prefill, _decode, _churn, _context, _heard, _ahead, _slowness
    cdef const int64_t[::1] _requests
    cdef double *_held  # of the last prompt, a run of slots for each tier
    cdef double *_booked  # blocks of it in active chains, by slot
    cdef double *_price  # by candidate
    cdef double *_cached  # tokens, by candidate
    cdef double *_odds  # summed up to each candidate
    cdef Py_ssize_t _slots
    cdef bint _is_found

    def __cinit__(self, *columns):
        if len({len(one) for one in columns}) != 1:
            raise ValueError("columns of one length")
        (
            self._prefill, self._decode, self._churn, self._context, self._heard, self._ahead,
            self._requests, self._slowness,
        ) = columns
        self._slots = len(self._prefill)
        self._held = <double *>calloc((TIERS + 4) * self._slots + 1, sizeof(double))
        if self._held == NULL:
            raise MemoryError
        self._booked = self._held + TIERS * self._slots
        self._price = self._booked + self._slots
        self._cached = self._price + self._slots
        self._odds = self._cached + self._slots

    def __dealloc__(self):
        free(self._held)

    def choose(
        self,
        rows,
        isl_tokens,
        block_size,
        double blocks,
        weights,
        found,
        list shared,
        trust,
        preference,
        double now,
        rng,
    ):
        """Return (slot, cost, decode blocks, cached tokens, most cached tokens) of the choice."""
        cdef Py_buffer view, believed, preferred
        cdef const int64_t *among = NULL
        cdef const double *factor = NULL, *wish = NULL
        cdef Py_ssize_t count, at, row, ties = 0, best = 0, tier
        cdef double credit, decay, scale, host_weight, disk_weight, temperature
        cdef double decode_scale, delay, eviction, context_scale, pace, interference, each, slowness
        cdef bint track, expects, is_chosen = False
        cdef double isl = isl_tokens, size = block_size, least = 0.0, prompt = 1.0, weight
        cdef double tokens, cached, credited, held, expected, raw, own, worked, most, cost, more
        cdef double low = 0.0, most_cached = 0.0, booked, bare
        (
            credit, decay, scale, host_weight, disk_weight, temperature, track, decode_scale,
            delay, eviction, expects, context_scale, pace, interference, each, slowness,
        ) = weights
        cdef const double *device = self._held
        cdef const double *host = device + self._slots
        cdef const double *disk = host + self._slots
        cdef const double *shares = self._booked
        cdef double *price = self._price
        cdef double *had = self._cached
        self._is_found = found is not None
        if found is not None:
            memset(self._held, 0, TIERS * self._slots * sizeof(double))
            for tier in range(TIERS):
                self._add(self._held + tier * self._slots, found[tier])
        if shared is not None:
            memset(self._booked, 0, self._slots * sizeof(double))
            self._add(self._booked, shared)
        if trust is not None:
            PyObject_GetBuffer(trust, &believed, PyBUF_SIMPLE)
            factor = <const double *>believed.buf
        if preference is not None:
            PyObject_GetBuffer(preference, &preferred, PyBUF_SIMPLE)
            wish = <const double *>preferred.buf
        try:
            if isinstance(rows, int):
                count = rows
            else:
                PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
                is_chosen = True
                among, count = <const int64_t *>view.buf, view.len // 8
            if (
                not 0 < count <= self._slots
                or (factor != NULL and believed.len < self._slots * <Py_ssize_t>sizeof(double))
                or (wish != NULL and preferred.len < count * <Py_ssize_t>sizeof(double))
            ):
                raise ValueError("rows beyond the columns")
            for at in range(count if among != NULL else 0):
                if not 0 <= among[at] < self._slots:
                    raise IndexError("rows beyond the columns")
            if track and decay > 0.0 and found is not None:
                prompt = -(-isl_tokens // block_size)
                least = INFINITY
                for at in range(count):
                    row = at if among == NULL else among[at]
                    if self._prefill[row] < least:
                        least = self._prefill[row]
            for at in range(count):
                row = at if among == NULL else among[at]
                cached, credited, held, booked, expected = 0.0, 0.0, 0.0, 0.0, 0.0
                if found is not None:
                    held = device[row] + host_weight * host[row] + disk_weight * disk[row]
                    cached = floor(held * size + 0.5)
                    weight = credit
                    if track and decay > 0.0:
                        weight = credit * (
                            1.0 / (1.0 + decay * ((self._prefill[row] - least) / size) / prompt)
                        )
                    credited = (
                        weight * device[row] + host_weight * host[row] + disk_weight * disk[row]
                    )
                    if factor != NULL:
                        cached, credited = floor(cached * factor[row]), credited * factor[row]
                if shared is not None:
                    booked = shares[row]
                    if expects:
                        held = 0.0
                        if found is not None:
                            held = device[row] + host[row] + disk[row]
                        if booked > held:
                            expected = booked - held
                worked = 0.0
                if pace != 0.0:
                    worked, most = (now - self._heard[row]) * pace, self._ahead[row]
                    worked = 0.0 if worked < 0.0 else worked
                    worked = most if most < worked else worked
                raw = own = 0.0
                if track:
                    tokens = isl if cached < isl else cached
                    raw, own = (self._prefill[row] - worked + tokens) / size, tokens / size
                raw, own = raw - credited - expected, own - credited - expected
                raw = raw if raw > 0.0 else 0.0
                own = own if own > 0.0 else 0.0
                bare = self._decode[row] + blocks - booked
                more = delay + eviction * self._churn[row] + interference * self._requests[row]
                cost = scale * (raw + more * own)
                cost += decode_scale * bare
                cost += context_scale * (self._context[row] + blocks)
                cost += each * self._requests[row]
                cost *= 1.0 + slowness * self._slowness[row]
                if wish != NULL:
                    cost *= wish[at]
                price[at], had[at] = cost, cached
                if at == 0 or cached > most_cached:
                    most_cached = cached
                if ties == 0 or cost < low:
                    low, best, ties = cost, at, 1
                elif cost == low:
                    ties += 1
            if temperature != 0.0:
                best = self._drawn(count, low, temperature, rng)
            elif ties > 1:
                at = <Py_ssize_t>(<double>rng.random() * ties)
                while at:
                    best += 1
                    if price[best] == low:
                        at -= 1
            row = best if among == NULL else among[best]
            bare = self._decode[row] + blocks
            if shared is not None:
                bare = bare - shares[row]
            return row, price[best], <long long>bare, <long long>had[best], <long long>most_cached
        finally:
            if trust is not None:
                PyBuffer_Release(&believed)
            if preference is not None:
                PyBuffer_Release(&preferred)
            if is_chosen:
                PyBuffer_Release(&view)

    cdef Py_ssize_t _drawn(
        self, Py_ssize_t count, double low, double temperature, rng
    ) except -1:
        """Draw a candidate by its price: what `pick` and `random.choices` do, number by number."""
        cdef const double *price = self._price
        cdef double *odds = self._odds
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

    def held_at(self, Py_ssize_t slot):
        """Return the blocks that a slot holds of the last prompt: device, host, disk."""
        if not 0 <= slot < self._slots:
            raise IndexError(slot)
        if not self._is_found:
            return 0, 0, 0
        cdef const double *held = self._held + slot
        return (
            <long long>held[0], <long long>held[self._slots], <long long>held[2 * self._slots]
        )

    cdef int _add(self, double *column, list groups) except -1:
        """Add the blocks of each group to its slots."""
        cdef Py_buffer view
        cdef const int64_t *slot
        cdef Py_ssize_t i
        cdef double blocks
        for group in groups:
            blocks = group[0]
            PyObject_GetBuffer(group[1], &view, PyBUF_SIMPLE)
            try:
                slot = <const int64_t *>view.buf
                for i in range(view.len // 8):
                    if not 0 <= slot[i] < self._slots:
                        raise IndexError(slot[i])
                    column[slot[i]] += blocks
            finally:
                PyBuffer_Release(&view)
        return 0


@cython.final
cdef class Fill:
    """How full ranks are, read from columns whose content changes."""

    cdef const double[::1] _prefill, _decode, _block_tokens, _floor

    def __cinit__(self, *columns):
        if len({len(one) for one in columns}) != 1:
            raise ValueError("columns of one length")
        self._prefill, self._decode, self._block_tokens, self._floor = columns

    def total(self, double room):
        """Return the sum over the rows of max(prefill, decode * block_tokens, floor * room)."""
        cdef Py_ssize_t row, lane
        cdef double one, sums[LANES]  # side by side, as the plain form adds them
        for lane in range(LANES):
            sums[lane] = 0.0
        for row in range(self._prefill.shape[0]):
            one = self._decode[row] * self._block_tokens[row]
            one = self._prefill[row] if one < self._prefill[row] else one
            sums[row % LANES] += max(one, self._floor[row] * room)
        for lane in range(1, LANES):
            sums[0] += sums[lane]
        return sums[0]
