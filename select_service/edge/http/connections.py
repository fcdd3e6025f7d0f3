"""The limits of connections: how many, how slow, and how much may wait on one.

`protocol.py` holds each to its limits, `server.py` all of them together.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["ConnectionLimits"]


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
