"""The time to the first token and between tokens that an answer predicts, and how it came out.

`ledger/rank_speeds.py` has learnt how fast ranks are. What is predicted is kept with the answer of
a booking and compared when its calls come. Until a rank was measured nothing is predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from select_service.core.pricing.weights import sequence_blocks
from select_service.types import PairSelection, Selection

if TYPE_CHECKING:
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.core.partition import Partition

__all__ = ["check_itl", "check_ttft", "predicted_itl_ms", "predicted_ttft_ms"]


def predicted_ttft_ms(partition: Partition, slot: int, tokens: int) -> float | UnsetType:
    """Return the milliseconds to the first token of a prompt that is not booked yet.

    Args:
        partition: of the slot.
        slot: the rank's.
        tokens: of the prompt, that the rank has to compute.
    """
    loads = partition.ledger.loads
    rank = loads.speeds.by_slot.get(slot)
    seconds = None if rank is None else rank.ttft.at(loads.prefill_left[slot] + tokens)
    return UNSET if seconds is None else round(seconds * 1e3, 3)


def predicted_itl_ms(partition: Partition, slot: int, blocks: int) -> float | UnsetType:
    """Return the milliseconds between tokens of a request that is not booked yet.

    Args:
        partition: of the slot.
        slot: the rank's.
        blocks: whole ones of the prompt.
    """
    loads, block_size = partition.ledger.loads, partition.index.block_size
    rank = loads.speeds.by_slot.get(slot)
    if rank is None:
        return UNSET
    context = loads.context.item(slot) + (blocks or 1) + sequence_blocks(block_size)
    seconds = rank.block.at(context)
    return UNSET if seconds is None else round(seconds * 1e3 / block_size, 3)


def check_ttft(booking: LiveReservation, now: float) -> None:
    """Compare what was predicted for a booking with its first token, which comes now."""
    answer, reservation = booking.answer, booking.reservation
    if not isinstance(answer, Selection | PairSelection) or answer.predicted_ttft_ms is UNSET:
        return
    rank = booking.partition.ledger.loads.speeds.by_slot.get(reservation.slot)
    if rank is not None:
        rank.ttft_error.tell(answer.predicted_ttft_ms / 1e3, now - reservation.created)


def check_itl(booking: LiveReservation) -> None:
    """Compare what was predicted for a booking that ends with its output blocks."""
    answer, reservation = booking.answer, booking.reservation
    if (
        not reservation.output_at
        or not isinstance(answer, Selection | PairSelection)
        or answer.predicted_itl_ms is UNSET
    ):
        return
    partition = booking.partition
    rank = partition.ledger.loads.speeds.by_slot.get(reservation.slot)
    if rank is not None:
        took = reservation.output_at - reservation.first_token_at
        predicted = answer.predicted_itl_ms / 1e3 * partition.index.block_size
        rank.block_error.tell(predicted, took / reservation.output_blocks)
