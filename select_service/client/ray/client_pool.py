"""A client for whichever selectors exist at present; they come and go, and are found through Ray.

A process has one client pool for everything that asks the same selectors. When the set changes, new
requests go to a new client; the old one is closed once its bookings are over. `routing.py` and
`serve_worker.py` use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from select_service.client.asynchronous import AsyncClient
from select_service.client.core.options import Options
from select_service.client.ray.registry import SelectorRegistry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from select_service.client.reservation import Reservation
    from select_service.types import Outcome

LOOK_S: Final = 2.0
"""Interval at which the selectors are looked up."""

_OLD_MAX: Final = 8
"""Old clients that may wait for their last booking; beyond it the oldest is closed early."""


class ClientPool:
    """The client in use, and its predecessors."""

    def __init__(
        self,
        selectors: Sequence[str],
        options: Options,
        find: Callable[[], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        """Make no connection yet.

        Args:
            selectors: addresses; empty: use `find`.
            options: of the clients.
            find: returns addresses.
        """
        self._options = options
        self._find = find
        self._rng = random.Random()
        self._known: frozenset[str] = frozenset()
        self._live: dict[AsyncClient, int] = {}
        self._looking: asyncio.Task[None] | None = None
        self.client: AsyncClient | None = None
        self.failures = 0  # lookups that failed or found none
        if selectors:
            self._use(selectors)

    def begin(self) -> None:
        """Start the periodic lookup on the running loop. Idempotent."""
        if self._find is not None and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def aclose(self) -> None:
        """Stop the lookup, and close all clients."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self.client = None
        for client in list(self._live):
            del self._live[client]
            await client.aclose()

    def hold(self, client: AsyncClient) -> None:
        """Count a booking made through a client."""
        if client in self._live:
            self._live[client] += 1

    def free(
        self,
        client: AsyncClient,
        reservation: Reservation | None,
        outcome: Outcome | None = None,
    ) -> None:
        """Count a booking that is over, or was never made."""
        if reservation is not None:
            reservation.free(outcome)
        if client in self._live:
            self._live[client] -= 1

    async def look(self) -> None:
        """Look up the selectors once, and close clients that are no longer needed."""
        assert self._find is not None
        try:
            found = await self._find()
        except Exception:  # noqa: BLE001 - Ray may be in any state; the last ones stay
            found = ()
        self.failures += not found
        if found and frozenset(found) != self._known:
            self._use(self._rng.sample(list(found), len(found)))  # spreads the clients
        for client in [one for one, n in self._live.items() if one is not self.client and n <= 0]:
            await self._close(client)
        while len(self._live) > _OLD_MAX:
            await self._close(next(iter(self._live)))

    def _use(self, selectors: Sequence[str]) -> None:
        self._known = frozenset(selectors)
        self.client = AsyncClient(*selectors, options=self._options)
        self._live[self.client] = 0

    async def _close(self, client: AsyncClient) -> None:
        del self._live[client]
        with contextlib.suppress(Exception):
            await client.aclose()

    async def _look(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)


_outlets: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[object, ClientPool]] = (
    WeakKeyDictionary()
)


def client_pool_for(
    selectors: Sequence[str] | None, namespace: str, options: Options | None = None
) -> ClientPool:
    """Return this loop's client pool for these selectors; it lives as long as the process.

    Args:
        selectors: addresses; None: those of `select_service.serve_ray`, found through Ray.
        namespace: where they are found.
        options: of its clients.
    """
    options = options or Options()
    client_pools = _outlets.setdefault(asyncio.get_running_loop(), {})
    key = (None if selectors is None else tuple(selectors), namespace, options)
    client_pool = client_pools.get(key)
    if client_pool is None:
        find = None if selectors is not None else _finder(namespace)
        client_pool = client_pools[key] = ClientPool(selectors or (), options, find)
    client_pool.begin()
    return client_pool


def _finder(namespace: str) -> Callable[[], Awaitable[list[str]]]:
    meeting = SelectorRegistry(namespace)

    async def find() -> list[str]:
        present = await meeting.present()
        return [url for url, _ in present.selectors.values()]

    return find
