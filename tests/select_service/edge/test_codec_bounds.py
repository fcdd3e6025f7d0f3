"""Bodies of many small things: no byte count tells what reading them costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from select_service.config import FieldValidation
from select_service.edge.codec import PARTS_MAX, RequestDecoder
from select_service.edge.msgpack_codec import LOOSE_BYTES_MAX, MsgpackDecoder
from select_service.edge.waves import ITEMS_MAX, WaveBody
from select_service.errors import InvalidField
from select_service.types import BatchRequest, SelectRequest

IGNORE = FieldValidation.IGNORE
MANY = PARTS_MAX + 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b",".join([b"{}"] * MANY) + b"]}",
        b'{"a":[' + b",".join([b"[]"] * MANY) + b"]}",
        b'{"a":[' + b",".join([b'"x"'] * MANY) + b"]}",
        b"{" + b",".join(b'"%d":1' % number for number in range(MANY)) + b"}",
        b'{"a":{' + b",".join(b'"%d":1' % number for number in range(MANY)) + b"}}",
    ],
)
def test_too_many_parts(body: bytes) -> None:
    with pytest.raises(InvalidField, match=str(PARTS_MAX)):
        RequestDecoder(SelectRequest, IGNORE).decode(body)


def test_numbers_and_one_long_text_are_no_parts() -> None:
    body = msgspec.json.encode({"token_ids": [1] * MANY, "a": [1] * MANY, "b": "x" * MANY})
    assert RequestDecoder(SelectRequest, IGNORE).decode(body).request.token_ids is not None


def test_what_is_read_later_does_not_count() -> None:
    items = [{"lora_name": "x", "token_ids": [number]} for number in range(MANY // 4)]
    body = msgspec.json.encode({"requests": items, "atomic": True, "odd": [{"a": 1}]})
    decoded = RequestDecoder(WaveBody, IGNORE).decode(body)
    assert [msgspec.json.decode(one) for one in decoded.request.requests] == items
    assert decoded.unknown == b'{"odd":[{"a":1}]}'
    for twice in (
        b'{"requests":[{"a":1}],"atomic":true,"requests":[{}]}',
        body[:-1] + b',"odd":1}',
    ):
        with pytest.raises(InvalidField, match="duplicate"):
            RequestDecoder(WaveBody, IGNORE).decode(twice)


@pytest.mark.parametrize("item", [1, {}])
def test_a_wave_of_too_many(item: object) -> None:
    wave = {"requests": [item] * (ITEMS_MAX + 1)}
    with pytest.raises(InvalidField) as refusal:
        RequestDecoder(WaveBody, IGNORE).decode(msgspec.json.encode(wave))
    assert refusal.value.field == "requests"
    with pytest.raises(InvalidField):
        MsgpackDecoder(WaveBody, IGNORE).decode(msgspec.msgpack.encode(wave))


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (SelectRequest, {"a": [[]] * (LOOSE_BYTES_MAX + 1)}),
        (SelectRequest, {str(number): 1 for number in range(MANY)}),
        (BatchRequest, {"operations": [{"op": "free", "reservation_id": "a"}] * MANY}),
    ],
)
def test_too_much_in_msgpack(kind: Any, members: dict[str, object]) -> None:
    body = msgspec.msgpack.encode(members)
    with pytest.raises(InvalidField):
        MsgpackDecoder(kind, IGNORE).decode(body)


def test_a_long_text_in_msgpack() -> None:
    body = msgspec.msgpack.encode({"a": "x" * (LOOSE_BYTES_MAX + 1), "b": b"x" * LOOSE_BYTES_MAX})
    assert MsgpackDecoder(SelectRequest, IGNORE).decode(body).unknown
