"""The exchanges of a transcript in MessagePack: what was sent and answered as JSON, in that form.

Long lists go out as binaries, so that a recording is played with other bytes and must come to the
same. What a step sends as bytes of its own, malformed as a rule, stays as it is.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from typing import Any

import msgspec

from tests.live.http import JSON_TYPE, Answer, exchange_raw

MSGPACK_TYPE = "application/msgpack"
HASHES = ("block_hashes", "sequence_hashes")


def packed_exchange(
    port: int,
    method: str,
    path: str,
    value: object,
    body: bytes | None,
    headers: Mapping[str, str],
) -> Answer:
    """Send `value` as MessagePack if it is what `body` says, and read the answer back as JSON."""
    fields = {"Accept": MSGPACK_TYPE, **headers}
    if value is not None and body is not None and headers.get("Content-Type") == JSON_TYPE:
        fields["Content-Type"] = MSGPACK_TYPE
        body = msgspec.msgpack.encode(_packed(value))
    answer = exchange_raw(port, method, path, body, fields)
    if answer.headers.get("content-type") != MSGPACK_TYPE or not answer.raw:
        assert answer.headers.get("content-type") != JSON_TYPE or _stays_json(method, path), path
        return answer
    told = msgspec.msgpack.decode(answer.raw)
    return Answer(answer.status, answer.headers, json.dumps(_unpacked(told)).encode())


def _stays_json(method: str, path: str) -> bool:
    return method == "HEAD" or path.partition("?")[0] in {"/dump", "/openapi.json"}


def _packed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    members = dict(value)
    if _fit(members.get("token_ids"), 0, 2**32):
        members["token_ids"] = array("I", members["token_ids"]).tobytes()
    for name in HASHES:
        if _fit(members.get(name), -(2**63), 2**64):
            members[name] = array("Q", [one % 2**64 for one in members[name]]).tobytes()
    return members


def _fit(values: object, least: int, beyond: int) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and least <= value < beyond for value in values
    )


def _unpacked(answer: Any) -> Any:
    if isinstance(answer, dict) and isinstance(answer.get("sequence_hashes"), bytes):
        return answer | {"sequence_hashes": array("q", answer["sequence_hashes"]).tolist()}
    return answer
