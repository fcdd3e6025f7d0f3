"""Syntax of a ZMQ endpoint, and of an HTTP base URL; checked before either is used.

Only the syntax is checked here. `edge/sockets` finds out whether libzmq accepts the endpoint, and
only time tells whether anybody answers.
"""

from __future__ import annotations

from typing import Final

from indexer.errors import InvalidEndpoint

SCHEMES: Final = frozenset({"tcp", "ipc", "inproc"})
PORT_MAX: Final = 0xFFFF
"""Highest TCP port."""


def why_no_base(url: str) -> str | None:
    """Return why no path can be appended to an HTTP URL; None if one can.

    Appended to a query or a fragment, the path would become part of it, and the request would go to
    a URL chosen by the one that supplied the base. Credentials in a URL would be shown to everyone
    who sees the URL, and end up in logs.
    """
    if not url.isprintable() or " " in url or "\\" in url:
        return "it has a character that must be escaped"
    return why_elsewhere(url)


def why_elsewhere(url: str) -> str | None:
    """Return why an appended path would not address the host or resource it seems to."""
    if "?" in url:
        return "it has a query"
    if "#" in url:
        return "it has a fragment"
    if "@" in url:  # anywhere: a password may contain a slash, which does not start a path
        return "it has a user's name"
    return None


def check_endpoint(endpoint: str) -> None:
    """Accept a well-formed endpoint; nothing is trimmed.

    Raises:
        InvalidEndpoint: with the reason in the contract's words.
    """
    scheme, separator, address = endpoint.partition("://")
    if not separator:
        raise InvalidEndpoint(endpoint, "missing scheme")
    if not address:
        raise InvalidEndpoint(endpoint, "missing address")
    if scheme not in SCHEMES:
        raise InvalidEndpoint(endpoint, f"unsupported scheme `{scheme}`")
    if "\0" in endpoint:  # C strings end there
        raise InvalidEndpoint(endpoint, "invalid character")
    if scheme == "tcp":
        _check_tcp(endpoint, address)


def _check_tcp(endpoint: str, address: str) -> None:
    host, separator, port = address.rpartition(":")
    if not separator:
        raise InvalidEndpoint(endpoint, "missing TCP port")
    if not host:
        raise InvalidEndpoint(endpoint, "missing TCP host")
    if not port:
        raise InvalidEndpoint(endpoint, "invalid TCP port: cannot parse integer from empty string")
    if not (port.isascii() and port.isdigit()):
        raise InvalidEndpoint(endpoint, "invalid TCP port: invalid digit found in string")
    # int() must not see a number of arbitrary length: its cost is quadratic in the digits, and
    # beyond 4300 digits, leading zeros included, it raises an error that no caller expects.
    digits = port.lstrip("0")
    if len(digits) > len(str(PORT_MAX)) or int(digits or "0") > PORT_MAX:
        reason = "invalid TCP port: number too large to fit in target type"
        raise InvalidEndpoint(endpoint, reason)


def at_rank(endpoint: str, rank: int) -> str:
    """Return where an engine binds what belongs to a data-parallel rank: at its port + rank.

    An endpoint that has no port (ipc, inproc) is returned as it is.
    """
    address = tcp_address(endpoint)
    return endpoint if address is None else f"tcp://{address[0]}:{address[1] + rank}"


def tcp_address(endpoint: str) -> tuple[str, int] | None:
    """Return host (IPv6 in brackets, as written) and port of a well-formed TCP endpoint.

    None if it is of another scheme or malformed.
    """
    try:
        check_endpoint(endpoint)
    except InvalidEndpoint:
        return None
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp":
        return None
    host, _, port = address.rpartition(":")
    return host, int(port)
