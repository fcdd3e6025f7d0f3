"""JSON requests: what is refused, with which status and field, and what is let through."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.edge.codec.json_codec import Decoded, RequestDecoder
from select_service.edge.codec.msgpack_codec import MsgpackDecoder
from select_service.errors import InvalidField, InvalidJson, ServiceError, UnknownField
from select_service.settings import FieldValidation
from select_service.types import (
    OutputBlockRequest,
    ReservationRequest,
    SelectRequest,
    WorkerPatch,
    WorkerSpec,
)

SELECT = RequestDecoder(SelectRequest, FieldValidation.WARN)
WORKER = RequestDecoder(WorkerSpec, FieldValidation.WARN)
PATCH = RequestDecoder(WorkerPatch, FieldValidation.WARN)
PACKED = MsgpackDecoder(SelectRequest, FieldValidation.WARN)

PROMPT = b'"block_hashes":[1],"sequence_hashes":[1],"isl_tokens":16'


def select(body: bytes) -> Decoded[SelectRequest]:
    return SELECT.decode(body)


def refusal(decoder: Any, body: bytes) -> InvalidField:
    with pytest.raises(InvalidField) as refused:
        decoder.decode(body)
    return refused.value


def test_a_regular_request() -> None:
    decoded = select(b'{"model_name":"m","tenant_id":"t:1",%s,"selection_id":"a:b"}' % PROMPT)
    assert decoded.warning is None
    assert decoded.unknown == b""
    assert decoded.request.block_hashes == b"\1" + bytes(7)
    assert decoded.request.scope == ("m", "t:1")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"\xef\xbb\xbf{}",
        b'{"isl_tokens":1,}',
        b"{'isl_tokens':1}",
        b'{"isl_tokens":01}',
        b'{"isl_tokens":NaN}',
        b'{"priority_jump":Infinity}',
        b'{"lora_name":"\xff"}',
        b'{"bogus":"\xff"}',
        b'{"bo\xffgus":1}',
        b'{"lora_name":"\\ud800"}',
        b'{"lora_name":"a\nb"}',
        b'{"a":1"b":2}',
        b"{} x",
        b"nul",
        b'{"bogus":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"bogus":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_json_is_400(body: bytes) -> None:
    with pytest.raises(InvalidJson) as refused:
        select(body)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"token_ids":[1,-1]}', "token_ids[1]: Expected `int` >= 0"),
        (b'{"token_ids":[4294967296,-1]}', "token_ids[0]: Expected `int` <= 4294967295"),
        (
            b'{"block_hashes":[1,-9223372036854775809]}',
            "block_hashes[1]: Expected `int` >= -9223372036854775808",
        ),
        (
            b'{"sequence_hashes":[-1,18446744073709551616]}',
            "sequence_hashes[1]: must be at most 2^64-1",
        ),
    ],
)
def test_the_first_number_out_of_bounds_is_named(body: bytes, text: str) -> None:
    with pytest.raises(InvalidField) as refused:
        select(body)
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"null", None),
        (b"[]", None),
        (b"7", None),
        (b'{"isl_tokens":16.0}', "isl_tokens"),
        (b'{"isl_tokens":1e2}', "isl_tokens"),
        (b'{"isl_tokens":-0.0}', "isl_tokens"),
        (b'{"isl_tokens":true}', "isl_tokens"),
        (b'{"isl_tokens":"16"}', "isl_tokens"),
        (b'{"isl_tokens":-1}', "isl_tokens"),
        (b'{"isl_tokens":18446744073709551616}', "isl_tokens"),
        (b'{"isl_tokens":' + b"9" * 5000 + b"}", "isl_tokens"),
        (b'{"isl_tokens":1e400}', "isl_tokens"),
        (b'{"priority_jump":1e400}', "priority_jump"),
        (b'{"priority_jump":"x"}', "priority_jump"),
        (b'{"strict_priority":4294967296}', "strict_priority"),
        (b'{"block_hashes":1}', "block_hashes"),
        (b'{"block_hashes":[1.0]}', "block_hashes[0]"),
        (b'{"block_hashes":[1,"1"]}', "block_hashes[1]"),
        (b'{"block_hashes":[true]}', "block_hashes[0]"),
        (b'{"block_hashes":[1,2,null]}', "block_hashes[2]"),
        (b'{"block_hashes":[-9223372036854775809]}', "block_hashes[0]"),
        (b'{"block_hashes":[[[[[[[[[[]]]]]]]]]]}', "block_hashes[0]"),
        (b'{"token_ids":[1,4294967296]}', "token_ids[1]"),
        (b'{"token_ids":[-1]}', "token_ids[0]"),
        (b'{"allowed_worker_ids":[-1]}', "allowed_worker_ids[0]"),
        (b'{"allowed_worker_ids":[7,18446744073709551616]}', "allowed_worker_ids[1]"),
        (b'{"model_name":null}', "model_name"),
        (b'{"tenant_id":null}', "tenant_id"),
        (b'{"routing_group":null}', "routing_group"),
        (b'{"routing_constraints":null}', "routing_constraints"),
        (b'{"tenant_id":"a","routing_group":"b"}', "routing_group"),
        (b'{"selection_id":5}', "selection_id"),
        (b'{"pinned_worker":1}', "pinned_worker"),
        (b'{"pinned_worker":{"worker_id":1}}', "pinned_worker.dp_rank"),
        (
            b'{"pinned_worker":{"worker_id":18446744073709551616,"dp_rank":0}}',
            "pinned_worker.worker_id",
        ),
        (
            b'{"router_config_override":{"overlap_score_credit":2}}',
            "router_config_override.overlap_score_credit",
        ),
        (
            b'{"router_config_override":{"router_temperature":-1}}',
            "router_config_override.router_temperature",
        ),
        (
            b'{"router_config_override":{"assume_kv_reuse":1}}',
            "router_config_override.assume_kv_reuse",
        ),
        (
            b'{"routing_constraints":{"required_taints":[1]}}',
            "routing_constraints.required_taints[0]",
        ),
        (b'{"mm_routing_info":{}}', "mm_routing_info.routing_token_ids"),
        (
            b'{"block_mm_infos":[null,{"mm_objects":[{"mm_hash":18446744073709551616,'
            b'"offsets":[[0,1]]}]}]}',
            "block_mm_infos[1].mm_objects[0].mm_hash",
        ),
        (
            b'{"block_mm_infos":[{"mm_objects":[{"mm_hash":1,'
            b'"offsets":[[0,1],[0,18446744073709551616]]}]}]}',
            "block_mm_infos[0].mm_objects[0].offsets",
        ),
        (b'{"priority":9223372036854775808}', "priority"),
    ],
    ids=lambda part: repr(part[:60]) if isinstance(part, bytes) else str(part),
)
def test_json_of_the_wrong_shape_is_422_and_names_the_field(body: bytes, field: str | None) -> None:
    with pytest.raises(InvalidField) as refused:
        select(body)
    assert refused.value.status == 422
    assert refused.value.field == field
    assert str(refused.value)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"isl_tokens":1,"isl_tokens":1}', "isl_tokens"),
        (b'{ "isl_tokens" : 1 , "isl_tokens" : 1 }', "isl_tokens"),
        (b'{"\\u0069sl_tokens":1,"isl_tokens":1}', "isl_tokens"),
        (b'{"lora_name":"\\\\\\"","lora_name":"x"}', "lora_name"),
        (b'{"bogus":1,"bogus":2}', "bogus"),
        (b'{"pinned_worker":{"worker_id":1,"dp_rank":0,"dp_rank":0}}', "pinned_worker.dp_rank"),
        (
            b'{"routing_constraints":{"preferred_taints":{"a":1,"a":2}}}',
            "routing_constraints.preferred_taints.a",
        ),
        (
            b'{"block_mm_infos":[null,{"mm_objects":[{"mm_hash":1,"offsets":[]},'
            b'{"mm_hash":1,"offsets":[[1,2],[3,4]],"mm_hash":2}]}]}',
            "block_mm_infos[1].mm_objects[1].mm_hash",
        ),
    ],
    ids=repr,
)
def test_a_key_that_comes_twice_is_422_wherever_we_read(body: bytes, path: str) -> None:
    assert refusal(SELECT, body).field == path


@pytest.mark.parametrize(
    "body",
    [
        b'{"bogus":{"a":1,"a":2}}',  # not an object we read
        b'{"router_config_override":{"nope":{"a":1,"a":2}}}',
        b'{"a":{"isl_tokens":1},"isl_tokens":1,"b":[{"isl_tokens":2}]}',
        b'{"selection_id":"\\"isl_tokens\\":1","isl_tokens":1}',
        b'{"selection_id":"isl_tokens","isl_tokens":1}',
        b'{"lora_name":"{[","selection_id":"\\\\","isl_tokens":1}',
    ],
    ids=repr,
)
def test_what_only_looks_like_a_duplicate(body: bytes) -> None:
    select(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"isl_tokens":-0}',
        b'{"block_hashes":[-0]}',
        b'{"block_hashes":[-9223372036854775808,18446744073709551615]}',
        b'{"isl_tokens":18446744073709551615}',
        b'{"priority_jump":5}',
        b'{"token_ids":null,"allowed_worker_ids":null,"pinned_worker":null,"selection_id":null}',
        b'{"tenant_id":"a","routing_group":"a"}',
        b' \r\n\t{ "isl_tokens" : 1 } \n',
        b'{"router_config_override":{"nope":-1}}',
        '{"lora_name":"größe","selection_id":"\\ud83d\\ude00"}'.encode(),
    ],
    ids=repr,
)
def test_odd_but_right(body: bytes) -> None:
    decoded = select(body)
    assert decoded.warning is None
    assert decoded.unknown == b""


@pytest.mark.parametrize("decoder", [WORKER, PATCH])
@pytest.mark.parametrize(
    ("key", "status"),
    [
        ("x", 400),
        ("", 400),
        ("01", 400),
        ("+1", 400),
        (" 1", 400),
        ("٣", 400),
        ("1.5", 422),
        ("-1", 422),
        ("1e3", 422),
        ("4294967296", 422),
        ("9" * 5000, 422),
    ],
)
@pytest.mark.parametrize("field", ["kv_events_endpoints", "replay_endpoints"])
def test_keys_of_endpoints_by_rank_are_ranks(
    decoder: RequestDecoder[Any], field: str, key: str, status: int
) -> None:
    body = json.dumps({"worker_id": 1, field: {"0": "tcp://a:1", key: "b"}})
    with pytest.raises(ServiceError) as refused:
        decoder.decode(body.encode())
    assert refused.value.status == status
    assert refused.value.field == f"{field}.{key}"


@pytest.mark.parametrize("name", ["worker_id", "effective_prefill_tokens", "isl_tokens"])
def test_numbers_of_a_booking_have_64_bits(name: str) -> None:
    body: dict[str, Any] = {"reservation_id": "r", "worker_id": 1, name: 1 << 64}
    decoder = RequestDecoder(ReservationRequest, FieldValidation.WARN)
    assert refusal(decoder, json.dumps(body).encode()).field == name
    with pytest.raises(ValueError, match=f"{name} must be at least 0"):  # no codec in between
        ReservationRequest(**(body | {name: -1}))


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"taints":null}', b'{"topology_domains":null}', b'{"endpoint":null}'),
        b'{"kv_events_endpoints":null}',
        *(b'{"worker_id":"x"}', b'{"model_name":null}', b'{"tenant_id":5,"routing_group":[]}'),
    ],
)
def test_what_a_patch_leaves_alone(body: bytes) -> None:
    assert PATCH.decode(body).request == WorkerPatch(**json.loads(body))


def test_workers() -> None:
    body = b'{"worker_id":18446744073709551615,"kv_events_endpoints":{"0":"a","4294967295":"b"}}'
    assert WORKER.decode(body).request.worker_id == 2**64 - 1
    assert PATCH.decode(b"{}").warning is None
    assert PATCH.decode(b'{"max_num_seqs":18446744073709551615}').request.max_num_seqs == 2**64 - 1


@pytest.mark.parametrize(
    ("members", "field"),
    [
        *(
            (b'"worker_id":1,"%s":null' % name.encode(), name)
            for name in (
                *("kv_events_endpoints", "replay_endpoints", "taints", "topology_domains"),
                *("model_name", "tenant_id"),
            )
        ),
        (b'"worker_id":18446744073709551616', "worker_id"),
        (b'"worker_id":1,"curve_public_key":"short"', "curve_public_key"),
        (b'"worker_id":1,"kv_events_endpoints":{"0":"a","0":"b"}', "kv_events_endpoints.0"),
    ],
    ids=repr,
)
def test_what_no_worker_may_say(members: bytes, field: str) -> None:
    assert refusal(WORKER, b"{%s}" % members).field == field


@pytest.mark.parametrize("seats", [b"0", b"18446744073709551616", b"1.5"])
def test_numbers_of_seats(seats: bytes) -> None:
    assert refusal(WORKER, b'{"worker_id":1,"max_num_seqs":%s}' % seats).field == "max_num_seqs"
    assert refusal(PATCH, b'{"max_num_seqs":%s}' % seats).field == "max_num_seqs"


def test_a_key_that_is_no_text_is_where_its_object_is() -> None:
    for body, path in (
        ({1: 2}, None),
        ({"routing_constraints": {1: 2}}, "routing_constraints"),
        (
            {"routing_constraints": {"preferred_taints": {1: 2}}},
            "routing_constraints.preferred_taints",
        ),
    ):
        assert refusal(PACKED, msgspec.msgpack.encode(body)).field == path


def test_mandatory_fields() -> None:
    decoder = RequestDecoder(ReservationRequest, FieldValidation.WARN)
    for body, field in (
        (b'{"worker_id":1}', "reservation_id"),
        (b'{"reservation_id":"r"}', "worker_id"),
        (b'{"reservation_id":null,"worker_id":1}', "reservation_id"),
    ):
        assert refusal(decoder, body).field == field


# -- unknown fields ----------------------------------------------------------------------------


def test_unknown_fields_are_reported() -> None:
    decoded = select(b'{%s,"bogus":{"x":1},"pined_worker":2}' % PROMPT)
    assert decoded.warning == '299 - "unknown field: bogus, pined_worker"'
    assert decoded.request.isl_tokens == 16


def test_unknown_fields_are_refused_or_passed_over() -> None:
    strict = RequestDecoder(SelectRequest, FieldValidation.STRICT)
    with pytest.raises(UnknownField) as refused:
        strict.decode(b'{"bogus":1,"isl_tokens":1}')
    assert (refused.value.status, refused.value.field) == (422, "bogus")
    assert strict.decode(b'{"router_config_override":{"nope":-1}}').unknown == b""
    ignore = RequestDecoder(SelectRequest, FieldValidation.IGNORE)
    assert ignore.decode(b'{"bogus":1}').warning is None
    assert ignore.decode(b'{"bogus":1}').unknown == b'{"bogus":1}'


def test_a_known_nested_name_is_unknown_at_the_top() -> None:
    decoded = select(b'{"overlap_score_credit":1,"router_config_override":{"nope":1}}')
    assert decoded.warning == '299 - "unknown field: overlap_score_credit"'


def test_equal_unknown_members_have_equal_bytes() -> None:
    one = select(b'{"b":{"y":[1,{"k":"\\u00e9"}],"x":2},"a":1,"isl_tokens":1}').unknown
    two = select('{"isl_tokens":1,"a" :1,"b":{"x":2, "y":[1, {"k":"é"}]}}'.encode()).unknown
    assert one == two != b""
    assert select(b'{"a":2}').unknown != select(b'{"a":1}').unknown


def test_numbers_nobody_can_hold_are_found_in_unknown_fields() -> None:
    for body, path in (
        (b'{"bogus":1e400}', "bogus"),
        (b'{"bogus":[%s]}' % (b"9" * 5000), "bogus[0]"),
        (
            b'{"bogus":{"a":[1,1e400]}}',
            "bogus[...][1]",
        ),  # names are not kept where nobody knows them
    ):
        with pytest.raises(ServiceError) as refused:
            select(body)
        assert refused.value.field == path
        assert refused.value.status in (400, 422)


@given(st.text(), st.text())
def test_a_warning_is_always_one_clean_header(first: str, second: str) -> None:
    body = msgspec.json.encode({"x" + first: 1, "y" + second: 2})
    warning = select(body).warning
    assert warning is not None
    assert warning.isascii()
    assert warning.isprintable()
    assert warning.startswith('299 - "unknown field: x')
    assert warning.endswith('"')
    inner = warning[len('299 - "') : -1]
    assert '"' not in inner.replace("\\\\", "").replace('\\"', "")
    assert not inner.replace("\\\\", "").endswith("\\")


def test_a_long_warning_is_cut() -> None:
    warning = select(msgspec.json.encode({"n" * 10_000: 1})).warning
    assert warning is not None
    assert len(warning) < 600
    assert warning.endswith('..."')


# -- against an independent reading ------------------------------------------------------------

_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_FIELDS = {field.name for field in msgspec.structs.fields(OutputBlockRequest)}


def _write(members: list[tuple[str, Any]], *, spaced: bool) -> bytes:
    comma, colon = (" , ", " : ") if spaced else (",", ":")
    text = comma.join(f"{json.dumps(k)}{colon}{json.dumps(v)}" for k, v in members)
    return ("{" + text + "}").encode()


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "decay_fraction", 'q"', "\\", ":"]), _VALUES),
        max_size=4,
    ),
    st.booleans(),
)
def test_members_are_found_as_json_sees_them(members: list[tuple[str, Any]], spaced: bool) -> None:
    """Python's own parser is the opponent."""
    decoder = RequestDecoder(OutputBlockRequest, FieldValidation.WARN)
    members = [(k, 0.5 if k in _FIELDS else v) for k, v in members]
    body = _write(members, spaced=spaced)
    names: list[str] = []  # of the outermost object, which is the last to be complete

    def seen(pairs: list[tuple[str, Any]]) -> None:
        names[:] = [name for name, _ in pairs]

    json.JSONDecoder(object_pairs_hook=seen).decode(body.decode())
    if len(set(names)) < len(names):
        with pytest.raises(InvalidField) as refused:
            decoder.decode(body)
        assert refused.value.field in names
        return
    decoded = decoder.decode(body)
    unknown = [name for name in names if name not in _FIELDS]
    assert bool(unknown) == (decoded.warning is not None)
    assert set(msgspec.json.decode(decoded.unknown or b"{}")) == set(unknown)
