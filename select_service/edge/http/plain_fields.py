"""What the header lines of a plain request say, in one pass over what the parser has found.

For the fast lane (`fast_lane.py`), the first time a client says them; `head_memory.py` keeps what
they were found to mean. What is not plain goes the ASGI way, and is refused there if need be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.edge.http.framing import is_host
from select_service.edge.http.steady import LENGTH_DIGITS_MAX

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

__all__ = ["PlainFields", "plain_fields"]

_UNUSUAL: Final = frozenset((b"content-encoding", b"expect", b"upgrade"))


class PlainFields(NamedTuple):
    """What matters of a head; several lines of one list are one."""

    content_type: bytes | None
    accept: bytes | None
    credentials: bytes | None
    length: int  # of the body, in bytes; at least one, for all that is said, if it is in chunks
    is_chunked: bool
    kept: int  # lines that have a name of those that are remembered


def plain_fields(  # noqa: C901, PLR0912 - one pass, a branch a name
    headers: Iterable[tuple[bytes, bytes]], names: Container[bytes], *, is_old: bool
) -> PlainFields | None:
    """Return what lines say; None: they are not of a plain request.

    Args:
        headers: names in lower case, and values.
        names: of the lines that are remembered.
        is_old: the request is of HTTP/1.0.
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
