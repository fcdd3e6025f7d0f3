"""How answers begin that are written without uvicorn: status line, its lines, the headers' own.

Every answer has a head and nearly all have the same one, so it is put together once and kept; the
fast lane and its kernel write the length and the body behind it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from select_service.edge.codec.answers import ONLY_JSON

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["CLOSE_LINE", "Preamble", "header_lines", "length_line", "status_line"]

CLOSE_LINE: Final = b"connection: close\r\n"
_OK: Final = 200
_FORMS_MAX: Final = 8
_LENGTHS_MAX: Final = 1024  # of answers that are written once


class Preamble:
    """The beginning of every answer; uvicorn makes a new list of its own lines every second."""

    __slots__ = ("_others", "headers", "lines", "ok")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []  # uvicorn's, as they were followed last
        self._others: dict[tuple[tuple[bytes, bytes], ...], bytes] = {}
        self.lines = b""  # those of uvicorn
        self.ok = b""  # all but the length, of an answer 200 in JSON

    def follow(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin with these lines of uvicorn's from now on."""
        if headers is not self.headers:
            self.headers, self.lines = headers, header_lines(headers)
            self._others.clear()
            self.ok = self.of(ONLY_JSON)

    def start(self, status: int, is_last: bool) -> bytes:  # noqa: FBT001 - for the kernel
        """Return all but the length of the head of an answer in JSON, as `write_answer` writes."""
        lines = self.lines + header_lines(ONLY_JSON)
        if is_last and CLOSE_LINE not in self.lines:
            lines += CLOSE_LINE
        return status_line(status) + lines + b"content-length: "

    def of(self, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        """Return all but the length of an answer 200 with these headers."""
        found = self._others.get(headers)
        if found is None:
            found = status_line(_OK) + self.lines + header_lines(headers) + b"content-length: "
            if len(self._others) < _FORMS_MAX:  # a Warning may be as long as a client likes
                self._others[headers] = found
        return found


@lru_cache(_LENGTHS_MAX)
def length_line(length: int) -> bytes:
    """Return how a head ends whose last line is the length of a body."""
    return b"%d\r\n\r\n" % length


def status_line(status: int) -> bytes:
    """Return the first line of an answer; uvicorn has none for statuses beyond 599."""
    return STATUS_LINE.get(status) or b"HTTP/1.1 %d \r\n" % status


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return headers as they are written, a line each."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])
