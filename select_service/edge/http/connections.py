"""What concerns connections and not what is said on them: how many, and how slow.

`protocol.py` holds each to its limits, `server.py` all of them together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from select_service.edge.http.protocol import GuardedProtocol

__all__ = ["ConnectionLimits", "cut_unread"]


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
    descriptors_kept: int


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
