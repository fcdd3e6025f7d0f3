"""Idempotency: a request under the id of a live reservation, or of one that waits.

The same body on the same route (`fingerprint_of`) gets the first answer again, and nothing
changes; anything else is refused. The reservation may have been made at another replica
(`replication/first_answers.py`), and its worker need not be here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from select_service.core.replication.first_answers import answer_of, first_answer
from select_service.errors import ReservationConflict, ReservationUnderWay
from select_service.types import PairSelection, ReservationAnswer, Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.types import PackedHashes
    from select_service.core.admission.queue import Ticket
    from select_service.core.counters import Counters
    from select_service.core.ledger.reservation_ids import ReservationIds
    from select_service.core.replication.first_answers import FirstAnswer
    from select_service.core.reservations.remote_reservations import RemoteReservations

_NO_FINGERPRINT: Final = b"-"
"""Matches no fingerprint: those are empty or 16 bytes long."""

_SELECTIONS: Final = Selection, PairSelection

_BOOKING_FAILED: Final = "failed to book scheduler state: "


class Idempotency:
    """Recognises repeats across all partitions."""

    def __init__(
        self, bookings: ReservationIds, elsewhere: RemoteReservations, counters: Counters
    ) -> None:
        self._bookings = bookings
        self._elsewhere = elsewhere
        self._counters = counters

    def is_known(self, reservation_id: str) -> bool:
        """Tell whether an id, or a pair's, is live here or at another replica."""
        return (
            self._bookings.holder(reservation_id) is not None
            or self._elsewhere.holder(reservation_id) is not None
        )

    def selection(
        self,
        reservation_id: str,
        fingerprint: bytes,
        show_hashes: Callable[[PackedHashes], list[int]],
    ) -> Selection | PairSelection | Ticket | None:
        """Return the first answer, or the ticket to share, if this request is a repeat.

        Raises:
            ReservationConflict: the id is taken by something else.
        """
        try:
            known = self._known(reservation_id, fingerprint, _SELECTIONS, _BOOKING_FAILED)
            ticket = self._bookings.join_waiting(reservation_id, fingerprint, _BOOKING_FAILED)
        except ReservationConflict:
            self._counters.reservations_conflicting += 1
            raise
        if known is None:
            return ticket
        self._counters.reservations_repeated += 1
        self._bookings.share(reservation_id)
        answer, hashes = known
        if not isinstance(answer, Selection):
            assert isinstance(answer, PairSelection)
            return answer
        return msgspec.structs.replace(answer, sequence_hashes=show_hashes(hashes))

    def reservation(self, reservation_id: str, fingerprint: bytes) -> ReservationAnswer | None:
        """Return the first answer if this request is a repeat.

        Raises:
            ReservationConflict: the id is taken by something else.
        """
        try:
            known = self._known(reservation_id, fingerprint, ReservationAnswer)
        except ReservationConflict:
            self._counters.reservations_conflicting += 1
            raise
        if known is None:
            return None
        self._counters.reservations_repeated += 1
        self._bookings.share(reservation_id)
        answer, _ = known
        assert isinstance(answer, ReservationAnswer)
        return answer

    def in_batch(self, reservation_id: str) -> tuple[int, int] | None:
        """Return a live id's group in the batch that booked it, and its shared tokens; None: none.

        Our older versions do not tell, either.
        """
        booking = self._bookings.holder(reservation_id)
        if booking is not None:
            return booking.reservation.batch
        claim = self._elsewhere.holder(reservation_id)
        return None if claim is None else claim.record.batch

    def check_unused(self, reservation_id: str) -> None:
        """Refuse an id for a leg that is already taken.

        Raises:
            ReservationConflict: it is live.
        """
        try:
            self._known(reservation_id, _NO_FINGERPRINT, (), _BOOKING_FAILED)
        except ReservationConflict:
            self._counters.reservations_conflicting += 1
            raise

    def _known(
        self,
        reservation_id: str,
        fingerprint: bytes,
        kind: type | tuple[type, ...],
        prefix: str = "",
    ) -> tuple[FirstAnswer, PackedHashes] | None:
        """Return the first answer and the hashes of a repeat, None if the id is unused.

        Raises:
            ReservationConflict: the id is live with another body or route, or with one that no
                client has told us.
            ReservationUnderWay: a batch has booked it that may yet take it back.
        """
        answer: FirstAnswer | None
        booking = self._bookings.holder(reservation_id)
        claim = self._elsewhere.holder(reservation_id) if booking is None else None
        if booking is not None:
            first, answer = first_answer(booking)
            worker, dp_rank = booking.partition.fleet_slots.rank_at(booking.reservation.slot)
            worker_id = worker.worker_id
        elif claim is not None:
            first, answer = claim.record.fingerprint, answer_of(claim.record)
            worker_id, dp_rank = claim.record.worker_id, claim.record.dp_rank
        else:
            return None
        # the fingerprint names the route, but a replica may be wrong about its answer
        if answer is None or not isinstance(answer, kind) or first != fingerprint:
            raise ReservationConflict(
                f"{prefix}Request {reservation_id} already exists (assigned to worker "
                f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }})",
                field="reservation_id",
            )
        if booking is not None:
            claim = booking.reservation.claim
            if self._bookings.is_under_way(booking) or self._elsewhere.is_under_way(claim):
                raise ReservationUnderWay(reservation_id, prefix)
            for leg in (booking, *self._bookings.legs_of(reservation_id)):
                self._elsewhere.confirm(leg.reservation.claim)
            return answer, booking.partition.ledger.chain_of(booking.reservation)
        assert claim is not None
        if self._elsewhere.is_under_way(claim):
            raise ReservationUnderWay(reservation_id, prefix)
        self._elsewhere.confirm(claim)
        return answer, self._elsewhere.chain_of(claim)
