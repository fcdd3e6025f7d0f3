"""Skipping MessagePack values, a bounded number at a time: the plain twin of `_wire.walk`.

`pieces` uses it to cut long messages for decoding. Only well-formedness is checked here; the
decoders judge whether the skipped values mean anything.
"""

from __future__ import annotations

from typing import Final

NESTING_MAX: Final = 1_000
"""Nesting depth; deeper values are refused, as the interpreter's stack does."""

_FIXED: Final = bytearray(256)  # size of a value by its first byte, if that byte determines it
_FIXED[0x00:0x80] = b"\x01" * 128  # small numbers
_FIXED[0xE0:] = b"\x01" * 32
_FIXED[0xA0:0xC0] = bytes(range(1, 33))  # short text
_FIXED[0xC0], _FIXED[0xC2], _FIXED[0xC3] = 1, 1, 1  # nil, false, true
_FIXED[0xCA:0xD4] = bytes([5, 9, 2, 3, 5, 9, 2, 3, 5, 9])  # floats, numbers
_FIXED[0xD4:0xD9] = bytes([3, 4, 6, 10, 18])  # extensions
_FIXED[0x80] = _FIXED[0x90] = 1  # empty map and array

_SIZED: Final = {  # first byte → (bytes of the length field, bytes besides that and the content)
    0xC4: (1, 2), 0xC5: (2, 3), 0xC6: (4, 5),  # bytes
    0xC7: (1, 3), 0xC8: (2, 4), 0xC9: (4, 6),  # extensions
    0xD9: (1, 2), 0xDA: (2, 3), 0xDB: (4, 5),  # text
}  # fmt: skip

_HEAD_COST: Final = 8
"""Cost of a container, in values."""

_TRUNCATED: Final = "truncated MessagePack"


def walk(payload: bytes, at: int, left: list[int], fuel: int) -> int:
    """Skip about `fuel` values from `at` on; return where the next one begins.

    Args:
        payload: The message.
        at: Where a value begins.
        left: How many values are still to be skipped at each level, the innermost last. Modified in
            place; empty once all are skipped.
        fuel: Upper bound on the values to skip now, at least 1; somewhat fewer may be skipped. A
            long text counts as one.

    Raises:
        ValueError: the payload is not MessagePack, or shorter than it claims.
    """
    fixed = _FIXED
    try:
        while left:
            todo = count = min(left[-1], fuel)
            while todo:
                size = fixed[payload[at]]
                if not size:
                    break
                at += size
                todo -= 1
            fuel -= count - todo
            left[-1] -= count - todo
            if todo:
                fuel = max(0, fuel - _HEAD_COST)
                left[-1] -= 1
                at = _head(payload, at, left)
            elif not left[-1]:
                left.pop()
            elif not fuel:
                break
    except IndexError:
        raise ValueError(_TRUNCATED) from None
    if at > len(payload):
        raise ValueError(_TRUNCATED)
    return at


def _head(payload: bytes, at: int, left: list[int]) -> int:
    """Skip a value whose length is not given by its first byte, or begin to."""
    sized = _SIZED.get(payload[at])
    if sized is not None:
        width, more = sized
        return at + more + int.from_bytes(payload[at + 1 : at + 1 + width], "big")
    count, inner, is_map = container(payload, at)
    if len(left) == NESTING_MAX:
        msg = f"nested deeper than {NESTING_MAX}"
        raise ValueError(msg)
    if count:
        left.append(count << is_map)
    return inner


def container(payload: bytes, at: int) -> tuple[int, int, bool]:
    """Return the number of elements or pairs, where the first one is, and whether it is a map.

    Raises:
        ValueError: the value is neither an array nor a map.
    """
    code = payload[at] if at < len(payload) else 0xC1
    if 0x80 <= code < 0xA0:
        return code & 0x0F, at + 1, code < 0x90
    if not 0xDC <= code <= 0xDF:
        msg = f"neither array nor map at byte {at}"
        raise ValueError(msg)
    width = 4 if code & 1 else 2
    if at + 1 + width > len(payload):
        raise ValueError(_TRUNCATED)
    return int.from_bytes(payload[at + 1 : at + 1 + width], "big"), at + 1 + width, code >= 0xDE
