"""Bodies of many small things: no byte count tells what reading them costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from select_service.edge.batch_runner import ITEMS_MAX, BatchBody
from select_service.edge.codec.json_codec import RequestDecoder
from select_service.edge.codec.msgpack_codec import MsgpackDecoder
from select_service.errors import BodyTooLarge, InvalidField
from select_service.settings import FieldValidation
from select_service.types import (
    BatchRequest,
    BodyLimits,
    OutputBlockRequest,
    SelectRequest,
    WorkerSpec,
)

IGNORE = FieldValidation.IGNORE
LIMITS = BodyLimits()
LOOSE = LIMITS.unknown_bytes_max
PARTS_MAX, NUMBERS_MAX = LIMITS.parts_max, LIMITS.numbers_max
MANY = PARTS_MAX + 1


def listed(name: bytes, item: bytes) -> bytes:
    return b'{"%s":[' % name + b",".join([item] * MANY) + b"]}"


NAMES = b"{" + b",".join(b'"%d":1' % number for number in range(MANY)) + b"}"


@pytest.mark.parametrize(
    "body",
    [
        *(NAMES, b'{"a":%s}' % NAMES),
        *(
            listed(name, item)
            for name in (b"a", b"block_mm_infos", b"token_ids")
            for item in (b'""', b"[]", b"{}")
        ),
    ],
    ids=lambda body: repr(body[:24]),
)
def test_many_parts_are_refused_before_they_are_read(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight megabytes of empty strings held the loop for 1.4 s before they were refused."""
    decoder = RequestDecoder(SelectRequest, IGNORE)
    monkeypatch.setattr(decoder, "_decode", None)  # whoever reads on would fail
    with pytest.raises(InvalidField, match=str(PARTS_MAX)):
        decoder.decode(body)


@pytest.mark.parametrize("name", ["a", "allowed_worker_ids", "token_ids", "block_hashes"])
def test_numbers_have_a_limit(name: str) -> None:
    """As many as there may be, and one more."""
    decoder = RequestDecoder(SelectRequest, IGNORE)
    for count in (NUMBERS_MAX, NUMBERS_MAX + 2):
        body = b'{"%s":[' % name.encode() + b",".join([b"1"] * count) + b"]}"
        if count == NUMBERS_MAX:
            decoder.decode(body)
        else:
            with pytest.raises(InvalidField, match=str(NUMBERS_MAX)):
                decoder.decode(body)


def test_a_body_without_a_prompt_is_short() -> None:
    for kind in (BatchRequest, WorkerSpec, OutputBlockRequest):
        body = b'{"a":"%s"}' % (b"x" * LIMITS.short_bytes_max)
        with pytest.raises(BodyTooLarge, match=str(LIMITS.short_bytes_max)):
            RequestDecoder(kind, IGNORE).decode(body)
        packed = msgspec.msgpack.encode({"a": "x" * LIMITS.short_bytes_max})
        with pytest.raises(BodyTooLarge, match=str(LIMITS.short_bytes_max)):
            MsgpackDecoder(kind, IGNORE).decode(packed)
    long = b'{"model_name":"%s"}' % (b"x" * LIMITS.short_bytes_max)
    assert RequestDecoder(SelectRequest, IGNORE).decode(long).request.model_name


def test_a_long_member_that_nobody_knows_is_taken_as_it_is_written() -> None:
    decoder = RequestDecoder(SelectRequest, IGNORE)
    short, long = [1, 2], [1] * LOOSE
    unknown = decoder.decode(msgspec.json.encode({"b": long, "a": short})).unknown
    assert msgspec.json.decode(unknown) == {"a": short, "b": long}


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"token_ids": [1] * (NUMBERS_MAX + 1)}, f"token_ids: more than {NUMBERS_MAX} numbers"),
        ({"block_hashes": [1] * (NUMBERS_MAX + 1)}, f"more than {NUMBERS_MAX} numbers"),
        (
            {"a": [1] * (LOOSE + 1)},
            f"a: more than {LOOSE} bytes",
        ),
        ({"block_mm_infos": [None] * (LIMITS.media_bytes_max)}, f"{LIMITS.media_bytes_max} bytes"),
        ({"router_config_override": {str(n): 1 for n in range(MANY)}}, f"{PARTS_MAX} members"),
    ],
)
def test_msgpack_is_refused_by_what_it_announces(
    members: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = MsgpackDecoder(SelectRequest, IGNORE)
    decoder.decode(b"\x80")
    monkeypatch.setattr(decoder, "_tools", decoder._tools._replace(decode=None))  # type: ignore[union-attr,arg-type]
    with pytest.raises(InvalidField, match=text):
        decoder.decode(msgspec.msgpack.encode(members))


def test_numbers_and_one_long_text_are_no_parts() -> None:
    body = msgspec.json.encode({"token_ids": [1] * MANY, "a": [1] * MANY, "b": "x" * MANY})
    assert RequestDecoder(SelectRequest, IGNORE).decode(body).request.token_ids is not None


def test_what_is_read_later_does_not_count() -> None:
    items = [{"lora_name": "x", "token_ids": [number]} for number in range(MANY // 4)]
    body = msgspec.json.encode({"requests": items, "atomic": True, "odd": [{"a": 1}]})
    decoded = RequestDecoder(BatchBody, IGNORE).decode(body)
    assert [msgspec.json.decode(one) for one in decoded.request.requests] == items
    assert decoded.unknown == b'{"odd":[{"a":1}]}'
    for twice in (
        b'{"requests":[{"a":1}],"atomic":true,"requests":[{}]}',
        body[:-1] + b',"odd":1}',
    ):
        with pytest.raises(InvalidField, match="duplicate"):
            RequestDecoder(BatchBody, IGNORE).decode(twice)


@pytest.mark.parametrize("item", [1, {}])
def test_a_batch_of_too_many(item: object) -> None:
    batch = {"requests": [item] * (ITEMS_MAX + 1)}
    with pytest.raises(InvalidField) as refusal:
        RequestDecoder(BatchBody, IGNORE).decode(msgspec.json.encode(batch))
    assert refusal.value.field == "requests"
    with pytest.raises(InvalidField):
        MsgpackDecoder(BatchBody, IGNORE).decode(msgspec.msgpack.encode(batch))


def test_too_many_operations_in_msgpack() -> None:
    body = msgspec.msgpack.encode({"operations": [{"op": "free", "reservation_id": "a"}] * MANY})
    with pytest.raises(InvalidField):
        MsgpackDecoder(BatchRequest, IGNORE).decode(body)


def test_a_long_text_in_msgpack() -> None:
    body = msgspec.msgpack.encode({"a": "x" * (LOOSE + 1), "b": b"x" * LOOSE})
    assert MsgpackDecoder(SelectRequest, IGNORE).decode(body).unknown
