"""The checksum at the end of a message: who does not know it reads on, nobody believes another."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.replication.checksum import (
    GarbledReplicaMessage,
    is_checked,
    with_checksum,
)
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    decode_part,
    encode_message,
    encode_part,
)
from select_service.core.replication.messages import ClaimRecord, Heartbeat, Said
from tests.select_service.core.replication.test_message_codec import ADD_OF_1_3_1

BEAT = Heartbeat(2**64 - 1, 3, (2 << 40) + 7, 3, 4, 8092, "http://x", True, True, 5)
CLAIM = ClaimRecord("x", 3, "m", "t", 16, 1, 0, b"12345678", 5, 6, False, 7, "l", "s")


@pytest.mark.parametrize("members", [0, 1, 13, 14, 15, 16, 17, 64, 255, 256])
def test_it_is_one_more_member_of_any_map(members: int) -> None:
    plain = {str(number): number for number in range(members)}
    payload = msgspec.msgpack.encode(plain)
    summed = with_checksum(payload)
    told = msgspec.msgpack.decode(summed)
    checksum = told.pop("checksum")
    assert told == plain
    assert checksum == xxhash.xxh3_64_digest(summed[:-8])
    assert is_checked(summed)
    assert not is_checked(payload)


def test_whoever_does_not_know_it_reads_the_rest() -> None:
    topic, payload = encode_message(BEAT)
    assert decode_message(topic, with_checksum(payload)) == BEAT
    assert decode_part(with_checksum(encode_part(CLAIM))) == CLAIM


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\xc1" * 30, ADD_OF_1_3_1])
def test_what_has_none_is_no_error(payload: bytes) -> None:
    assert not is_checked(payload)


@given(st.data())
def test_no_flipped_bit_is_believed(data: st.DataObject) -> None:
    """But for one in the name of the member: then it is as one of an older version."""
    topic, payload = encode_message(BEAT if data.draw(st.booleans()) else Said(1, 1, 2, [CLAIM]))
    garbled = bytearray(with_checksum(payload))
    garbled[data.draw(st.integers(0, len(garbled) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert not is_checked(bytes(garbled))
        decode_message(topic, bytes(garbled))
    except (GarbledReplicaMessage, MalformedReplicaMessage):
        return
    assert garbled[1 : len(payload)] == payload[1:], "what it says is what was said"


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one[: len(one) // 2] + one[-19:],
        lambda one: one[:20] + one[20:40] + one[20:],
        lambda one: one[:-1],
        lambda one: one[:-8] + bytes(8),
    ],
    ids=["cut", "repeated", "short", "zeros"],
)
def test_no_other_bytes_are_believed(change: Any) -> None:
    other = change(with_checksum(encode_message(BEAT)[1]))
    try:
        assert not is_checked(other)
    except GarbledReplicaMessage:
        return
    with pytest.raises(MalformedReplicaMessage):
        decode_message(encode_message(BEAT)[0], other)
