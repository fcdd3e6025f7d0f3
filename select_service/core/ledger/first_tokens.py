"""What the first tokens of requests teach about the speed of their ranks.

A computed prompt is noted on its reservation, and counts once something has come after it: one that
is reported together with the rest of its answer tells only when that ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.ledger.rank_speeds import TOGETHER_S
from select_service.core.ledger.reservation import FirstToken

if TYPE_CHECKING:
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.ledger.slot_loads import SlotLoads

__all__ = ["learn_first_token", "learn_prefill"]


def learn_prefill(
    loads: SlotLoads, reservation: LedgerReservation, now: float, cached_tokens: int | None
) -> None:
    """Count a computed prompt towards the speed of its rank."""
    slot, tokens, created = reservation.slot, reservation.prefill_tokens, reservation.created
    loads.work.hear(slot, tokens, created)
    # else it may have been begun long before
    if created > loads.work.resumed_at and reservation.is_timed:
        learnt: int | None = None
        if reservation.pulled is None:  # else it took what moving takes, whoever set what that is
            if cached_tokens is not None:
                tokens = max(0, reservation.isl_tokens - cached_tokens)
            learnt = tokens + reservation.queued_tokens
        if reservation.pair is None:
            reservation.first_token = FirstToken(now, learnt)
        elif learnt is not None:  # a leg ends with its prompt
            loads.speeds.computed(slot, learnt, now - created)


def learn_first_token(loads: SlotLoads, reservation: LedgerReservation, now: float) -> bool:
    """Learn the speed of a rank from a first token, now that something came after it.

    Returns:
        Whether it tells how long that took; where blocks were pulled, it is all that is told.
    """
    told = reservation.first_token
    if told is None or now - told.at <= TOGETHER_S:
        return False
    reservation.first_token = None
    seconds = told.at - reservation.created
    if told.tokens is not None:
        loads.speeds.computed(reservation.slot, told.tokens, seconds)
    return True
