"""Reservations known by the claims of other replicas only, because their worker is not here.

They have no load here, but their ids are taken, and calls for them reach their owners: progress
and ends are noted on the claims and told to the others. `lifecycle.py` asks here for whatever has
no booking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from indexer.types import PackedHashes
    from select_service.core.ledger.reservation_ids import ReservationIds
    from select_service.core.replication.announcer import Announcer
    from select_service.core.replication.claim import Claim
    from select_service.core.replication.dynamo_events import ReplicaEnvelope


class RemoteReservations:
    """Finds and follows reservations that cannot be booked here."""

    def __init__(
        self, bookings: ReservationIds, announcer: Announcer, renew: Callable[[Claim, float], None]
    ) -> None:
        self._bookings = bookings
        self._announcer = announcer
        self._claims = announcer.claims
        self._renew = renew

    # -- what is known -------------------------------------------------------------------------

    def holder(self, reservation_id: str) -> Claim | None:
        """Return the claim that an id without a booking belongs to: on it, or a leg of the pair."""
        if not self._announcer.is_on:
            return None
        claims = self._claims
        return self._first(claims.alive(reservation_id)) or self._first(claims.legs(reservation_id))

    def find(self, name: str) -> Claim | None:
        """Return the claim that a lifecycle call is for: on this id, or of this selection_id.

        Of several made with one selection_id it is the one heard last.
        """
        if not self._announcer.is_on:
            return None
        claims = self._claims
        selected = [one for one in claims.names.at(name) if one.record.selection_id == name]
        return self._first(claims.alive(name)) or self._first(reversed(selected))

    def _first(self, claims: Iterable[Claim]) -> Claim | None:
        """Return the first living claim of another replica.

        Our own end with their rank, and what has expired is not live any more.
        """
        for claim in claims:
            if not (claim.dead or claim.aged) and claim.owner != self._claims.router_id:
                return claim
        return None

    def is_under_way(self, claim: Claim | None) -> bool:
        """Tell whether a batch at another replica may yet take a claim back.

        One whose replica is lost can be adopted, if it is booked here.
        """
        if claim is None or not claim.is_held or claim.owner == self._claims.router_id:
            return False
        return not (claim.booked and self._claims.is_silent(claim.owner))

    def confirm(self, claim: Claim | None) -> None:
        """Note that a caller of ours is told that this is booked, so that it stays.

        Its owner may crash, and come back without what was not on its disk yet.
        """
        if claim is None or claim.owner == self._claims.router_id:
            return
        if not claim.wanted:
            claim.wanted = True
            self._claims.note(claim)
        if claim.is_held:  # its owner is silent: it is adopted
            self._claims.homeless.append(claim.reservation_id)

    def tenant_of(self, name: str) -> str | None:
        """Return whose reservation a lifecycle call is for, by its id, selection_id or pair."""
        claim = self.find(name) or self.holder(name)
        return None if claim is None else claim.scope.tenant_id

    def chain_of(self, claim: Claim) -> PackedHashes:
        """Return the hashes of a claim without a booking."""
        reservation = claim.reservation
        if claim.hashes or reservation is None:
            return claim.hashes
        partition = self._bookings.unswept(reservation).partition
        return partition.ledger.blocks.chain(reservation.chain)

    # -- calls ---------------------------------------------------------------------------------

    def prefill_complete(self, claim: Claim, now: float) -> ReplicaEnvelope:
        """The prompt is computed; return what is to be told."""
        self._renew(claim, now)
        return self._announcer.completed_unbooked(claim)

    def output_block(
        self, claim: Claim, decay_fraction: float | None, now: float, count: int
    ) -> None:
        """Add `count` output blocks."""
        self._renew(claim, now)
        self._claims.output(claim.reservation_id, decay_fraction, count)

    def free(self, name: str, now: float) -> ReplicaEnvelope | None:
        """End what has this name, expired or not; return what is to be told.

        All its names then count as freed.
        """
        if not self._announcer.is_on:
            return None
        claim = self.find(name)
        reservation_id = name if claim is None else claim.reservation_id
        if claim is not None:
            self._renew(claim, now)
        meant = self._claims.alive(reservation_id)
        if not meant:
            return None
        message = self._announcer.freed_unbooked(meant, now)
        names = {reservation_id: None, name: None}
        for one in meant:
            pair, selection_id = one.record.pair, one.record.selection_id
            if selection_id is not None:
                names[selection_id] = None
            if pair is not None and all(leg.dead for leg in self._claims.legs(pair)):
                names[pair] = None
        for freed in names:
            self._bookings.remember(freed, now)
        return message
