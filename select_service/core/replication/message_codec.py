"""Replica messages and snapshot parts as MessagePack, as strict as the reference's receivers are.

The reference's events come as maps or as arrays in field order, with optional members left out; our
own come as we write them. Pure functions: frames in, messages out, and one error for all faults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from indexer.core.packing import pack_u64, unpack_u64
from select_service.core.replication.dynamo_events import (
    TEXT_CHARS_MAX,
    TOPIC,
    AddRequest,
    AddRequestData,
    Duration,
    Ending,
    EventWorker,
    Hashes,
    PrefillLoadHint,
    ReplicaEnvelope,
    ReplicaEvent,
    Stamp,
)
from select_service.core.replication.messages import (
    CACHED_TOKENS_TOPIC,
    LOADS_TOPIC,
    OWN_TOPIC,
    SESSIONS_TOPIC,
    CachedTokens,
    OwnMessage,
    RankLoads,
    ReplicaMessage,
    SessionRanks,
    SnapshotPart,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_U32_END = 1 << 32
_U64_END = 1 << 64

# Decoded level by level, so that no object is made of data that does not belong: a megabyte of
# empty arrays took a second to read.
_map: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_array: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_string: Final = msgspec.msgpack.Decoder(str).decode
_whole: Final = msgspec.msgpack.Decoder(int).decode
_wholes: Final = msgspec.msgpack.Decoder(list[int]).decode
_switch: Final = msgspec.msgpack.Decoder(bool).decode
_stamp: Final = msgspec.msgpack.Decoder(Stamp).decode

_NIL = 0xC0
_MEMBERS_MAX: Final = 64  # per level: the longest has a tenth of that
_LONG_HEADS: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}  # header → size of the count that follows

Value: TypeAlias = "msgspec.Raw | UnsetType"
_TOPICS: Final[Mapping[type, bytes]] = {
    ReplicaEnvelope: TOPIC,
    RankLoads: LOADS_TOPIC,
    CachedTokens: CACHED_TOKENS_TOPIC,
    SessionRanks: SESSIONS_TOPIC,
}
"""By kind of message; all others are of `OWN_TOPIC`."""
_part: Final[msgspec.msgpack.Decoder[SnapshotPart]] = msgspec.msgpack.Decoder(SnapshotPart)


def _numbers(value: object) -> list[int]:
    """Encode the one type that MessagePack does not have."""
    assert isinstance(value, Hashes)
    return unpack_u64(value.packed)


_encode = msgspec.msgpack.Encoder(enc_hook=_numbers).encode


class MalformedReplicaMessage(Exception):
    """Bytes that are no message of the replica plane; `str` says why."""


def encode_message(message: ReplicaMessage) -> tuple[bytes, bytes]:
    """Return (topic, payload)."""
    return _TOPICS.get(type(message), OWN_TOPIC), _encode(message)


def decode_message(topic: bytes, payload: bytes) -> ReplicaMessage:
    """Decode a message published by a peer.

    Raises:
        MalformedReplicaMessage: another topic, or bytes that mean nothing.
    """
    decode = _DECODERS.get(topic)
    if decode is None:
        raise MalformedReplicaMessage(f"unknown topic {topic!r}")
    try:
        return decode(payload)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise MalformedReplicaMessage(str(error)) from error


def encode_part(part: SnapshotPart) -> bytes:
    """Return one frame of a snapshot, without its length."""
    return _encode(part)


def decode_part(frame: bytes) -> SnapshotPart:
    """Decode one frame of a snapshot.

    Raises:
        MalformedReplicaMessage: bytes that mean nothing.
    """
    try:
        return _part.decode(frame)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise MalformedReplicaMessage(str(error)) from error


# -- the reference's envelope, member by member ----------------------------------------------------


def _envelope(payload: bytes) -> ReplicaEnvelope:
    model, tenant, block_size, event, group, stamp = _members(
        msgspec.Raw(payload),
        ("model_name", "tenant_id", "block_size", "event", "routing_group", "select_service"),
    )
    names = [_text(name) for name in (tenant, group) if name is not UNSET]
    if not names or names[0] != names[-1]:
        raise ValueError("tenant_id and routing_group: one of them, or both the same")
    return ReplicaEnvelope(
        model_name=_text(model),
        tenant_id=names[0],
        routing_group=names[0],
        block_size=_number(block_size, _U32_END),
        event=_event(event),
        select_service=UNSET if isinstance(stamp, UnsetType) else _stamp(stamp),
    )


def _event(raw: Value) -> ReplicaEvent:
    request_id, worker, data, router_id, lora = _members(
        raw, ("request_id", "worker", "data", "router_id", "lora_name")
    )
    worker_id, dp_rank = _members(worker, ("worker_id", "dp_rank"))
    return ReplicaEvent(
        request_id=_text(request_id),
        worker=EventWorker(_number(worker_id, _U64_END), _number(dp_rank, _U32_END)),
        data=_data(data),
        router_id=_number(router_id, _U64_END),
        lora_name=None if _is_absent(lora) else _text(lora),
    )


def _data(raw: Value) -> AddRequestData | Ending:
    kind, content = _tagged(_given(raw))
    if kind == "AddRequest" and content is not None:
        return AddRequestData(_admission(content))
    if content is None or _is_absent(content):
        if kind == "Free":
            return "Free"
        if kind == "MarkPrefillCompleted":
            return "MarkPrefillCompleted"
    raise ValueError("data is neither an admission nor an ending")


def _tagged(raw: msgspec.Raw) -> tuple[str, msgspec.Raw | None]:
    """Return the name and content of a variant: a text, or a map of one member."""
    if _announced(raw) == 1 and _is_map(raw):
        ((kind, content),) = _map(raw).items()
        return kind, content
    return _string(raw), None


def _admission(raw: msgspec.Raw) -> AddRequest:
    tokens, track, expected, hint = _members(
        raw,
        ("token_sequence", "track_prefill_tokens", "expected_output_tokens", "prefill_load_hint"),
    )
    return AddRequest(
        token_sequence=None if _is_absent(tokens) else _hashes(tokens),
        track_prefill_tokens=True if isinstance(track, UnsetType) else _switch(track),
        expected_output_tokens=None if _is_absent(expected) else _number(expected, _U32_END),
        prefill_load_hint=None if _is_absent(hint) else _hint(hint),
    )


def _hint(raw: Value) -> PrefillLoadHint:
    tokens, duration = _members(
        raw, ("initial_effective_prefill_tokens", "expected_prefill_duration")
    )
    if not _is_absent(duration):
        secs, nanos = _members(duration, ("secs", "nanos"))
        span = Duration(_number(secs, _U64_END), _number(nanos, _U32_END))
        return PrefillLoadHint(_number(tokens, _U64_END), span)
    return PrefillLoadHint(_number(tokens, _U64_END))


def _members(raw: Value, names: tuple[str, ...]) -> list[Value]:
    """Return the members of a map, or of an array in field order; absent ones are UNSET."""
    given = _given(raw)
    if _announced(given) > _MEMBERS_MAX:
        raise ValueError(f"too many members where {names[0]} belongs")
    if _is_map(given):
        found = _map(given)
        return [found.get(name, UNSET) for name in names]
    items = _array(given)
    return [*items[: len(names)], *[UNSET] * (len(names) - len(items))]


def _given(raw: Value) -> msgspec.Raw:
    if isinstance(raw, UnsetType):
        raise TypeError("something is missing")
    return raw


def _is_absent(raw: Value) -> bool:
    return isinstance(raw, UnsetType) or memoryview(raw)[0] == _NIL


def _is_map(raw: msgspec.Raw) -> bool:
    head = memoryview(raw)[0]
    return head in {0xDE, 0xDF} or head >> 4 == 0x8


def _announced(raw: msgspec.Raw) -> int:
    """Return how many elements a map or an array announces."""
    view = memoryview(raw)
    if not view:
        raise ValueError("nothing at all")
    size = _LONG_HEADS.get(view[0])
    return view[0] & 0x0F if size is None else int.from_bytes(view[1 : 1 + size])


def _text(raw: Value) -> str:
    text = _string(_given(raw))
    if len(text) > TEXT_CHARS_MAX:
        raise ValueError("too long a text")
    return text


def _number(raw: Value, end: int) -> int:
    number = _whole(_given(raw))
    if not 0 <= number < end:
        raise ValueError("a number out of range")
    return number


def _hashes(raw: Value) -> Hashes:
    numbers = _wholes(_given(raw))
    if numbers and not (min(numbers) >= 0 and max(numbers) < _U64_END):
        raise ValueError("a number out of range")
    return Hashes(pack_u64(numbers))


_DECODERS: Final[Mapping[bytes, Callable[[bytes], ReplicaMessage]]] = {
    TOPIC: _envelope,
    OWN_TOPIC: msgspec.msgpack.Decoder[OwnMessage](OwnMessage).decode,
    LOADS_TOPIC: msgspec.msgpack.Decoder(RankLoads).decode,
    CACHED_TOKENS_TOPIC: msgspec.msgpack.Decoder(CachedTokens).decode,
    SESSIONS_TOPIC: msgspec.msgpack.Decoder(SessionRanks).decode,
}
"""By topic."""
