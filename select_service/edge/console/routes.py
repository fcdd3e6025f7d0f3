"""The routes of the console; what answers them is loaded with the first that is called.

They are no part of the API that /openapi.json describes: page and service are of one version, and
ids are strings there, because numbers of a browser end at 2^53.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from select_service.edge.codec.answers import Response
from select_service.edge.console.history import History
from select_service.edge.routing import OPEN, Route

if TYPE_CHECKING:
    from select_service.edge.console.answering import Console
    from select_service.edge.driver import Driver
    from select_service.edge.http.api import Answer, Api, Handler, Request
    from select_service.edge.http.traffic import Traffic

__all__ = ["CONSOLE_PATH", "Booth"]

CONSOLE_PATH: Final = "/console"

_ROOMS: Final = (
    *("browser", "assets", "fleet", "prefix", "reservations"),
    *("sections", "sources", "stream", "answering"),
)
_READ: Final = "read"
_GETS: Final = (
    # the page is the same for everybody and tells nothing; it asks its user for a token
    ("", "page", OPEN),
    ("/", "folder", OPEN),
    ("/static/{name}", "static", OPEN),
    # what it shows is of the whole process
    ("/events", "events", _READ),
    ("/api/decisions", "decisions", _READ),
    ("/api/decisions/{id}", "decision", _READ),
    ("/api/leases", "leases", _READ),
    ("/api/reservations", "reservations", _READ),
    ("/api/findings", "findings", _READ),
    ("/api/shadow", "shadow", _READ),
)


class Booth:
    """The place of the console, and its history, whether anybody has ever opened it or not."""

    path: Final = CONSOLE_PATH

    def __init__(self, service: Driver, traffic: Traffic, *, clients_max: int) -> None:
        self.history = History(service, traffic)
        self._service = service
        self._traffic = traffic
        self._clients_max = clients_max
        self._console: Console | None = None
        self._is_closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to remember. Repeatable."""
        if not self._is_closed:
            self.history.start(loop)

    def close(self) -> None:
        """Send away who looks; the process is about to end. Idempotent."""
        self._is_closed = True
        self.history.close()
        if self._console is not None:
            self._console.close()

    async def _open(self) -> Console:
        """Load what answers, one module a turn: together they would hold the loop for 10 ms."""
        for name in _ROOMS:
            import_module(f"select_service.edge.console.{name}")
            await asyncio.sleep(0)
        if self._console is None:  # nobody was quicker
            from select_service.edge.console.answering import Console  # it is there

            self.start(asyncio.get_running_loop())  # for who serves without a server of ours
            self._console = Console(
                *(self._service, self._traffic, self.history), clients_max=self._clients_max
            )
            if self._is_closed:
                self._console.close()
        return self._console

    @property
    def routes(self) -> tuple[Route[Handler], ...]:
        """All under /console."""
        gets = (
            Route(
                *("GET", CONSOLE_PATH + path, self._handler(verb)),
                scope=scope,
                of_process=scope != OPEN,
            )
            for path, verb, scope in _GETS
        )
        prefix: Route[Any] = Route(
            *("POST", f"{CONSOLE_PATH}/api/prefix", self._handler("prefix")),
            takes=dict,
            scope=_READ,
            of_process=True,
        )
        return (*gets, prefix)

    def _handler(self, verb: str) -> Handler:
        def handle(_: Api, request: Request) -> Answer:
            if self._console is None:
                return self._open_for(verb, request)
            answer: Answer = getattr(self._console, verb)(request)
            return answer

        return handle

    async def _open_for(self, verb: str, request: Request) -> Response:
        answer: Answer = getattr(await self._open(), verb)(request)
        return answer if isinstance(answer, Response) else await answer
