"""Follows the bytes of request heads: where each ends, its length, and its request line.

The parser reports no positions, and accepts request lines that others read differently: a lone line
feed or carriage return before one, several spaces in one, other protocols' names. `connection.py`
passes it what this has measured.
"""

from __future__ import annotations

import re
from typing import Final

_REQUEST_LINE: Final = re.compile(
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ [!-~]+ HTTP/[0-9]\.[0-9]\r\n"  # RFC 9112, 3; and a fragment
)
_BLANK_LINES: Final = re.compile(rb"(?:\r\n)*")  # before a request line: RFC 9112, 2.2
_END: Final = b"\r\n\r\n"


class HeadReader:
    """One connection's heads, one after the other.

    Attributes:
        size: bytes of the current head that have been read; blank lines before it do not count.
        is_wrong: its request line is not one.
    """

    __slots__ = ("_line", "_tail", "is_wrong", "size")

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        self.is_wrong = False
        self._line = b""  # as far as it has been read
        self._tail = b""  # of what has been read behind it, up to three bytes

    def read(self, data: bytes, at: int) -> tuple[int, bool]:
        """Read on.

        Args:
            data: as received.
            at: position from which it belongs to a head.

        Returns:
            Position up to which it does, and whether the head ends there. The head after that
            begins with the next call.
        """
        if not self._tail:
            held = self._line
            line, first, shift = (held + data[at:], 0, at - len(held)) if held else (data, at, 0)
            if data.find(b"\n", at) < 0:  # nothing to judge yet
                self._line = line[first:]
                self.size = len(self._line)
                return len(data), False
            begin = _match_end(_BLANK_LINES, line, first)
            end = _match_end(_REQUEST_LINE, line, begin)
            if not end:
                end = line.find(b"\n", begin) + 1
                self.is_wrong = bool(end)
                end = end or len(line)
                self._line = line[begin:end]
                self.size = end - begin
                return end + shift, False
            self.size, self._line, self._tail = end - begin, b"", b"\r\n"
            at = end + shift
        return self._lines(data, at)

    def _lines(self, data: bytes, at: int) -> tuple[int, bool]:
        tail = self._tail
        end = (tail + data[at : at + 3]).find(_END)
        if end >= 0:
            stop = at + end + len(_END) - len(tail)
        else:
            end = data.find(_END, at)
            stop = end + len(_END) if end >= 0 else len(data)
        self.size += stop - at
        self._tail = (tail + data[max(at, stop - 3) : stop])[-3:]
        return stop, end >= 0

    def next(self) -> None:
        """Begin with another head."""
        self._begin()


def _match_end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    """Return the end of a match that begins here; 0: there is none."""
    found = pattern.match(text, at)
    return 0 if found is None else found.end()
