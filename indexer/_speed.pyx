# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The compiled twin of `indexer.core.plain_hashing` and `plain_runs`: same names, same numbers.

Optional: only built if there is a C compiler (`indexer/compiled.py`). Callers check the
arguments: lengths come from `bytes`, sizes are at least one token.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t

cdef extern from "_xxh3.h" nogil:
    enum:
        XXH3_SECRET_BYTES
        XXH3_MEDIUM_MAX
    uint64_t read64(const uint8_t *at)
    void write64(uint8_t *at, uint64_t word)
    void xxh3_derive(uint8_t *secret, uint64_t seed)
    uint64_t xxh3(const uint8_t *data, size_t len, uint64_t seed, const uint8_t *derived)
    uint64_t xxh3_16(uint64_t first, uint64_t last, uint64_t len, uint64_t seed)

ABI = 3  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    HASH = 8  # bytes
    BASE_SEED = 1337


def window_hashes(bytes tokens not None, Py_ssize_t stride, Py_ssize_t width, uint64_t seed):
    """Hash every whole window of `width` bytes, one per `stride` bytes."""
    cdef Py_ssize_t length = PyBytes_GET_SIZE(tokens)
    if min(stride, width) < 4:  # bytes of a token
        raise ValueError("windows have whole tokens")
    if width > length:
        return b""
    cdef Py_ssize_t count = (length - width) // stride + 1
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, count * HASH)
    cdef const uint8_t *window = <const uint8_t *>PyBytes_AS_STRING(tokens)
    cdef uint8_t *out = <uint8_t *>PyBytes_AS_STRING(packed)
    cdef uint8_t derived[XXH3_SECRET_BYTES]
    cdef Py_ssize_t i
    if width > XXH3_MEDIUM_MAX:
        xxh3_derive(derived, seed)
    for i in range(count):
        write64(out + i * HASH, xxh3(window + i * stride, width, seed, derived))
    return packed


def sequence_hashes(bytes local not None):
    """Chain local hashes: entry i covers the whole prefix up to block i."""
    cdef Py_ssize_t count = PyBytes_GET_SIZE(local) // HASH
    if count < 2:
        return local[: count * HASH]
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, count * HASH)
    cdef const uint8_t *block = <const uint8_t *>PyBytes_AS_STRING(local)
    cdef uint8_t *out = <uint8_t *>PyBytes_AS_STRING(packed)
    cdef uint64_t previous = read64(block)
    cdef Py_ssize_t i
    write64(out, previous)
    for i in range(1, count):
        previous = xxh3_16(previous, read64(block + i * HASH), 2 * HASH, BASE_SEED)
        write64(out + i * HASH, previous)
    return packed


def common_blocks(bytes edge not None, Py_ssize_t at, bytes hashes not None, Py_ssize_t start):
    """Return how many blocks agree between `edge` from byte `at` and `hashes` from byte `start`."""
    cdef Py_ssize_t here = PyBytes_GET_SIZE(edge) - at
    cdef Py_ssize_t there = PyBytes_GET_SIZE(hashes) - start
    cdef Py_ssize_t most = (here if here < there else there) // HASH
    if at < 0 or start < 0:
        raise ValueError("positions count from the beginning")
    cdef const uint8_t *one = <const uint8_t *>PyBytes_AS_STRING(edge) + at
    cdef const uint8_t *other = <const uint8_t *>PyBytes_AS_STRING(hashes) + start
    cdef Py_ssize_t i = 0
    while i < most and read64(one + i * HASH) == read64(other + i * HASH):
        i += 1
    return i
