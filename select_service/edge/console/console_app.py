"""The routes of the console and of /docs; their handlers are loaded with the first call.

They are not part of the API in /openapi.json: page and service always have the same version, and
ids are strings here, because a browser's integers end at 2^53.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from select_service.edge.codec.responses import Response
from select_service.edge.console.history import History
from select_service.edge.routing import OPEN, Route

if TYPE_CHECKING:
    from select_service.edge.console.console_handlers import Console
    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.api import Api, Handler, Reply, Request
    from select_service.edge.http.traffic import Traffic

CONSOLE_PATH: Final = "/console"
DOCS_PATH: Final = "/docs"

_ROOMS: Final = (
    "browser",
    "assets",
    "fleet",
    "prefix",
    "sections",
    "sources",
    "stream",
    "console_handlers",
)
_READ: Final = "read"
_GETS: Final = (
    # Static and without data; the page asks its user for a token.
    (CONSOLE_PATH, "page", OPEN),
    (f"{CONSOLE_PATH}/", "folder", OPEN),
    (f"{CONSOLE_PATH}/static/{{name}}", "static", OPEN),
    # Shows the whole process.
    (f"{CONSOLE_PATH}/events", "events", _READ),
    (f"{CONSOLE_PATH}/api/decisions", "decisions", _READ),
    (f"{CONSOLE_PATH}/api/decisions/{{id}}", "decision", _READ),
    (f"{CONSOLE_PATH}/api/leases", "leases", _READ),
    (f"{CONSOLE_PATH}/api/reservations", "reservations", _READ),
    (f"{CONSOLE_PATH}/api/findings", "findings", _READ),
    (f"{CONSOLE_PATH}/api/shadow", "shadow", _READ),
    # The same of the API's page, which shows /openapi.json.
    (DOCS_PATH, "docs_page", OPEN),
    (f"{DOCS_PATH}/", "docs_folder", OPEN),
    (f"{DOCS_PATH}/static/{{name}}", "docs_static", OPEN),
)


class ConsoleApp:
    """The routes and the history of the console, whether or not anybody has opened it."""

    path: Final = CONSOLE_PATH
    docs_path: Final = DOCS_PATH

    def __init__(
        self,
        service: Driver,
        traffic: Traffic,
        *,
        clients_max: int,
        grafana_url: str | None = None,
    ) -> None:
        self.history = History(service, traffic)
        self._service = service
        self._traffic = traffic
        self._clients_max = clients_max
        self._grafana_url = grafana_url
        self._console: Console | None = None
        self._is_closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the history. Repeatable."""
        if not self._is_closed:
            self.history.start(loop)

    def close(self) -> None:
        """End all streams, as the process is about to end. Idempotent."""
        self._is_closed = True
        self.history.close()
        if self._console is not None:
            self._console.close()

    async def _open(self) -> Console:
        """Load the handlers, one module per turn: together they would hold the loop for 10 ms."""
        for name in _ROOMS:
            import_module(f"select_service.edge.console.{name}")
            await asyncio.sleep(0)
        if self._console is None:  # no concurrent call was faster
            from select_service.edge.console.console_handlers import Console  # already loaded

            self.start(asyncio.get_running_loop())  # for embedding apps, which do not call `start`
            self._console = Console(
                self._service,
                self._traffic,
                self.history,
                clients_max=self._clients_max,
                grafana_url=self._grafana_url,
            )
            if self._is_closed:
                self._console.close()
        return self._console

    @property
    def routes(self) -> tuple[Route[Handler], ...]:
        """All routes under /console and /docs."""
        gets = (
            Route(
                "GET",
                path,
                self._handler(verb),
                scope=scope,
                of_process=scope != OPEN,
            )
            for path, verb, scope in _GETS
        )
        prefix: Route[Any] = Route(
            "POST",
            f"{CONSOLE_PATH}/api/prefix",
            self._handler("prefix"),
            takes=dict,
            scope=_READ,
            of_process=True,
        )
        return (*gets, prefix)

    def _handler(self, verb: str) -> Handler:
        def handle(_: Api, request: Request) -> Reply:
            if self._console is None:
                return self._open_for(verb, request)
            answer: Reply = getattr(self._console, verb)(request)
            return answer

        return handle

    async def _open_for(self, verb: str, request: Request) -> Response:
        answer: Reply = getattr(await self._open(), verb)(request)
        return answer if isinstance(answer, Response) else await answer
