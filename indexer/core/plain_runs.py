"""The plain twin of `common_blocks`: same name, same numbers, no compiler needed."""

from __future__ import annotations

from indexer.types import HASH_BYTES


def common_blocks(edge: bytes, at: int, hashes: bytes, start: int) -> int:
    """Return how many blocks agree between `edge` from byte `at` and `hashes` from byte `start`.

    One comparison if all agree, otherwise a bisection: O(log n) comparisons of slices.
    """
    low, high = 0, min(len(edge) - at, len(hashes) - start) // HASH_BYTES
    count = high
    while low < high:
        begin, end = low * HASH_BYTES, count * HASH_BYTES
        if hashes.startswith(edge[at + begin : at + end], start + begin):
            low = count
        else:
            high = count - 1
        count = (low + high + 1) // 2
    return low
