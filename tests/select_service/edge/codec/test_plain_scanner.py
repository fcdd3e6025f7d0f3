"""With simdjson and without it a body is the same request or the same refusal."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from select_service.config import FieldValidation
from select_service.edge.codec import json_codec, plain_scanner
from select_service.edge.codec.bulk import BodyGuard
from select_service.edge.codec.json_codec import Decoded, RequestDecoder
from select_service.edge.codec.writing import echo, encode, show_hashes
from select_service.errors import ServiceError
from select_service.types import (
    BodyLimits,
    PromptFields,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectRequest,
)
from tests.effort import examples

if not plain_scanner.IS_USABLE:
    pytest.skip("there is no simdjson for this interpreter", allow_module_level=True)

KINDS = (SelectRequest, SelectAndReserveRequest, ReservationRequest)
LONGS = {"block_hashes": True, "sequence_hashes": True, "token_ids": False}


def _decoder(
    kind: type[Any], mode: FieldValidation, *, scans: bool, guard: BodyGuard | None = None
) -> RequestDecoder[Any]:
    decoder = RequestDecoder(kind, mode, guard)
    echoes = kind is SelectAndReserveRequest
    scanner = plain_scanner.PlainScanner(kind, Decoded, LONGS, ["isl_tokens"], echoes=echoes)
    decoder._scan = scanner.scan if scans else None
    return decoder


PAIRS = [
    (_decoder(kind, mode, scans=True), _decoder(kind, mode, scans=False))
    for kind in KINDS
    for mode in FieldValidation
]


def outcome(decoder: RequestDecoder[Any], body: bytes) -> object:
    try:
        return decoder.decode(body)
    except ServiceError as error:
        return type(error), str(error), error.field, error.status


def shown(packed: object) -> bytes:
    assert isinstance(packed, bytes)
    return encode({"hashes": show_hashes(packed)})


def check(body: bytes) -> None:
    for fast, plain in PAIRS:
        mine, its = outcome(fast, body), outcome(plain, body)
        assert mine == its
        assert repr(mine) == repr(its), "1 is no 1.0, and True neither"
        if isinstance(mine, Decoded) and isinstance(mine.request.sequence_hashes, bytes):
            said = shown(mine.request.sequence_hashes)  # as the body has it, or printed anew
            echo.note(b"", b"[]")
            assert said == shown(bytes(bytearray(mine.request.sequence_hashes)))


def taken(body: bytes) -> bool:
    """Whether it does this one itself."""
    scan = PAIRS[0][0]._scan
    assert scan is not None
    return scan(body, 1 << 20) is not None


HASH = (
    st.integers(-(2**63), 2**64 - 1)
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**19, -(10**18)])
)
ODD: st.SearchStrategy[object] = st.sampled_from(
    [1.0, 2.5, 1e300, None, True, "1", [], [1], {}, 2**64, -(2**63) - 1, 10**40]
)
NUMBERS = st.lists(HASH, max_size=6) | st.lists(HASH | ODD, max_size=3)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=6) | st.lists(
    st.integers(-1, 2**32) | HASH | ODD, max_size=3
)
NAMES = [
    *(field.encode_name for kind in KINDS for field in msgspec.structs.fields(kind)),
    *("bogus", "", "["),
]
VALUES = (
    st.text(max_size=4)
    | st.integers(-2, 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([None, True, False, "reject", "gpu", "[", "{", "größe", "\\"])
    | st.lists(st.integers(-1, 2**64) | st.none() | st.text(max_size=2), max_size=3)
    | st.dictionaries(st.sampled_from(["worker_id", "dp_rank", "x"]), st.integers(0, 3), max_size=2)
)
MEMBERS = st.lists(
    st.tuples(st.sampled_from(["block_hashes", "sequence_hashes"]), NUMBERS)
    | st.tuples(st.just("token_ids"), TOKENS)
    | st.tuples(st.just("isl_tokens"), st.integers(0, 2**64 - 1))
    | st.tuples(st.sampled_from(["reservation_id", "model_name"]), st.text(max_size=3))
    | st.tuples(st.sampled_from(NAMES), VALUES),
    max_size=6,
)
BLANK = st.sampled_from(["", "", " ", "\n", "\t\r "])


def written(members: list[tuple[str, Any]], comma: str, colon: str, *, plain: bool) -> bytes:
    """Return an object with members in that order, also of one name."""
    separators = f",{comma}", f":{colon}"
    parts = [
        f"{json.dumps(name)}{separators[1]}"
        + json.dumps(value, separators=separators, ensure_ascii=not plain)
        for name, value in members
    ]
    return ("{" + separators[0].join(parts) + "}").encode("utf-8", "surrogatepass")


@settings(max_examples=examples(150), deadline=None)
@given(MEMBERS, BLANK, BLANK, st.booleans(), st.sampled_from(["", "", "", " ", "}", ",", "\0"]))
@example([("block_hashes", [[1], 2])], "", "", True, "")
@example([("token_ids", [2**32])], "", "", True, "")
@example([("sequence_hashes", [2**63]), ("block_hashes", [-1])], "", "", True, "")
@example([("block_hashes", [2**63]), ("sequence_hashes", [-1])], "", "", True, "")
@example([("allowed_worker_ids", [[1]]), ("block_hashes", [1])], "", "", True, "")
@example([("reservation_id", "r"), ("worker_id", 1), ("dp_rank", 1.0)], "", "", True, "")
def test_a_body_is_the_same_request_or_the_same_refusal(
    members: list[tuple[str, Any]], comma: str, colon: str, plain: bool, tail: str
) -> None:
    check(written(members, comma, colon, plain=plain) + tail.encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xef\xbb\xbf{}",
        b' {"block_hashes":[1]}',
        b'{"block_hashes":[-0]}',
        b'{"sequence_hashes":[0,-0],"block_hashes":[1,2]}',
        b'{"block_hashes":[01]}',
        b'{"block_hashes":[1.0]}',
        b'{"block_hashes":[1,]}',
        b'{"block_hashes":[1e2]}',
        b'{"block_hashes":[1 2]}',
        b'{"block_hashes" : [1]}',
        b'{"block_hashes":\n\n[1]}',
        b'{"block_hashes":null,"sequence_hashes":[1]}',
        b'{"block_hashes":"[1]","sequence_hashes":[1]}',
        b'{"model_name":"\xff","block_hashes":[1]}',
        b'{"model_name":"\xed\xa0\x80","block_hashes":[1]}',
        b'{"model_name":"a\nb","block_hashes":[1]}',
        b'{"model_name":"\\ud800","block_hashes":[1]}',
        b'{"block_hashes":[1],"block_hashes":[2]}',
        b'{"bogus":"\xff","block_hashes":[1]}',
        b'{"sequence_hashes":[1],"explain":true,"ttl_s":1,"priority_jump":3}',
        b'{"isl_tokens":1.0,"block_hashes":[1]}',
        b'{"isl_tokens":-1,"block_hashes":[1]}',
        b'{"tenant_id":"a","routing_group":"b","block_hashes":[1]}',
        b'{"block_hashes":[1]}{}',
    ],
    ids=repr,
)
def test_odd_ones_are_read_by_the_other(body: bytes) -> None:
    check(body)


@pytest.mark.parametrize(
    ("body", "is_taken"),
    [
        (b'{"block_hashes":[1],"sequence_hashes":[-1],"isl_tokens":16}', True),
        (b'{"block_hashes": [1, 18446744073709551615], "model_name": "[x"}', False),
        (b'{"block_hashes": [1, 18446744073709551615], "model_name": "x"}', True),
        (b'{"token_ids":[4294967295],"allowed_worker_ids":[1,2],"explain":null}', True),
        (b'{"pinned_worker":{"worker_id":1},"block_hashes":[1]}', False),
        (b'{"block_hashes":[18446744073709551615,-1]}', False),
    ],
    ids=repr,
)
def test_it_does_what_is_regular(body: bytes, is_taken: bool) -> None:
    assert taken(body) is is_taken
    check(body)


def test_what_it_may_not_count_is_counted_first() -> None:
    guard = BodyGuard(BodyLimits(parts_max=4))
    body = b'{"block_hashes":[%b],"sequence_hashes":[1],"isl_tokens":1}' % b",".join([b"7"] * 40)
    fast, plain = (
        _decoder(SelectRequest, FieldValidation.WARN, scans=scans, guard=guard)
        for scans in (True, False)
    )
    assert isinstance(outcome(plain, body), tuple), "three names are too many"
    assert outcome(fast, body) == outcome(plain, body)


def test_bodies_of_any_length_are_read() -> None:
    hashes = b",".join([b"18446744073709551615"] * (plain_scanner.SCANNED_BYTES_MAX // 21 + 2))
    body = b'{"block_hashes":[%b]}' % hashes
    assert not taken(body)
    check(body)


def test_members_in_every_order_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_scanner, "_PLANS_MAX", 2)
    decoder = plain_scanner.PlainScanner(SelectRequest, Decoded, LONGS, [], echoes=False)
    for name in ("model_name", "lora_name", "cache_salt", "session_id"):
        assert decoder.scan(b'{"%b":"x"}' % name.encode(), 1 << 20) is not None
        assert len(decoder._plans) <= 2


def test_without_its_wheel_msgspec_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_codec, "Scanner", None)
    monkeypatch.setattr(plain_scanner, "IS_USABLE", False)
    decoder = RequestDecoder(SelectRequest, FieldValidation.WARN)
    assert decoder._scan is None
    request: PromptFields = decoder.decode(b'{"block_hashes":[1]}').request
    assert request.block_hashes == (1).to_bytes(8, "little")


def test_a_parser_in_another_thread_s_hands_is_not_waited_for() -> None:
    scanner = plain_scanner.PlainScanner(SelectRequest, Decoded, LONGS, [], echoes=False)
    body = b'{"block_hashes":[1]}'
    held = scanner._parse(body)
    assert scanner.scan(body, 1 << 20) is None
    del held
    assert scanner.scan(body, 1 << 20) is not None
