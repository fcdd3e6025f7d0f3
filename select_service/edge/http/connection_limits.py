"""The limits of connections: how many, how slow, and how much may wait on one.

`connection_guard.py` enforces them on each connection, `server.py` on all together.
"""

from __future__ import annotations

from msgspec import Struct


class ConnectionLimits(Struct):
    """Limits of connections; times in seconds.

    All connections read one shared object, which `config_reload.py` updates.
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
