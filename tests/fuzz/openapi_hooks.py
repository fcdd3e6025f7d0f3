"""What schemathesis is taught for its runs against this service.

MessagePack both ways, and a few names that exist: a request for a scope without workers is answered
503 whatever else is in it. `test_openapi.py` starts the server with them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec
import schemathesis
from schemathesis.transport.requests import REQUESTS_TRANSPORT

from tests.fuzz.known import LEASE, RESERVATION, WORKERS

if TYPE_CHECKING:
    from schemathesis import Case

MSGPACK: Final = "application/msgpack"
SCOPE: Final = ("model_name", "tenant_id", "routing_group", "model")
HASH_BYTES: Final = 8
KNOWN: Final = {"worker_id": WORKERS[2], "reservation_id": RESERVATION, "lease_id": LEASE}
PROMPTED: Final = frozenset(
    {
        *("/select", "/select_and_reserve", "/select_pair", "/reservations"),
        *("/potential_loads", "/overlap_scores"),
    }
)
TOKENS: Final = [7] * 40


@REQUESTS_TRANSPORT.serializer(MSGPACK)
def serialize(context: Any, value: Any) -> dict[str, Any]:
    """Write a body; one that MessagePack cannot say (2^64, a lone surrogate) goes out broken."""
    if isinstance(value, bytes):
        return {"data": value}
    try:
        return {"data": msgspec.msgpack.encode(value)}
    except (OverflowError, TypeError, ValueError, RecursionError):
        return {"data": json.dumps(value).encode()}  # whose first byte is a number, with a rest


@schemathesis.deserializer(MSGPACK)
def deserialize(context: Any, response: Any) -> Any:
    """Read an answer as the JSON it stands for: binaries are hashes, 8 bytes each."""
    return _in_json(msgspec.msgpack.decode(response.content))


def _in_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return [
            int.from_bytes(value[at : at + HASH_BYTES], "little", signed=True)
            for at in range(0, len(value), HASH_BYTES)
        ]
    if isinstance(value, dict):
        return {name: _in_json(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_in_json(one) for one in value]
    return value


@schemathesis.hook
def before_call(context: Any, case: Case, kwargs: dict[str, Any]) -> None:
    """Make what is right in a request right enough to be done, so that what is wrong decides.

    Names are those of what `test_openapi.py` has put there, prompts have tokens, and the answer is
    asked for in the form of the body.
    """
    for names in (case.body, case.query):
        if isinstance(names, dict):
            for name in SCOPE:
                if isinstance(names.get(name), str):
                    names[name] = "default"
    if isinstance(case.body, dict):
        _name_what_exists(case.path, case.body)
    if case.method in {"POST", "PATCH"}:
        for name, known in KNOWN.items():
            given = str(case.path_parameters.get(name, ""))
            if given and len(given) % 2:  # the others stay what they are
                case.path_parameters[name] = known
    if case.media_type == MSGPACK:
        case.headers = {**(case.headers or {}), "Accept": MSGPACK}


def _name_what_exists(path: str, body: dict[str, Any]) -> None:
    if path in PROMPTED and not any(body.get(name) for name in ("token_ids", "block_hashes")):
        body["token_ids"] = TOKENS
    if path == "/reservations" and _is_u64(body.get("worker_id")):
        body["worker_id"] = WORKERS[0]
    if path == "/workers" and body.get("worker_id") in WORKERS:
        body["worker_id"] = 0


def _is_u64(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64
