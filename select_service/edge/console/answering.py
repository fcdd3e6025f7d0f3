"""What answers under /console. Loaded with the first request for it; it only looks.

Changes go through the routes of the API, like everybody's.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from select_service.edge.codec.answers import Feed, Response
from select_service.edge.codec.writing import encode
from select_service.edge.console import sources
from select_service.edge.console.assets import PAGE, SAFE, Assets
from select_service.edge.console.browser import for_browser
from select_service.edge.console.fleet import RANK_FIELDS
from select_service.edge.console.history import HISTORY_STEP_S, POINT
from select_service.edge.console.prefix import look_up
from select_service.edge.console.reservations import reservations
from select_service.edge.console.sections import actions
from select_service.edge.console.stream import INTERVAL_S, LiveView
from select_service.edge.http.traffic import LATENCY_BUCKETS_S
from select_service.edge.routing import read_count, read_id, read_query
from select_service.edge.telling import Wanted
from select_service.version import __version__

if TYPE_CHECKING:
    from select_service.edge.console.history import History
    from select_service.edge.driver import Driver
    from select_service.edge.http.api import Request
    from select_service.edge.http.traffic import Traffic

__all__ = ["LISTED_MAX", "Console"]

LISTED: Final = 50
LISTED_MAX: Final = 200
"""Rows in one list, whatever is asked for: some 300 microseconds of event loop."""

_JSON: Final = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"), *SAFE)
_EVENTS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would keep messages until it has 4 KiB of them
    *SAFE,
)
_DECISION_QUERY: Final = ("limit", "worker_id", "model_name", "tenant_id")


class Console:
    """The handlers, by the names `routes.py` has for them."""

    def __init__(
        self, service: Driver, traffic: Traffic, history: History, *, clients_max: int
    ) -> None:
        self._service = service
        self._assets = Assets()
        about = {
            "version": __version__,
            "life": secrets.token_hex(8),  # another one: the service was restarted
            "assets": self._assets.digest,
            "interval_s": INTERVAL_S,
            "history_step_s": HISTORY_STEP_S,
            "point": POINT,
            "latency_bounds_s": LATENCY_BUCKETS_S,
            "rank_fields": RANK_FIELDS,
            "actions": actions(),
        }
        self._live = LiveView(service, history, traffic.console, about, clients_max=clients_max)

    def close(self) -> None:
        """Send every page away. Idempotent."""
        self._live.close()

    # -- the page ------------------------------------------------------------------------------

    def page(self, _: Request) -> Response:
        """Return the page."""
        return self._assets.get(PAGE)

    def folder(self, _: Request) -> Response:
        """Lead who has typed a slash too many to the page; its links are relative to it."""
        return Response(308, b"", ((b"location", b"../console"), *SAFE))

    def static(self, request: Request) -> Response:
        """Return what the page is made of."""
        return self._assets.get(request.params[0])

    def events(self, _: Request) -> Response:
        """Begin to tell what happens."""
        return Feed(200, b"", _EVENTS, stream=self._live.open())

    # -- what is asked for -----------------------------------------------------------------------

    async def decisions(self, request: Request) -> Response:
        """List the newest decisions."""
        values = read_query(request.query, _DECISION_QUERY)
        wanted = Wanted(
            worker_id=read_id("worker_id", values.get("worker_id")),
            model_name=values.get("model_name"),
            tenant_id=values.get("tenant_id"),
            limit=_limit(values.get("limit")),
        )
        return _written(await sources.decisions(self._service, wanted))

    async def decision(self, request: Request) -> Response:
        """Return one decision with all its candidates."""
        return _written(await sources.decision(self._service, request.params[0]))

    def leases(self, request: Request) -> Response:
        """List open leases."""
        values = read_query(request.query, ("limit",))
        return _reply(for_browser(self._service.leases(None, _limit(values.get("limit")))))

    def reservations(self, request: Request) -> Response:
        """List the reservations made last."""
        values = read_query(request.query, ("limit",))
        return _reply(reservations(self._service, _limit(values.get("limit"))))

    async def findings(self, _: Request) -> Response:
        """Say what the doctor finds."""
        return _written(await sources.findings(self._service))

    async def shadow(self, _: Request) -> Response:
        """Say what other weights would have done."""
        return _reply(for_browser(await self._service.shadow()))

    def prefix(self, request: Request) -> Response:
        """Say who holds what of a prompt."""
        return _reply(look_up(self._service, request.body))


def _reply(answer: object) -> Response:
    return _written(encode(answer))


def _written(text: bytes) -> Response:
    return Response(200, text, _JSON)


def _limit(text: str | None) -> int:
    return min(LISTED_MAX, read_count("limit", text, LISTED))
