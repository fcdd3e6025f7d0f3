"""What is booked: a request's load, before its reservation exists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from select_service.core.pricing.prompt import Prompt
    from select_service.types import KvSource


class BookingSpec(Struct, frozen=True):
    """What to book, once the rank is known; replicas hear of it as a claim."""

    reservation_id: str
    fingerprint: bytes
    prompt: Prompt
    computed_tokens: int  # of the prompt, that its rank has to compute
    track_prefill_tokens: bool  # whether these count, and are sent to replicas
    fairness_id: str | None = None  # whose share of the pool it counts against; None: its tenant's
    pair: str | None = None  # the pair it is a leg of
    wave: tuple[int, int] | None = None  # its group in the wave that books it, and shared tokens
    session_id: str | None = None  # the session it belongs to, where sessions are kept
    kv_source: KvSource | None = None  # where its rank pulls blocks of the prompt from
