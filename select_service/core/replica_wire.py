"""Replica messages and snapshot parts as MessagePack, as strict as contract 6.4 asks for.

The reference's events come as maps or as arrays in field order, with optional members left out;
our own come as we write them. Pure: frames in, messages out, one error for whatever is wrong.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from select_service.core.replica_events import (
    TEXT_CHARS_MAX,
    TOPIC,
    AddRequest,
    AddRequestData,
    Duration,
    Ending,
    EventWorker,
    PrefillLoadHint,
    ReplicaEnvelope,
    ReplicaEvent,
    Stamp,
)
from select_service.core.replica_messages import (
    OWN_TOPIC,
    OwnMessage,
    ReplicaMessage,
    SnapshotPart,
)

_U32_END = 1 << 32
_U64_END = 1 << 64

_encode = msgspec.msgpack.Encoder().encode
_decode_any = msgspec.msgpack.Decoder().decode
_own: Final[msgspec.msgpack.Decoder[OwnMessage]] = msgspec.msgpack.Decoder(OwnMessage)
_part: Final[msgspec.msgpack.Decoder[SnapshotPart]] = msgspec.msgpack.Decoder(SnapshotPart)


class MalformedReplicaMessage(Exception):
    """Bytes that are no message of the replica plane; `str` says why."""


def encode_message(message: ReplicaMessage) -> tuple[bytes, bytes]:
    """Return (topic, payload)."""
    topic = TOPIC if isinstance(message, ReplicaEnvelope) else OWN_TOPIC
    return topic, _encode(message)


def decode_message(topic: bytes, payload: bytes) -> ReplicaMessage:
    """Read what a peer has published.

    Raises:
        MalformedReplicaMessage: another topic, or bytes that mean nothing.
    """
    try:
        if topic == TOPIC:
            return _envelope(_decode_any(payload))
        if topic == OWN_TOPIC:
            return _own.decode(payload)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise MalformedReplicaMessage(str(error)) from error
    raise MalformedReplicaMessage(f"unknown topic {topic!r}")


def encode_part(part: SnapshotPart) -> bytes:
    """Return one frame of a snapshot, without its length."""
    return _encode(part)


def decode_part(frame: bytes) -> SnapshotPart:
    """Read one frame of a snapshot.

    Raises:
        MalformedReplicaMessage: bytes that mean nothing.
    """
    try:
        return _part.decode(frame)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise MalformedReplicaMessage(str(error)) from error


# -- the reference's envelope, member by member ----------------------------------------------------


def _envelope(raw: object) -> ReplicaEnvelope:
    model, tenant, block_size, event, group, stamp = _members(
        raw, ("model_name", "tenant_id", "block_size", "event", "routing_group", "select_service")
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
        select_service=UNSET if stamp is UNSET else msgspec.convert(stamp, Stamp),
    )


def _event(raw: object) -> ReplicaEvent:
    request_id, worker, data, router_id, lora = _members(
        raw, ("request_id", "worker", "data", "router_id", "lora_name")
    )
    worker_id, dp_rank = _members(worker, ("worker_id", "dp_rank"))
    return ReplicaEvent(
        request_id=_text(request_id),
        worker=EventWorker(_number(worker_id, _U64_END), _number(dp_rank, _U32_END)),
        data=_data(data),
        router_id=_number(router_id, _U64_END),
        lora_name=None if lora is UNSET or lora is None else _text(lora),
    )


def _data(raw: object) -> AddRequestData | Ending:
    if isinstance(raw, dict) and len(raw) == 1:
        ((kind, content),) = raw.items()
        if kind == "AddRequest":
            return AddRequestData(_admission(content))
        if content is None:
            raw = kind
    if raw == "Free":
        return "Free"
    if raw == "MarkPrefillCompleted":
        return "MarkPrefillCompleted"
    raise ValueError("data is neither an admission nor an ending")


def _admission(raw: object) -> AddRequest:
    tokens, track, expected, hint = _members(
        raw,
        ("token_sequence", "track_prefill_tokens", "expected_output_tokens", "prefill_load_hint"),
    )
    if track is UNSET:
        track = True
    if not isinstance(track, bool):
        raise TypeError("track_prefill_tokens is no boolean")
    return AddRequest(
        token_sequence=None if tokens is UNSET or tokens is None else _numbers(tokens),
        track_prefill_tokens=track,
        expected_output_tokens=(
            None if expected is UNSET or expected is None else _number(expected, _U32_END)
        ),
        prefill_load_hint=None if hint is UNSET or hint is None else _hint(hint),
    )


def _hint(raw: object) -> PrefillLoadHint:
    tokens, duration = _members(
        raw, ("initial_effective_prefill_tokens", "expected_prefill_duration")
    )
    if duration is not UNSET and duration is not None:
        secs, nanos = _members(duration, ("secs", "nanos"))
        span = Duration(_number(secs, _U64_END), _number(nanos, _U32_END))
        return PrefillLoadHint(_number(tokens, _U64_END), span)
    return PrefillLoadHint(_number(tokens, _U64_END))


def _members(raw: object, names: tuple[str, ...]) -> list[object]:
    """Return the members of a map, or of an array in field order; absent ones are UNSET."""
    if isinstance(raw, dict):
        return [raw.get(name, UNSET) for name in names]
    if isinstance(raw, list):
        return [*raw[: len(names)], *[UNSET] * (len(names) - len(raw))]
    raise ValueError(f"neither map nor array where {names[0]} belongs")


def _text(raw: object) -> str:
    if isinstance(raw, str) and len(raw) <= TEXT_CHARS_MAX:
        return raw
    raise ValueError("no text, or too long a one, where text belongs")


def _number(raw: object, end: int) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and 0 <= raw < end:
        return raw
    raise ValueError("no number, or one out of range")


def _numbers(raw: object) -> list[int]:
    if isinstance(raw, list):
        return [_number(one, _U64_END) for one in raw]
    raise ValueError("token_sequence is no array")
