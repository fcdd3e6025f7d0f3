"""The selectors behind names: all addresses of each, looked up again while the planner runs.

A headless Service's name leads to every replica, and to others when they come and go. Of a name
with addresses of both families, those of one family are asked: a dual-stack replica has one of
each, and would be counted twice.
"""

from __future__ import annotations

import asyncio
import socket
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Lookup: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]

LOOKUP_S: Final = 10.0
"""Between two look-ups, unless set otherwise."""
SILENT_S: Final = 60.0
"""One of several addresses of a name that has not answered for so long is not waited for: it boots,
or is broken, and gets no traffic. What it had reported is known, and others know what it had
booked."""
ADDRESSES_MAX: Final = 256
"""Of one name: each is asked at every look."""
_LOOKUP_TIMEOUT_S: Final = 5.0
_CONNECT_TIMEOUT_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}


class SelectorAddress(NamedTuple):
    """Where one selector is asked."""

    url: str
    """With an address in the place of a name."""
    shown: str
    """For people: as it was configured, and which of several addresses it is."""
    name: str = ""
    """The host as it was configured, which its certificate has to name; empty: an address."""
    authority: str = ""
    """Of the Host header; empty: that of the URL."""
    is_one_of_several: bool = False
    """Whether the name has other addresses."""


def is_waited_for(answered_at: float | None, now: float, *, is_one_of_several: bool) -> bool:
    """Tell whether what a selector that does not answer knows is waited for.

    Args:
        answered_at: when it answered last; None: never.
        now: of the same clock.
        is_one_of_several: whether its name has other addresses.
    """
    if not is_one_of_several:
        return True
    return answered_at is not None and now - answered_at < SILENT_S


class SelectorAddresses:
    """Follows the names in the URLs of selectors.

    Args:
        urls: as configured.
        every_s: seconds between two look-ups; what a name has lost is asked no more, and what it
            has gained is.
        clock: monotonic seconds.
        lookup: returns the addresses of a host at a port; None: the resolver's.

    Attributes:
        problems: URL to why its name has no address; the addresses from before are asked.
    """

    def __init__(
        self,
        urls: Sequence[str],
        every_s: float = LOOKUP_S,
        clock: Callable[[], float] = time.monotonic,
        lookup: Lookup | None = None,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._every_s = every_s
        self._clock = clock
        self._lookup = lookup or _resolved
        self._found: dict[str, list[SelectorAddress]] = {}
        self._looked_at: float | None = None
        self._looking = asyncio.Lock()
        self.problems: dict[str, str] = {}

    async def look(self) -> list[SelectorAddress]:
        """Return all addresses, looked up anew if the last time is `every_s` ago."""
        async with self._looking:
            now = self._clock()
            if self._looked_at is None or now - self._looked_at >= self._every_s:
                self._looked_at = now
                await asyncio.gather(*(self._look_up(url) for url in self._urls))
        found = {one.url: one for url in self._urls for one in self._found.get(url, ())}
        return list(found.values())

    async def _look_up(self, url: str) -> None:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        if _is_address(host):
            self._found[url] = [SelectorAddress(url, url)]
            return
        try:
            async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
                found = await self._lookup(host, port)
            addresses = list(dict.fromkeys(found))[:ADDRESSES_MAX]
            why = "" if addresses else "no address"
        except TimeoutError:
            addresses, why = [], f"no answer within {_LOOKUP_TIMEOUT_S:g} s"
        except (OSError, UnicodeError) as error:
            addresses, why = [], getattr(error, "strerror", None) or str(error)
        if why:
            self.problems[url] = f"{url}: the name cannot be looked up: {why}"
            return
        self.problems.pop(url, None)
        addresses = await _of_one_family(addresses, port)
        self._found[url] = [
            SelectorAddress(
                _at(parts, one),
                f"{url} ({one})" if len(addresses) > 1 else url,
                host,
                parts.netloc,
                len(addresses) > 1,
            )
            for one in addresses
        ]


async def _resolved(host: str, port: int) -> Sequence[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def _of_one_family(addresses: list[str], port: int) -> list[str]:
    """Return the addresses of the first family in which anybody is connected to."""
    first = ip_address(addresses[0].partition("%")[0]).version
    preferred = [one for one in addresses if _version(one) == first]
    others = [one for one in addresses if _version(one) != first]
    if not others:
        return addresses
    if any(await asyncio.gather(*(_connects(one, port) for one in preferred))):
        return preferred
    is_there = any(await asyncio.gather(*(_connects(one, port) for one in others)))
    return others if is_there else preferred


async def _connects(address: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(address, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def _version(address: str) -> int:
    return ip_address(address.partition("%")[0]).version


def _is_address(host: str) -> bool:
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _at(parts: SplitResult, address: str) -> str:
    host = f"[{address}]" if ":" in address else address
    port = "" if parts.port is None else f":{parts.port}"
    return parts._replace(netloc=f"{host}{port}").geturl()
