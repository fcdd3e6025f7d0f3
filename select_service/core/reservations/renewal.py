"""Signs of life: lifecycle calls renew leases, wherever their owner is, and adopt orphans.

`lifecycle.py` calls it for its own reservations, `core/replication` for what replicas report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.replication.messages import Renewed

if TYPE_CHECKING:
    from select_service.core.ledger.leases import Leases
    from select_service.core.ledger.reservation_ids import LiveReservation, ReservationIds
    from select_service.core.replication.announcer import Announcer
    from select_service.core.replication.claim import Claim
    from select_service.types import CoreLimits

_ANNOUNCED_AGAIN: Final = 0.125
"""Fraction of a lease's time to live between two renewals that lifecycle calls here send to its
owner."""


class Renewal:
    """Renews leases and adopts orphans."""

    def __init__(
        self,
        bookings: ReservationIds,
        leases: Leases,
        announcer: Announcer,
        limits: CoreLimits,
    ) -> None:
        self._bookings = bookings
        self._leases = leases
        self._announcer = announcer
        self._limits = limits

    def cared_for(self, booking: LiveReservation, now: float) -> None:
        """A lifecycle call came: renew the reservation, and adopt it if its owner is gone."""
        self.renew(booking, now)
        if self._announcer.is_on and self._announcer.may_adopt(booking.reservation):
            self.adopt(booking, now)
        self._bookings.touched(booking)

    def renew(self, booking: LiveReservation, now: float) -> None:
        """Renew the lease, and so everything under it, wherever its owner is."""
        reservation = booking.reservation
        if reservation.lease is not None:
            self._leases.touch(reservation.lease, now)
        if reservation.claim is not None:
            self.renew_claimed(reservation.claim, now)

    def renew_claimed(self, claim: Claim, now: float) -> None:
        """Renew the lease that a claim names, here and at its owner."""
        claim.touched = now
        if claim.record.lease is None:
            return
        lease_id = claim.record.lease.lease_id
        self.sign_of_life(lease_id, now)
        copies = self._announcer.claims.copies
        copy = copies.find(lease_id)
        if copy is not None:
            copy.renewed_at = now
            if (
                copy.announced_at is None
                or now - copy.announced_at >= copy.lease_ttl_s * _ANNOUNCED_AGAIN
            ):
                copy.announced_at = now
                self.tell_of(lease_id)

    def tell_of(self, lease_id: str) -> None:
        """State that a caller has renewed a lease, with its time to live if callers changed it."""
        lease = self._leases.find(lease_id)
        copy = self._announcer.claims.copies.find(lease_id)
        said = Renewed(lease_id)
        if copy is not None and copy.is_changed_here:
            said = Renewed(lease_id, copy.lease_ttl_s, revision=copy.revision)
        elif lease is not None and lease.is_changed:
            said = Renewed(lease_id, lease.ttl_s, revision=lease.revision)
        self._announcer.claims.outbox.say_of_lease(said)

    def sign_of_life(self, lease_id: str, now: float) -> None:
        """Renew a lease here or as a copy."""
        lease = self._leases.find(lease_id)
        if lease is not None:
            self._leases.touch(lease, now)
        copies = self._announcer.claims.copies
        copy = copies.find(lease_id)
        if copy is not None:
            copies.touch(copy, now)

    def adopt(self, booking: LiveReservation, now: float) -> None:
        """Own an orphan (`may_adopt`), and open its lease here if there is room."""
        partition, reservation = booking.partition, booking.reservation
        claim = reservation.claim
        assert claim is not None
        record, lease = claim.record, None
        if claim.lease is not None:
            state = claim.lease.state
            lease = self._leases.find(state.lease_id)
            if lease is None:
                lease = self._leases.admit(self._announcer.claims.adopted_lease(state), now)
                self._announcer.claims.counters.leases_adopted += lease is not None
            self._announcer.claims.copies.adopted_from[state.lease_id] = None
        if lease is not None:
            partition.ledger.touch(reservation, now, 0.0)
            self._leases.join(lease, reservation)
        else:
            partition.ledger.touch(
                reservation,
                now,
                self._announcer.claims.copies.orphan_ttl(record, self._limits.reservation_ttl_s),
            )
        self._announcer.adopt(partition, reservation, now)
        if lease is not None and reservation.claim is not None:
            adopts, claims = reservation.claim.record.adopts, self._announcer.claims
            self._leases.inherit(lease, adopts, claims.is_silent)
        self._bookings.touched(booking)
