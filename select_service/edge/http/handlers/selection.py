"""Selections: of one worker, of a pair, of a batch; answered at once, or when one is free.

What can be answered at once costs no task: a handler gives an awaitable only where a caller waits,
or where a decision is to be explained.
"""

from __future__ import annotations

import asyncio
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from select_service.core.admission.queue import Ticket
from select_service.edge.batch_runner import BatchBody, explained
from select_service.edge.driver.selection_operations import SelectionOperations
from select_service.edge.http.decorators import post, safe_post
from select_service.edge.withdrawal import withdrawn_if_lost
from select_service.errors import ServiceError
from select_service.types import (
    Answer,
    PairSelection,
    SelectAndReserveRequest,
    SelectPairRequest,
    SelectRequest,
)
from select_service.types.batches import SelectBatchAnswer, SelectBatchItem, SelectBatchRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.batches.batch_selection import Item
    from select_service.edge.codec.json_codec import Decoded
    from select_service.edge.codec.responses import Response
    from select_service.edge.http.api import Api, Handler, Reply, Request

_BATCH_ITEMS: Final = 8  # decoded in one go, some 10 µs each at 2,048 tokens


def _handler(
    operation: Callable[..., object],
    takes: type[SelectRequest],
    summary: str,
    *,
    books: bool = True,
) -> Handler:
    """Return the handler of an operation of the driver, or of a tenant's view of it.

    Args:
        operation: takes a request and the bytes of its unknown members, and returns an answer or a
            ticket.
        takes: the type of its requests.
        summary: of the route.
        books: whether its answers carry bookings, which are withdrawn if they cannot be written.
    """
    name = operation.__name__
    operation_of = attrgetter(f"service.{name}")

    def handle(api: Api, request: Request) -> Reply:
        decoded = api.bodies[takes].decode(request.body)
        choose: Callable[[SelectRequest, bytes], Answer | Ticket] = operation_of(api)
        try:
            decided = choose(decoded.request, decoded.unknown)
        except ServiceError as error:
            return refuse(api, error, decoded.warning)
        if type(decided) is Ticket:
            return _wait(api, decided, decoded.request, decoded.warning)
        if decoded.request.explain:
            return _explain(api, decided, decoded.request, decoded.warning)
        response = api.writer.reply(decided, 200, decoded.warning)
        if books:
            service = api.service
            response.withdraw = partial(service.withdraw, decided, service.bookings.added)
        return response

    handle.__name__, handle.__doc__ = name.removesuffix("_now"), summary
    return handle


select: Final = safe_post("/select", Answer, 503, scope="select", takes=SelectRequest)(
    _handler(
        SelectionOperations.select_now,
        SelectRequest,
        "Choose the worker for a prompt; waits while every eligible rank is busy.",
        books=False,
    )
)
select_and_reserve: Final = post(
    "/select_and_reserve", Answer, 404, 409, 503, scope="select", takes=SelectAndReserveRequest
)(
    _handler(
        SelectionOperations.select_and_reserve_now,
        SelectAndReserveRequest,
        "Choose a worker and book it in one step; waits likewise.",
    )
)
select_pair: Final = post(
    "/select_pair", PairSelection, 404, 409, 503, scope="select", takes=SelectPairRequest
)(
    _handler(
        SelectionOperations.select_pair_now,
        SelectPairRequest,
        "Book a prefill and a decode worker in one step, or one worker if that costs less.",
    )
)


def refuse(api: Api, error: ServiceError, warning: str | None) -> Reply:
    """Answer with a refusal, whose decision is explained where that was asked for."""
    if error.decision is not None:
        return _refuse(api, error, warning)
    return api.refusal(error, warning)


async def _wait(api: Api, ticket: Ticket, request: SelectRequest, warning: str | None) -> Response:
    try:
        answer = await api.service.wait(ticket)
    except ServiceError as error:
        return await _refuse(api, error, warning)
    return await _explain(api, answer, request, warning)


async def _explain(
    api: Api, answer: Answer, request: SelectRequest, warning: str | None
) -> Response:
    service = api.service
    withdraw = partial(service.withdraw, answer, service.bookings.added)
    with withdrawn_if_lost(service, answer):
        finished = await service.decision_reports.finish(answer, request, api.writer.written)
        response = api.writer.reply(finished, 200, warning)
    response.withdraw = withdraw
    return response


async def _refuse(api: Api, error: ServiceError, warning: str | None) -> Response:
    await api.service.decision_reports.finish_refusal(error, api.writer.written)
    return api.refusal(error, warning)


@post("/select_batch", SelectBatchAnswer, 404, 409, 503, scope="select", takes=SelectBatchRequest)
def select_batch(api: Api, request: Request) -> Reply:
    """Choose workers for a batch of prompts together, and reserve them if that is wanted."""
    return _select_batch(api, api.bodies[BatchBody].decode(request.body))


async def _select_batch(api: Api, decoded: Decoded[BatchBody]) -> Response:
    wants, warning = decoded.request, decoded.warning
    items: list[Item] = []
    for at, raw in enumerate(wants.requests):
        try:
            one = api.bodies[SelectBatchItem].decode(bytes(raw))
        except ServiceError as refusal:  # of a body that is wrong nothing is done
            inside = "" if refusal.field is None else f".{refusal.field}"
            refusal.field = f"requests[{at}]{inside}"
            raise
        items.append((one.request, one.unknown))
        warning = warning or one.warning
        if not (at + 1) % _BATCH_ITEMS:
            await asyncio.sleep(0)
    service = api.service
    try:
        answer = await service.select_batch(wants, items)
    except ServiceError as refusal:
        return api.refusal(refusal, warning)
    withdraw = partial(service.withdraw, answer, service.bookings.added)
    with withdrawn_if_lost(service, answer):
        finished = await explained(answer, service.decision_reports, api.writer.written)
        response = api.writer.reply(finished, 200, warning)
    response.withdraw = withdraw
    return response
