"""Of the claims on an id, one is booked: the same one wherever the same claims are known.

It is that of the lowest router id among those that have not ended and whose rank is here; with it
comes all that became of it. `hearing.py` and `foreigners.py` ask for it whenever the claims on an
id change; claims whose rank is away wait until it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.core.booking.desk import Desk
    from select_service.core.books.bookings import Booking
    from select_service.core.counters import ReplicaCounters
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition
    from select_service.core.replicas.claim import Claim
    from select_service.core.replicas.claims import Claims


class Resolver:
    """From claims to bookings; the desk does the booking."""

    def __init__(
        self, claims: Claims, desk: Desk, membership: Membership, counters: ReplicaCounters
    ) -> None:
        self.touched: dict[Partition, None] = {}  # where load has become less
        self.again: dict[str, None] = {}  # ids to resolve, a few each turn
        self._claims = claims
        self._desk = desk
        self._membership = membership
        self._counters = counters

    def resolve(self, reservation_id: str, now: float) -> None:
        """Make the ledger say what the claims on an id say."""
        winner, seat = self._winner(reservation_id, now)
        booking = self._desk.bookings.live(reservation_id)
        if winner is None or seat is None:
            return
        if booking is not None:
            if booking.reservation.claim is winner:
                self.follow(winner, now)
                return
            self._give_up(booking, now)
        partition, slot = seat
        origin = "local" if winner.owner == self._claims.router_id else winner.owner
        reservation = self._desk.learn(
            *(partition, slot, winner.record, winner.hashes, origin, now),
            watched=winner.lease is not None,
        )
        self._claims.tie(winner, reservation)
        self._counters.booked += 1
        self.follow(winner, now, is_news=False)

    def _winner(
        self, reservation_id: str, now: float
    ) -> tuple[Claim | None, tuple[Partition, int] | None]:
        """Return the claim that counts, of those that could be booked here."""
        claims = self._claims
        for claim in sorted(claims.alive(reservation_id), key=lambda one: one.owner):
            if claim.aged:
                continue
            seat = self.seat(claim)
            lost = claim.reservation is not None and not claim.booked
            ours = claim.owner == claims.router_id
            if ours and (seat is None or lost or self.is_over(claim)):
                self.unbook(claim, now)
                claims.end_own(claim, now)  # with its rank, as any reservation
            elif seat is not None:
                if lost:  # the rank has gone and come back
                    claims.untie(claim, self.chain(claim))
                return claim, seat
            else:
                claims.wait(claim)
        return None, None

    def is_over(self, claim: Claim) -> bool:
        """Whether the lease of a claim of ours ended while another's was the one booked."""
        lease = claim.record.lease
        return (
            not claim.booked
            and lease is not None
            and self._desk.leases.find(lease.lease_id) is None
        )

    def chain(self, claim: Claim) -> bytes:
        """The hashes of a claim: booked, or not, or of a rank that has gone, swept or not."""
        if claim.hashes or claim.reservation is None:
            return claim.hashes
        partition = self._membership.partitions[claim.scope]
        return partition.ledger.blocks.chain(claim.reservation.chain)

    def seat(self, claim: Claim) -> tuple[Partition, int] | None:
        """Return where it would be booked, None while its rank is not here."""
        partition = self._membership.partitions.get(claim.scope)
        if partition is None or partition.index.block_size != claim.record.block_size:
            return None
        worker = partition.seating.present.get(claim.record.worker_id)
        if worker is None or claim.record.dp_rank not in worker.slots:
            return None
        return partition, worker.slots[claim.record.dp_rank]

    def follow(self, claim: Claim, now: float, *, is_news: bool = True) -> None:
        """Let a booking be what its claim has become; no news: before it was booked here."""
        reservation = claim.reservation
        assert reservation is not None
        partition = self._membership.partitions[claim.scope]
        ledger = partition.ledger
        if claim.prefill_done and not reservation.prefill_done:
            ledger.prefill_complete(reservation, now, is_news=is_news)
            self.touched[partition] = None
        outputs = claim.output_blocks
        faded_at = min(claim.faded_at, outputs)  # else whoever told of them told nonsense
        faded = faded_at if claim.fraction != 1.0 else 0
        seen = reservation.output_blocks, reservation.faded_outputs, reservation.output_fraction
        if seen != (outputs, faded, claim.fraction):
            ledger.learn_outputs(reservation, outputs, faded_at, claim.fraction)

    def touch(self, claim: Claim, now: float) -> None:
        """Somebody cares for a claim, and so for all under the same lease."""
        if claim.record.lease is not None:
            self._desk.sign_of_life(claim.record.lease.lease_id, now)
        if not claim.booked:
            return
        booking = self._desk.bookings.live(claim.reservation_id)
        assert booking is not None
        booking.partition.ledger.touch(booking.reservation, now)
        self._desk.bookings.touched(booking)

    def unbook(self, claim: Claim, now: float) -> None:
        """Take its load out of the ledger, if it is there; it is about to end."""
        if not claim.booked:
            if claim.reservation is not None:
                self._claims.untie(claim, claim.hashes)
            return
        booking = self._desk.bookings.live(claim.reservation_id)
        assert booking is not None
        assert booking.reservation is claim.reservation
        self._claims.untie(claim, b"")
        self.release(booking, now)

    def book_anew(self, claim: Claim, now: float) -> None:
        """It lives on other terms than it was booked on; `resolve` books it again."""
        booking = self._desk.bookings.live(claim.reservation_id)
        if booking is not None and booking.reservation.claim is claim:
            self._give_up(booking, now)

    def _give_up(self, booking: Booking, now: float) -> None:
        """Another claim counts; this one stays a claim, with its hashes."""
        claim = booking.reservation.claim
        if claim is not None:
            self._claims.untie(claim, booking.partition.ledger.chain_of(booking.reservation))
        self.release(booking, now)

    def release(self, booking: Booking, now: float) -> None:
        """End a booking that is nobody's claim any more."""
        self._desk.release(booking, now)
        self._counters.freed += 1
        self.touched[booking.partition] = None

    def worker_came(self, scope: Scope, worker_id: int) -> None:
        """Claims on this worker may be booked now."""
        self.again.update(dict.fromkeys(self._claims.waited_for(scope, worker_id)))

    # -- what has no claim: told by the reference's selectors ----------------------------------

    def free_unclaimed(self, reservation_id: str, now: float) -> None:
        """End a booking that never was a claim."""
        booking = self._desk.bookings.live(reservation_id)
        if booking is not None and booking.reservation.claim is None:
            self.release(booking, now)

    def complete_unclaimed(self, reservation_id: str, now: float) -> None:
        """The prefill of such a booking is done."""
        booking = self._desk.bookings.live(reservation_id)
        if booking is not None and booking.reservation.claim is None:
            booking.partition.ledger.prefill_complete(booking.reservation, now)
            self.touched[booking.partition] = None
