"""TCP addresses to listen at, of either family, and how clients on them are called.

An unspecified address, `0.0.0.0` or `::`, means every address of this machine, of both families: a
pod may have IPv6 addresses alone, and its probes come there. The service and the planner bind with
this.
"""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

__all__ = ["bind_tcp", "host_in_url", "is_unspecified", "plain_address"]

_NO_SUCH_FAMILY = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})


def bind_tcp(host: str, port: int) -> socket.socket:
    """Bind without listening: nobody is accepted before `listen` is called.

    Args:
        host: an address or a name; of a name's addresses, the first that can be bound. `0.0.0.0`
            and `::` stand for all addresses of both families, where the system has both.
        port: 0 takes a free one.

    Raises:
        OSError: no address of the host can be bound.
    """
    if is_unspecified(host):
        try:
            return _bind(socket.AF_INET6, ("::", port))
        except OSError as error:
            if error.errno not in _NO_SUCH_FAMILY:
                raise
        return _bind(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104  # nosec B104
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    first: OSError | None = None
    for family, *_, address in found:
        try:
            return _bind(family, address)
        except OSError as error:
            first = first or error
    raise first or OSError(errno.EADDRNOTAVAIL, "it has no address")


def _bind(family: int, address: object) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_one = address[0] != "::"  # type: ignore[index]
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(is_one))
        listener.bind(address)  # type: ignore[arg-type]
    except OSError:
        listener.close()
        raise
    return listener


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
