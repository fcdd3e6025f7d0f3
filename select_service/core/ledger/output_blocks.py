"""Output blocks of reservations, and the fractions that decoding gives to unshared blocks.

It keeps the weights of the active blocks (`active_blocks.py`) in step with a reservation's own
facts. `ledger.py`, the only caller, derives the load of the slot, and adds whole blocks to whole
blocks by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from select_service.core.ledger.active_blocks import ActiveBlocks
    from select_service.core.ledger.reservation import LedgerReservation


class OutputBlocks:
    """Writes the output blocks and the fraction of live reservations."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: ActiveBlocks) -> None:
        self._blocks = blocks

    def fade(self, reservation: LedgerReservation, count: int, fraction: float) -> None:
        """Add `count` blocks; all blocks of this reservation alone get the fraction."""
        outputs = reservation.output_blocks + count
        if fraction == 1.0:
            self._become(reservation, outputs, 0, fraction)
        else:
            self._become(reservation, 0, outputs, fraction)
        self._blocks.fade(reservation.chain, reservation.generation.number, fraction)

    def resume(
        self, reservation: LedgerReservation, whole: int, faded: int, fraction: float
    ) -> None:
        """Restore the blocks of a reservation from before a restart; it must have none.

        The blocks it alone references get the fraction again. A prompt block that was faded and
        later shared weighs 1 again, because its history is not among a reservation's facts.
        """
        self._become(reservation, whole, faded, fraction)
        if fraction != 1.0:
            self._blocks.fade(reservation.chain, reservation.generation.number, fraction)

    def learn(
        self, reservation: LedgerReservation, outputs: int, faded_at: int, fraction: float
    ) -> None:
        """Adopt reported output: `outputs` blocks, the first `faded_at` with a fraction."""
        faded = faded_at if fraction != 1.0 else 0
        refade = faded_at > 0 and (
            reservation.faded_outputs != faded or reservation.output_fraction != fraction
        )
        self._become(reservation, outputs - faded, faded, fraction)
        if refade:
            self._blocks.fade(reservation.chain, reservation.generation.number, fraction)

    def drop(self, reservation: LedgerReservation) -> None:
        """Remove all output blocks; the weight of the prompt stays."""
        self._become(reservation, 0, 0, reservation.output_fraction)

    def _become(
        self, reservation: LedgerReservation, whole: int, faded: int, fraction: float
    ) -> None:
        number, counts = reservation.generation.number, self._blocks.counts
        counts.add(number, whole - reservation.whole_outputs)
        if reservation.faded_outputs:
            counts.add(number, -reservation.faded_outputs, reservation.output_fraction)
        if faded:
            counts.add(number, faded, fraction)
        reservation.whole_outputs, reservation.faded_outputs = whole, faded
        reservation.output_fraction = fraction
