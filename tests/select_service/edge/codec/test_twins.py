"""With the kernel and without it, a body is the same request or the same refusal."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from select_service.edge.codec.json_codec import RequestDecoder, Scanner
from select_service.errors import ServiceError
from select_service.settings import FieldValidation
from select_service.types import (
    OverlapScoresRequest,
    PotentialLoadsRequest,
    PromptFields,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectRequest,
)

if Scanner is None:
    pytest.skip("the kernel is not in use", allow_module_level=True)
from select_service._speed import msgpack_tokens
from tests.effort import examples

KINDS = (
    *(SelectRequest, SelectAndReserveRequest, ReservationRequest),
    *(PotentialLoadsRequest, OverlapScoresRequest),
)
MODES = tuple(FieldValidation)


def _plain(kind: type[Any], mode: FieldValidation) -> RequestDecoder[Any]:
    decoder = RequestDecoder(kind, mode)
    decoder._scan = None
    return decoder


PAIRS = [(RequestDecoder(kind, mode), _plain(kind, mode)) for kind in KINDS for mode in MODES]
FAST, PLAIN = PAIRS[MODES.index(FieldValidation.WARN)]


def outcome(decoder: RequestDecoder[Any], body: bytes) -> object:
    try:
        return decoder.decode(body)
    except ServiceError as error:
        return type(error), str(error), error.field, error.status


def check(body: bytes) -> None:
    for fast, plain in PAIRS:
        assert outcome(fast, body) == outcome(plain, body)


def taken(body: bytes) -> bool:
    """Whether the kernel does this one itself."""
    assert FAST._scan is not None
    return FAST._scan(body) is not None


def packed(values: list[int], width: int) -> bytes:
    return b"".join((value % (1 << 8 * width)).to_bytes(width, "little") for value in values)


# -- what it does itself -----------------------------------------------------------------------

HASHES = st.lists(
    st.integers(-(2**63), 2**64 - 1)
    | st.sampled_from([0, 9, 10, 99_999_999, 10**8, 10**16 - 1, 10**16, 10**19, 2**63, 2**64 - 1])
    | st.sampled_from([-1, -(10**8), -(2**63), -(2**63) + 1]),
    max_size=40,
)
TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 10**6), max_size=200)
BLANK = st.sampled_from(["", "", "", " ", "\n", "\t\r ", "   "])


@given(hashes=HASHES, sequence=HASHES, tokens=TOKENS, comma=BLANK, colon=BLANK, edge=BLANK)
def test_integers_of_every_length_with_blanks_everywhere(
    hashes: list[int], sequence: list[int], tokens: list[int], comma: str, colon: str, edge: str
) -> None:
    members: dict[str, Any] = {"block_hashes": hashes, "model_name": "größe:{["}
    members |= {"sequence_hashes": sequence, "token_ids": tokens, "isl_tokens": 16}
    text = json.dumps(
        members, separators=(f"{edge},{comma}", f"{edge}:{colon}"), ensure_ascii=False
    )
    for opening in "[{":
        text = text.replace(opening, opening + edge)
    text = text.replace(f"größe:{{{edge}[{edge}", "größe:{[")
    body = f"{edge}{text}{comma}".encode()
    assert taken(body)
    request: PromptFields = FAST.decode(body).request
    assert request.block_hashes == packed(hashes, 8)
    assert request.sequence_hashes == packed(sequence, 8)
    assert request.token_ids == packed(tokens, 4)
    assert request.model_name == "größe:{["
    check(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"block_hashes":[0]}',
        b'{"block_hashes":[-0,-1]}',
        b'{"block_hashes":[ ]}',
        b'{"block_hashes":null,"token_ids":null}',
        b'{"block_hashes":[18446744073709551615,-9223372036854775808]}',
        b'{"token_ids":[4294967295]}',
        b'{"pinned_worker":{"worker_id":1,"dp_rank":0},"block_hashes":[1]}',
        b'{"bogus":{"block_hashes":[1]},"block_hashes":[2]}',
        b'{"bogus":[[{}],"]"],"token_ids":[1]}',
        b'{"isl_tokens":5}',
        b'{"":1,"token_ids":[1]}',
        b'{"selection_id":"a\\/\\"\\\\","model_name":"\\u00e9{","block_hashes":[1]}',
        b'{"bogus":{"a":[{"b":1},{"b":2}],"b":"a:","\\"":3},"block_hashes":[1]}',
        b'{"bogus":1,"other":{},"block_hashes":[1]}',
    ],
    ids=repr,
)
def test_it_does_all_that_is_regular(body: bytes) -> None:
    assert taken(body)
    check(body)


@pytest.mark.parametrize(
    ("inside", "names"),
    [
        (b'"bogus":{"a":1,"b":{"a":2}},"more":[]', ["bogus", "more"]),
        (b'"pinned_worker":{"worker_id":1,"dp_rank":0}', []),
        (b'"b\xc3\xb6se":1', ["böse"]),
        (b'"bogus":{"a":1,"a":1}', None),
        (b'"bogus":{"a":[{"b":1,"b":2}]}', None),
        (b'"bogus":{"\\u0061":1}', None),
        (b'"bogus":1,"bogus":1', None),
        (b'"bogus":' + b"[" * 8 + b"]" * 8, None),
        (b'"bogus":' + b"[" * 7 + b"]" * 7, ["bogus"]),
        (b'"bogus":{' + b",".join(b'"%d":0' % n for n in range(25)) + b"}", None),
        (b'"bogus":{' + b",".join(b'"%d":0' % n for n in range(24)) + b"}", ["bogus"]),
        (b",".join(b'"%d":0' % n for n in range(17)), None),
        (b",".join(b'"%d":0' % n for n in range(16)), [str(n) for n in range(16)]),
    ],
    ids=repr,
)
def test_it_sees_whose_names_are_unknown_and_that_none_is_there_twice(
    inside: bytes, names: list[str] | None
) -> None:
    body = b'{"token_ids":[7],' + inside + b"}"
    assert FAST._scan is not None
    scanned: Any = FAST._scan(body)
    assert scanned[1] == names
    check(body)


WHOLE = b'{"model_name":"m","block_hashes":[1],"sequence_hashes":[2],"isl_tokens":16}'


CHOSEN = b'"reservation_id":"r","worker_id":18446744073709551615'

BESIDE = [  # short texts and numbers beside the arrays
    WHOLE,
    b'{"isl_tokens":0}',
    b'{"isl_tokens":999999999999999999,"tenant_id":" ~","selection_id":""}',
    b'{ "token_ids" : [ ] , "isl_tokens" : 1 }',
    b'{"isl_tokens":9999999999999999999}',
    b'{"isl_tokens":10000000000000000000}',
    b'{"expected_output_tokens":0,"isl_tokens":7}',
    b'{"expected_output_tokens":999999999}',
    b'{"expected_output_tokens":1000000000}',
    b'{"expected_output_tokens":4294967296}',
    b'{"expected_output_tokens":null}',
    b'{"isl_tokens":01}',
    b'{"isl_tokens":-1}',
    b'{"isl_tokens":1.0}',
    b'{"isl_tokens":null}',
    b'{"isl_tokens":"1"}',
    b'{"model_name":1}',
    b'{"model_name":"m\x1f"}',
    b'{"model_name":"m\x7f"}',
    b'{"model_name":"m\xc3\xa9"}',
    b'{"selection_id":null}',
    b'{"tenant_id":"a","tenant_id":"b"}',
    b'{"routing_group":"a","block_hashes":[1]}',
    b'{"block_hashes":null}',
    b'{"priority":1,"block_hashes":[1]}',
    b'{"bogus":1,"block_hashes":[1]}',
    WHOLE[:-1] + b" " * 200 + b"}",
]
BOOKINGS = [
    b'{"reservation_id":"r","worker_id":7,"sequence_hashes":[2],"isl_tokens":16}',
    b'{"worker_id":9999999999999999999,"dp_rank":3,"reservation_id":"r"}',
    b'{"effective_prefill_tokens":0,"reservation_id":"","worker_id":0}',
    b"{%b}" % CHOSEN,  # a digit more than all numbers of which fit
    b'{"reservation_id":"r","sequence_hashes":[2],"isl_tokens":16}',
    b'{"worker_id":7,"sequence_hashes":[2],"isl_tokens":16}',
    b'{"worker_id":null,"reservation_id":"r"}',
    b'{"worker_id":7,"reservation_id":null}',
    b'{"worker_id":7,"reservation_id":"r","dp_rank":4294967296}',
    b'{"worker_id":7,"reservation_id":"r","track_prefill_tokens":true}',
    b'{"worker_id":7,"worker_id":8,"reservation_id":"r"}',
    *(
        WHOLE[:-1] + b"," + more + b"}"
        for more in (
            b'"reservation_id":"r"',
            b'"reservation_id":"r","selection_id":"s","tenant_id":"t"',
            b'"reservation_id":null',
            b'"reservation_id":"\xc3\xa9"',
            b'"ttl_s":1.5',
            b'"lease_id":"l"',
        )
    ),
]


def test_requests_it_makes_share_nothing_that_changes() -> None:
    first, second = FAST.decode(WHOLE).request, FAST.decode(WHOLE).request
    first.isl_tokens, first.model_name = 5, "other"
    assert second == FAST.decode(WHOLE).request != first


# -- what it leaves to the other ---------------------------------------------------------------

ODD = [
    b"",
    b"{}",
    b" { } ",
    b"[]",
    b'{"block_hashes":[1]',
    b'{"block_hashes":[1',
    b'{"block_hashes":[',
    b'{"block_hashes":',
    b'{"block_hashes"',
    b'{"block_hashes',
    b'{"block_hashes":[1]}x',
    b'{"block_hashes":[1],}',
    b'{"block_hashes":[1],,"isl_tokens":1}',
    b'{,"block_hashes":[1]}',
    b'{"block_hashes":[1,]}',
    b'{"block_hashes":[,1]}',
    b'{"block_hashes":[1,,2]}',
    b'{"block_hashes":[1 2]}',
    b'{"block_hashes":[01]}',
    b'{"block_hashes":[-01]}',
    b'{"block_hashes":[00]}',
    b'{"block_hashes":[+1]}',
    b'{"block_hashes":[-]}',
    b'{"block_hashes":[- 1]}',
    b'{"block_hashes":[--1]}',
    b'{"block_hashes":[1.0]}',
    b'{"block_hashes":[1e3]}',
    b'{"block_hashes":[1E400]}',
    b'{"block_hashes":[true]}',
    b'{"block_hashes":["1"]}',
    b'{"block_hashes":[null]}',
    b'{"block_hashes":[[1]]}',
    b'{"block_hashes":[{}]}',
    b'{"block_hashes":"AQ=="}',
    b'{"block_hashes":1}',
    b'{"block_hashes":{}}',
    b'{"block_hashes":[18446744073709551616]}',
    b'{"block_hashes":[99999999999999999999]}',
    b'{"block_hashes":[100000000000000000000]}',
    b'{"block_hashes":[-9223372036854775809]}',
    b'{"block_hashes":[' + b"9" * 5000 + b"]}",
    b'{"block_hashes":[' + b"0" * 24 + b"]}",
    b'{"block_hashes":[1\x00]}',
    b'{"block_hashes":[1\x0b,2]}',
    b'{"block_hashes":[1\xff]}',
    b'{"block_hashes":[\xd9\xa3]}',
    b'{"token_ids":[-1]}',
    b'{"token_ids":[-0]}',
    b'{"token_ids":[4294967296]}',
    b'{"token_ids":[99999999999]}',
    b'{"token_ids":"AQAAAA=="}',
    b'{"block_hashes":[1],"block_hashes":[2]}',
    b'{"token_ids":[1],"token_ids":null}',
    b'{"block\\u005fhashes":[1]}',
    b'{"block\\u005fhashes":[1],"block_hashes":[2]}',
    b'{"model_name":"a\\"","block_hashes":[1]}',
    b'{"model_name":"\\ud800","block_hashes":[1]}',
    b'{"model_name":"\xff","block_hashes":[1]}',
    b'{"bogus":"\xff","block_hashes":[1]}',
    b'{"b\xffgus":1,"block_hashes":[1]}',
    b'{"model_name":"a\nb","block_hashes":[1]}',
    b'{"isl_tokens":1"x,"block_hashes":[1],"y":"z"}',
    b'{"isl_tokens":1]}',
    b'{"bogus":[1},"block_hashes":[1]}',
    b'{"bogus":{"a":1],"block_hashes":[1]}',
    b'{"bogus":[{"a":"]"}],"block_hashes":[1]}',
    b'{"bogus":{"a":1,"a":2},"block_hashes":[1]}',
    b'{"pinned_worker":{"worker_id":1,"dp_rank":0,"dp_rank":1},"block_hashes":[1]}',
    b'{"bogus":1,"bogus":2,"block_hashes":[1]}',
    b'{"bogus":' + b"[" * 100_000 + b"]" * 100_000 + b',"block_hashes":[1]}',
    b'{"bogus":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b',"block_hashes":[1]}',
    b'{"tenant_id":"a","routing_group":"b","block_hashes":[1]}',
    b'{"allowed_worker_ids":[18446744073709551616],"block_hashes":[1]}',
    b'{"isl_tokens":18446744073709551616,"block_hashes":[1,1.5]}',
    b'{"sequence_hashes":[18446744073709551616],"block_hashes":[18446744073709551616]}',
    b'{"bogus":1,"block_hashes":[18446744073709551616]}',
    b'{"mm_routing_info":{"routing_token_ids":[4294967296]},"token_ids":[1]}',
    b'{"mm_routing_info":{"routing_token_ids":[1,2]},"token_ids":[1]}',
    b"\xef\xbb\xbf{}",
    b'{"bogus":"\\',
    b'{"bogus":"\\"',
    b'{"bogus":"\\x","block_hashes":[1]}',
    b'{"bogus":{"\\","a":1},"block_hashes":[1]}',
    b'{"bogus":{"a","a":1},"block_hashes":[1]}',
    b'{"bogus":{"a":1]},"block_hashes":[1]}',
    b'{"bogus":["a":1,"a":2],"block_hashes":[1]}',
    b'{"\xff":1,"block_hashes":[1]}',
    b'{"\\u0061":1,"block_hashes":[1]}',
    b'{"router_config_override":{"router_temperature":0,"router_temperature":1},"token_ids":[1]}',
    b'{"routing_constraints":{"preferred_taints":{"a":1,"a":2}},"token_ids":[1]}',
]


@pytest.mark.parametrize("body", [*BESIDE, *BOOKINGS, *ODD], ids=lambda body: repr(body[:40]))
def test_what_is_short_or_odd_or_wrong(body: bytes) -> None:
    check(body)


def test_nothing_is_read_behind_the_end() -> None:
    """Every beginning of a body, in memory of its own, so that a sanitizer would see it."""
    body = b'{"block_hashes": [1, -22, 18446744073709551615 ],"token_ids":[7],"lora_name":"x"} '
    for length in range(len(body) + 1):
        check(bytes(bytearray(body[:length])))


# -- fuzz --------------------------------------------------------------------------------------

SEEDS = [
    b'{"model_name":"m","block_hashes":[1,-2,18446744073709551615],"sequence_hashes":[4,5,6],'
    b'"isl_tokens":48}',
    b'{ "token_ids" : [ 1 , 22 , 333333333 ] , "pinned_worker" : {"worker_id":1,"dp_rank":0} }',
    b'{"reservation_id":"r","worker_id":1,"sequence_hashes":[12345678,1234567812345678,'
    b'12345678123456781234],"isl_tokens":1}',
    b'{"block_mm_infos":[null,{"mm_objects":[{"mm_hash":1,"offsets":[[0,1]]}]}],"token_ids":[1]}',
]
BITS = [
    *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b" ", b"\n", b"-", b"0", b"9", b"1.5"),
    *(b"e1", b"null", b"true", b"\x00", b"\xff", b"\xc3\xa9", b"\xed\xa0\x80", b'"a":'),
    *(b"4294967296", b"18446744073709551616", b"-9223372036854775809", b'"block_hashes":[1]'),
    *(b'"token_ids":[]', b"[[]]", b'{"a":1,"a":1}', b'"bogus":{}', b'"bogus":', b'"b\\/":'),
    *(b'{"a":1,"b":{"a":1}}', b'"\\u0062"', b'\\"', b'"router_config_override":{"x":1}'),
]


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    body = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(body)))
        until = min(len(body), at + draw(st.sampled_from([0, 0, 1, 2, 9])))
        body[at:until] = draw(st.sampled_from(BITS) | st.binary(max_size=2))
    return bytes(body)


@given(mutants())
@example(b'{"token_ids":[1],"model_name":"]"}')
def test_bodies_with_something_changed(body: bytes) -> None:
    check(body)


@given(st.binary(max_size=60) | st.lists(st.sampled_from(BITS), max_size=30).map(b"".join))
def test_any_bytes(body: bytes) -> None:
    check(body)
    check(b'{"block_hashes":[' + body)
    check(b'{"token_ids":' + body + b"}")
    check(b'{"model_name":' + body + b',"block_hashes":[1]}')


# -- tokens that media are among ---------------------------------------------------------------

MEDIA_MEMBERS = st.sampled_from(
    [
        *('"routing_token_ids":[1,2,70000]', '"routing_token_ids" : [ 4294967295 ]'),
        *('"routing_token_ids":[]', '"routing_token_ids":[4294967296]'),
        *('"routing_token_ids":[1.0]', '"routing_token_ids":[-1]', '"routing_token_ids":[[1]]'),
        *('"routing_token_ids":null', '"routing_token_ids":[1', '"routing_token_ids":"[1]"'),
        '"routing\\u005ftoken_ids":[3]',
        '"block_mm_infos":[null,{"mm_objects":[{"mm_hash":77,"offsets":[[0,5]]}]},null]',
        '"block_mm_infos":[{"mm_objects":[{"mm_hash":-1,"offsets":[]}]}]',
        *('"other":{"routing_token_ids":[5]}', '"other":"}"', '"":0', "1", ""),
    ]
)
MEDIA = st.lists(MEDIA_MEMBERS, min_size=1, max_size=3).map(lambda some: "{" + ",".join(some) + "}")


@settings(max_examples=examples(200))
@given(
    media=st.lists(MEDIA | st.sampled_from(["null", "{", "[]", "{}"]), min_size=1, max_size=2),
    before=st.sampled_from(["", '"model_name":"m",', '"token_ids":[1,2],', '"bogus":{"a":1},']),
    behind=st.sampled_from(["}", ',"isl_tokens":7}', ',"token_ids":[9]}', " } ", ""]),
    blank=BLANK,
)
def test_tokens_among_media_are_packed_the_same(
    media: list[str], before: str, behind: str, blank: str
) -> None:
    members = f",{blank}".join(f'"mm_routing_info"{blank}:{blank}{one}' for one in media)
    check(f"{{{before}{members}{behind}".encode())


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([127, 128, 255, 256, 65535, 65536])))
@example([1] * 15)
@example([1] * 16)
@example([1] * 65536)
def test_tokens_are_written_as_msgspec_writes_their_list(values: list[int]) -> None:
    assert msgpack_tokens(packed(values, 4)) == msgspec.msgpack.encode(values)
