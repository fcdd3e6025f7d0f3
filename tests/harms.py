"""What a disk, an editor or a copy does to a file while nobody has it open: one change each."""

from collections.abc import Callable
from typing import Final, TypeAlias

__all__ = ["HARMS", "Harm", "cut", "flipped", "with_a_copy", "with_one_more", "without"]

Harm: TypeAlias = Callable[[bytes, int], bytes]


def cut(data: bytes, at: int) -> bytes:
    """End the data here."""
    return data[:at]


def without(data: bytes, at: int) -> bytes:
    """Remove the byte here."""
    return data[:at] + data[at + 1 :]


def with_one_more(data: bytes, at: int) -> bytes:
    """Insert a byte here."""
    return data[:at] + b"\x5a" + data[at:]


def with_a_copy(data: bytes, at: int) -> bytes:
    """Double the byte here."""
    return data[:at] + data[at : at + 1] + data[at:]


def flipped(data: bytes, at: int) -> bytes:
    """Flip one bit here; in every eighth place it makes another digit of a digit."""
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


HARMS: Final[list[Harm]] = [cut, without, with_one_more, with_a_copy, flipped]
