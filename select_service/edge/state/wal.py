"""Reads SQLite's write-ahead log independently: did SQLite take everything committed?

SQLite follows the log to the first frame whose checksum is wrong and ignores the rest. That is
right for an unfinished tail, but a silent loss if a byte in the middle has flipped. File format:
sqlite.org/fileformat2.html, section 4.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.edge.plain_file import open_own

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Log", "frames_taken", "inspect"]

HEADER: Final = struct.Struct(">8I")  # magic, version, page size, number, salts, checksums
FRAME: Final = struct.Struct(">6I")  # page, pages after a commit or 0, salts, checksums
_MAGIC: Final = (0x377F0682, 0x377F0683)  # checksums over little- and big-endian words
_U32: Final = (1 << 32) - 1


class Log(NamedTuple):
    """The log as found, before SQLite opened it."""

    is_there: bool = False
    header_is_sound: bool = True
    commits_at: int = 0  # last frame that ends a transaction and has the header's salts

    def damage(self, frames_taken: int) -> list[str]:
        """Return what is wrong, given how many frames SQLite took."""
        if not self.is_there:
            return []
        if not self.header_is_sound:
            return ["the head of the log is damaged: what was in it is lost"]
        if self.commits_at > frames_taken:
            return [
                f"the log is damaged behind frame {frames_taken} of {self.commits_at}: "
                "later transactions are lost"
            ]
        return []


def inspect(path: Path) -> Log:
    """Read the headers of all frames; a missing or empty log is sound.

    An incomplete last frame found no room on the disk, and its writer got an error.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    try:
        file = os.fdopen(open_own(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return Log()
    with file:
        head = file.read(HEADER.size)
        if not head:
            return Log()
        if len(head) < HEADER.size or not _is_sound(head):
            return Log(is_there=True, header_is_sound=False)
        _, _, page_size, _, *salts, _, _ = HEADER.unpack(head)
        size = page_size or 1 << 16
        whole = (os.fstat(file.fileno()).st_size - HEADER.size) // (FRAME.size + size)
        commits_at = 0
        for number in range(1, whole + 1):
            frame = file.read(FRAME.size)
            _, commits, *frame_salts, _, _ = FRAME.unpack(frame)
            if commits and frame_salts == salts:
                commits_at = number
            file.seek(size, 1)
    return Log(is_there=True, commits_at=commits_at)


def frames_taken(path: Path) -> int:
    """Return how many frames SQLite would take; asking SQLite itself would write to the file.

    Those are all up to the last that ends a transaction, before the first with a wrong checksum;
    checksums are cumulative. Some 0.2 ms per frame.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    try:
        file = os.fdopen(open_own(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return 0
    with file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not _is_sound(head):
            return 0
        _, _, page_size, _, *salts, first, second = HEADER.unpack(head)
        size, order = page_size or 1 << 16, _order(head)
        taken = number = 0
        while len(frame := file.read(FRAME.size + size)) == FRAME.size + size:
            page, commits, *frame_salts, _, _ = FRAME.unpack_from(frame)
            sums = _sums(order, frame[:8] + frame[FRAME.size :], (first, second))
            if not page or frame_salts != salts or sums != FRAME.unpack_from(frame)[-2:]:
                break
            first, second = sums
            number += 1
            if commits:
                taken = number
    return taken


def _is_sound(head: bytes) -> bool:
    if int.from_bytes(head[:4], "big") not in _MAGIC:
        return False
    return _sums(_order(head), head[:24], (0, 0)) == struct.unpack(">2I", head[24:])


def _order(head: bytes) -> str:
    return "<" if int.from_bytes(head[:4], "big") == _MAGIC[0] else ">"


def _sums(order: str, data: bytes, sums: tuple[int, int]) -> tuple[int, int]:
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & _U32
        second = (second + other + first) & _U32
    return first, second
