"""Of all claims on an id, one is booked: the same one wherever the same claims are known.

It is the one with the lowest router id among those that have not ended and whose rank is here; its
state becomes the booking's. `apply_messages.py` and `dynamo_peers.py` call this whenever the claims
on an id change; claims whose rank is absent wait until it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from indexer.types import Scope
    from select_service.core.counters import ReplicaCounters
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition
    from select_service.core.replication.claim import Claim
    from select_service.core.replication.claims import Claims
    from select_service.core.reservations.lifecycle import Lifecycle


class Resolver:
    """Turns claims into bookings, through `Lifecycle`."""

    def __init__(
        self,
        claims: Claims,
        lifecycle: Lifecycle,
        membership: Membership,
        counters: ReplicaCounters,
    ) -> None:
        self.touched: dict[Partition, None] = {}  # partitions that lost load
        self.again: dict[str, None] = {}  # ids to resolve, a few each turn
        self._claims = claims
        self._lifecycle = lifecycle
        self._membership = membership
        self._counters = counters

    def resolve(self, reservation_id: str, now: float, *, is_new: bool = False) -> None:
        """Bring the ledger in line with the claims on an id; `is_new`: one was made just now."""
        winner, place = self._winner(reservation_id, now)
        booking = self._lifecycle.bookings.live(reservation_id)
        if winner is None or place is None:
            return
        if booking is not None:
            if booking.reservation.claim is winner:
                self.follow(winner, now)
                # a silent owner would still take back only what its batch has not done yet
                is_wanted = winner.wanted and winner.is_held
                if is_wanted and self._lifecycle.announcer.may_adopt(booking.reservation):
                    self._lifecycle.renewal.adopt(booking, now)
                return
            _hand_on_charge(booking.reservation, [winner])
            self._give_up(booking, now)
        partition, slot = place
        origin = "local" if winner.owner == self._claims.router_id else winner.owner
        reservation = self._lifecycle.learn(
            partition,
            slot,
            winner.record,
            winner.hashes,
            origin,
            now,
            watched=winner.lease is not None,
            is_new=is_new,
        )
        if winner.charge is not None:
            reservation.charge, winner.charge = winner.charge, None
        self._claims.tie(winner, reservation)
        self._counters.booked += 1
        self.follow(winner, now, is_new=False)

    def _winner(
        self, reservation_id: str, now: float
    ) -> tuple[Claim | None, tuple[Partition, int] | None]:
        """Return the winning claim, of those that can be booked here."""
        claims = self._claims
        for claim in sorted(claims.alive(reservation_id), key=lambda one: one.owner):
            if claim.aged:
                continue
            place = self.place_of(claim)
            lost = claim.reservation is not None and not claim.booked
            ours = claim.owner == claims.router_id
            if ours and (place is None or lost or self.is_over(claim)):
                self.unbook(claim, now)
                claims.end_own(claim, now)  # with its rank, as any reservation ends
            elif place is not None:
                if lost:  # the rank has left and come back
                    claims.untie(claim, self.chain(claim))
                return claim, place
            else:
                claims.waiting.add(claim)
        return None, None

    def is_over(self, claim: Claim) -> bool:
        """Whether our claim's lease ended while another claim was the booked one."""
        lease = claim.record.lease
        return (
            not claim.booked
            and lease is not None
            and self._lifecycle.leases.find(lease.lease_id) is None
        )

    def chain(self, claim: Claim) -> bytes:
        """Return the hashes of a claim: booked or not, or of a lost rank, swept or not."""
        if claim.hashes or claim.reservation is None:
            return claim.hashes
        partition = self._membership.partitions[claim.scope]
        return partition.ledger.blocks.chain(claim.reservation.chain)

    def place_of(self, claim: Claim) -> tuple[Partition, int] | None:
        """Return where a claim would be booked; None while its rank is not here."""
        partition = self._membership.partitions.get(claim.scope)
        if partition is None or partition.index.block_size != claim.record.block_size:
            return None
        return self.place(claim.scope, claim.record.worker_id, claim.record.dp_rank)

    def place(self, scope: Scope, worker_id: int, dp_rank: int) -> tuple[Partition, int] | None:
        """Return the partition and the slot of a rank; None while it is not here."""
        partition = self._membership.partitions.get(scope)
        worker = None if partition is None else partition.fleet_slots.present.get(worker_id)
        if partition is None or worker is None or dp_rank not in worker.slots:
            return None
        return partition, worker.slots[dp_rank]

    def follow(self, claim: Claim, now: float, *, is_new: bool = True) -> None:
        """Apply a claim's state to its booking; not news: it happened before the booking here."""
        reservation = claim.reservation
        assert reservation is not None
        partition = self._membership.partitions[claim.scope]
        ledger = partition.ledger
        growth = claim.growth
        has_grown = growth.prefill_done and not reservation.prefill_done
        if has_grown:
            ledger.prefill_complete(reservation, now, is_measured=is_new)
            self.touched[partition] = None
        outputs = claim.output_blocks
        faded_at = min(growth.faded_at, outputs)  # otherwise the sender's numbers are inconsistent
        faded = faded_at if growth.fraction != 1.0 else 0
        seen = reservation.output_blocks, reservation.faded_outputs, reservation.output_fraction
        if seen != (outputs, faded, growth.fraction):
            ledger.learn_outputs(reservation, outputs, faded_at, growth.fraction)
            has_grown = True
        booking = self._lifecycle.bookings.live(claim.reservation_id) if has_grown else None
        if booking is not None:
            self._lifecycle.bookings.touched(booking)

    def touch(self, claim: Claim, now: float) -> None:
        """Renew a claim, and with it everything under its lease."""
        if claim.record.lease is not None:
            self._lifecycle.renewal.sign_of_life(claim.record.lease.lease_id, now)
        if not claim.booked:
            claim.touched = now
            return
        booking = self._lifecycle.bookings.live(claim.reservation_id)
        assert booking is not None
        booking.partition.ledger.touch(booking.reservation, now)
        self._lifecycle.bookings.touched(booking)

    def unbook(self, claim: Claim, now: float, *, freed: bool = False) -> None:
        """Remove the load of a claim that is about to end, if it is in the ledger.

        `freed`: its request is over, so its prompt was computed.
        """
        if not claim.booked:
            if claim.reservation is not None:
                self._claims.untie(claim, claim.hashes)
            return
        booking = self._lifecycle.bookings.live(claim.reservation_id)
        assert booking is not None
        assert booking.reservation is claim.reservation
        if freed and not booking.reservation.prefill_done:
            booking.partition.ledger.note_computed(booking.reservation, now)
        if not freed:
            _hand_on_charge(booking.reservation, self._claims.alive(claim.reservation_id))
        self._claims.untie(claim, b"")
        self.release(booking, now)

    def keep(self, claim: Claim, now: float) -> bool:
        """Adopt a claim that its owner has lost, if a caller of ours has its answer."""
        booking = self._lifecycle.bookings.live(claim.reservation_id) if claim.wanted else None
        if booking is None or booking.reservation.claim is not claim:
            return False
        if not self._lifecycle.announcer.may_adopt(booking.reservation, is_lost=True):
            return False
        self._lifecycle.renewal.adopt(booking, now)
        return True

    def book_anew(self, claim: Claim, now: float) -> None:
        """Unbook a claim that has other terms than it was booked with; `resolve` books it again."""
        booking = self._lifecycle.bookings.live(claim.reservation_id)
        if booking is not None and booking.reservation.claim is claim:
            claim.charge, booking.reservation.charge = booking.reservation.charge, None
            self._give_up(booking, now)

    def _give_up(self, booking: LiveReservation, now: float) -> None:
        """Release a booking whose claim lost; the claim keeps its hashes."""
        claim = booking.reservation.claim
        if claim is not None:
            self._claims.untie(claim, booking.partition.ledger.chain_of(booking.reservation))
            self._claims.set_aside(claim)
        self.release(booking, now)

    def release(self, booking: LiveReservation, now: float) -> None:
        """End a booking that no longer belongs to a claim."""
        self._lifecycle.release(booking, now)
        self._counters.freed += 1
        self.touched[booking.partition] = None

    def worker_came(self, scope: Scope, worker_id: int) -> None:
        """Resolve the claims that waited for this worker."""
        waiting = self._claims.waiting
        for claim in waiting.at((scope, worker_id)):
            waiting.remove(claim)
            self.again[claim.reservation_id] = None

    # -- bookings without a claim, made by the reference's selectors ---------------------------

    def free_unclaimed(self, reservation_id: str, now: float) -> None:
        """End a booking that never had a claim."""
        booking = self._lifecycle.bookings.live(reservation_id)
        if booking is not None and booking.reservation.claim is None:
            self.release(booking, now)

    def complete_unclaimed(self, reservation_id: str, now: float) -> None:
        """Complete the prefill of such a booking."""
        booking = self._lifecycle.bookings.live(reservation_id)
        if booking is not None and booking.reservation.claim is None:
            booking.partition.ledger.prefill_complete(booking.reservation, now)
            self.touched[booking.partition] = None


def _hand_on_charge(reservation: LedgerReservation, claims: Iterable[Claim]) -> None:
    """Let the claim that took a reservation over correct what was charged for it at its end."""
    before = reservation.claim
    if before is None or reservation.charge is None:
        return
    for claim in claims:
        if before.key in claim.record.adopts:
            claim.charge, reservation.charge = reservation.charge, None
            return
