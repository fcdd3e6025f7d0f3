"""What concerns connections and not what is said on them: how many, how slow, whether still there.

`protocol.py` holds each to its limits, `server.py` all of them together.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from select_service.edge.http.protocol import GuardedProtocol

__all__ = ["ConnectionLimits", "cut_unread", "probe_when_silent"]

_PROBE_AFTER_S: Final = 60
_PROBES: Final = 4
"""A peer that vanished without a word is noticed after 60 + 4 * 15 s; until then it may hold a
place in the queue."""
_PROBE_EVERY_S: Final = 15


class ConnectionLimits(Struct):
    """Deadlines in seconds, how many connections may be open, how long a request head may be.

    One object that all connections read: `reloading.py` writes it.
    """

    header_timeout_s: float
    body_timeout_s: float
    connections_max: int
    head_bytes_max: int
    header_lines_max: int
    connections_per_address_max: int
    tls_handshakes_max: int
    unread_bytes_max: int


def cut_unread(connections: Iterable[GuardedProtocol], most: int) -> int:
    """Cut off who has read nothing for longest until no more than `most` bytes lie unread.

    Returns:
        How many bytes that are. O(connections).
    """
    unread = [(one.unread_bytes, one) for one in connections]
    total = sum(size for size, _ in unread)
    if total <= most:
        return total
    unread.sort(key=lambda row: (row[1].stalled_since, -row[0]))
    for size, one in unread:
        if size:
            one.cut_off()
            total -= size
            if total <= most:
                break
    return total


def probe_when_silent(transport: asyncio.Transport) -> None:
    """Let the kernel find out whether a silent peer still exists."""
    sock: Any = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _PROBE_AFTER_S),
        ("TCP_KEEPINTVL", _PROBE_EVERY_S),
        ("TCP_KEEPCNT", _PROBES),
    ):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
