"""The beginning of answers: status line, default headers, own headers.

Nearly all answers begin alike, so the text is built once and cached; `connection.py` appends the
length and the body, `exchange.py` writes other heads with the same lines.
"""

from __future__ import annotations

from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from select_service.edge.codec.responses import ONLY_JSON

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.edge.codec.responses import Response

CLOSE_LINE: Final = b"connection: close\r\n"
_OK: Final = 200
_FORMS_MAX: Final = 8
_STATUSES_MAX: Final = 64
_LENGTHS_MAX: Final = 1024  # most answers have one of few lengths


class ResponseHead:
    """Cached beginnings of answers; uvicorn replaces its list of default headers every second."""

    __slots__ = ("_others", "headers", "lines", "ok")

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []  # uvicorn's, as last followed
        self._others: dict[tuple[tuple[bytes, bytes], ...], bytes] = {}
        self.lines = b""  # uvicorn's default headers as text
        self.ok = b""  # a JSON answer with status 200, up to its length

    def follow(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Use these default headers of uvicorn from now on."""
        if headers is not self.headers:
            self.headers, self.lines = headers, header_lines(headers)
            self._others.clear()
            self.ok = self.of(ONLY_JSON)

    def of(self, headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
        """Return the head of an answer with status 200 and these headers, up to its length."""
        found = self._others.get(headers)
        if found is None:
            found = status_line(_OK) + self.lines + header_lines(headers) + b"content-length: "
            if len(self._others) < _FORMS_MAX:  # a Warning may be as long as a client likes
                self._others[headers] = found
        return found

    def whole(self, answer: Response, *, is_last: bool) -> bytes:
        """Return the head of any answer with a body, and its length."""
        own = header_lines(answer.headers)
        if is_last and CLOSE_LINE not in self.lines:
            own += CLOSE_LINE
        head = status_line(answer.status) + self.lines + own
        return b"%bcontent-length: %d\r\n\r\n" % (head, len(answer.body))


@lru_cache(_LENGTHS_MAX)
def length_line(length: int) -> bytes:
    """Return the end of a head whose last line is the length of the body."""
    return b"%d\r\n\r\n" % length


@lru_cache(_STATUSES_MAX)
def status_line(status: int) -> bytes:
    """Return the status line of an answer; statuses of our own have no phrase."""
    try:
        phrase = HTTPStatus(status).phrase.encode()
    except ValueError:
        phrase = b""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase)


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Format headers, one per line."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])
