"""Reservations, from the booking to the end, and the leases above them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from select_service.edge.codec.responses import Status
from select_service.edge.driver.reservation_operations import ReservationOperations
from select_service.edge.http.decorators import delete, get, post
from select_service.edge.routing import read_choice, read_count, read_query
from select_service.errors import ServiceError
from select_service.types import (
    OUTCOMES,
    BatchAnswer,
    BatchRequest,
    LeaseList,
    LeaseRecord,
    LeaseRenewal,
    LeaseRequest,
    OutputBlockRequest,
    PrefillCompleteRequest,
    ReservationAnswer,
    ReservationRequest,
)

if TYPE_CHECKING:
    from select_service.core.ledger.reservation import Lease
    from select_service.edge.codec.responses import Response
    from select_service.edge.http.api import Api, Reply, Request

FREE_QUERY: Final = ("cached_tokens", "outcome")
_CACHED_TOKENS: Final = b"cached_tokens"


@post(
    "/reservations",
    ReservationAnswer,
    404,
    409,
    503,
    scope="lifecycle",
    takes=ReservationRequest,
    status=201,
)
def reserve(api: Api, request: Request) -> Reply:
    """Book a rank of the caller's choice."""
    service, decoded = api.service, api.bodies[ReservationRequest].decode(request.body)
    try:
        booked = service.reserve(decoded.request, decoded.unknown)
    except ServiceError as error:
        return api.refusal(error, decoded.warning)
    response = api.writer.reply(booked, 201, decoded.warning)
    response.withdraw = partial(service.withdraw, booked, service.bookings.added)
    return response


@post(
    "/reservations/{reservation_id}/prefill_complete",
    Status,
    404,
    scope="lifecycle",
    takes=PrefillCompleteRequest,
    body_optional=True,
    body_lenient=True,
)
def prefill_complete(api: Api, request: Request) -> Response:
    """Take a reservation's prefill tokens out of the load: its prompt is computed."""
    if not request.body or _CACHED_TOKENS not in request.body:  # others are ignored
        api.service.prefill_complete(request.params[0])
        return api.writer.done()
    decoded = api.bodies[PrefillCompleteRequest].decode(request.body)
    name = request.params[0]

    def verb(done: PrefillCompleteRequest, _: bytes) -> Status:
        api.service.prefill_complete(name, done.cached_tokens)
        return Status()

    return api.answer(decoded, verb)


@post(
    "/reservations/{reservation_id}/output_block",
    Status,
    404,
    scope="lifecycle",
    takes=OutputBlockRequest,
)
def output_block(api: Api, request: Request) -> Reply:
    """Add one more KV block to a reservation."""
    decoded = api.bodies[OutputBlockRequest].decode(request.body)
    try:
        api.service.output_block(request.params[0], decoded.request.decay_fraction)
    except ServiceError as error:
        return api.refusal(error, decoded.warning)
    if decoded.warning is None:
        return api.writer.done()
    return api.writer.reply(Status(), 200, decoded.warning)


@delete("/reservations/{reservation_id}", Status, 404, scope="lifecycle", query=FREE_QUERY)
def free(api: Api, request: Request) -> Response:
    """End a reservation. Repeatable.

    `cached_tokens`, also in a repeat: tokens of its prompt that the engine has found cached.
    `outcome`: `completed`, `failed` (by its engine) or `cancelled` (by its caller).
    """
    cached_tokens = outcome = None
    if request.query:
        values = read_query(request.query, FREE_QUERY)
        text = values.get("cached_tokens")
        cached_tokens = None if text is None else read_count("cached_tokens", text, 0, least=0)
        outcome = read_choice("outcome", values.get("outcome"), OUTCOMES)
    api.service.free(request.params[0], cached_tokens, outcome)
    return api.writer.done()


@post("/reservations/batch", BatchAnswer, scope="lifecycle", takes=BatchRequest)
def batch(api: Api, request: Request) -> Reply:
    """Carry out many lifecycle calls in order, each for itself."""
    decoded = api.bodies[BatchRequest].decode(request.body)
    try:
        answer = api.service.batch_now(decoded.request)
    except ServiceError as error:
        return api.refusal(error, decoded.warning)
    if isinstance(answer, BatchAnswer):
        return api.writer.reply(answer, 200, decoded.warning)
    return _finish_batch(api, answer, decoded.warning)


async def _finish_batch(
    api: Api, answer: asyncio.Task[BatchAnswer], warning: str | None
) -> Response:
    return api.writer.reply(await asyncio.shield(answer), 200, warning)


open_lease: Final = post(
    "/leases", LeaseRecord, 409, 503, scope="lifecycle", takes=LeaseRequest, status=201
).calls(ReservationOperations.open_lease)


renew_lease: Final = post(
    "/leases/{lease_id}/renew",
    LeaseRecord,
    404,
    scope="lifecycle",
    changes=False,
    takes=LeaseRenewal,
    body_optional=True,
).calls(ReservationOperations.renew_lease)


@delete("/leases/{lease_id}", Status, 404, scope="lifecycle")
def close_lease(api: Api, request: Request) -> Reply:
    """End a lease and every reservation under it. Repeatable."""
    lease = api.service.close_lease_now(request.params[0])
    return api.writer.done() if lease is None else _clear_lease(api, lease)


async def _clear_lease(api: Api, lease: Lease) -> Response:
    await api.service.clear_lease(lease)
    return api.writer.done()


leases: Final = get("/leases", LeaseList, scope="read", query=("owner", "limit")).calls(
    ReservationOperations.leases
)
