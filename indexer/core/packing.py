"""Numbers to bytes and back: tokens of 4 and hashes of 8 bytes each, little-endian.

The form in which prompts travel and are kept. Knows nothing of hashing, and needs nothing for it.
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

__all__ = [
    "TOKEN_BYTES",
    "is_packed",
    "numbers_in",
    "pack_backwards",
    "pack_names",
    "pack_tokens",
    "pack_u64",
    "unpack_i64",
    "unpack_native",
    "unpack_tokens",
    "unpack_u32",
    "unpack_u64",
]

TOKEN_BYTES: Final = 4
_I64_MIN: Final = -(1 << 63)
_GLANCE: Final = 8  # values that tell whether some are negative, as half of all signed ones are
_FITS: Final = struct.calcsize("n") == HASH_BYTES and sys.byteorder == "little"
_SIGNED, _UNSIGNED = ("%dn", "%dN") if _FITS else ("<%dq", "<%dQ")
"""So many hashes. `struct` packs what C calls a size in half the time of 64 bits."""
_NATIVE: Final = "%dN" if _FITS else "=%dQ"
_LENGTHS_MAX: Final = 4096  # of prompts, in blocks, whose form is kept ready
_SWAP: Final = sys.byteorder == "big"  # `array` packs in the order of the machine
_TOKENS: Final = frozenset(one for one in "IL" if struct.calcsize(one) == TOKEN_BYTES)
_HASHES: Final = frozenset(one for one in "lLqQnN" if struct.calcsize(one) == HASH_BYTES)
"""Formats of numbers that are packed as they lie in memory."""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Pack token ids as unsigned 32-bit numbers, little-endian.

    Those of an array of such numbers (`array`, numpy) are copied as they lie there.

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
    """Whether these are tokens of 32 bits in the memory's own order, which is the packed one."""
    return isinstance(token_ids, memoryview) and token_ids.format == "I" and not _SWAP


def pack_u64(values: Sequence[int]) -> PackedHashes:
    """Pack hashes written as signed or unsigned 64-bit numbers; both spellings give the same bytes.

    Those of an array of such numbers (`array`, numpy) are copied as they lie there.

    Raises:
        ValueError: A value is not an integer in [-2^63, 2^64).
    """
    if type(values) is not list and (packed := _as_they_lie(values, _HASHES)) is not None:
        return packed
    # all unsigned or all signed in one C call; a wrong guess stops at its first misfit, soon.
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


def pack_names(names: Sequence[int]) -> PackedHashes:
    """Pack unsigned 64-bit numbers; what is packed in memory already is copied as it lies."""
    if isinstance(names, array | memoryview) and not _SWAP:
        return names.tobytes()
    return struct.pack(f"<{len(names)}Q", *names)


def pack_backwards(names: Sequence[int]) -> PackedHashes:
    """Pack unsigned 64-bit numbers, the last one first."""
    if isinstance(names, array | memoryview) and not _SWAP:
        return names[::-1].tobytes()
    return struct.pack(f"<{len(names)}Q", *reversed(names))


def numbers_in(packed: PackedHashes) -> array[int]:
    """The hashes as unsigned numbers, an array of them: no object each until it is asked for."""
    numbers = array("Q")
    numbers.frombytes(packed)
    if _SWAP:
        numbers.byteswap()
    return numbers


def _as_they_lie(values: object, formats: frozenset[str]) -> bytes | None:
    """Return the bytes of an array of numbers in one of these formats; None: it is none."""
    try:
        view = memoryview(values)  # type: ignore[arg-type] # that is the question
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
    """The hashes as unsigned numbers."""
    return list(struct.unpack(f"<{len(packed) // HASH_BYTES}Q", packed))


def unpack_native(packed: PackedHashes) -> tuple[int, ...]:
    """The hashes as unsigned numbers in the machine's byte order: they can be told apart."""
    return _form(_NATIVE, len(packed) // HASH_BYTES).unpack(packed)


def unpack_i64(packed: PackedHashes) -> list[int]:
    """The hashes as signed numbers, the way the HTTP API prints them."""
    return list(struct.unpack(f"<{len(packed) // HASH_BYTES}q", packed))


def unpack_u32(packed: bytes) -> list[int]:
    """The tokens as numbers."""
    return list(struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed))
