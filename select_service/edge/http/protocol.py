"""Makes the class of a server's connections, which has what they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.edge.http.connection import READ_BYTES_MAX, HttpConnection
from select_service.edge.http.head_memory import Heads, Peers
from select_service.edge.http.header_cache import GUARDED, KEPT, HeaderCache

if TYPE_CHECKING:
    from select_service.edge.http.application import Application
    from select_service.edge.http.connection_limits import ConnectionLimits
    from select_service.edge.http.traffic import Connections


def http_protocol(
    application: Application, limits: ConnectionLimits, counts: Connections
) -> type[HttpConnection]:
    """Create the protocol class of one server, which creates the instances itself."""
    kind: type[HttpConnection] = type("HttpConnection", (HttpConnection,), {})
    kind.application, kind.limits, kind.counts = application, limits, counts
    kind.heads, kind.peers, kind.outbox = Heads(), Peers(), []
    kind.read_bytes_max = min(READ_BYTES_MAX, limits.head_bytes_max)
    kind.header_cache = HeaderCache(KEPT if application.authority is None else GUARDED)
    if application.authority is not None:
        application.authority.on_change(kind.heads.forget)
        application.authority.on_change(kind.peers.forget)
    return kind
