"""The planner's HTTP server: /health, /ready, /metrics, /decisions; and /v1/decision.

It listens on the loopback interface by default. Clients of the virtual connector's routes can
report work that was never done; nothing here can change a target.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from indexer.redaction import redact
from select_service.planner.edge.connectors.virtual import Completion, VirtualConnector
from select_service.planner.edge.planner_metrics import PlannerMetrics

if TYPE_CHECKING:
    from starlette.requests import Request

    from select_service.planner.edge.loop import Loop

BODY_MAX: Final = 65_536
ID_MOST: Final = 2**53
"""JSON readers round ids beyond it."""
_TOLD: Final = 50  # decisions, without a limit in the request
_OK, _NOTHING, _BAD, _NOT_FOUND, _TOO_LARGE, _NOT_READY = 200, 204, 400, 404, 413, 503


def create_app(loop: Loop) -> Starlette:
    """Return the application; the virtual connector's routes only if that is used."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PlannerMetrics(loop))

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        waiting = [f"{pool}: {why}" for pool, why in loop.connector.problems.items()]
        if not loop.counts.intervals:
            waiting.append("the first interval is not over")
        if loop.lease.problem:
            waiting.append(loop.lease.problem)
        body = {"ready": loop.is_ready, "leader": loop.is_leader, "waiting_for": waiting}
        return _json(body, _OK if loop.is_ready else _NOT_READY)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def decisions(request: Request) -> Response:
        asked = _whole(request.query_params.get("limit", ""))
        count = _TOLD if asked is None else asked
        newest = list(loop.decisions)[-count:] if count else []
        return _json({"decisions": newest[::-1]})

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/decisions", decisions),
    ]
    if isinstance(loop.connector, VirtualConnector):
        routes += _virtual(loop.connector)
    return Starlette(routes=routes)


def _virtual(connector: VirtualConnector) -> list[Route]:
    async def decision(request: Request) -> Response:
        try:
            after = int(request.query_params.get("after", "0"))
            wait_s = float(request.query_params.get("wait_s", "0"))
        except ValueError:
            return _json({"error": "after and wait_s are numbers"}, _BAD)
        if math.isnan(wait_s):  # it would wait for ever
            return _json({"error": "wait_s is not a number"}, _BAD)
        if not 0 <= after < ID_MOST:
            return _json({"error": f"after is not within 0 and {ID_MOST}"}, _BAD)
        found = await connector.next(after, wait_s)
        return Response(status_code=_NOTHING) if found is None else _json(found)

    async def complete(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():  # a chunked request does not announce its length
            body += part
            if len(body) > BODY_MAX:
                return _json({"error": f"the body is longer than {BODY_MAX}"}, _TOO_LARGE)
        try:
            completion = msgspec.json.decode(body, type=Completion)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _json({"error": str(error)}, _BAD)
        decision_id = _whole(request.path_params["decision_id"])
        if decision_id is None or not connector.complete(decision_id, completion):
            return _json({"error": "no such decision"}, _NOT_FOUND)
        return _json({"status": "ok"})

    return [
        Route("/v1/decision", decision),
        Route("/v1/decision/{decision_id}/complete", complete, methods=["POST"]),
    ]


def _whole(text: str) -> int | None:
    """Return a decimal number; None: it is none, or has more digits than `int` reads."""
    try:
        return int(text) if text.isdecimal() else None
    except ValueError:
        return None


def _json(body: object, status: int = _OK) -> Response:
    text = redact(msgspec.json.encode(body).decode())
    return Response(text, status, media_type="application/json")
