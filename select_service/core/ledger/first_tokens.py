"""What the first tokens of requests teach about the speed of their ranks.

A computed prompt is noted on its reservation, and counts once something has come after it: one that
is reported together with the rest of its answer shows only when that ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.ledger.rank_speeds import TOGETHER_S
from select_service.core.ledger.reservation import FirstToken

if TYPE_CHECKING:
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.ledger.slot_loads import SlotLoads


def learn_prefill(
    loads: SlotLoads, reservation: LedgerReservation, now: float, cached_tokens: int | None
) -> None:
    """Count a computed prompt towards the speed of its rank."""
    slot, tokens, created = reservation.slot, reservation.prefill_tokens, reservation.created
    loads.work.note_computed(slot, tokens, created)
    # else it may have been begun long before
    if created > loads.work.resumed_at and reservation.is_timed:
        if cached_tokens is not None:
            tokens = max(0, reservation.isl_tokens - cached_tokens)
        first = FirstToken(now, tokens + reservation.queued_tokens)
        if reservation.pulled is not None:
            first = _pulled(reservation, now, tokens)
        if reservation.pair is None:
            reservation.first_token = first
        else:  # a leg ends with its prompt
            _learn(loads, reservation, first)


def _pulled(reservation: LedgerReservation, now: float, tokens: int) -> FirstToken:
    """Return what the first token of a prompt that pulls teaches: how long that takes.

    Unless its rank had anything else to compute, or most of the blocks did not come.
    """
    predicted, pulled = reservation.prefill_tokens, reservation.pulled_tokens
    if (
        reservation.pull_path is None
        or reservation.queued_tokens
        or not 0 < pulled <= reservation.isl_tokens - predicted  # a replica may say anything
        or tokens > predicted + pulled // 2
        or next(reversed(reservation.generation.reservations)) != reservation.reservation_id
    ):
        return FirstToken(now, None)
    return FirstToken(now, tokens, pulls=True)


def _learn(loads: SlotLoads, reservation: LedgerReservation, first: FirstToken) -> None:
    """Learn from a first token that is known to be one."""
    slot, seconds, path = reservation.slot, first.at - reservation.created, reservation.pull_path
    if first.tokens is None:
        return
    if not first.pulls:
        loads.speeds.computed(slot, first.tokens, seconds)
    elif path is not None and reservation.pulled is not None:
        loads.pull_speeds.pulled(slot, path, reservation.pulled.blocks, first.tokens, seconds)


def learn_first_token(loads: SlotLoads, reservation: LedgerReservation, now: float) -> bool:
    """Learn the speed of a rank from a first token, now that something came after it.

    Returns:
        Whether it shows how long that took.
    """
    first = reservation.first_token
    if first is None or now - first.at <= TOGETHER_S:
        return False
    reservation.first_token = None
    _learn(loads, reservation, first)
    return True
