"""What this process leaves open to the network: warned of at the start, and shown in /metrics."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from select_service.settings import Settings


def open_doors(settings: Settings) -> dict[str, str]:
    """Return what anybody on the network may do, by the missing protection."""
    found: dict[str, str] = {}
    side = side_address(settings)
    is_open = settings.port is not None and not _is_loopback(settings.host)
    if settings.epp_port is not None:
        is_open |= not _is_loopback(settings.epp_host or settings.host)
    is_ajar = side is not None and not _is_loopback(side[0])
    if is_open or is_ajar:
        if settings.token_file is None and settings.tls_client_ca is None:
            may = (
                "register workers, book, and read everything" if is_open else "read what is booked"
            )
            found["tokens"] = f"may {may}, as there are no tokens (--token-file)"
        if settings.tls_cert is None:
            found["tls"] = "may read its HTTP traffic, as there is no TLS (--tls-cert)"
    if settings.replica_sync_port is not None and settings.curve_key is None:
        found["replicas"] = "may read what replicas say, as there is no key (--curve-key)"
    return found


def side_address(settings: Settings) -> tuple[str, int] | None:
    """Return the address of the side entrance, if there is one.

    It is meant for other machines: if the API is on loopback, it defaults to all addresses of the
    same family.
    """
    if settings.side_port is None:
        return None
    host = settings.side_host
    if host is None:
        everywhere = "::" if ":" in settings.host else "0.0.0.0"  # noqa: S104  # nosec B104
        host = everywhere if _is_loopback(settings.host) else settings.host
    return host, settings.side_port


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may resolve to anything
