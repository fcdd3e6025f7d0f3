"""A body in MessagePack is the same request, or the same refusal, as in JSON."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.routing.read import fingerprint_of
from select_service.edge.codec.json_codec import Decoded, RequestDecoder
from select_service.edge.codec.msgpack_codec import MsgpackDecoder
from select_service.edge.http.routes import ROUTES
from select_service.errors import InvalidField, InvalidMsgpack, ServiceError
from select_service.settings import FieldValidation
from select_service.types import (
    BatchRequest,
    MmRoutingInfo,
    PromptFields,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectRequest,
    WorkerPatch,
    WorkerSpec,
)

KINDS: list[type[Any]] = sorted({r.takes for r in ROUTES if r.takes}, key=lambda k: k.__name__)
PROMPTS = [kind for kind in KINDS if issubclass(kind, PromptFields)]
WIDTHS = {"token_ids": 4, "block_hashes": 8, "sequence_hashes": 8}
MODES = tuple(FieldValidation)
pack = msgspec.msgpack.encode


def packed(values: list[int], width: int) -> bytes:
    return b"".join((value % (1 << 8 * width)).to_bytes(width, "little") for value in values)


def outcome(decoder: Any, body: bytes) -> object:
    """What becomes of a body; not the words of a refusal, which name the form."""
    try:
        decoded: Decoded[Any] = decoder.decode(body)
    except ServiceError as error:
        return type(error).__name__.replace("Msgpack", "Json"), error.field, error.status
    members = msgspec.structs.asdict(decoded.request)
    mark = fingerprint_of(decoded.request, decoded.unknown)
    return type(decoded.request).__name__, members, decoded.warning, decoded.unknown, mark


def check(kind: type[Any], mode: FieldValidation, members: object) -> object:
    """Both forms of one value; returns what came of it."""
    expected = outcome(RequestDecoder(kind, mode), msgspec.json.encode(members))
    assert outcome(MsgpackDecoder(kind, mode), pack(members)) == expected
    return expected


def refusal(kind: type[Any], body: bytes, mode: FieldValidation = FieldValidation.WARN) -> Any:
    with pytest.raises(ServiceError) as caught:
        MsgpackDecoder(kind, mode).decode(body)
    return caught.value


# -- packed ------------------------------------------------------------------------------------

HASHES = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=40)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@pytest.mark.parametrize("kind", PROMPTS)
@given(blocks=HASHES, sequence=HASHES, tokens=TOKENS)
def test_binaries_and_lists_are_the_same_request(
    kind: type[Any], blocks: list[int], sequence: list[int], tokens: list[int]
) -> None:
    lists = {"token_ids": tokens, "block_hashes": blocks, "sequence_hashes": sequence}
    rest: dict[str, Any] = {"isl_tokens": 7}
    if kind is ReservationRequest:
        rest |= {"worker_id": 1, "reservation_id": "r"}
    binaries = {name: packed(values, WIDTHS[name]) for name, values in lists.items()}
    decoder = MsgpackDecoder(kind, FieldValidation.STRICT)
    expected = check(kind, FieldValidation.STRICT, rest | lists)
    assert outcome(decoder, pack(rest | binaries)) == expected
    decoded = decoder.decode(pack(rest | binaries)).request
    assert isinstance(decoded, kind)
    assert {name: getattr(decoded, name) for name in binaries} == binaries


@pytest.mark.parametrize("kind", PROMPTS)
def test_tokens_around_media_may_be_a_binary(kind: type[Any]) -> None:
    rest: dict[str, Any] = {"isl_tokens": 7}
    if kind is ReservationRequest:
        rest |= {"worker_id": 1, "reservation_id": "r"}
    infos: dict[str, Any] = {"block_mm_infos": [None]}
    media = {"routing_token_ids": packed([1, 2**32 - 1], 4)} | infos
    listed = rest | {"mm_routing_info": {"routing_token_ids": [1, 2**32 - 1]} | infos}
    decoder = MsgpackDecoder(kind, FieldValidation.STRICT)
    body = pack(rest | {"mm_routing_info": media})
    assert outcome(decoder, body) == check(kind, FieldValidation.STRICT, listed)
    found = decoder.decode(body).request.mm_routing_info
    assert type(found) is MmRoutingInfo
    assert found.routing_token_ids == media["routing_token_ids"]


def test_a_binary_around_media_of_no_whole_number_of_tokens() -> None:
    error = refusal(SelectRequest, pack({"mm_routing_info": {"routing_token_ids": bytes(5)}}))
    assert isinstance(error, InvalidField)
    assert error.field == "mm_routing_info.routing_token_ids"
    assert str(error).endswith("5 bytes are no whole number of tokens of 4")


def test_a_refused_binary_is_named_in_the_plural() -> None:
    error = refusal(SelectRequest, pack({"block_hashes": bytes(3)}))
    assert str(error) == "block_hashes: 3 bytes are no whole number of hashes of 8"


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("length", [1, 3, 7, 9, 4 * 8 + 1])
def test_a_binary_of_no_whole_number_of_numbers(name: str, length: int) -> None:
    error = refusal(SelectRequest, pack({name: bytes(length)}))
    assert isinstance(error, InvalidField)
    assert (error.field, error.status) == (name, 422)
    assert str(error).startswith(f"{name}: {length} bytes are no whole number of ")


def test_only_long_lists_may_be_binaries() -> None:
    for members in (
        {"model_name": b"m"},
        {"allowed_worker_ids": bytes(8)},
        {"mm_routing_info": {"routing_token_ids": "1234"}},
        {"mm_routing_info": {"routing_token_ids": [1], "block_mm_infos": bytes(4)}},
        {"block_hashes": "AQEBAQEBAQE="},
    ):
        error = refusal(SelectRequest, pack(members))
        assert isinstance(error, InvalidField)
        (name,) = members
        assert (error.field or "").startswith(name)


# -- the same as in JSON -----------------------------------------------------------------------

VALUES: list[tuple[type[Any], Any]] = [
    (SelectRequest, {}),
    (SelectRequest, []),
    (SelectRequest, None),
    (SelectRequest, {"isl_tokens": None, "block_hashes": None}),
    (SelectRequest, {"isl_tokens": -1}),
    (SelectRequest, {"isl_tokens": 2**64 - 1}),
    (SelectRequest, {"isl_tokens": 1.5}),
    (SelectRequest, {"isl_tokens": True}),
    (SelectRequest, {"isl_tokens": "1"}),
    (SelectRequest, {"priority_jump": 1}),
    (SelectRequest, {"token_ids": [2**32]}),
    (SelectRequest, {"token_ids": [1, "x"]}),
    (SelectRequest, {"block_hashes": [-(2**63), 2**64 - 1]}),
    (SelectRequest, {"tenant_id": "a", "routing_group": "b"}),
    (SelectRequest, {"pinned_worker": {"worker_id": 1}}),
    (SelectRequest, {"pinned_worker": {"worker_id": 1, "dp_rank": 0, "x": 1}}),
    (SelectRequest, {"router_config_override": {"router_temperature": -1}}),
    (SelectRequest, {"mm_routing_info": {"routing_token_ids": [1], "block_mm_infos": [None]}}),
    (SelectRequest, {"block_mm_infos": [{"mm_objects": [{"mm_hash": 1, "offsets": [[0, 1]]}]}]}),
    (SelectRequest, {"on_cache_threshold": "neither"}),
    (SelectRequest, {"surprise": 1}),
    (SelectRequest, {"größe": {"b": [1, 2.5, None, "x"], "a": {}}, "another": True}),
    (SelectRequest, {"surprise": 'a"b\\', "model_name": "m"}),
    (SelectAndReserveRequest, {"reservation_id": "r", "ttl_s": 0}),
    (ReservationRequest, {"sequence_hashes": [1]}),
    (WorkerSpec, {"worker_id": 1, "kv_events_endpoints": {"0": "tcp://a", "1": "tcp://b"}}),
    (WorkerSpec, {"worker_id": 1, "kv_events_endpoints": {"x": "tcp://a"}}),
    (WorkerSpec, {"worker_id": 1, "kv_events_endpoints": {"4294967296": "tcp://a"}}),
    (WorkerSpec, {"model_name": "m"}),
    (WorkerPatch, {"worker_id": {"a": [1]}, "taints": ["x"]}),
    (BatchRequest, {"operations": [{"op": "free", "reservation_id": "r"}]}),
    (BatchRequest, {"operations": [{"op": "free"}, {"op": "nothing"}]}),
    (BatchRequest, {"operations": [{"op": "output_block", "reservation_id": "r", "count": 0}]}),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("kind", "members"), VALUES, ids=repr)
def test_both_forms_of_a_value(kind: type[Any], members: Any, mode: FieldValidation) -> None:
    check(kind, mode, members)


NAMES = sorted({f.encode_name for kind in KINDS for f in msgspec.structs.fields(kind)})
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["free", "output_block", "a", "reject", "gpu"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(
    kind=st.sampled_from(KINDS),
    mode=st.sampled_from(MODES),
    members=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), ANY, max_size=6),
)
def test_both_forms_of_any_object(
    kind: type[Any], mode: FieldValidation, members: dict[str, Any]
) -> None:
    check(kind, mode, members)


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_alone_in_every_type(kind: type[Any]) -> None:
    for field in msgspec.structs.fields(kind):
        value: Any
        for value in (None, True, 0, -1, 2**63, 1.5, "x", [], [0], ["x"], {}, {"x": 0}, [{}]):
            check(kind, FieldValidation.WARN, {field.encode_name: value})


# -- what is wrong with it ---------------------------------------------------------------------


def map_of(*pairs: tuple[str, object]) -> bytes:
    body = b"".join(pack(name) + pack(value) for name, value in pairs)
    return bytes([0x80 | len(pairs)]) + body


class Twice(msgspec.Struct):
    """Stands in a table for an object with a member twice; printed by `pytest`."""

    path: str
    body: bytes


RAW = msgspec.Raw
DUPLICATES = [
    Twice("isl_tokens", map_of(("isl_tokens", 1), ("isl_tokens", 2))),
    Twice("nobody's", map_of(("nobody's", 1), ("isl_tokens", 2), ("nobody's", 1))),
    Twice(
        "pinned_worker.dp_rank",
        map_of(("pinned_worker", RAW(map_of(("worker_id", 1), ("dp_rank", 0), ("dp_rank", 1))))),
    ),
    Twice(
        "block_mm_infos[1].mm_objects[0].mm_hash",
        map_of(
            (
                "block_mm_infos",
                [
                    None,
                    {"mm_objects": [RAW(map_of(("mm_hash", 1), ("offsets", []), ("mm_hash", 1)))]},
                ],
            )
        ),
    ),
    Twice(
        "routing_constraints.preferred_taints.a",
        map_of(("routing_constraints", {"preferred_taints": RAW(map_of(("a", 1.0), ("a", 2.0)))})),
    ),
]


@pytest.mark.parametrize("twice", DUPLICATES, ids=lambda twice: twice.path)
def test_a_member_twice(twice: Twice) -> None:
    error = refusal(SelectRequest, twice.body, FieldValidation.IGNORE)
    assert isinstance(error, InvalidField)
    assert (error.field, str(error)) == (twice.path, f"duplicate field `{twice.path}`")


@pytest.mark.parametrize("head", [b"\xde\x00\x02", b"\xdf\x00\x00\x00\x02"])
def test_maps_with_longer_heads(head: bytes) -> None:
    decoder = MsgpackDecoder(SelectRequest, FieldValidation.WARN)
    body = map_of(("isl_tokens", 1), ("model_name", "m"))[1:]
    assert decoder.decode(head + body).request.isl_tokens == 1
    body = map_of(("isl_tokens", 1), ("isl_tokens", 1))[1:]
    assert refusal(SelectRequest, head + body).field == "isl_tokens"


MALFORMED = {
    "nothing": b"",
    "cut": pack({"isl_tokens": 1})[:-1],
    "trailing": pack({"isl_tokens": 1}) + b"\x00",
    "no opcode": b"\xc1",
    "JSON": b'{"isl_tokens":1}',
    "a long map that is not there": b"\xdf\xff\xff\xff\xff",
    "a long array that is not there": b"\x81" + pack("token_ids") + b"\xdd\xff\xff\xff\xff",
    "a long binary that is not there": b"\x81" + pack("token_ids") + b"\xc6\xff\xff\xff\xff",
    "no UTF-8": b"\x81" + pack("lora_name") + b"\xa1\xff",
    "no UTF-8 in a name": b"\x81\xa1\xff\x01",
    "no UTF-8 in what nobody knows": b"\x81\xa1x\xa1\xff",
    "no UTF-8 further down": map_of(
        (
            "pinned_worker",
            RAW(b"\x83" + map_of(("worker_id", 1), ("dp_rank", 0))[1:] + b"\xa1x\xa1\xff"),
        )
    ),
    "deep": b"\x81\xa1x" * 100_000 + b"\xc0",
    "deep arrays": b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
    "a key that is none": b"\x81\xa1x\x81\xd4\x05\x01\x02",
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("mode", MODES)
def test_what_is_no_msgpack(body: bytes, mode: FieldValidation) -> None:
    error = refusal(SelectRequest, body, mode)
    if error.status == 422:  # JSON's text is a small number to msgpack, and no object
        assert str(error) == "Expected `object`, got `int`"
        return
    assert isinstance(error, InvalidMsgpack)
    assert error.code == "invalid_msgpack"
    assert str(error).startswith("not msgpack")


@pytest.mark.parametrize(
    "value", [b"\xc7\x01\x05x", b"\x81\x01\x02", b"\xc4\x01\xff", b"\xcb\x7f\xf8" + bytes(6)]
)
def test_what_json_cannot_say_is_no_reason_to_refuse_what_nobody_reads(value: bytes) -> None:
    body = b"\x82\xa1x" + value + pack("isl_tokens") + b"\x01"
    decoded = MsgpackDecoder(SelectRequest, FieldValidation.WARN).decode(body)
    assert decoded.warning == '299 - "unknown field: x"'
    assert decoded.unknown


@pytest.mark.parametrize("key", [b"\x91\xc0", b"\xd4\x05\x01", b"\x81\x01\x01", b"\x91\x91\x80"])
def test_keys_that_cannot_be_hashed(key: bytes) -> None:
    value = b"\x81" + key + b"\x01"
    named = b"\x81" + pack("worker_id") + value  # may be anything that JSON has
    assert refusal(WorkerPatch, named).status in {400, 422}
    unknown = b"\x81\xa1x" + value
    if key == b"\x91\xc0":  # read as a tuple
        decoded = MsgpackDecoder(SelectRequest, FieldValidation.IGNORE).decode(unknown)
        assert fingerprint_of(decoded.request, decoded.unknown)
    else:
        assert isinstance(refusal(SelectRequest, unknown), InvalidMsgpack)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("kind", "members", "field"),
    [
        (SelectRequest, {"priority_jump": NAN}, "priority_jump"),
        (SelectRequest, {"priority_jump": -INFINITY}, "priority_jump"),
        (SelectRequest, {"slo_ttft_ms": INFINITY}, "slo_ttft_ms"),
        (SelectAndReserveRequest, {"ttl_s": NAN}, "ttl_s"),
        (
            SelectRequest,
            {"router_config_override": {"router_temperature": NAN}},
            "router_config_override.router_temperature",
        ),
        (
            SelectRequest,
            {"routing_constraints": {"preferred_taints": {"a": 1.0, "b": INFINITY}}},
            "routing_constraints.preferred_taints.b",
        ),
        (
            BatchRequest,
            {
                "operations": [
                    {"op": "free", "reservation_id": "r"},
                    {"op": "output_block", "reservation_id": "r", "decay_fraction": NAN},
                ]
            },
            "operations[1].decay_fraction",
        ),
        (WorkerSpec, {"worker_id": 1, "kv_transfer_preferred_weight": NAN}, None),
        (WorkerPatch, {"worker_id": [{"a": NAN}]}, "worker_id"),
        (WorkerPatch, {"worker_id": {1: 2}}, "worker_id"),
        (WorkerPatch, {"worker_id": b"1"}, "worker_id"),
        (WorkerPatch, {"worker_id": msgspec.msgpack.Ext(5, b"")}, "worker_id"),
        (WorkerPatch, {"worker_id": datetime.now(UTC)}, "worker_id"),
    ],
)
def test_what_json_cannot_say_is_refused_where_it_is_read(
    kind: type[Any], members: dict[str, Any], field: str | None
) -> None:
    error = refusal(kind, pack(members))
    assert isinstance(error, InvalidField)
    assert error.field == (field or "kv_transfer_preferred_weight")


def test_every_float_is_looked_at() -> None:
    """Of the types of all routes, found by their schemas and not as the decoder does."""
    for kind in KINDS:
        for field in msgspec.structs.fields(kind):
            if "float" in str(field.type):
                for value in (NAN, [NAN], {"x": NAN}):
                    with pytest.raises(ServiceError):
                        MsgpackDecoder(kind, FieldValidation.WARN).decode(
                            pack({field.encode_name: value})
                        )


def test_names_of_another_type_are_refused() -> None:
    for name in (1, None, b"isl_tokens"):
        assert refusal(SelectRequest, b"\x81" + pack(name) + b"\x01").status == 422


# -- fuzz --------------------------------------------------------------------------------------

SEEDS = [
    pack(
        {"model_name": "m", "block_hashes": bytes(16), "sequence_hashes": [1, -2], "isl_tokens": 48}
    ),
    pack({"token_ids": bytes(12), "pinned_worker": {"worker_id": 1, "dp_rank": 0}, "bogus": [{}]}),
    pack({"block_mm_infos": [None, {"mm_objects": [{"mm_hash": 1, "offsets": [[0, 1]]}]}]}),
    pack({"operations": [{"op": "free", "reservation_id": "x"}] * 2}),
    pack({"worker_id": 1, "kv_events_endpoints": {"0": "tcp://a:1"}, "taints": ["x"]}),
]
BITS = [
    *(bytes([head]) for head in (0x80, 0x81, 0x82, 0x90, 0x91, 0xA0, 0xA1, 0xC0, 0xC1, 0xC4, 0xC7)),
    *(bytes([head]) for head in (0xCA, 0xCB, 0xCC, 0xCF, 0xD3, 0xD4, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF)),
    *(b"\xff", b"\xff" * 4, b"\xff" * 8, b"\x00" * 4, pack("token_ids"), pack("worker_id")),
]


@st.composite
def mutants(draw: st.DrawFn) -> bytes:
    body = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(body)))
        until = min(len(body), at + draw(st.sampled_from([0, 0, 1, 2, 9])))
        body[at:until] = draw(st.sampled_from(BITS) | st.binary(max_size=2))
    return bytes(body)


DECODERS = [MsgpackDecoder(kind, mode) for kind in KINDS for mode in MODES]


@given(mutants() | st.binary(max_size=60) | st.lists(st.sampled_from(BITS)).map(b"".join))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes) -> None:
    for decoder in DECODERS:
        try:
            decoded = decoder.decode(body)
        except ServiceError as error:
            refused = error
        else:
            fingerprint_of(decoded.request, decoded.unknown)
            for name in WIDTHS:
                assert isinstance(getattr(decoded.request, name, None), bytes | None)
            continue
        assert refused.status in {400, 422}
        assert json.dumps(refused.body())


def test_every_beginning_of_a_body() -> None:
    for seed in SEEDS:
        for length in range(len(seed)):
            for decoder in DECODERS:
                with pytest.raises(ServiceError):
                    decoder.decode(seed[:length])


def test_long_lists_may_be_binaries_wherever_there_are_any() -> None:
    assert {kind for kind in KINDS if {*WIDTHS} & {*kind.__struct_fields__}} == {*PROMPTS}
