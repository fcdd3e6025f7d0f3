"""Server-sent events: a snapshot for each new page, then the changes every second.

One round serves all open pages; without any there are no rounds. A page that does not read is
dropped, not waited for: it gets a snapshot when it reconnects. A message every second, however
empty, shows the page that the service is alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

import orjson

from select_service.edge.console.fleet import FleetChanges, FleetTable, joined
from select_service.edge.console.history import now_ms
from select_service.edge.console.sections import sections
from select_service.edge.cooperative import TimeSlices
from select_service.errors import TooManyConsoles

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from select_service.edge.console.history import History
    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.traffic import ConsoleTraffic

INTERVAL_S: Final = 1.0
"""Between two messages: as often as people look."""

BEHIND_MAX: Final = 5
"""Messages a page may leave unread, besides those in its socket's buffer, before it is dropped."""

_log = logging.getLogger("select_service.console")


class _Client:
    """One page, and the messages yet to be sent to it."""

    __slots__ = ("is_new", "is_over", "messages", "wake")

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.wake = asyncio.Event()
        self.is_new = True  # it has had no snapshot
        self.is_over = False

    def send(self, message: bytes) -> bool:
        """Queue a message; if too many are queued, drop the page and return False."""
        if len(self.messages) >= BEHIND_MAX:
            self.end()
            return False
        self.messages.append(message)
        self.wake.set()
        return True

    def end(self) -> None:
        self.messages.clear()
        self.is_over = True
        self.wake.set()


class LiveView:
    """Sends changes to all open pages, once a second while there are any."""

    def __init__(
        self,
        service: Driver,
        history: History,
        counts: ConsoleTraffic,
        about: Mapping[str, object],
        *,
        clients_max: int,
    ) -> None:
        """Send nothing yet.

        Args:
            service: what is shown.
            history: the last minutes.
            counts: of clients and rounds, for /metrics.
            about: sent with every snapshot.
            clients_max: most pages at a time.
        """
        self._service = service
        self._history = history
        self._counts = counts
        self._about = orjson.dumps(about)
        self._clients_max = clients_max
        self._clients: set[_Client] = set()
        self._rounds: asyncio.Task[None] | None = None
        self._view: _View | None = None  # set after the first round
        self._is_closed = False

    def open(self) -> AsyncGenerator[bytes]:
        """Return the messages for one more page; it takes its place when the first one is read.

        Raises:
            TooManyConsoles: `clients_max` are open.
        """
        if len(self._clients) >= self._clients_max:
            self._counts.refused += 1
            raise TooManyConsoles(self._clients_max)
        return self._messages()

    def close(self) -> None:
        """End all streams, as the process is about to end. Idempotent."""
        self._is_closed = True
        for client in self._clients:
            client.end()
        if self._rounds is not None:
            self._rounds.cancel()
            self._rounds = None

    async def _messages(self) -> AsyncGenerator[bytes]:
        if self._is_closed or len(self._clients) >= self._clients_max:
            return  # others have taken the last places
        client = _Client()
        self._clients.add(client)
        self._counts.clients = len(self._clients)
        try:
            if self._view is not None:  # up to a second old, or from the middle of a round, whose
                self._introduce(client, self._snapshot(self._view))  # changes are then sent again
            if self._rounds is None:
                self._rounds = asyncio.get_running_loop().create_task(self._run())
            yield b": hello\n\n"  # proxies may hold back a head without a body
            while True:
                while client.messages:
                    yield client.messages.popleft()
                if client.is_over:
                    return
                client.wake.clear()
                await client.wake.wait()
        finally:
            self._clients.discard(client)
            self._counts.clients = len(self._clients)

    async def _run(self) -> None:
        """Run rounds while any page is open; the state is dropped with the last one."""
        view = _View(self._service)
        while self._clients:
            try:
                await self._round(view)
                self._counts.rounds += 1
            except Exception:  # noqa: BLE001 - a bug in one round must not end all of them
                self._counts.faults += 1
                for client in self._clients:
                    client.is_new = True  # this round's changes are lost
                _log.exception("the changes could not be sent to the console")
            await asyncio.sleep(INTERVAL_S)
        self._rounds = self._view = None

    async def _round(self, view: _View) -> None:
        changes = await view.look()
        self._view = view
        tick = b"event: tick\ndata: {" + self._moment() + changes + b"}\n\n"
        snapshot: bytes | None = None
        for client in list(self._clients):
            if client.is_new:
                snapshot = snapshot or self._snapshot(view)
                self._introduce(client, snapshot)
            elif not client.is_over and not client.send(tick):
                self._counts.dropped += 1

    def _introduce(self, client: _Client, snapshot: bytes) -> None:
        client.is_new = False
        client.send(snapshot)

    def _moment(self) -> bytes:
        return b'"at_ms":%d,"point":%b,' % (now_ms(), self._history.now())

    def _snapshot(self, view: _View) -> bytes:
        parts = [
            b"event: snapshot\ndata: {" + self._moment(),
            b'"about":' + self._about,
            b',"history":' + joined(self._history.points) + b",",
            b'"chosen":' + joined(self._history.chosen) + b",",
            view.whole(),
            b"}\n\n",
        ]
        return b"".join(parts)


class _View:
    """The state as last seen, and its changes."""

    def __init__(self, service: Driver) -> None:
        self._service = service
        self._fleet = FleetTable(service)
        self._sections: dict[str, bytes] = {}
        self._whole: bytes | None = None  # joined once for all newcomers until something changes

    async def look(self) -> bytes:
        """Return the members of a tick: what has changed."""
        slices = TimeSlices()
        fresh = await sections(self._service, slices)
        self._whole = None
        fleet_changes = await self._fleet.look(slices)
        self._whole = None  # a newcomer may have set it in between
        changed = {name: text for name, text in fresh.items() if self._sections.get(name) != text}
        self._sections = fresh
        return _members(fleet_changes, changed)

    def whole(self) -> bytes:
        """Return the members of a snapshot: everything."""
        if self._whole is None:
            self._whole = _members(self._fleet.all_rows(), self._sections)
        return self._whole


def _members(changes: FleetChanges, sections: Mapping[str, bytes]) -> bytes:
    members = [b'"%b":%b' % (name.encode(), text) for name, text in sections.items()]
    members += [b'"workers":' + joined(changes.workers), b'"ranks":' + joined(changes.ranks)]
    members.append(b'"gone":' + orjson.dumps(changes.gone))
    return b",".join(members)
