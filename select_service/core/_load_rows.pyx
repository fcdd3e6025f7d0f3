# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The rows of the load columns that a step of a reservation's life changes, all in one go.

Optional: built when there is a C compiler, left out when not (`indexer/compiled.py`). The plain
twin, which says what is what, is `plain_load_rows.py`.
"""

cimport cython
from libc.math cimport ceil
from libc.stdint cimport int64_t

ABI = 3  # change it with every change of what is offered here: see `indexer/compiled.py`


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
        int64_t[::1] seats not None,
        double[::1] wait not None,
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
            or seats.shape[0] != rows
            or wait.shape[0] != rows
        ):
            raise ValueError("columns of one length")
        self._prefill, self._decode, self._churn, self._context = prefill, decode, churn, context
        self._requests, self._computing = requests, computing
        self._heard, self._ahead, self._step = heard, ahead, step
        self._seats, self._wait = seats, wait

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
        if requests >= self._seats[slot]:
            self._context[slot] += self._wait[slot]

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

    cpdef lengthen(self, Py_ssize_t slot, double decode, double blocks):
        """A request has become longer; the twin says what is what."""
        if not 0 <= slot < self._decode.shape[0]:
            raise IndexError(slot)
        self._decode[slot] = decode
        self._context[slot] += blocks

    cpdef give_up(self, Py_ssize_t slot, double left, double begun, int64_t prompts):
        """Nobody computes a prompt, or not all of it; the twin says what is what."""
        if not 0 <= slot < self._prefill.shape[0]:
            raise IndexError(slot)
        self._prefill[slot] = left
        self._computing[slot] -= prompts
        cdef double ahead = self._ahead[slot] - begun
        if ahead < 0.0:
            ahead = 0.0
        self._ahead[slot] = left if left < ahead else ahead

    cpdef free(self, Py_ssize_t slot, int64_t requests, double decode, double blocks):
        """A request whose prompt is computed went."""
        if not 0 <= slot < self._prefill.shape[0]:
            raise IndexError(slot)
        self._requests[slot] = requests
        self._decode[slot] = decode
        self._context[slot] -= blocks
        if requests >= self._seats[slot] - 1:
            self._context[slot] -= self._wait[slot]
