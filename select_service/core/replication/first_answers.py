"""The first answer of a booking, as replicas send it: a repeat gets it wherever the id is known.

A claim carries the fingerprint of the request (`routing/read.py`) and what the answer says
beyond the claim. Both are missing from claims of Dynamo's selectors and of our older versions:
nothing says what was asked there, so no request is a repeat of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
from msgspec import UNSET, Struct

from select_service.core.replication.dynamo_events import ANSWER_BYTES_MAX
from select_service.types import KvSource, PairSelection, ReservationAnswer, Selection
from select_service.types.selections import Advice, CacheHit, Overlap

if TYPE_CHECKING:
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.core.replication.messages import ClaimRecord

FirstAnswer: TypeAlias = Selection | PairSelection | ReservationAnswer


class _Selected(Struct, array_like=True, frozen=True, tag="s"):
    """What `Selection` says beyond the claim."""

    endpoint: str | None
    overlap: tuple[int, int, dict[str, int], int, int]
    effective_prefill_tokens: int
    potential_decode_blocks: int
    needs_prefill: bool
    cache_hit: CacheHit | None
    advice: Advice | None
    overlap_estimated: bool = False
    kv_source: KvSource | None = None
    predicted_ttft_ms: float | None = None
    predicted_itl_ms: float | None = None


class _Chosen(Struct, array_like=True, frozen=True, tag="r"):
    """What `ReservationAnswer` says beyond the claim."""

    endpoint: str | None


class _Paired(Struct, array_like=True, frozen=True, tag="p"):
    """The answer of both legs; each of their claims has it."""

    answer: PairSelection


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Selected | _Chosen | _Paired).decode


def packed_answer(answer: FirstAnswer | None) -> bytes:
    """Return what an answer says beyond its claim; empty if it is too long to be sent."""
    if answer is None:
        return b""
    if isinstance(answer, PairSelection):
        packed = _encode(_Paired(answer))
    elif isinstance(answer, ReservationAnswer):
        packed = _encode(_Chosen(answer.endpoint))
    else:
        assert answer.potential_decode_blocks is not UNSET, "it is booked"
        overlap = answer.overlap
        packed = _encode(
            _Selected(
                answer.endpoint,
                (overlap.longest_matched, overlap.gpu, overlap.dp, overlap.cpu, overlap.disk),
                answer.effective_prefill_tokens,
                answer.potential_decode_blocks,
                answer.needs_prefill is True,
                None if answer.cache_hit is UNSET else answer.cache_hit,
                None if answer.advice is UNSET else answer.advice,
                answer.overlap_estimated is True,
                None if answer.kv_source is UNSET else answer.kv_source,
                None if answer.predicted_ttft_ms is UNSET else answer.predicted_ttft_ms,
                None if answer.predicted_itl_ms is UNSET else answer.predicted_itl_ms,
            )
        )
    return packed if len(packed) <= ANSWER_BYTES_MAX else b""


def answer_of(record: ClaimRecord) -> FirstAnswer | None:
    """Return the answer that the owner gave, without hashes; None: it is not told, or unreadable.

    An unreadable one is a newer version's: its repeats are then refused, as if it were not told.
    """
    if not record.answer:
        return None
    try:
        answer = _decode(record.answer)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if isinstance(answer, _Paired):
        return answer.answer
    booked_on = record.model_name, record.tenant_id, record.worker_id, record.dp_rank
    if isinstance(answer, _Chosen):
        return ReservationAnswer(record.reservation_id, *booked_on, answer.endpoint or "")
    return Selection(
        selection_id=UNSET if record.selection_id is None else record.selection_id,
        reservation_id=record.reservation_id,
        model_name=record.model_name,
        tenant_id=record.tenant_id,
        worker_id=record.worker_id,
        dp_rank=record.dp_rank,
        endpoint=answer.endpoint or "",
        block_size=record.block_size,
        overlap=Overlap(*answer.overlap),
        effective_prefill_tokens=answer.effective_prefill_tokens,
        needs_prefill=answer.needs_prefill or UNSET,
        cache_hit=UNSET if answer.cache_hit is None else answer.cache_hit,
        isl_tokens=record.isl_tokens,
        track_prefill_tokens=record.track_prefill_tokens,
        potential_decode_blocks=answer.potential_decode_blocks,
        advice=UNSET if answer.advice is None else answer.advice,
        overlap_estimated=answer.overlap_estimated or UNSET,
        kv_source=answer.kv_source or UNSET,
        predicted_ttft_ms=UNSET if answer.predicted_ttft_ms is None else answer.predicted_ttft_ms,
        predicted_itl_ms=UNSET if answer.predicted_itl_ms is None else answer.predicted_itl_ms,
    )


def first_answer(booking: LiveReservation) -> tuple[bytes | None, FirstAnswer | None]:
    """Return a live booking's fingerprint and first answer, from its claim if made elsewhere."""
    reservation = booking.reservation
    if booking.answer is not None:
        return reservation.fingerprint, booking.answer
    claim = reservation.claim
    return (None, None) if claim is None else (claim.record.fingerprint, answer_of(claim.record))
