"""GET /openapi.json: the route table and the types that validate, as OpenAPI 3.1.

Generated, so it cannot disagree with the service about fields, types and ranges. What JSON Schema
cannot express (u64, duplicate keys) is in the descriptions.
"""

from __future__ import annotations

import re
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec
import orjson

from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import OPEN
from select_service.types import (
    PromptFields,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectPairRequest,
    SelectRequest,
)
from select_service.types.batches import SelectBatchRequest
from select_service.types.decisions import Decision
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator

    from select_service.edge.http.api import Handler
    from select_service.edge.routing import Route

__all__ = ["Problem", "describe", "describing"]

_PARAM: Final = re.compile(r"\{(\w+)\}")
_REF: Final = "#/components/schemas/{name}"
_U64_MAX: Final = (1 << 64) - 1
_U64: Final[dict[str, object]] = {"type": "integer", "minimum": 0, "maximum": _U64_MAX}
_QUERY: Final[dict[str, dict[str, object]]] = {  # those that are not text
    "worker_id": _U64,
    "limit": {"type": "integer", "minimum": 1},
    "candidates": {"type": "boolean"},
}
_RANKS: Final[dict[str, object]] = {"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}
_FRACTION: Final[dict[str, object]] = {"minimum": 0, "maximum": 1}
_NARROWER: Final[dict[tuple[str, str], dict[str, object]]] = {
    # Checked outside the types, because these have error texts or statuses of their own.
    ("WorkerSpec", "kv_events_endpoints"): _RANKS,
    ("WorkerPatch", "kv_events_endpoints"): _RANKS,
    ("WorkerSpec", "replay_endpoints"): _RANKS,
    ("WorkerPatch", "replay_endpoints"): _RANKS,
    ("OutputBlockRequest", "decay_fraction"): _FRACTION,
    ("BusyThresholdChange", "active_decode_blocks_threshold"): _FRACTION,
    ("BusyThresholdChange", "active_prefill_tokens_threshold"): _U64,
    ("BusyThresholdChange", "active_prefill_tokens_threshold_frac"): {"minimum": 0},
    ("LeaseRequest", "owner"): {"minLength": 1},
    ("LeaseRequest", "lease_id"): {"minLength": 1},
    ("PeerRequest", "endpoint"): {"pattern": "^(tcp|ipc|inproc)://."},
}
_EVERYWHERE: Final = {500: "An error of this service."}
_WITH_PARAMS: Final = {400: "The path cannot be read."}
_WITH_QUERY: Final = {400: "A key appears twice in the query."}
_WITH_BODY: Final = {
    400: "The body is not what its Content-Type says, or asks for what cannot be served.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    415: "The body claims to be neither JSON nor msgpack.",
    422: "Of the wrong shape; `field` says where.",
}
_WITH_CHANGES: Final = {
    503: "Nothing can serve this now, or the state cannot be written: its disk is full or broken.",
}
_WITH_TOKENS: Final = {
    401: "A token is needed, or the one shown is not known.",
    403: "The token does not allow this.",
}
_TEXTS: Final = {
    404: "No such worker, rank, reservation, lease, decision or tenant.",
    409: "The id is live with another body, in another scope or for another owner, or belongs to a "
    "lease closed just now; or replica sync is off.",
    503: "Nothing can serve this now.",
}
_OF_LOAD: Final = "A refusal for load: `--overload-status-code`."

_ONLY_JSON: Final = frozenset({"/dump", "/openapi.json"})  # long or static, without refusals
_PACKED: Final = (
    "`token_ids`, `routing_token_ids`, `block_hashes` and `sequence_hashes` may be binaries instead"
    " of arrays: little-endian numbers, 4 bytes a token, 8 bytes a hash."
)
_PROMPTS: Final = (PromptFields, SelectBatchRequest)  # a batch has prompts in its items
_GATED: Final = frozenset(  # routes subject to admission
    (
        SelectRequest,
        SelectAndReserveRequest,
        SelectPairRequest,
        SelectBatchRequest,
        ReservationRequest,
    )
)
_WITH_HASHES: Final = frozenset({SelectAndReserveRequest})  # routes whose answers have hashes
_PACKED_ANSWER: Final = "`sequence_hashes`, where there are any, are a binary: 8 bytes a hash."


class Problem(msgspec.Struct):
    """Every answer of status 400 and above."""

    error: str
    code: str | int  # a number, the status, only when all workers are busy
    field: str | msgspec.UnsetType = msgspec.UNSET
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    # Of refusals by the gate.
    reason: str | msgspec.UnsetType = msgspec.UNSET  # stable
    gate: str | msgspec.UnsetType = msgspec.UNSET
    policy: str | msgspec.UnsetType = msgspec.UNSET
    retry_after_s: float | msgspec.UnsetType | None = msgspec.UNSET  # null: it never fits
    promised: bool | msgspec.UnsetType = msgspec.UNSET  # a place is held for the return
    knob: str | msgspec.UnsetType | None = msgspec.UNSET
    value: float | msgspec.UnsetType | None = msgspec.UNSET
    limit: float | msgspec.UnsetType | None = msgspec.UNSET
    message: str | msgspec.UnsetType = msgspec.UNSET  # when all workers are busy
    type: str | msgspec.UnsetType = msgspec.UNSET  # likewise
    decision: Decision | msgspec.UnsetType = msgspec.UNSET  # if `explain` was set


def describe(overload_status: int = 503) -> bytes:
    """Render the document of a service whose refusals for load have this status."""
    making = describing(overload_status)
    while True:
        try:
            next(making)
        except StopIteration as done:
            document: bytes = done.value
            return document


def describing(overload_status: int = 503) -> Generator[None, None, bytes]:
    """Like `describe`, in steps of a type or a route; 30 ms in total, a few per step at most."""
    described = [
        kind
        for route in ROUTES
        for one in (route.takes, route.answers)
        if one
        for kind in _kinds(one)
    ]
    components: dict[str, Any] = {}
    schema_of: dict[str, Any] = {}
    for kind in (Problem, *described):
        if repr(kind) in schema_of:
            continue
        (shape,), parts = msgspec.json.schema_components([kind], ref_template=_REF)
        schema_of[repr(kind)] = shape
        for name, part in parts.items():
            if name not in components:
                _bound(part)
                components[name] = part
        yield
    for (name, member), narrower in _NARROWER.items():
        described_as = components[name]["properties"][member]
        (described_as["anyOf"][0] if "anyOf" in described_as else described_as).update(narrower)
    paths: dict[str, dict[str, object]] = {}
    for route in ROUTES:
        operation = _operation(route, schema_of, overload_status)
        paths.setdefault(route.pattern, {})[route.method.lower()] = operation
        yield
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "select-service",
                "version": __version__,
                "description": "Decides which LLM inference worker serves a request. Integers are"
                " up to 64 bits wide: worker ids and token counts are unsigned, hashes may be"
                " written signed or unsigned. A float is never an integer. A key that comes twice"
                " in an object is refused. Bodies and answers may be msgpack instead of JSON:"
                " bodies say so in Content-Type, answers are asked for in Accept, under the name"
                " application/msgpack, application/x-msgpack or application/vnd.msgpack.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "token": {
                        "type": "http",
                        "scheme": "bearer",
                        "description": "With `--token-file`; `x-scope` says what it must allow.",
                    }
                },
            },
        }
    )


def _kinds(answers: object) -> list[Any]:
    """Return the types of an answer that may be a union."""
    return list(get_args(answers)) if isinstance(answers, UnionType) else [answers]


def _bound(schema: object) -> None:
    """Add the upper bound of 64-bit integers, which msgspec cannot express as a range."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer" and "minimum" in schema:
            schema.setdefault("maximum", _U64_MAX)
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _bound(part)


def _operation(
    route: Route[Handler], schema_of: dict[str, Any], overload_status: int
) -> dict[str, object]:
    words = _PARAM.sub("", f"{route.method}{route.pattern}").strip("/").lower().split("/")
    if route.method == "GET" and route.pattern.endswith("}"):  # distinguishes it from the list
        words.append("one")
    operation: dict[str, object] = {
        "summary": route.summary,
        "operationId": "_".join(word for word in words if word),
        "responses": _responses(route, schema_of, overload_status),
    }
    parameters = [_path_parameter(name) for name in _PARAM.findall(route.pattern)]
    parameters += [
        {
            "name": name,
            "in": "query",
            "required": name == "model",
            "schema": _QUERY.get(name, {"type": "string"}),
        }
        for name in route.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.scope != OPEN:
        operation |= {"security": [{}, {"token": []}], "x-scope": route.scope}
    if route.takes is not None:
        note = _PACKED if issubclass(route.takes, _PROMPTS) else ""
        operation["requestBody"] = {
            "required": not route.body_optional,
            "content": _in_both_forms(_taken(route, schema_of), note),
        }
    return operation


def _taken(route: Route[Handler], schema_of: dict[str, Any]) -> dict[str, Any]:
    """Describe a body; a lenient one may be anything without the named fields."""
    schema: dict[str, Any] = schema_of[repr(route.takes)]
    if not route.body_lenient:
        return schema
    assert route.takes is not None
    names = [field.encode_name for field in msgspec.structs.fields(route.takes)]
    named = [{"type": "object", "required": [name]} for name in names]
    return {"anyOf": [schema, {"not": {"anyOf": named}}]}


def _path_parameter(name: str) -> dict[str, object]:
    schema = _U64 if name == "worker_id" else {"type": "string"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _content(route: Route[Handler], schema_of: dict[str, Any]) -> dict[str, object]:
    if route.answers is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    if route.answers is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    schemas = [schema_of[repr(kind)] for kind in _kinds(route.answers)]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if route.pattern in _ONLY_JSON:
        return {"application/json": {"schema": schema}}
    return _in_both_forms(schema, _PACKED_ANSWER if route.takes in _WITH_HASHES else "")


def _in_both_forms(schema: dict[str, Any], note: str) -> dict[str, object]:
    """Describe a value in JSON and in msgpack, with a note on differences."""
    packed = schema | {"description": note} if note else schema
    return {"application/json": {"schema": schema}, "application/msgpack": {"schema": packed}}


def _responses(
    route: Route[Handler], schema_of: dict[str, Any], overload_status: int
) -> dict[str, object]:
    problem = _in_both_forms(schema_of[repr(Problem)], "")
    content = _content(route, schema_of)
    texts = dict(_EVERYWHERE)
    if "{" in route.pattern:
        texts |= _WITH_PARAMS
    if route.query:
        texts |= _WITH_QUERY | {422: _WITH_BODY[422]}
    if route.takes is not None:
        texts |= _WITH_BODY
    texts |= {status: _TEXTS[status] for status in route.refusals}
    if route.changes:
        texts |= _WITH_CHANGES
    is_gated = route.takes in _GATED
    if is_gated:
        texts.setdefault(overload_status, _OF_LOAD)
    if route.scope != OPEN:
        texts |= _WITH_TOKENS
        if not route.of_process:  # for tokens bound to other tenants
            texts.setdefault(404, _TEXTS[404])
    responses: dict[str, object] = {
        str(status): {"description": text, "content": problem}
        for status, text in sorted(texts.items())
    }
    for status in {503, overload_status} if is_gated else {503} & texts.keys():
        again = {"description": "Seconds until it may help.", "schema": {"type": "integer"}}
        responses[str(status)] = {
            "description": texts[status],
            "headers": {"Retry-After": again},
            "content": problem,
        }
    if route.pattern == "/ready":  # its 503 has the usual body
        responses["503"] = {"description": "It waits for something.", "content": content}
    return _done(route, content) | responses


def _done(route: Route[Handler], content: dict[str, object]) -> dict[str, object]:
    """Describe the answers of successful requests."""
    done: dict[str, object] = {"description": "Done.", "content": content}
    if route.answers is not None:
        text = '`299 - "unknown parameter: ..."` when the query names what the route does not know.'
        if route.takes is not None:
            text = '`299 - "unknown field: ..."` when the body has fields nobody knows; ' + text
        done["headers"] = {"Warning": {"description": text, "schema": {"type": "string"}}}
    if route.status_again is None:
        return {str(route.status): done}
    again = done | {"description": "So it is already."}
    return {str(route.status): done, str(route.status_again): again}
