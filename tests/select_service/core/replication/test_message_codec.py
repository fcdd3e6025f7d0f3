"""Bytes of the replica plane, ours and the reference's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.packing import unpack_u64
from select_service.core.replication.dynamo_events import (
    TEXT_CHARS_MAX,
    TOPIC,
    AddRequest,
    ReplicaEnvelope,
    Stamp,
)
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    decode_part,
    encode_message,
    encode_part,
)
from select_service.core.replication.messages import (
    OWN_TOPIC,
    ClaimGrowth,
    ClaimRecord,
    Closed,
    Ended,
    Grown,
    Heartbeat,
    RelayedClaim,
    Renewed,
    Said,
    SnapshotEnd,
    SnapshotHead,
)
from select_service.types import LeaseState

ADD_OF_1_3_1 = bytes.fromhex(
    "84aa6d6f64656c5f6e616d65a56d6f64656ca974656e616e745f6964a764656661756c74aa626c6f636b5f73697a6510"
    "a56576656e7485aa726571756573745f6964a27831a6776f726b657282a9776f726b65725f696401a764705f72616e6b"
    "00a46461746181aa4164645265717565737484ae746f6b656e5f73657175656e636594151617cfffffffffffffffffb4"
    "747261636b5f70726566696c6c5f746f6b656e73c3b665787065637465645f6f75747075745f746f6b656e73c0b17072"
    "6566696c6c5f6c6f61645f68696e7482d920696e697469616c5f6566666563746976655f70726566696c6c5f746f6b65"
    "6e7328b965787065637465645f70726566696c6c5f6475726174696f6ec0a9726f757465725f6964cf7b68c2c010d1ff"
    "e5a96c6f72615f6e616d65c0"
)
"""A real one."""

EVENT: dict[str, Any] = {
    "request_id": "x",
    "worker": {"worker_id": 2**64 - 1, "dp_rank": 3},
    "data": "Free",
    "router_id": 9,
}
ENVELOPE: dict[str, Any] = {
    "model_name": "m",
    "tenant_id": "t",
    "block_size": 16,
    "event": EVENT,
}


def read(raw: Any) -> ReplicaEnvelope:
    message = decode_message(TOPIC, msgspec.msgpack.encode(raw))
    assert isinstance(message, ReplicaEnvelope)
    return message


def with_data(data: Any) -> dict[str, Any]:
    return ENVELOPE | {"event": EVENT | {"data": data}}


def admission(content: Any) -> AddRequest:
    event = read(with_data({"AddRequest": content})).event
    assert event is not None
    assert not isinstance(event.data, str)
    return event.data.AddRequest


def test_a_real_admission() -> None:
    message = decode_message(TOPIC, ADD_OF_1_3_1)
    told = msgspec.to_builtins(message, enc_hook=lambda hashes: unpack_u64(hashes.packed))
    assert told == {
        "model_name": "model",
        "tenant_id": "default",
        "routing_group": "default",
        "block_size": 16,
        "event": {
            "request_id": "x1",
            "worker": {"worker_id": 1, "dp_rank": 0},
            "data": {
                "AddRequest": {
                    "token_sequence": [21, 22, 23, 2**64 - 1],
                    "track_prefill_tokens": True,
                    "expected_output_tokens": None,
                    "prefill_load_hint": {
                        "initial_effective_prefill_tokens": 40,
                        "expected_prefill_duration": None,
                    },
                }
            },
            "router_id": 0x7B68C2C010D1FFE5,
            "lora_name": None,
        },
    }


def test_arrays_in_field_order_will_do() -> None:
    event = ["x", [7, 1], {"AddRequest": [[1, 2], False, 5, [40, [1, 500]]]}, 9, "lora"]
    assert read(["m", "t", 16, event]) == read(
        ENVELOPE
        | {
            "event": {
                "request_id": "x",
                "worker": {"worker_id": 7, "dp_rank": 1},
                "data": {
                    "AddRequest": {
                        "token_sequence": [1, 2],
                        "track_prefill_tokens": False,
                        "expected_output_tokens": 5,
                        "prefill_load_hint": {
                            "initial_effective_prefill_tokens": 40,
                            "expected_prefill_duration": {"secs": 1, "nanos": 500},
                        },
                    }
                },
                "router_id": 9,
                "lora_name": "lora",
            }
        }
    )


def test_what_may_be_absent() -> None:
    assert admission({}) == AddRequest(None, True, None, None)
    assert admission({"token_sequence": None}) == AddRequest()


@pytest.mark.parametrize("data", ["Free", {"Free": None}])
def test_endings_in_both_spellings(data: Any) -> None:
    event = read(with_data(data)).event
    assert event is not None
    assert event.data == "Free"


def test_either_name_of_the_scope_will_do_and_both_must_agree() -> None:
    del (plain := dict(ENVELOPE))["tenant_id"]
    assert read(plain | {"routing_group": "t", "more": 1}) == read(ENVELOPE)
    assert read(ENVELOPE | {"routing_group": "t"}) == read(ENVELOPE)
    for bad in (plain, ENVELOPE | {"routing_group": "other"}):
        with pytest.raises(MalformedReplicaMessage):
            read(bad)


@pytest.mark.parametrize(
    "raw",
    [
        7,
        {},
        ENVELOPE | {"block_size": -1},
        ENVELOPE | {"block_size": 2**32},
        ENVELOPE | {"event": None},
        with_data("Freed"),
        with_data({"Free": 1}),
        with_data({"AddRequest": {"token_sequence": [-1]}}),
        with_data({"AddRequest": {"token_sequence": [1.0]}}),
        with_data({"AddRequest": {"token_sequence": 5}}),
        with_data({"AddRequest": {"track_prefill_tokens": 1}}),
        with_data({"AddRequest": {"prefill_load_hint": {}}}),
        ENVELOPE | {"event": EVENT | {"worker": {"worker_id": True, "dp_rank": 0}}},
        ENVELOPE | {"select_service": {"epoch": "x", "seq": 1}},
    ],
)
def test_what_means_nothing_is_refused(raw: Any) -> None:
    with pytest.raises(MalformedReplicaMessage):
        read(raw)


def nonsense() -> Iterator[dict[str, Any]]:
    """Every number of our own messages out of its range."""
    claim = msgspec.to_builtins(ClaimRecord("x", 3, "m", "t", 16, 1, 0))
    for field in ("born", "block_size", "worker_id", "dp_rank", "prefill_tokens", "isl_tokens"):
        yield said(claim | {field: -1})
    yield said(claim | {"block_size": 2**32})
    yield said(claim | {"dp_rank": 2**32})
    yield said(claim | {"adopts": [[-1, 1]]})
    grown = {"type": "grown", "reservation_id": "x", "owner": 1, "born": 2}
    for growth in (
        {"outputs": {1: -1}},
        {"outputs": {-1: 1}},
        {"faded_at": -1},
        *({"fraction": number} for number in (math.nan, -0.1, 1.1, math.inf)),
    ):
        yield said(grown | {"growth": growth})
    beat = msgspec.to_builtins(Heartbeat(1, 1, 2, 3, 4))
    for field in ("router_id", "epoch", "seq", "live", "digest", "http_port"):
        yield beat | {field: -1}
    yield beat | {"epoch": 0}
    yield beat | {"epoch": 2**24 + 1}
    yield beat | {"http_port": 2**16}


def said(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "said", "router_id": 1, "epoch": 1, "seq": 1, "items": [item]}


@pytest.mark.parametrize("raw", list(nonsense()))
def test_numbers_of_our_own_that_can_be_none_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(MalformedReplicaMessage):
        decode_message(OWN_TOPIC, msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    "stamp", [{"epoch": 0}, {"seq": -1}, {"of": [[1, -1]]}, {"isl_tokens": -1}]
)
def test_a_stamp_with_numbers_that_can_be_none_is_refused(stamp: dict[str, Any]) -> None:
    with pytest.raises(MalformedReplicaMessage):
        read(with_data("Free") | {"select_service": {"epoch": 1, "seq": 1} | stamp})


@given(st.binary(max_size=60), st.sampled_from([TOPIC, OWN_TOPIC]))
def test_any_bytes_are_a_message_or_refused(payload: bytes, topic: bytes) -> None:
    try:
        decode_message(topic, payload)
    except MalformedReplicaMessage:
        return


@pytest.mark.parametrize("extra", [0, 1])
def test_names_are_not_of_any_length(extra: int) -> None:
    name = "x" * (TEXT_CHARS_MAX + extra)
    foreign = msgspec.msgpack.encode(ENVELOPE | {"event": EVENT | {"request_id": name}})
    own = encode_message(Said(1, 1, 1, [Ended(name, 1, 1)]))
    for topic, payload in ((TOPIC, foreign), own):
        if extra:
            with pytest.raises(MalformedReplicaMessage):
                decode_message(topic, payload)
        else:
            decode_message(topic, payload)


def test_other_topics_are_refused() -> None:
    with pytest.raises(MalformedReplicaMessage, match="unknown topic"):
        decode_message(TOPIC + b"x", ADD_OF_1_3_1)


CLAIM = ClaimRecord(
    "x",
    3,
    "m",
    "t",
    16,
    2**64 - 1,
    0,
    b"12345678",
    5,
    growth=ClaimGrowth(True, {2**64 - 1: 4}, 3, 0.5),
)

LEASED = msgspec.structs.replace(CLAIM, ttl_s=2.5, lease=LeaseState("l", "o", 30.0))


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(1, 1, 2, 3, 2**64 - 1, 8092, "http://x"),
        Said(1, 1, 2, [CLAIM, Grown("x", 1, 2, ClaimGrowth()), Ended("x", 1, 2)]),
        Said(1, 1, 2, [LEASED, Renewed("l"), Renewed("l", 5.0), Closed("l", [2**64 - 1])]),
    ],
)
def test_our_own_messages_come_back(message: Heartbeat | Said) -> None:
    topic, payload = encode_message(message)
    assert topic == OWN_TOPIC
    assert decode_message(topic, payload) == message


@pytest.mark.parametrize(
    "part",
    [
        SnapshotHead(1, 1, 2),
        CLAIM,
        Grown("x", 1, 2, ClaimGrowth()),
        Ended("x", 1, 2),
        Ended("x", 1, 2, (3, 2**64 - 1)),
        Ended("x", 1, 2, freed=True),
        RelayedClaim(5, CLAIM),
        RelayedClaim(5, LEASED),
        Renewed("l", 5.0, 2.5),
        SnapshotEnd(7),
    ],
)
def test_parts_of_snapshots_come_back(part: Any) -> None:
    assert decode_part(encode_part(part)) == part


def test_ends_without_heirs_are_as_they_always_were() -> None:
    told = msgspec.msgpack.decode(encode_part(Ended("x", 1, 2)))
    assert told == {"type": "ended", "reservation_id": "x", "owner": 1, "born": 2}
    assert decode_part(msgspec.msgpack.encode(told | {"later": 1})) == Ended("x", 1, 2)


def test_claims_without_terms_are_as_they_always_were() -> None:
    told = msgspec.msgpack.decode(encode_part(CLAIM))
    assert told.keys().isdisjoint({"ttl_s", "lease"})
    read_again = decode_part(msgspec.msgpack.encode(told))
    assert isinstance(read_again, ClaimRecord)
    assert (read_again.ttl_s, read_again.lease) == (None, None)
    told = msgspec.msgpack.decode(encode_part(LEASED))
    assert told["lease"] == {"lease_id": "l", "owner": "o", "ttl_s": 30.0}
    assert decode_part(msgspec.msgpack.encode(told | {"of_later": 1})) == LEASED


def test_an_admission_tells_its_terms_in_the_stamp_only() -> None:
    plain = read(ENVELOPE | {"select_service": {"epoch": 1, "seq": 5}}).select_service
    assert plain is not msgspec.UNSET
    assert (plain.ttl_s, plain.lease) == (None, None)
    lease = {"lease_id": "l", "owner": "o", "ttl_s": 30.0}
    terms = {"epoch": 1, "seq": 5, "ttl_s": 2.5, "lease": lease}
    stamp = read(ENVELOPE | {"select_service": terms}).select_service
    assert stamp == Stamp(1, 5, ttl_s=2.5, lease=LeaseState("l", "o", 30.0))
    for wrong in ({"lease": "l"}, {"lease": {"lease_id": 1}}, {"ttl_s": "5"}):
        with pytest.raises(MalformedReplicaMessage):
            read(ENVELOPE | {"select_service": terms | wrong})
    envelope = read(ENVELOPE)
    told = msgspec.msgpack.decode(encode_message(msgspec.structs.replace(envelope))[1])
    stamped = msgspec.structs.replace(envelope, select_service=stamp)
    again = msgspec.msgpack.decode(encode_message(stamped)[1])
    assert again.pop("select_service") == terms
    assert again == told, "foreign readers find what they know as it was"


def test_a_broken_part_is_refused() -> None:
    with pytest.raises(MalformedReplicaMessage):
        decode_part(encode_part(CLAIM)[:-1])


MANY = (1 << 20).to_bytes(4, "big")


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd" + MANY + b"\x90" * 1000,
        b"\xdf" + MANY + b"\xa1a\x90" * 1000,
        b"\x81\xa5event\xdd" + MANY + b"\x90" * 1000,
        b"\xdd\x00\x00\x00\x41" + b"\x01" * 65,
    ],
)
def test_what_announces_too_much_is_refused_before_it_is_read(payload: bytes) -> None:
    """A megabyte of empty arrays took a second to make, and was no message all the same."""
    with pytest.raises(MalformedReplicaMessage):
        decode_message(TOPIC, payload)


def test_what_nobody_knows_is_not_made() -> None:
    """A member that is skipped may hold what it likes: its keys need not even be texts."""
    event = ["r", [1, 0], "Free", 7]
    message = {"model_name": "m", "tenant_id": "t", "block_size": 16, "event": event}
    plain = decode_message(TOPIC, msgspec.msgpack.encode(message))
    odd: dict[int, Any] = {1: {2: [[], {}]}}
    assert decode_message(TOPIC, msgspec.msgpack.encode(message | {"odd": odd})) == plain


def test_names_of_members_are_texts() -> None:
    event = ["r", [1, 0], {"AddRequest": {1: 2}}, 7]
    message = {"model_name": "m", "tenant_id": "t", "block_size": 16, "event": event}
    with pytest.raises(MalformedReplicaMessage):
        decode_message(TOPIC, msgspec.msgpack.encode(message))
