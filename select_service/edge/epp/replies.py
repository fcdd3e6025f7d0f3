"""Builds the answers of a stream: where a request goes, what passes on, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson

from select_service.edge.epp.messages import ProcessingResponse
from select_service.errors import AdmissionRefused, QueueFull, problem, retry_after
from select_service.types.selections import RANK_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.epp.picker import Choice
    from select_service.errors import ServiceError

DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"
_PIECE_BYTES: Final = 62_000
"""Envoy refuses pieces of more than 64 KiB in a full-duplex stream."""

_OVERWRITE: Final = 2
"""A client cannot choose its endpoint by sending the header itself."""

_SHED, _UNAVAILABLE = 429, 503
_SERVER_ERROR: Final = 500


def destination(kind: str, choice: Choice) -> Any:
    """Return the answer to a message of a request that tells where it goes.

    Args:
        kind: of the message; the answer's member has the same name.
        choice: the worker.
    """
    answer = ProcessingResponse()
    part = getattr(answer, kind)
    common = part if kind.endswith("trailers") else part.response
    headers = common.header_mutation
    _set(headers, DESTINATION, choice.endpoint)
    if choice.dp_rank is not None:
        _set(headers, RANK_HEADER, str(choice.dp_rank))
    if not kind.endswith("trailers"):
        common.clear_route_cache = True  # a route may look at the header
    answer.dynamic_metadata.update({NAMESPACE: {DESTINATION: choice.endpoint}})
    return answer


def passed_on(kind: str) -> Any:
    """Return the answer to a message that changes nothing."""
    answer = ProcessingResponse()
    getattr(answer, kind).SetInParent()
    return answer


def body_pieces(kind: str, body: bytes, *, is_last: bool) -> Iterator[Any]:
    """Return a body in answers of a full-duplex stream, at least one.

    Args:
        kind: `request_body` or `response_body`.
        body: what is to be passed on.
        is_last: whether the stream of the message ends with it.
    """
    for at in range(0, max(1, len(body)), _PIECE_BYTES):
        answer = ProcessingResponse()
        piece = getattr(answer, kind).response.body_mutation.streamed_response
        piece.SetInParent()
        piece.body = body[at : at + _PIECE_BYTES]
        piece.end_of_stream = is_last and at + _PIECE_BYTES >= len(body)
        yield answer


def status_of(error: ServiceError) -> int:
    """Return the status of a refusal as the protocol has it: 429 shed, 503 nobody to serve it."""
    if isinstance(error, AdmissionRefused | QueueFull):
        return _SHED
    return error.status if error.status < _SERVER_ERROR else _UNAVAILABLE


def refusal(error: ServiceError) -> Any:
    """Return the response that the gateway gives its client at once."""
    _, body = problem(error)
    answer = ProcessingResponse()
    response = answer.immediate_response
    response.status.code = status_of(error)
    response.body = orjson.dumps(body, default=str)
    response.details = error.code
    _set(response.headers, "content-type", "application/json")
    again = retry_after(error)
    if again is not None:
        _set(response.headers, "retry-after", str(again))
    return answer


def _set(mutation: Any, name: str, value: str) -> None:
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key, option.header.raw_value = name, value.encode()
