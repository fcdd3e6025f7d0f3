"""Where this process may connect to: schemes, and addresses by list.

Only the rules are here. They are applied to the addresses a name resolves to, never to the name
alone, because the owner of a name decides where it leads. `edge/addresses` resolves names and
asks.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from indexer.core.endpoint import check_endpoint
from indexer.errors import EndpointRefused, SchemeRefused
from indexer.types import EgressSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from ipaddress import IPv4Network, IPv6Network

Address: TypeAlias = IPv4Address | IPv6Address

_TRANSLATED: Final = (
    ip_network("64:ff9b::/96"),  # NAT64
    ip_network("64:ff9b:1::/48"),  # the same, network-specific
    ip_network("::ffff:0:0:0/96"),  # SIIT
)
_IPV4_MASK: Final = (1 << 32) - 1
_ISATAP: Final = 0x5EFE  # followed by an IPv4 address, behind any prefix (RFC 5214)
_ISATAP_MASK: Final = 0xFDFF_FFFF  # without the bit that says whether the address is global
_HOST_CHARACTERS: Final = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_:%[];"
)


class ParsedEndpoint(NamedTuple):
    """A parsed endpoint."""

    endpoint: str  # as given
    before: str  # everything before the host: scheme, and possibly the source address
    host: str  # without brackets; "" if the scheme has no host
    port: str

    def at(self, address: Address) -> str:
        """Return the endpoint with its host replaced by an address."""
        host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
        return f"{self.before}{host}:{self.port}"


class Egress:
    """The allow and deny rules."""

    def __init__(self, settings: EgressSettings | None = None) -> None:
        """Parse the lists.

        Raises:
            ValueError: an entry is neither a host nor a network.
        """
        settings = settings or EgressSettings()
        self.schemes = frozenset(settings.schemes)
        self._allow = _Entries(settings.allow)
        self._deny = _Entries(settings.deny)
        self._loopback = settings.loopback

    def target(self, endpoint: str) -> ParsedEndpoint:
        """Parse a ZMQ endpoint.

        Raises:
            InvalidEndpoint: it is malformed.
            SchemeRefused: its scheme is not allowed.
            EndpointRefused: its host is a wildcard or missing.
        """
        check_endpoint(endpoint)
        scheme, _, address = endpoint.partition("://")
        if scheme not in self.schemes:
            raise SchemeRefused(endpoint, f"scheme `{scheme}` is not among --connect-schemes")
        if scheme != "tcp":
            return ParsedEndpoint(endpoint, "", "", "")
        where, _, port = address.rpartition(":")
        source, semicolon, host = where.rpartition(";")  # tcp://eth0;host:port
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if (
            not bare
            or not _HOST_CHARACTERS.issuperset(where)
            or not bare[0].isalnum() | (bare[0] == ":")
        ):
            raise EndpointRefused(endpoint, "that is no host to connect to")
        return ParsedEndpoint(endpoint, f"{scheme}://{source}{semicolon}", bare, port)

    def why_not(self, host: str, address: Address | None = None) -> str | None:
        """Return why connecting to a host at this address is not allowed; None if it is.

        Without an address only the rules about the host's name are applied.
        """
        name = host.lower().rstrip(".")
        forms = () if address is None else tuple(_forms_of(address))
        denied = self._deny.match(name, forms)
        if denied is not None:
            return f"{denied} is denied (--connect-deny)"
        if address is None:
            return None
        if not self._loopback and any(form.is_loopback for form in forms):
            return "loopback is denied (--connect-no-loopback)"
        # an address that may lead to an allowed one may just as well lead elsewhere
        is_same = address if isinstance(address, IPv4Address) else address.ipv4_mapped or address
        if self._allow and self._allow.match(name, (address, is_same)) is None:
            return "it is not among --connect-allow"
        return None


class _Entries:
    """One list of hosts and networks."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._networks: list[tuple[IPv4Network | IPv6Network, str]] = []
        self._names: set[str] = set()
        self._suffixes: tuple[str, ...] = ()
        for entry in entries:
            try:
                self._networks.append((ip_network(entry), entry))
            except ValueError:
                self._add_name(entry)

    def _add_name(self, entry: str) -> None:
        name = entry.lower().rstrip(".")
        bare = name.removeprefix("*.")
        if "/" in name or not bare or not all(c.isalnum() or c in "-_." for c in bare):
            raise ValueError(f"{entry!r} is neither a host nor a network")
        if bare.replace(".", "").isdigit():
            raise ValueError(f"{entry!r} is no address")
        if bare != name:
            self._suffixes += ("." + bare,)
        else:
            self._names.add(name)

    def __bool__(self) -> bool:
        return bool(self._networks or self._names or self._suffixes)

    def match(self, name: str, forms: Sequence[Address]) -> str | None:
        """Return the entry that covers a host or one of the forms of its address."""
        if name in self._names:
            return name
        for suffix in self._suffixes:
            if name.endswith(suffix):
                return f"*{suffix}"
        for network, entry in self._networks:
            if any(form.version == network.version and form in network for form in forms):
                return entry
        return None


def read_address(text: str) -> Address | None:
    """Return the address a host spells out, None for a name.

    Spellings that only the resolver understands (`127.1`, `0x7f000001`) count as names: they are
    resolved first, then judged.
    """
    try:
        return ip_address(text)
    except ValueError:
        return None


def _forms_of(address: Address) -> Iterator[Address]:
    """Yield an address and the IPv4 addresses it may lead to."""
    yield address
    if isinstance(address, IPv4Address):
        return
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    if address.sixtofour is not None:
        yield address.sixtofour
    if address.teredo is not None:
        yield from address.teredo  # the relay server and the client
    if int(address) >> 32 & _ISATAP_MASK == _ISATAP:
        yield IPv4Address(int(address) & _IPV4_MASK)
    if any(address in one for one in _TRANSLATED) or (not int(address) >> 32 and int(address) > 1):
        yield IPv4Address(int(address) & _IPV4_MASK)
