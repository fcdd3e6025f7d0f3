"""Numbers to bytes and back: tokens of 4 and hashes of 8 bytes each, little-endian.

This is the form in which prompts travel and are kept. It knows nothing of hashing; `hashing` and
the client build on it.
"""

from __future__ import annotations

import struct
import sys
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from indexer.types import HASH_BYTES, U64_MASK, PackedHashes

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKEN_BYTES: Final = 4
_I64_MIN: Final = -(1 << 63)
_GLANCE: Final = 8  # values inspected to guess the sign: half of all signed hashes are negative
_FITS: Final = struct.calcsize("n") == HASH_BYTES and sys.byteorder == "little"
_SIGNED, _UNSIGNED = ("%dn", "%dN") if _FITS else ("<%dq", "<%dQ")
"""Formats of a number of hashes. `struct` packs C's size type in half the time of 64-bit ints."""
_NATIVE: Final = "%dN" if _FITS else "=%dQ"
_LENGTHS_MAX: Final = 4096  # prompt lengths, in blocks, whose compiled format is cached
_SWAP: Final = sys.byteorder == "big"  # `array` packs in the machine's byte order
_TOKENS: Final = frozenset(one for one in "IL" if struct.calcsize(one) == TOKEN_BYTES)
_HASHES: Final = frozenset(one for one in "lLqQnN" if struct.calcsize(one) == HASH_BYTES)
"""Buffer formats that can be copied from memory as they are."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as unsigned 32-bit numbers, little-endian.

    An array of such numbers (`array`, numpy) is copied from memory as it is.

    Raises:
        ValueError: one is not such a number.
    """
    if type(token_ids) is not list and (packed := _as_they_lie(token_ids, _TOKENS)) is not None:
        return packed
    try:
        return _form("<%dI", len(token_ids)).pack(*token_ids)
    except (struct.error, TypeError) as error:
        msg = f"token ids must be unsigned 32-bit integers: {error}"
        raise ValueError(msg) from None


def is_packed(token_ids: object) -> bool:
    """Whether these are 32-bit tokens in the machine's byte order, and that is the packed order."""
    return isinstance(token_ids, memoryview) and token_ids.format == "I" and not _SWAP


def pack_u64(values: Sequence[int]) -> PackedHashes:
    """Pack hashes given as signed or unsigned 64-bit numbers; both give the same bytes.

    An array of such numbers (`array`, numpy) is copied from memory as it is.

    Raises:
        ValueError: a value is not an integer in [-2^63, 2^64).
    """
    if type(values) is not list and (packed := _as_they_lie(values, _HASHES)) is not None:
        return packed
    # all unsigned or all signed in one C call; a wrong guess fails early, at the first misfit
    count = len(values)
    try:
        likely, other = _UNSIGNED, _SIGNED
        if count and min(values[:_GLANCE]) < 0:
            likely, other = other, likely
        try:
            return _form(likely, count).pack(*values)
        except (struct.error, OverflowError):
            return _form(other, count).pack(*values)
    except (struct.error, OverflowError, TypeError):
        pass
    if not all(isinstance(value, int) for value in values):
        msg = "a hash must be an integer"
        raise ValueError(msg)
    if min(values) < _I64_MIN or max(values) > U64_MASK:
        msg = "hash does not fit 64 bits"
        raise ValueError(msg)
    return struct.pack(f"<{count}Q", *[value & U64_MASK for value in values])


pack_name: Final = struct.Struct("<Q").pack
"""Pack an unsigned 64-bit number."""


def pack_names(names: Sequence[int]) -> PackedHashes:
    """Pack unsigned 64-bit numbers; an array or view is copied from memory as it is."""
    if isinstance(names, array | memoryview) and not _SWAP:
        return names.tobytes()
    return struct.pack(f"<{len(names)}Q", *names)


def numbers_in(packed: PackedHashes) -> array[int]:
    """Return the hashes as an array of unsigned numbers, which creates no object per hash."""
    numbers = array("Q")
    numbers.frombytes(packed)
    if _SWAP:
        numbers.byteswap()
    return numbers


def _as_they_lie(values: object, formats: frozenset[str]) -> bytes | None:
    """Return the bytes of an array of numbers in one of these formats; None if it is not one."""
    try:
        view = memoryview(values)  # type: ignore[arg-type] # tested by trying
    except (TypeError, ValueError, BufferError):
        return None
    return view.tobytes() if view.format in formats and view.ndim == 1 and not _SWAP else None


@lru_cache(_LENGTHS_MAX)
def _form(form: str, count: int) -> struct.Struct:
    return struct.Struct(form % count)


def unpack_tokens(packed: bytes) -> list[int]:
    """Return packed token ids as unsigned 32-bit integers."""
    return list(_form("<%dI", len(packed) // TOKEN_BYTES).unpack(packed))


def unpack_u64(packed: PackedHashes) -> list[int]:
    """Return the hashes as unsigned numbers."""
    return list(struct.unpack(f"<{len(packed) // HASH_BYTES}Q", packed))


def unpack_native(packed: PackedHashes) -> tuple[int, ...]:
    """Return the hashes in the machine's byte order: enough to tell them apart."""
    return _form(_NATIVE, len(packed) // HASH_BYTES).unpack(packed)


def unpack_i64(packed: PackedHashes) -> list[int]:
    """Return the hashes as signed numbers, the way the HTTP API prints them."""
    return list(struct.unpack(f"<{len(packed) // HASH_BYTES}q", packed))
