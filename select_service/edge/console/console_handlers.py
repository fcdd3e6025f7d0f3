"""The handlers under /console. Loaded with the first request to them; read-only.

Changes go through the routes of the API.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import orjson

from select_service.edge.codec.responses import Feed, Response
from select_service.edge.console import sources
from select_service.edge.console.assets import DOCS, PAGE, SAFE, Assets
from select_service.edge.console.browser import for_browser
from select_service.edge.console.fleet import RANK_FIELDS
from select_service.edge.console.history import HISTORY_STEP_S, POINT
from select_service.edge.console.prefix import look_up
from select_service.edge.console.sections import actions
from select_service.edge.console.stream import INTERVAL_S, LiveView
from select_service.edge.decision_report import Wanted
from select_service.edge.http.traffic import LATENCY_BUCKETS_S
from select_service.edge.routing import read_count, read_id, read_query
from select_service.errors import InvalidQuery
from select_service.types.common_fields import WEIGHT_SETTINGS, weight_text
from select_service.types.decisions import Outcome
from select_service.version import __version__

if TYPE_CHECKING:
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.edge.console.history import History
    from select_service.edge.driver.driver import Driver
    from select_service.edge.http.api import Request
    from select_service.edge.http.traffic import Traffic

LISTED: Final = 50
LISTED_MAX: Final = 200
"""Most rows in one list, whatever limit is requested: some 300 µs of event loop."""

DOCUMENTATION: Final = "https://github.com/select-service/select-service/tree/main/deploy/docs"
"""As in pyproject.toml."""

_JSON: Final = ((b"content-type", b"application/json"), (b"cache-control", b"no-store"), *SAFE)
_EVENTS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer messages up to 4 KiB
    *SAFE,
)
_DECISION_QUERY: Final = ("limit", "worker_id", "model_name", "tenant_id", "outcome")


class Console:
    """The handlers, under the names used in `console_app.py`."""

    def __init__(
        self,
        service: Driver,
        traffic: Traffic,
        history: History,
        *,
        clients_max: int,
        grafana_url: str | None,
    ) -> None:
        self._service = service
        self._assets = Assets()
        self._docs: Assets | None = None
        about = {
            "version": __version__,
            "life": secrets.token_hex(8),  # changes when the service restarts
            "assets": self._assets.digest,
            "interval_s": INTERVAL_S,
            "history_step_s": HISTORY_STEP_S,
            "point": POINT,
            "latency_bounds_s": LATENCY_BUCKETS_S,
            "rank_fields": RANK_FIELDS,
            "actions": actions(),
            "weights": {name: weight_text(name) for name in WEIGHT_SETTINGS},
            "links": {"documentation": DOCUMENTATION, "grafana": grafana_url},
        }
        self._live = LiveView(service, history, traffic.console, about, clients_max=clients_max)

    def close(self) -> None:
        """End the streams of all pages. Idempotent."""
        self._live.close()

    # -- the page ------------------------------------------------------------------------------

    def page(self, _: Request) -> Response:
        """Return the page."""
        return self._assets.get(PAGE)

    def folder(self, _: Request) -> Response:
        """Redirect from the URL with a trailing slash: relative links would break there."""
        return Response(308, b"", ((b"location", b"../console"), *SAFE))

    def static(self, request: Request) -> Response:
        """Return a file of the page."""
        return self._assets.get(request.params[0])

    def docs_page(self, _: Request) -> Response:
        """Return the page of the API."""
        return self._docs_assets().get(PAGE)

    def docs_folder(self, _: Request) -> Response:
        """Redirect from the URL with a trailing slash, as in `folder`."""
        return Response(308, b"", ((b"location", b"../docs"), *SAFE))

    def docs_static(self, request: Request) -> Response:
        """Return a file of that page."""
        return self._docs_assets().get(request.params[0])

    def _docs_assets(self) -> Assets:
        if self._docs is None:
            self._docs = Assets(DOCS)
        return self._docs

    def events(self, _: Request) -> Response:
        """Open the stream of events."""
        return Feed(200, b"", _EVENTS, stream=self._live.open())

    # -- requests of the page --------------------------------------------------------------------

    async def decisions(self, request: Request) -> Response:
        """List the newest decisions."""
        values = read_query(request.query, _DECISION_QUERY)
        wanted = Wanted(
            worker_id=read_id("worker_id", values.get("worker_id")),
            model_name=values.get("model_name"),
            tenant_id=values.get("tenant_id"),
            outcome=_outcome(values.get("outcome")),
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
        """List the newest reservations."""
        values = read_query(request.query, ("limit",))
        return _reply(_reservations(self._service, _limit(values.get("limit"))))

    async def findings(self, _: Request) -> Response:
        """Return the doctor's findings."""
        return _written(await sources.findings(self._service))

    async def shadow(self, _: Request) -> Response:
        """Return what the shadow weights would have chosen."""
        return _reply(for_browser(await self._service.shadow()))

    def prefix(self, request: Request) -> Response:
        """Return which ranks hold a prompt."""
        return _reply(look_up(self._service, request.body))


def _reply(answer: object) -> Response:
    return _written(orjson.dumps(answer))


def _written(text: bytes) -> Response:
    return Response(200, text, _JSON)


def _limit(text: str | None) -> int:
    return min(LISTED_MAX, read_count("limit", text, LISTED))


def _outcome(text: str | None) -> Outcome | None:
    for one in get_args(Outcome):
        if text == one:
            return cast("Outcome", one)
    if text is not None:
        raise InvalidQuery(f"`outcome` must be one of {get_args(Outcome)}", field="outcome")
    return None


def _reservations(service: Driver, limit: int) -> dict[str, Any]:
    """Return how many reservations there are, and the newest of them. O(limit)."""
    bookings, now = service.core.lifecycle.bookings, service.now()
    rows = [_row(one, now) for one in bookings.newest(limit)]
    return {"total": len(bookings), "reservations": rows}


def _row(booking: LiveReservation, now: float) -> dict[str, Any]:
    one, partition = booking.reservation, booking.partition
    worker, dp_rank = partition.fleet_slots.rank_at(one.slot)
    return {
        "reservation_id": one.reservation_id,
        "selection_id": one.selection_id,
        "model_name": partition.scope.model_name,
        "tenant_id": partition.scope.tenant_id,
        "worker_id": str(worker.worker_id),
        "dp_rank": dp_rank,
        "phase": "decode" if one.prefill_done else "prefill",
        "isl_tokens": one.isl_tokens,
        "prefill_tokens": one.prefill_tokens,
        "output_blocks": one.output_blocks,
        "age_s": round(now - one.created, 1),
        "idle_s": round(now - one.touched, 1),
        "ttl_s": one.ttl_s or None,
        "lease_id": None if one.lease is None else one.lease.lease_id,
        "origin": str(one.origin),
    }
