"""The plain twin of `common_blocks`: same name, same numbers, no compiler needed."""

from __future__ import annotations

from typing import Final

from indexer.types import HASH_BYTES

_FEW_BYTES: Final = 16 * HASH_BYTES
"""Below this size, comparing as two numbers is cheaper than bisecting further."""


def common_blocks(edge: bytes, at: int, hashes: bytes, start: int) -> int:
    """Return how many blocks agree between `edge` from byte `at` and `hashes` from byte `start`.

    One comparison if all agree, otherwise a bisection: O(log n) comparisons of slices.
    """
    low, high = 0, len(edge) - at
    if len(hashes) - start < high:  # noqa: PLR1730 - min() is slow
        high = len(hashes) - start
    high -= high % HASH_BYTES
    if hashes.startswith(edge[at : at + high], start):
        return high // HASH_BYTES
    while high - low > _FEW_BYTES:
        middle = (low + high) // (2 * HASH_BYTES) * HASH_BYTES
        if hashes.startswith(edge[at + low : at + middle], start + low):
            low = middle
        else:
            high = middle
    differ = int.from_bytes(edge[at + low : at + high], "big")
    differ ^= int.from_bytes(hashes[start + low : start + high], "big")
    return (high - (differ.bit_length() + 7) // 8) // HASH_BYTES
