"""Selects the header lines that are the same in every request of a client, and reads the length.

Only a dozen header lines affect how a request is answered, and a client repeats them unchanged:
`connection.py` remembers what its parser found in them. All others (tracing, proxies, cookies,
idempotency keys) may differ in every request and are left out; so is the length of the body, which
is read anew each time.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import WeakValueDictionary

from typing_extensions import override

from select_service.edge.http.framing import is_host

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    from select_service.edge.http.calls import Head

KEPT: Final = frozenset(
    (
        b"host",
        b"content-type",
        b"accept",
        b"content-encoding",
        b"expect",
        b"connection",
        b"proxy-connection",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
"""Names of the lines that decide how a request is read, by us or by the parser, and answered."""

GUARDED: Final = KEPT | {b"authorization"}
"""The same if tokens are required."""

LENGTH_DIGITS_MAX: Final = 12
"""Of a Content-Length: a terabyte. The parser judges longer ones."""

_LENGTH_NAME: Final = b"content-length"
_LENGTH: Final = re.compile(
    rb"\r\n%b:[ \t]*+([0-9]{1,%d})[ \t]*+(?=\r\n|\Z)" % (_LENGTH_NAME, LENGTH_DIGITS_MAX),
    re.IGNORECASE,
)


class HeaderCache:
    """Reads the lines of heads.

    Attributes:
        names: of the lines that are kept, in lower case.
    """

    __slots__ = ("_left_out", "names")

    def __init__(self, names: frozenset[bytes]) -> None:
        self.names = names
        self._left_out = _left_out(names)

    def read(self, lines: bytes) -> tuple[bytes, int]:
        """Filter the lines of a head, each after its line break.

        Returns:
            The lines that are kept, and the length that was among them, or 0. Linear. Anything odd
            is kept, so that the head is not found in memory and the parser reports what is wrong.
        """
        kept = self._left_out(b"", lines)
        length = _LENGTH.search(kept)
        if length is None:
            return kept, 0
        return kept[: length.start()] + kept[length.end() :], int(length[1])


@lru_cache
def _left_out(names: frozenset[bytes]) -> Callable[[bytes, bytes], bytes]:
    """Return a function that replaces the lines that are not kept.

    The pattern never backtracks (`*+`): a line of blanks would hold the loop for most of a second.
    """
    kept = rb"|".join(sorted({*names, _LENGTH_NAME}))
    line = rb"\r\n(?!(?:%b):)[A-Za-z0-9_-]++:[\t -~]*+(?=\r\n|\Z)" % kept
    return re.compile(line, re.IGNORECASE).sub


HEADS_MAX: Final = 1024
"""Heads remembered across all connections; when full, all are dropped."""

PEERS_MAX: Final = 64
"""Clients with a certificate that have a memory of their own; more are not remembered."""

LINES_MAX: Final = 256
"""Whole heads remembered as received."""

HEAD_BYTES_MAX: Final = 1024
"""The longest head remembered, counting only the lines that are kept."""


class Heads:
    """Heads parsed before, by the bytes of their lines: some two megabytes at most.

    Stored only if the parser read every line as one header, so that there is no other reading.
    """

    __slots__ = ("__weakref__", "known", "read")

    def __init__(self) -> None:
        self.known: dict[bytes, Head] = {}  # by the kept lines
        self.read: dict[bytes, tuple[Head, int]] = {}
        """By all lines of a head, no more than allowed: its meaning, and the length of its body. A
        request that differs only in the path need not be read again."""

    def forget(self) -> None:
        """Forget everything: the permissions of tokens have changed."""
        self.known.clear()
        self.read.clear()

    def learn(self, lines: bytes, head: Head) -> None:
        """Store what the parser found in the kept lines of a plain request."""
        if len(lines) > HEAD_BYTES_MAX:
            return
        if len(self.known) >= HEADS_MAX:
            self.forget()
        self.known[lines] = head

    def note(self, lines: bytes, head: Head, length: int) -> None:
        """Store the meaning of all lines of an HTTP/1.1 head."""
        if len(lines) > HEAD_BYTES_MAX:
            return
        if len(self.read) >= LINES_MAX:
            self.read.clear()
        self.read[lines] = head, length


class _Oblivion(Heads):
    """Remembers nothing."""

    __slots__ = ()

    @override
    def learn(self, lines: bytes, head: Head) -> None:
        """Do nothing."""

    @override
    def note(self, lines: bytes, head: Head, length: int) -> None:
        """Do nothing."""


class Peers:
    """The memories of clients with certificates, separate for each."""

    def __init__(self) -> None:
        # Weak: lives as long as a connection uses it, so that `forget` reaches all in use.
        self._heads: WeakValueDictionary[tuple[str, ...], Heads] = WeakValueDictionary()

    def heads_of(self, names: tuple[str, ...]) -> Heads:
        """Return the memory of one client."""
        heads = self._heads.get(names)
        if heads is None:
            if len(self._heads) >= PEERS_MAX:
                return _Oblivion()
            heads = self._heads[names] = Heads()
        return heads

    def forget(self) -> None:
        """Forget everything."""
        for heads in list(self._heads.values()):
            heads.forget()


# Extracts what matters from the header lines of a plain request, in one pass. Requests that are not
# plain become exchanges, and are refused there if necessary.

_UNUSUAL: Final = frozenset((b"content-encoding", b"expect", b"upgrade"))


class PlainFields(NamedTuple):
    """What matters of a head; repeated list headers are joined."""

    content_type: bytes | None
    accept: bytes | None
    credentials: bytes | None
    length: int  # of the body, in bytes; 1 if it is chunked, as it is unknown
    is_chunked: bool
    kept: int  # lines whose names are among those remembered


def credentials_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the Authorization headers, joined by commas; None: there is none.

    Args:
        headers: names in lower case, and values.
    """
    shown = [value for name, value in headers if name == b"authorization"]
    return b",".join(shown) if shown else None


def plain_fields(  # noqa: C901, PLR0912 - one pass, one branch per name
    headers: Iterable[tuple[bytes, bytes]], names: Container[bytes], *, is_old: bool
) -> PlainFields | None:
    """Return the fields of a head; None if the request is not plain.

    Args:
        headers: names in lower case, and values.
        names: of the lines that are remembered.
        is_old: the request is HTTP/1.0.
    """
    content_type: bytes | None = None
    accept: bytes | None = None
    credentials: bytes | None = None
    host: bytes | None = None
    length, kept, is_chunked = 0, 0, False
    for name, value in headers:
        kept += name in names
        if name == b"content-type":
            content_type = value
        elif name == b"accept":
            accept = value if accept is None else accept + b"," + value
        elif name == b"content-length":
            if len(value) > LENGTH_DIGITS_MAX:
                return None
            length = int(value)
        elif name == b"authorization":
            credentials = value if credentials is None else credentials + b"," + value
        elif name == b"host":
            if host is not None:
                return None
            host = value
        elif name == b"transfer-encoding":
            is_chunked = True
            if is_old or value.strip().lower() != b"chunked":
                return None
        elif name in _UNUSUAL:
            return None
    if not is_host(host or b"") or (host is None and not is_old):
        return None
    return PlainFields(
        content_type, accept, credentials, 1 if is_chunked else length, is_chunked, kept
    )
