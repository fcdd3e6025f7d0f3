"""What is open to whoever reaches this process: said once at the start, and in /metrics."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from select_service.config import Settings

__all__ = ["open_doors"]


def open_doors(settings: Settings) -> dict[str, str]:
    """Return what anybody on the network may do, by what is missing."""
    found: dict[str, str] = {}
    if settings.port is not None and not _is_loopback(settings.host):
        if settings.token_file is None and settings.tls_client_ca is None:
            found["tokens"] = (
                "register workers, book, and read everything: there are no tokens (--token-file)"
            )
        if settings.tls_cert is None:
            found["tls"] = "listen in on HTTP: there is no TLS (--tls-cert)"
    if settings.replica_sync_port is not None and settings.curve_key is None:
        found["replicas"] = "listen in on the replica plane: there is no key (--curve-key)"
    return found


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may be anything
