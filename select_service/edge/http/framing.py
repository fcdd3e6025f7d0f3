"""Checks of framing that the HTTP parser omits: version, Host, transfer coding.

`connection.py` has every head judged here that is not plain, `header_cache.py` checks Host lines.
"""

from __future__ import annotations

import re
from typing import Final

import httptools

CHUNKED: Final = -1
"""The length of a body that comes in chunks."""

_VERSIONS: Final = frozenset({"1.0", "1.1"})

_HOST: Final = re.compile(
    rb"[ \t]*"
    rb"(?:\[[0-9A-Za-z:.%_~-]+\]|(?:[0-9A-Za-z._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?"
    rb"[ \t]*"
)
"""A Host header (RFC 3986, 3.2.2 and 3.2.3): an address in brackets or a possibly empty name, and
an optional port."""


def is_host(value: bytes) -> bool:
    """Return whether this is a valid value of a Host header."""
    return _HOST.fullmatch(value) is not None


def judge_framing(version: str, headers: list[tuple[bytes, bytes]]) -> None:
    """Refuse framing that another server, or a proxy before us, may read differently.

    Args:
        version: of HTTP.
        headers: names in lower case, and values.

    Raises:
        httptools.HttpParserError: with the reason.
    """
    if version not in _VERSIONS:
        raise httptools.HttpParserError(f"HTTP/{version} is not understood")
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if not is_host(value):
                raise httptools.HttpParserError("no valid Host")
        if name != b"transfer-encoding":
            continue
        if value.strip().lower() != b"chunked":
            raise httptools.HttpParserError("a transfer-encoding other than chunked")
        if version != "1.1":
            raise httptools.HttpParserError("chunks are not for HTTP/1.0")
    if hosts > 1:  # RFC 9112, 3.2
        raise httptools.HttpParserError("more than one Host")
    if not hosts and version == "1.1":
        raise httptools.HttpParserError("no Host")


def body_length(headers: list[tuple[bytes, bytes]]) -> int:
    """Return the length of a body in bytes, or CHUNKED.

    Args:
        headers: names in lower case, and values, which the parser has accepted.
    """
    for name, value in headers:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return CHUNKED
    return 0


def as_plain(
    method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]], rest: bytes
) -> bytes:
    """Rewrite a request that offers a protocol upgrade as plain HTTP/1.1, which is what it gets.

    The parser would take the body for the other protocol. Java's client offers h2c with every first
    request.

    Args:
        method: of the request.
        url: likewise.
        version: likewise.
        headers: likewise.
        rest: what followed the head.

    Raises:
        httptools.HttpParserError: it wants a tunnel.
    """
    if method == b"CONNECT":
        raise httptools.HttpParserError("this is no proxy")
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    lines += [
        b"%s: %s" % (name, value)
        for name, value in headers
        if name not in (b"upgrade", b"connection", b"http2-settings")
    ]
    return b"\r\n".join([*lines, b"", rest])
