"""From host names to addresses that may be connected to, without blocking the event loop.

libzmq would resolve a name itself on every connect, where the result cannot be checked, and a name
may lead elsewhere at any time. So names are resolved here, `core/egress` judges their addresses,
and sockets only ever get addresses. Of several allowed addresses, the first that accepts a
connection is taken, because some may be dead. Lookups run in a few daemon threads that shutdown
does not wait for, because the system's resolver may take half a minute.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from indexer.core.egress import Egress, read_address
from indexer.edge.io_threads import IoThreads
from indexer.errors import EndpointRefused, HostNotFound
from indexer.happy_eyeballs import connect_first
from indexer.types import EgressSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from indexer.core.egress import Address, ParsedEndpoint
    from indexer.happy_eyeballs import Target

    Answer: TypeAlias = str | EndpointRefused | HostNotFound
    """The result for a name: an endpoint with an address in it, or the reason why there is none."""

THREADS: Final = 4
"""Concurrent lookups; a resolver that hangs delays other names and nothing else."""

TRIALS_MAX: Final = 64
"""Names whose several addresses are tried at one time; the others wait."""

_PORTS: Final = {"http": 80, "https": 443}
_FAMILIES: Final = {4: socket.AF_INET, 6: socket.AF_INET6}


class CheckedUrl(NamedTuple):
    """How to request a URL at an address that has been checked."""

    url: str
    headers: dict[str, str]
    extensions: dict[str, str]


class Addresses:
    """Resolves, judges and caches. Lives on the event loop it is used from.

    Attributes:
        refused: Endpoints and URLs refused, by cause: the scheme, a host or an address as written,
            an address that a name resolved to.
        lookups: Names looked up, by outcome.
        unreachable: Trials of a name's several addresses that ended without a connection.
    """

    def __init__(
        self,
        settings: EgressSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        look_up: Callable[[str], list[str]] | None = None,
    ) -> None:
        """Resolve nothing yet.

        Args:
            settings: where connections may lead, and how long a lookup may take.
            clock: monotonic seconds.
            look_up: returns the addresses of a host, or raises OSError; called in threads.

        Raises:
            ValueError: an entry of the lists is neither a host nor a network.
        """
        self.settings = settings or EgressSettings()
        self.egress = Egress(self.settings)
        self._clock = clock
        self._look_up = look_up or _look_up
        self._known: OrderedDict[str, tuple[float, list[Address]]] = OrderedDict()
        self._running: dict[str, asyncio.Future[list[Address]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._threads = IoThreads("names", THREADS)
        self._trials = asyncio.Semaphore(TRIALS_MAX)
        self.unreachable = 0
        self.refused = {"scheme": 0, "address": 0, "resolved": 0}
        self.lookups = {"found": 0, "failed": 0, "timeout": 0, "left_out": 0}

    def close(self) -> None:
        """Stop the threads and cancel pending lookups. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        for lookup in list(self._running.values()):
            lookup.cancel()
        self._threads.close()

    # -- ZMQ endpoints -----------------------------------------------------------------------------

    def place(self, endpoint: str) -> str | None:
        """Return the endpoint with its address, if only one is known; None: call `find`.

        Raises:
            EndpointRefused: it must not be connected to, whatever its name resolves to.
        """
        target = self._target(endpoint)
        if not target.host:
            return endpoint
        address = read_address(target.host)
        self._check(endpoint, self.egress.why_not(target.host, address))
        if address is not None:
            return target.at(address)
        known = self._remembered(target.host)
        allowed = [] if known is None else self._allowed(endpoint, target.host, known)
        return target.at(allowed[0]) if len(allowed) == 1 else None

    def is_named(self, endpoint: str) -> bool:
        """Whether an endpoint that `place` has accepted contains a host name."""
        host = self.egress.target(endpoint).host
        return bool(host) and read_address(host) is None

    def find(
        self,
        endpoint: str,
        then: Callable[[Answer], None],
        *,
        last: str | None = None,
        tries: bool = True,
    ) -> None:
        """Resolve an endpoint's name; `then` gets the answer, never before this call returns.

        Args:
            endpoint: one that `place` has accepted.
            then: called with the endpoint to connect to, or the reason why there is none.
            last: an earlier answer that was of no use: it is tried last, and kept if no other
                address accepts, because an engine may listen there again.
            tries: of several addresses, take the first that accepts a connection.
        """
        task = asyncio.get_running_loop().create_task(self._find(endpoint, then, last, tries=tries))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _find(
        self, endpoint: str, then: Callable[[Answer], None], last: str | None, *, tries: bool
    ) -> None:
        try:
            target = self._target(endpoint)
            allowed = self._allowed(endpoint, target.host, await self._resolve(target.host))
            places = {target.at(address): address for address in allowed}
            answer: Answer = next(iter(places))
            if tries and len(places) > 1:
                order = sorted(places, key=lambda place: place == last)
                found = await self._first_alive([places[one] for one in order], int(target.port))
                kept = last if last in places else answer
                answer = kept if found is None else target.at(found)
        except (EndpointRefused, HostNotFound) as error:
            answer = error
        then(answer)

    def _target(self, endpoint: str) -> ParsedEndpoint:
        try:
            return self.egress.target(endpoint)
        except EndpointRefused:
            self.refused["scheme"] += 1
            raise

    def _check(self, asked: str, why: str | None) -> None:
        if why is not None:
            self.refused["address"] += 1
            raise EndpointRefused(asked, why)

    # -- of several addresses ----------------------------------------------------------------------

    def _allowed(self, asked: str, host: str, addresses: list[Address]) -> list[Address]:
        """Return the addresses that may be connected to, at least one.

        Raises:
            EndpointRefused: none may.
        """
        verdicts = [(address, self.egress.why_not(host, address)) for address in addresses]
        allowed = [address for address, why in verdicts if why is None]
        if not allowed:
            self.refused["resolved"] += 1
            why = verdicts[-1][1] if verdicts else "it has no address"
            raise EndpointRefused(asked, f"where its name leads, {why}")
        return allowed

    async def _first_alive(self, addresses: Sequence[Address], port: int) -> Address | None:
        """Return the first address that accepts a connection, which is closed; None: none does."""
        targets: dict[Target, Address] = {
            (_FAMILIES[address.version], (str(address), port)): address for address in addresses
        }
        try:
            async with self._trials, asyncio.timeout(self.settings.lookup_timeout_s):
                target, made = await connect_first(list(targets))
        except OSError:  # TimeoutError is one
            self.unreachable += 1
            return None
        made.close()
        return targets[target]

    # -- URLs --------------------------------------------------------------------------------------

    async def route(self, url: str) -> CheckedUrl:
        """Return how to request a URL without resolving its name again.

        Raises:
            EndpointRefused: connecting to its address is not allowed.
            HostNotFound: its name does not resolve.
        """
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname or "", parts.port
        except ValueError as error:
            raise HostNotFound(url, str(error)) from None
        address = read_address(host)
        if address is not None:
            self._check(url, self.egress.why_not(host, address))
            return CheckedUrl(url, {}, {})
        self._check(url, self.egress.why_not(host) if host else "it names no host")
        allowed = self._allowed(url, host, await self._resolve(host))
        found = allowed[0]
        if len(allowed) > 1:
            number = parts.port or _PORTS.get(parts.scheme, 0)
            found = await self._first_alive(allowed, number) or found
        user, at, where = parts.netloc.rpartition("@")
        port = f":{parts.port}" if parts.port is not None else ""
        literal = f"[{found}]" if found.version == 6 else str(found)  # noqa: PLR2004 - of IP
        there = urlunsplit(parts._replace(netloc=f"{user}{at}{literal}{port}"))
        return CheckedUrl(there, {"host": where}, {"sni_hostname": host})

    # -- lookups -----------------------------------------------------------------------------------

    def _remembered(self, host: str) -> list[Address] | None:
        until, addresses = self._known.get(host, (0.0, []))
        return addresses if addresses and self._clock() < until else None

    async def _resolve(self, host: str) -> list[Address]:
        """Return a name's addresses, in the resolver's order.

        Raises:
            HostNotFound: it has none, or the lookup timed out.
        """
        until, known = self._known.get(host, (0.0, []))
        if self._clock() < until:
            if not known:
                raise HostNotFound(host, "it has no address")
            return known
        lookup = self._running.get(host)
        if lookup is None:
            if len(self._running) >= self.settings.lookups_max:
                self.lookups["left_out"] += 1
                raise HostNotFound(host, "too many names are being resolved")
            lookup = asyncio.wrap_future(self._threads.begin(self._ask, host))
            self._running[host] = lookup
            lookup.add_done_callback(lambda done: self._hear(host, done))
        try:
            async with asyncio.timeout(self.settings.lookup_timeout_s):
                found = await asyncio.shield(lookup)  # others may wait for it, too
        except TimeoutError:
            self.lookups["timeout"] += 1
            raise HostNotFound(host, "no answer in time") from None
        if not found:
            raise HostNotFound(host, "it has no address")
        return found

    def _ask(self, host: str) -> list[Address]:
        """Look a name up; in a thread."""
        try:
            names = self._look_up(host)
        except (OSError, ValueError):  # ValueError (UnicodeError): not a valid name
            return []
        return [one for one in map(read_address, names) if one is not None]

    def _hear(self, host: str, lookup: asyncio.Future[list[Address]]) -> None:
        del self._running[host]
        if lookup.cancelled():
            return
        found = lookup.result()
        self.lookups["found" if found else "failed"] += 1
        self._known.pop(host, None)
        self._known[host] = self._clock() + self.settings.lookup_cache_s, found
        while len(self._known) > self.settings.lookups_max:
            self._known.popitem(last=False)


def _look_up(host: str) -> list[str]:
    """Ask the system; IPv4 first, which is what names of endpoints have always meant here."""
    rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    rows.sort(key=lambda row: row[0] != socket.AF_INET)
    return list(dict.fromkeys(str(row[4][0]) for row in rows))
