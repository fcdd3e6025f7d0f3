"""Reads SQLite's write-ahead log independently: did SQLite take everything committed?

SQLite follows the log to the first frame whose checksum is wrong and ignores the rest. That is
right for an unfinished tail, but a silent loss if a byte in the middle has flipped, or was cut out.
File format: sqlite.org/fileformat2.html, section 4.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.plain_file import open_own

if TYPE_CHECKING:
    from pathlib import Path

HEADER: Final = struct.Struct(">8I")  # magic, version, page size, number, salts, checksums
FRAME: Final = struct.Struct(">6I")  # page, pages after a commit or 0, salts, checksums
_MAGIC: Final = (0x377F0682, 0x377F0683)  # checksums over little- and big-endian words
_SALTS: Final = slice(16, 24)  # within the header
_SALTS_IN_FRAME: Final = 8
_U32: Final = (1 << 32) - 1


class Log(NamedTuple):
    """The log as found, before SQLite opened it."""

    is_there: bool = False
    header_is_sound: bool = True
    commits: tuple[int, ...] = ()  # frames that end a transaction and have the header's salts
    strays_end: int = 0  # position behind the last salts that are not where frames have theirs
    frame_size: int = 0  # bytes

    def damage(self, frames_taken: int, *, is_complete: bool = False) -> list[str]:
        """Return what is wrong.

        Args:
            frames_taken: how many frames SQLite took.
            is_complete: they are known to contain all that was acknowledged. One transaction more
                may have been begun: a killed process may have written the head of its last frame,
                and not the page.
        """
        if not self.is_there:
            return []
        if not self.header_is_sound:
            return ["the head of the log is damaged: what was in it is lost"]
        missed = [number for number in self.commits if number > frames_taken]
        if len(missed) > is_complete:
            return [
                f"the log is damaged behind frame {frames_taken} of {missed[-1]}: "
                "later transactions are lost"
            ]
        if self.strays_end > HEADER.size + frames_taken * self.frame_size:
            return [
                f"the log is damaged behind frame {frames_taken}: later frames are not in their "
                "places, their transactions are lost"
            ]
        return []


def inspect(path: Path) -> Log:
    """Read the headers of all frames; a missing or empty log is sound.

    An incomplete last frame found no room on the disk, and its writer got an error.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    data = _read(path)
    if not data:
        return Log()
    head = data[: HEADER.size]
    if len(head) < HEADER.size or not _is_sound(head):
        return Log(is_there=True, header_is_sound=False)
    _, _, page_size, _, *salts, _, _ = HEADER.unpack(head)
    frame_size = FRAME.size + (page_size or 1 << 16)
    commits = []
    for number in range(1, (len(data) - HEADER.size) // frame_size + 1):
        at = HEADER.size + (number - 1) * frame_size
        _, ends, *frame_salts, _, _ = FRAME.unpack_from(data, at)
        if ends and frame_salts == salts:
            commits.append(number)
    strays_end = _strays_end(data, head[_SALTS], frame_size)
    return Log(is_there=True, commits=tuple(commits), strays_end=strays_end, frame_size=frame_size)


def _strays_end(data: bytes, salts: bytes, frame_size: int) -> int:
    """Return the position behind the last salts outside of frame headers; 0: there are none."""
    at = len(data)
    while (at := data.rfind(salts, HEADER.size, at + len(salts) - 1)) >= 0:
        if (at - HEADER.size) % frame_size != _SALTS_IN_FRAME:
            return at + len(salts)
    return 0


def frames_taken(path: Path) -> int:
    """Return how many frames SQLite would take; asking SQLite itself would write to the file.

    Those are all up to the last that ends a transaction, before the first with a wrong checksum;
    checksums are cumulative. Some 0.2 ms per frame.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    data = _read(path)
    head = data[: HEADER.size]
    if len(head) < HEADER.size or not _is_sound(head):
        return 0
    _, _, page_size, _, *salts, first, second = HEADER.unpack(head)
    size, order = FRAME.size + (page_size or 1 << 16), _order(head)
    taken = 0
    for number in range(1, (len(data) - HEADER.size) // size + 1):
        end = HEADER.size + number * size
        frame = data[end - size : end]
        page, commits, *frame_salts, _, _ = FRAME.unpack_from(frame)
        sums = _sums(order, frame[:8] + frame[FRAME.size :], (first, second))
        if not page or frame_salts != salts or sums != FRAME.unpack_from(frame)[-2:]:
            break
        first, second = sums
        if commits:
            taken = number
    return taken


def _read(path: Path) -> bytes:
    """Return the log; nothing where there is none."""
    try:
        file = os.fdopen(open_own(path, os.O_RDONLY), "rb")
    except FileNotFoundError:
        return b""
    with file:
        return file.read()


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
