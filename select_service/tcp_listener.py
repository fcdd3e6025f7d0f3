"""TCP addresses to listen at, of either family, and how clients on them are called.

An unspecified address, `0.0.0.0` or `::`, means every address of this machine, of both families: a
pod may have IPv6 addresses alone, and its probes come there. The service and the planner bind with
this.
"""

from __future__ import annotations

import errno
import re
import socket
from ipaddress import ip_address
from typing import Any

_WITH_PORT = re.compile(r"([^:]*|\[.*\]):\d+")
_NO_SUCH_FAMILY = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})


def bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Bind without listening: no client is accepted before `listen` is called.

    Args:
        host: an address, in brackets or not, or a name, which stands for all its addresses that
            this machine has (`localhost`: 127.0.0.1 and ::1). `0.0.0.0` and `::` stand for all
            addresses of both families, where the system has both.
        port: 0 takes a free one, the same for all.

    Returns:
        One socket, or several for a name.

    Raises:
        OSError: no address of the host is this machine's, the port is taken at one of them, or
            the host has a port of its own.
    """
    if _WITH_PORT.fullmatch(host):
        raise OSError("--host takes a name without a port; the port goes to --port")
    host = host.removeprefix("[").removesuffix("]")
    if is_unspecified(host):
        return [_bind_all_addresses(port)]
    bound: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in _addresses(host):
        if bound:
            port = bound[0].getsockname()[1]
        try:
            bound.append(_bind(family, (address[0], port, *address[2:])))
        except OSError as error:
            if error.errno not in _NO_SUCH_FAMILY:
                close_all(bound)
                raise
            absent = absent or error
    if bound:
        return bound
    raise absent or OSError(errno.EADDRNOTAVAIL, "it has no address")


def _addresses(host: str) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the families and socket addresses of a host.

    Systems' tables often know one loopback address only; `localhost` means both (RFC 6761).
    """
    if host.lower() == "localhost":
        return [(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0))]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, *_, address in found]


def close_all(listeners: list[socket.socket]) -> None:
    """Close every one."""
    for one in listeners:
        one.close()


def _bind_all_addresses(port: int) -> socket.socket:
    try:
        return _bind(socket.AF_INET6, ("::", port))
    except OSError as error:
        if error.errno not in _NO_SUCH_FAMILY:
            raise
    return _bind(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104  # nosec B104


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    # with its protocol: otherwise asyncio leaves Nagle's algorithm on
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_one = address[0] != "::"
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(is_one))
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def loopback() -> str:
    """Return this machine's loopback address: `127.0.0.1`, or `::1` where there is no IPv4."""
    try:
        _bind(socket.AF_INET, ("127.0.0.1", 0)).close()
    except OSError:
        return "::1"
    return "127.0.0.1"


def is_unspecified(host: str) -> bool:
    """Whether a host to listen at stands for every address."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def host_in_url(host: str) -> str:
    """Return a host as it is written in URLs: IPv6 addresses stand in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def plain_address(address: str) -> str:
    """Return a client's address as the client knows it.

    On a socket of both families the system shows IPv4 clients as `::ffff:192.0.2.1`.
    """
    return address.removeprefix("::ffff:") if "." in address else address
