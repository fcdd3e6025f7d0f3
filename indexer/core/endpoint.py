"""How a ZMQ endpoint is written, and a URL that paths are put behind: the grammar at the door.

Only the writing is judged here. Whether libzmq will connect is for `edge/sockets` to find out,
whether anybody answers only time can tell.
"""

from __future__ import annotations

from typing import Final

from indexer.errors import InvalidEndpoint

SCHEMES: Final = frozenset({"tcp", "ipc", "inproc"})
PORT_MAX: Final = 0xFFFF
"""Of TCP."""


def why_no_base(url: str) -> str | None:
    """Tell why no path can be put behind a URL of HTTP; None: it can.

    Behind a query or a fragment the path would be part of that, and what is asked for another one:
    anything that somebody else, who told us the URL, would like to have asked for. Credentials
    would be shown to whoever is told the URL, and stand in logs.
    """
    if not url.isprintable() or " " in url or "\\" in url:
        return "it has a character that must be escaped"
    return why_elsewhere(url)


def why_elsewhere(url: str) -> str | None:
    """Tell why a path behind a URL is not what is asked for there, or not by us alone."""
    if "?" in url:
        return "it has a query"
    if "#" in url:
        return "it has a fragment"
    if "@" in url:  # a password may have a slash in it, and is none of a path's then
        return "it has a user's name"
    return None


def check_endpoint(endpoint: str) -> None:
    """Accept a well-written endpoint; nothing is trimmed.

    Raises:
        InvalidEndpoint: With the reason as the contract words it.
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
    # a number of any length must not reach int(): its cost grows with the square of the digits, and
    # beyond 4300 of them, leading zeros too, it raises what nobody expects here
    digits = port.lstrip("0")
    if len(digits) > len(str(PORT_MAX)) or int(digits or "0") > PORT_MAX:
        reason = "invalid TCP port: number too large to fit in target type"
        raise InvalidEndpoint(endpoint, reason)
