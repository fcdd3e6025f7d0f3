"""The plain twin of `common_blocks`: same name, same numbers, no compiler needed."""

from __future__ import annotations

from typing import Final

from indexer.types import HASH_BYTES

_FEW: Final = 16
"""So many blocks are cheaper told apart as two numbers than by halving on."""

_HASH_BITS: Final = 8 * HASH_BYTES


def common_blocks(edge: bytes, at: int, hashes: bytes, start: int) -> int:
    """Return how many blocks agree from byte `at` of `edge` and byte `start` of `hashes` on.

    One comparison when all agree, else a bisection: O(log n) comparisons of slices.
    """
    low, high = 0, min(len(edge) - at, len(hashes) - start) // HASH_BYTES
    if hashes.startswith(edge[at : at + high * HASH_BYTES], start):
        return high
    while high - low > _FEW:
        middle = (low + high) // 2
        offset = low * HASH_BYTES
        if hashes.startswith(edge[at + offset : at + middle * HASH_BYTES], start + offset):
            low = middle
        else:
            high = middle
    first, last = low * HASH_BYTES, high * HASH_BYTES
    differ = int.from_bytes(edge[at + first : at + last], "little")
    differ ^= int.from_bytes(hashes[start + first : start + last], "little")
    return low + ((differ & -differ).bit_length() - 1) // _HASH_BITS
