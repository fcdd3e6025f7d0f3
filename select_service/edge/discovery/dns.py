"""Replicas behind a DNS name: resolves every address of a headless Service periodically."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from typing_extensions import override

from select_service.edge.discovery.source import DiscoverySource, SourceFailed, poll

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence


async def resolve(host: str, port: int) -> list[str]:
    """Return the addresses of a name, by the system's resolver.

    Raises:
        OSError: there are none, or no resolver answers.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class DnsReplicas(DiscoverySource[frozenset[str]]):
    """Endpoints `tcp://<address>:<port>` of one name."""

    def __init__(
        self,
        name: str,
        poll_s: float,
        own_addresses: Sequence[str] = (),
        resolver: Callable[[str, int], Awaitable[list[str]]] = resolve,
    ) -> None:
        """Resolve nothing yet.

        Args:
            name: host:port.
            poll_s: how often.
            own_addresses: skipped; listening to ourselves would be harmless but useless.
            resolver: returns the addresses of a name.
        """
        super().__init__("dns", poll_s)
        host, _, port = name.rpartition(":")
        self._host, self._port = host, int(port)
        self._poll_s = poll_s
        self._own = tuple(own_addresses)
        self._resolver = resolver

    @override
    async def run(self) -> None:
        await poll(self, self.look, self._poll_s)

    async def look(self) -> None:
        """Resolve once; publish if something has changed.

        Raises:
            SourceFailed: there is no answer, or no address: a Service that has lost all its pods
                looks like a failing resolver, and the grace covers both.
        """
        try:
            async with asyncio.timeout(max(self._poll_s, 5.0)):
                addresses = await self._resolver(self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise SourceFailed("unresolved", f"{self._host}: {error}") from None
        self.is_good()
        endpoints = frozenset(
            endpoint_of(address, self._port)
            for address in of_one_family(addresses, self._own)
            if address not in self._own
        )
        if endpoints != self.latest:
            self.publish(endpoints)


def is_of_our_family(address: str, own_addresses: Sequence[str]) -> bool:
    """Return whether an address is of the family of our own; without one of our own, IPv4."""
    return (":" in address) is (":" in own_addresses[0] if own_addresses else False)


def of_one_family(addresses: Sequence[str], own_addresses: Sequence[str]) -> list[str]:
    """Return the addresses of the family that has more of them; of as many, our own family's.

    A dual-stack replica has one of each, and would be listened to twice.
    """
    ours = [one for one in addresses if is_of_our_family(one, own_addresses)]
    others = [one for one in addresses if not is_of_our_family(one, own_addresses)]
    return ours if len(ours) >= len(others) else others


def endpoint_of(address: str, port: int) -> str:
    """Return an endpoint in ZMQ's notation."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
