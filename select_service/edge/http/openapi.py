"""GET /openapi.json: the route table and the types that validate, as OpenAPI 3.1.

Generated, so it cannot disagree with the service about fields, types and ranges: texts are those of
the handlers and of the types. What JSON Schema cannot express (u64, duplicate keys) is in the
descriptions.
"""

from __future__ import annotations

import inspect
import re
from types import ModuleType, UnionType
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec
import orjson
from msgspec import inspect as types

from select_service.edge.http.field_texts import text_of
from select_service.edge.http.routes import ROUTES, TOPICS
from select_service.edge.routing import OPEN
from select_service.types import (
    OUTCOMES,
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

_PARAM: Final = re.compile(r"\{(\w+)\}")
_REF: Final = "#/components/schemas/{name}"
_U64_MAX: Final = (1 << 64) - 1
_U64: Final[dict[str, object]] = {"type": "integer", "minimum": 0, "maximum": _U64_MAX}
_TEXT: Final[dict[str, object]] = {"type": "string"}
_SWITCH: Final[dict[str, object]] = {"type": "boolean"}
_COUNT: Final[dict[str, object]] = {"type": "integer", "minimum": 1}
_NAME: Final = "5f0c7f0e-6a1c-4b58-a5c1-5d1c2a9b7c11"
_PARAMETERS: Final[dict[str, tuple[str, dict[str, object], object]]] = {
    "worker_id": ("Id of the worker.", _U64, 7),
    "reservation_id": ("Id of the reservation.", _TEXT, _NAME),
    "lease_id": ("Id of the lease.", _TEXT, "router-1"),
    "id": ("Id of the decision, or of its selection or reservation.", _TEXT, _NAME),
    "model_name": ("Only of this model.", _TEXT, "llama-3-70b"),
    "tenant_id": ("Only of this tenant.", _TEXT, "default"),
    "routing_group": ("Another name of `tenant_id`.", _TEXT, "default"),
    "model": ("Model whose thresholds are meant.", _TEXT, "llama-3-70b"),
    "owner": ("Only leases of this owner.", _TEXT, "router-1:4711"),
    "limit": ("How many are listed at most.", _COUNT, 20),
    "count": ("How many workers to name. Default: 1.", _COUNT, 2),
    "hit_rate_loss_max": ("Loss of the hit rate that is advised. Default: 0.02.", _TEXT, "0.02"),
    "role": ("Only workers of this role.", _TEXT, "decode"),
    "candidates": ("Whether to list all ranks of each decision.", _SWITCH, True),
    "verbose": ("Whether to list the findings of the doctor. Default: false.", _SWITCH, True),
    "examine": ("With `verbose`: examine the fleet now. Default: false.", _SWITCH, True),
    "for": ("`traffic`: whether to send requests here, even without a worker.", _TEXT, "traffic"),
    "cached_tokens": ("Prompt tokens that the engine has found in its cache.", _U64, 384),
    "outcome": ("How the request ended.", {"enum": [*OUTCOMES]}, "failed"),
}
"""Parameters of paths and queries: text, schema, example."""

_PROMPT: Final[dict[str, object]] = {"token_ids": [1, 15043, 3186]}
_EXAMPLES: Final[dict[str, dict[str, object]]] = {
    "upsert_worker": {
        "worker_id": 7,
        "endpoint": "http://10.0.0.7:8000",
        "block_size": 16,
        "kv_events_endpoint": "tcp://10.0.0.7:5557",
    },
    "patch_worker": {"max_num_seqs": 256},
    "drain_worker": {"reason": "upgrade"},
    "report": {"ranks": [{"dp_rank": 0, "kv_used_blocks": 12000, "kv_total_blocks": 25000}]},
    "select": _PROMPT,
    "select_and_reserve": {**_PROMPT, "reservation_id": _NAME, "expected_output_tokens": 256},
    "select_pair": {**_PROMPT, "reservation_id": _NAME},
    "select_batch": {"requests": [_PROMPT, {**_PROMPT, "n": 2}]},
    "reserve": {**_PROMPT, "reservation_id": _NAME, "worker_id": 7, "dp_rank": 0},
    "prefill_complete": {"cached_tokens": 2},
    "output_block": {"decay_fraction": 0.5},
    "batch": {"operations": [{"op": "prefill_complete", "reservation_id": _NAME}]},
    "open_lease": {"owner": "router-1:4711", "ttl_s": 30.0, "lease_id": "router-1"},
    "renew_lease": {"ttl_s": 30.0},
    "change_admission": {"policy": "always-admit"},
    "change_threshold": {"model": "llama-3-70b", "active_decode_blocks_threshold": 0.85},
    "change_config": {"settings": {"header_timeout_s": 5.0}},
    "potential_loads": _PROMPT,
    "overlap_scores": _PROMPT,
    "register_peer": {"endpoint": "tcp://10.0.0.2:9091"},
    "deregister_peer": {"endpoint": "tcp://10.0.0.2:9091"},
}
"""Bodies of operations; of others, the examples of the fields."""
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
_INSIDE: Final = ("type", "types", "item_type", "item_types", "key_type", "value_type")
"""Where `msgspec.inspect` keeps the types within another."""

_ABOUT: Final = """\
Decides which LLM inference worker serves a request: the one that costs least, given what each has
cached and how much it has to do.

To try it, register a worker with `POST /workers`, then send a prompt to `POST /select`: *Try it
out* sends the example, or what you make of it, to this instance. `POST /select_and_reserve` also
books the worker, until `DELETE /reservations/{reservation_id}` says that the request has ended.
`GET /decisions` shows why each worker was chosen.

Bodies and answers may be msgpack instead of JSON: bodies say so in `Content-Type`, answers are
asked for in `Accept`, as `application/msgpack`, `application/x-msgpack` or
`application/vnd.msgpack`. Integers are up to 64 bits wide: worker ids and token counts are
unsigned, hashes may be written signed or unsigned. A float is never an integer. A key that comes
twice in an object is refused.
"""
_HOME: Final = "https://github.com/select-service/select-service"
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
_TOKEN: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "One of `--token-file`; `x-scope` says what it must allow.",
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
    code: str | int
    """What is wrong, for programs; stable. The status where all workers are busy, e.g.
    `"worker_not_found"`."""
    field: str | msgspec.UnsetType = msgspec.UNSET
    details: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    # Of refusals by the gate.
    reason: str | msgspec.UnsetType = msgspec.UNSET
    """Why the gate refused it; stable, e.g. `"class_shed"`."""
    gate: str | msgspec.UnsetType = msgspec.UNSET
    """Gate that refused it, e.g. `"policy"`."""
    policy: str | msgspec.UnsetType = msgspec.UNSET
    retry_after_s: float | msgspec.UnsetType | None = msgspec.UNSET
    """Seconds until a repeat may succeed; null: the same request never fits, e.g. `1.5`."""
    promised: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether a place is held until then."""
    knob: str | msgspec.UnsetType | None = msgspec.UNSET
    """Setting that was crossed, e.g. `"max_inflight"`."""
    value: float | msgspec.UnsetType | None = msgspec.UNSET
    """Value that crossed it, e.g. `65.0`."""
    limit: float | msgspec.UnsetType | None = msgspec.UNSET
    """Value of the setting, e.g. `64.0`."""
    message: str | msgspec.UnsetType = msgspec.UNSET
    """The text in the reference's form; where all workers are busy, e.g.
    `"Service temporarily unavailable: all workers are busy"`."""
    type: str | msgspec.UnsetType = msgspec.UNSET
    """Kind of error in the reference's form; where all workers are busy, e.g.
    `"service_unavailable"`."""
    decision: Decision | msgspec.UnsetType = msgspec.UNSET


def describing(overload_status: int, *, with_tokens: bool) -> Generator[None, None, bytes]:
    """Render the document, in steps of a type or a route; 30 ms in total, a few per step at most.

    Args:
        overload_status: what it answers under load.
        with_tokens: whether it asks for tokens (`--token-file`).
    """
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
    for name, kind in _structs(described).items():
        if "properties" in components[name]:
            _explain(components[name]["properties"], kind)
            yield
    for (name, member), narrower in _NARROWER.items():
        described_as = components[name]["properties"][member]
        (described_as["anyOf"][0] if "anyOf" in described_as else described_as).update(narrower)
    paths: dict[str, dict[str, object]] = {}
    for topic, routes in TOPICS.items():
        for route in routes:
            operation = _operation(route, _tag(topic), schema_of)
            texts = _statuses(route, overload_status, with_tokens=with_tokens)
            operation["responses"] = _responses(route, schema_of, texts, overload_status)
            operation |= _security(route) if with_tokens else {}
            paths.setdefault(route.pattern, {})[route.method.lower()] = operation
            yield
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "select-service",
                "version": __version__,
                "description": _ABOUT,
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
                "contact": {"name": "select-service", "url": _HOME},
            },
            "servers": [{"url": "/", "description": "Where this document comes from."}],
            "tags": _topics(),
            "paths": paths,
            "components": {"schemas": components}
            | ({"securitySchemes": {"token": _TOKEN}} if with_tokens else {}),
        }
    )


def _tag(topic: ModuleType) -> str:
    return topic.__name__.rpartition(".")[2]


def _topics() -> list[dict[str, str]]:
    """Return the tags in the order of the table, with what their modules say."""
    return [
        {"name": _tag(topic), "description": (inspect.getdoc(topic) or "").partition("\n\n")[0]}
        for topic in TOPICS
    ]


def _structs(described: list[Any]) -> dict[str, type]:
    """Return the classes within some types, by the name of their component."""
    found: dict[str, type] = {"Problem": Problem}
    left: list[Any] = list(types.multi_type_info([Problem, *described]))
    while left:
        one = left.pop()
        if isinstance(one, types.StructType):
            if found.get(one.cls.__name__) is one.cls and one.cls is not Problem:
                continue
            found[one.cls.__name__] = one.cls
            left += [field.type for field in one.fields]
        else:
            inner = (getattr(one, name, ()) for name in _INSIDE)
            left += [part for within in inner for part in _listed(within)]
    return found


def _listed(within: object) -> tuple[Any, ...]:
    return within if isinstance(within, tuple) else (within,)


def _explain(properties: dict[str, dict[str, Any]], kind: type) -> None:
    """Add what each field means, and an example."""
    for name, property_ in properties.items():
        text = text_of(kind, name)
        if text is not None:
            property_["description"] = text.text
            if text.examples:
                property_["examples"] = text.examples


def _kinds(answers: object) -> list[Any]:
    """Return the types of an answer that may be a union."""
    return list(get_args(answers)) if isinstance(answers, UnionType) else [answers]


def _bound(schema: object) -> None:
    """Add the upper bound of 64-bit integers, which msgspec cannot express as a range.

    Pairs of numbers have the type of their members in the place that readers of 3.0 know.
    """
    if isinstance(schema, dict):
        if schema.get("items") is False:
            schema["items"] = schema["prefixItems"][0]
        if schema.get("type") == "integer" and "minimum" in schema:
            schema.setdefault("maximum", _U64_MAX)
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            _bound(part)


def _operation(route: Route[Handler], tag: str, schema_of: dict[str, Any]) -> dict[str, Any]:
    parts = _PARAM.sub("", f"{route.method}{route.pattern}").strip("/").lower().split("/")
    if route.method == "GET" and route.pattern.endswith("}"):  # distinguishes it from the list
        parts.append("one")
    operation: dict[str, object] = {
        "tags": [tag],
        "summary": route.summary,
        "description": route.description,
        "operationId": "_".join(part for part in parts if part),
    }
    parameters = [_parameter(name, "path") for name in _PARAM.findall(route.pattern)]
    parameters += [_parameter(name, "query") for name in route.query]
    if parameters:
        operation["parameters"] = parameters
    if route.takes is not None:
        note = _PACKED if issubclass(route.takes, _PROMPTS) else ""
        content = _in_both_forms(_taken(route, schema_of), note)
        content["application/json"]["example"] = _EXAMPLES.get(route.name) or _example(route.takes)
        operation["requestBody"] = {"required": not route.body_optional, "content": content}
    return operation


def _security(route: Route[Handler]) -> dict[str, object]:
    return {} if route.scope == OPEN else {"security": [{"token": []}], "x-scope": route.scope}


def _example(kind: type[msgspec.Struct]) -> dict[str, object]:
    texts = ((name, text_of(kind, name)) for name in kind.__struct_fields__)
    return {name: text.examples[0] for name, text in texts if text is not None and text.examples}


def _taken(route: Route[Handler], schema_of: dict[str, Any]) -> dict[str, Any]:
    """Describe a body; a lenient one may be anything without the named fields."""
    schema: dict[str, Any] = schema_of[repr(route.takes)]
    if not route.body_lenient:
        return schema
    assert route.takes is not None
    names = [field.encode_name for field in msgspec.structs.fields(route.takes)]
    named = [{"type": "object", "required": [name]} for name in names]
    return {"anyOf": [schema, {"not": {"anyOf": named}}]}


def _parameter(name: str, place: str) -> dict[str, object]:
    text, schema, example = _PARAMETERS[name]
    is_required = place == "path" or name == "model"
    return {
        "name": name,
        "in": place,
        "required": is_required,
        "description": text,
        "schema": schema,
        "example": example,
    }


def _content(route: Route[Handler], schema_of: dict[str, Any]) -> dict[str, Any]:
    if route.answers is None:
        return {"text/plain": {"schema": {"type": "string"}}}
    if route.answers is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    schemas = [schema_of[repr(kind)] for kind in _kinds(route.answers)]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if route.pattern in _ONLY_JSON:
        return {"application/json": {"schema": schema}}
    return _in_both_forms(schema, _PACKED_ANSWER if route.takes in _WITH_HASHES else "")


def _in_both_forms(schema: dict[str, Any], note: str) -> dict[str, dict[str, Any]]:
    """Describe a value in JSON and in msgpack, with a note on differences."""
    packed = schema | {"description": note} if note else schema
    return {"application/json": {"schema": schema}, "application/msgpack": {"schema": packed}}


def _statuses(route: Route[Handler], overload_status: int, *, with_tokens: bool) -> dict[int, str]:
    """Return what each status of a refusal means."""
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
    if route.takes in _GATED:
        texts.setdefault(overload_status, _OF_LOAD)
    if with_tokens and (route.scope != OPEN or route.pattern == "/ready"):  # for its `verbose`
        texts |= _WITH_TOKENS
    if route.scope != OPEN and not route.of_process:  # for tokens bound to other tenants
        texts.setdefault(404, _TEXTS[404])
    return texts


def _responses(
    route: Route[Handler], schema_of: dict[str, Any], texts: dict[int, str], overload_status: int
) -> dict[str, object]:
    problem = _in_both_forms(schema_of[repr(Problem)], "")
    content = _content(route, schema_of)
    responses: dict[str, object] = {
        str(status): {"description": text, "content": problem}
        for status, text in sorted(texts.items())
    }
    for status in {503, overload_status} if route.takes in _GATED else {503} & texts.keys():
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
            text = '`299 - "unknown field: ..."` when the body has unknown fields; ' + text
        done["headers"] = {"Warning": {"description": text, "schema": {"type": "string"}}}
    if route.status_again is None:
        return {str(route.status): done}
    again = done | {"description": "So it is already."}
    return {str(route.status): done, str(route.status_again): again}
