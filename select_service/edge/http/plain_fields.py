"""Extracts what matters from the header lines of a plain request, in one pass.

Used by `connection.py` when a client's lines are new; `header_cache.py` remembers the
result. Requests that are not plain become exchanges, and are refused there if necessary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.edge.http.framing import is_host
from select_service.edge.http.header_cache import LENGTH_DIGITS_MAX

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

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
