"""The messages of ext_proc and of gRPC's health protocol, as far as they are used here.

Built from one table at import, in a descriptor pool of their own. The published packages with
these messages bring other packages' files along (`xds-protos` overwrites those of
`opentelemetry-proto`), so the few that are needed are declared here; fields that are not in the
table are skipped by the decoder. Names and numbers are those of Envoy's API, version 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import orjson
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

from select_service.errors import AdmissionRefused, QueueFull, problem, retry_after
from select_service.types.selections import RANK_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.edge.epp.picker import Choice
    from select_service.errors import ServiceError

__all__ = [
    "BUFFERED",
    "BUFFERED_PARTIAL",
    "FULL_DUPLEX_STREAMED",
    "NONE",
    "STREAMED",
    "HealthCheckRequest",
    "HealthCheckResponse",
    "ProcessingRequest",
    "ProcessingResponse",
]

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""How bodies are sent: `ProcessingMode.BodySendMode`."""

_PACKAGE: Final = "ext_proc"
_STRUCT: Final = ".google.protobuf.Struct"
_FIELD: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "string": _FIELD.TYPE_STRING,
    "bytes": _FIELD.TYPE_BYTES,
    "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32,  # of enumerations, too: the same on the wire
}
_MESSAGES: Final = {
    # -- envoy.config.core.v3, envoy.type.v3
    "HeaderValue": "1 key string, 2 value string, 3 raw_value bytes",
    "HeaderMap": "1 headers HeaderValue*",
    "HeaderValueOption": "1 header HeaderValue, 3 append_action int32",
    "Metadata": "1 filter_metadata Struct{}",
    "HttpStatus": "1 code int32",
    # -- envoy.service.ext_proc.v3
    "HttpHeaders": "1 headers HeaderMap, 3 end_of_stream bool",
    "HttpBody": "1 body bytes, 2 end_of_stream bool",
    "HttpTrailers": "1 trailers HeaderMap",
    "ProtocolConfiguration": "1 request_body_mode int32, 2 response_body_mode int32",
    "ProcessingRequest": "2 request_headers HttpHeaders |request, "
    "3 response_headers HttpHeaders |request, 4 request_body HttpBody |request, "
    "5 response_body HttpBody |request, 6 request_trailers HttpTrailers |request, "
    "7 response_trailers HttpTrailers |request, 8 metadata_context Metadata, "
    "10 observability_mode bool, 11 protocol_config ProtocolConfiguration",
    "HeaderMutation": "1 set_headers HeaderValueOption*",
    "StreamedBodyResponse": "1 body bytes, 2 end_of_stream bool",
    "BodyMutation": "3 streamed_response StreamedBodyResponse |mutation",
    "CommonResponse": "2 header_mutation HeaderMutation, 3 body_mutation BodyMutation, "
    "5 clear_route_cache bool",
    "HeadersResponse": "1 response CommonResponse",
    "BodyResponse": "1 response CommonResponse",
    "TrailersResponse": "1 header_mutation HeaderMutation",
    "ImmediateResponse": "1 status HttpStatus, 2 headers HeaderMutation, 3 body bytes, "
    "5 details string",
    "ProcessingResponse": "1 request_headers HeadersResponse |response, "
    "2 response_headers HeadersResponse |response, 3 request_body BodyResponse |response, "
    "4 response_body BodyResponse |response, 5 request_trailers TrailersResponse |response, "
    "6 response_trailers TrailersResponse |response, "
    "7 immediate_response ImmediateResponse |response, 8 dynamic_metadata Struct",
    # -- grpc.health.v1
    "HealthCheckRequest": "1 service string",
    "HealthCheckResponse": "1 status int32",
}
"""Fields as `number name type`: `*` repeats, `{}` is a map by string, `|` names the oneof."""


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="select_service/ext_proc.proto", package=_PACKAGE, syntax="proto3"
    )
    file.dependency.append(struct_pb2.DESCRIPTOR.name)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            _add_field(message, text)
    return file


def _add_field(message: Any, text: str) -> None:
    declaration, _, oneof = text.partition(" |")
    number, name, kind = declaration.split(" ")
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if kind.endswith("{}"):
        entry = message.nested_type.add(name="".join(map(str.title, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=_FIELD.TYPE_STRING)
        _type(entry.field.add(name="value", number=2, label=1), kind.removesuffix("{}"))
        field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.endswith("*"):
        field.label = _FIELD.LABEL_REPEATED
    _type(field, kind.removesuffix("*"))
    if oneof:
        if not message.oneof_decl:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = 0


def _type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = _FIELD.TYPE_MESSAGE
    field.type_name = _STRUCT if kind == "Struct" else f".{_PACKAGE}.{kind}"


def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    shared = descriptor_pb2.FileDescriptorProto()
    struct_pb2.DESCRIPTOR.CopyToProto(shared)
    pool.Add(shared)
    pool.Add(_described())
    return pool


_POOL: Final = _pool()


def _message(name: str) -> Any:
    found = _POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}")
    return message_factory.GetMessageClass(found)


ProcessingRequest: Final = _message("ProcessingRequest")
ProcessingResponse: Final = _message("ProcessingResponse")
HealthCheckRequest: Final = _message("HealthCheckRequest")
HealthCheckResponse: Final = _message("HealthCheckResponse")


DESTINATION: Final = "x-gateway-destination-endpoint"
NAMESPACE: Final = "envoy.lb"
_PIECE_BYTES: Final = 62_000
"""Envoy refuses pieces of more than 64 KiB in a full-duplex stream."""

_OVERWRITE: Final = 2
"""A client cannot choose its endpoint by sending the header itself."""

_SHED, _UNAVAILABLE = 429, 503
_SERVER_ERROR: Final = 500


def destination(kind: str, choice: Choice) -> Any:
    """Return the answer to a message of a request that shows where it goes.

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
    """Return the status of a refusal as the protocol has it: 429 shed, 503 no worker for it."""
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
