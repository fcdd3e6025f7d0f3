"""How the times to the first token and between tokens came out that an answer predicted.

`SlotLoads.predicted_ms` predicts them. They are kept with the answer of a booking and compared when
its calls come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from select_service.core.ledger.first_tokens import learn_first_token
from select_service.types import PairSelection, Selection

if TYPE_CHECKING:
    from select_service.core.ledger.reservation_ids import LiveReservation


def learn_ttft(booking: LiveReservation, now: float) -> None:
    """Learn from the first token of a booking whose answer goes on or ends now.

    Then it is also compared with what was predicted.
    """
    reservation, loads = booking.reservation, booking.partition.ledger.loads
    reported = reservation.first_token
    if reported is not None and learn_first_token(loads, reservation, now):
        check_ttft(booking, reported.at)


def check_ttft(booking: LiveReservation, now: float) -> None:
    """Compare what was predicted for a booking with its first token, which came at `now`."""
    answer, reservation = booking.answer, booking.reservation
    if not isinstance(answer, Selection | PairSelection) or answer.predicted_ttft_ms is UNSET:
        return
    loads = booking.partition.ledger.loads
    rank = loads.speeds.by_slot.get(reservation.slot)
    if rank is not None and reservation.created > loads.work.resumed_at:  # else begun before
        rank.ttft_error.learn(answer.predicted_ttft_ms / 1e3, now - reservation.created)


def check_itl(booking: LiveReservation) -> None:
    """Compare what was predicted for a booking that ends with its output blocks.

    Blocks that were reported together at its end tell nothing.
    """
    answer, reservation = booking.answer, booking.reservation
    report = reservation.output_report
    if (
        report is None
        or report.outputs <= report.first_outputs
        or not isinstance(answer, Selection | PairSelection)
        or answer.predicted_itl_ms is UNSET
    ):
        return
    partition = booking.partition
    rank = partition.ledger.loads.speeds.by_slot.get(reservation.slot)
    if rank is not None:
        took = (report.at - report.first_at) / (report.outputs - report.first_outputs)
        predicted = answer.predicted_itl_ms / 1e3 * partition.index.block_size
        rank.block_error.learn(predicted, took)
