"""The plain twin of `common_blocks`: same name, same numbers, no compiler needed."""

from __future__ import annotations

from indexer.core.packing import numbers_in


def common_blocks(edge: bytes, at: int, hashes: bytes, start: int) -> int:
    """Return how many blocks agree between `edge` from byte `at` and `hashes` from byte `start`."""
    one = numbers_in(edge[at:])
    other = numbers_in(hashes[start : start + len(edge) - at])
    if one == other:
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((number for number, (a, b) in pairs if a != b), min(len(one), len(other)))
