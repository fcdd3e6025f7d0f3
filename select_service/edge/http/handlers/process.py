"""State of the process: whether it is up, whether it is ready, its counters, its description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET
from msgspec.structs import asdict

from select_service.edge.codec.encoder import retry_after_line
from select_service.edge.codec.responses import ALWAYS_JSON, Response, Status
from select_service.edge.http.decorators import get
from select_service.edge.http.worker_list import AT_ONCE_MAX, records
from select_service.edge.routing import OPEN, read_query
from select_service.errors import InvalidQuery
from select_service.types import BriefReady, Ready

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.edge.http.api import Api, Reply, Request

READY_QUERY: Final = ("verbose", "for", "examine")
_TRAFFIC: Final = "traffic"
_SWITCH: Final = {"true": True, "1": True, "false": False, "0": False, "": False}


@get("/health", Status, scope=OPEN)
def health(api: Api, _: Request) -> Response:
    """Say that the process is up, and nothing else."""
    return api.writer.done()


@get("/ready", Ready | BriefReady, 503, scope=OPEN, query=READY_QUERY)
def ready(api: Api, request: Request) -> Reply:
    """Say whether a worker is schedulable (for=traffic: whether to send requests): 200 or 503.

    `for=traffic` is for probes: workers do not matter, and none is listed. With `verbose`, the
    doctor's findings are listed, and with `examine` those of an examination that begins now.
    """
    query = read_query(request.query, READY_QUERY)
    is_verbose, examines = _switch(query, "verbose"), _switch(query, "examine")
    if examines and not is_verbose:
        raise InvalidQuery("`examine` goes with `verbose=true`", field="examine")
    if "for" in query:
        if query["for"] != _TRAFFIC:
            raise InvalidQuery(f"`for` must be {_TRAFFIC}", field="for")
        if is_verbose:
            raise InvalidQuery(f"`for={_TRAFFIC}` has nothing more to show", field="verbose")
        traffic = api.service.ready_for_traffic()
        if api.brief is not None:
            traffic = BriefReady(traffic.ready)
        return _say_ready(api, traffic, is_ready=traffic.ready)
    if api.brief is not None:
        if is_verbose:
            raise api.brief()
        brief = BriefReady(api.service.is_ready())
        return _say_ready(api, brief, is_ready=brief.ready)
    if is_verbose:
        return _ready_verbose(api, examines=examines)
    ids = api.service.worker_ids()
    if len(ids) > AT_ONCE_MAX:
        return _ready_with_many(api, api.service.ready(with_workers=False), ids)
    ready = api.service.ready()
    return _say_ready(api, ready, is_ready=ready.ready)


def _switch(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "")
    if value not in _SWITCH:
        raise InvalidQuery(f"`{name}` must be true or false", field=name)
    return _SWITCH[value]


async def _ready_verbose(api: Api, *, examines: bool) -> Response:
    ready = await api.service.ready_verbose(with_workers=False, examines=examines)
    return await _ready_with_many(api, ready, api.service.worker_ids())


async def _ready_with_many(api: Api, ready: Ready, ids: list[int]) -> Response:
    """Say so with records that are written already: a `Ready` cannot have those."""
    members = asdict(ready) | {"workers": await records(api, ids)}
    answer = {name: value for name, value in members.items() if value is not UNSET}
    return _say_ready(api, answer, is_ready=ready.ready)


def _say_ready(api: Api, answer: object, *, is_ready: bool) -> Response:
    response = api.writer.reply(answer, 200 if is_ready else 503)
    if not is_ready:
        response.headers += (retry_after_line(0.0),)
    return response


@get("/metrics", None, scope="read", of_process=True)
def metrics(api: Api, _: Request) -> Reply:
    """Return counters for Prometheus."""
    return _metrics(api)


async def _metrics(api: Api) -> Response:
    body, media_type = await api.render_metrics()
    return Response(200, body, ((b"content-type", media_type.encode()),))


@get("/openapi.json", dict[str, Any], scope="read")
async def openapi(api: Api, _: Request) -> Response:
    """Return this description."""
    return Response(200, await api.describe(), ALWAYS_JSON)
