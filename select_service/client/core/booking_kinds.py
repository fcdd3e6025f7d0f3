"""The kinds of booking: a worker chosen by the service, a pair, or a rank chosen elsewhere.

`session.py` does what they have in common; here is the route of each, how its answer is read, and
what replaces it while no selector can be reached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from select_service.client.core.codec import decode
from select_service.client.core.fallback import length_of, no_overlap, scope_of
from select_service.client.core.problems import NotAnAnswer
from select_service.types import (
    CacheThreshold,
    PairLeg,
    PairSelection,
    ReservationAnswer,
    Selection,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from select_service.client.core.exchange import ExchangeOutcome
    from select_service.client.core.fallback import FallbackCatalog

Answer: TypeAlias = Selection | PairSelection


class BookingKind(NamedTuple):
    """One kind of booking."""

    path: str
    read: Callable[[ExchangeOutcome], Answer | CacheThreshold]
    stand_in: Callable[[], Answer | None]
    may_wait: bool = True  # in the service's queue
    again: dict[str, object] | None = None
    """Set if the answer does not contain what books it again: the request does, with these
    additions."""


def choosing(catalog: FallbackCatalog, rng: random.Random, prompt: dict[str, Any]) -> BookingKind:
    """POST /select_and_reserve."""
    return BookingKind("/select_and_reserve", chosen, lambda: catalog.choose(prompt, rng))


def pairing(catalog: FallbackCatalog, rng: random.Random, prompt: dict[str, Any]) -> BookingKind:
    """POST /select_pair; if no selector can be reached, one worker does both, if there is one."""

    def alone() -> PairSelection | None:
        found = catalog.choose(prompt, rng)
        return None if found is None else _alone(found)

    return BookingKind("/select_pair", lambda outcome: decode(outcome, PairSelection), alone)


def _alone(found: Selection) -> PairSelection:
    leg = PairLeg(
        reservation_id="",
        worker_id=found.worker_id,
        dp_rank=found.dp_rank,
        endpoint=found.endpoint,
        overlap=found.overlap,
        effective_prefill_tokens=found.effective_prefill_tokens,
        potential_decode_blocks=0,
        overlap_estimated=found.overlap_estimated,
    )
    return PairSelection(
        reservation_id="",
        model_name=found.model_name,
        tenant_id=found.tenant_id,
        block_size=found.block_size,
        mode="aggregated",
        reason="degraded",
        prefill=None,
        decode=leg,
        transfer_blocks=0,
        isl_tokens=found.effective_prefill_tokens,
        track_prefill_tokens=True,
        aggregated_cost=None,
        disaggregated_cost=None,
    )


def booking_of(catalog: FallbackCatalog, body: dict[str, Any], block_size: int) -> BookingKind:
    """POST /reservations; if no selector can be reached, the choice stands, unbooked."""
    scope, length = scope_of(body), length_of(body)
    track = body.get("track_prefill_tokens")
    effective = body.get("effective_prefill_tokens")
    if effective is None:
        effective = 0 if track is False else length

    def selection(endpoint: str) -> Selection:
        return Selection(
            model_name=scope.model_name,
            tenant_id=scope.tenant_id,
            worker_id=body["worker_id"],
            dp_rank=body.get("dp_rank") or 0,
            endpoint=endpoint,
            block_size=block_size,
            overlap=no_overlap(),
            effective_prefill_tokens=effective,
            isl_tokens=length,
        )

    def read(outcome: ExchangeOutcome) -> Selection:
        answer = decode(outcome, ReservationAnswer)
        found = selection(answer.endpoint)
        found.reservation_id = answer.reservation_id
        return found

    def stand_in() -> Selection:
        return selection(catalog.endpoint_of(scope, body["worker_id"]))

    return BookingKind("/reservations", read, stand_in, may_wait=False, again={})


def chosen(outcome: ExchangeOutcome) -> Selection | CacheThreshold:
    """Decode the answer to a selection."""
    try:
        return decode(outcome, Selection)
    except NotAnAnswer:
        if b"cache_threshold" not in outcome.body:
            raise
        return decode(outcome, CacheThreshold)
