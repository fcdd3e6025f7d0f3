"""Applies the statements of publishers: claims are learnt, grow and end, and the books follow.

A statement changes claims (`claims.py`); then `resolver.py` brings the ledger in line with the
claims on that id. Both accept statements in any order, so a statement we missed can come later, in
the publisher's snapshot. `plane.py` and the verbs call this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from indexer.types import HASH_BYTES, Scope
from select_service.core.replication.claim import Claim
from select_service.core.replication.dynamo_events import AddRequestData, ReplicaEnvelope
from select_service.core.replication.dynamo_peers import DynamoPeers, claimed
from select_service.core.replication.messages import (
    ClaimGrowth,
    ClaimRecord,
    Closed,
    Ended,
    Grown,
    Heartbeat,
    RankLoads,
    Renewed,
    ReportMessage,
    Said,
    SessionRank,
    SessionRanks,
)
from select_service.core.replication.statement_outbox import SEQ_BITS
from select_service.core.replication.tombstones import Tombstone

if TYPE_CHECKING:
    from select_service.core.replication.claims import Claims
    from select_service.core.replication.load_book import CachedTokensBook, LoadBook, SessionBook
    from select_service.core.replication.messages import Key, ReplicaMessage, Statement
    from select_service.core.replication.publishers import Publishers
    from select_service.core.replication.resolver import Resolver
    from select_service.core.replication.sequence_tracker import SequenceTracker
    from select_service.core.replication.shared_leases import SharedLeases
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.types import CoreLimits

_DONE = ClaimGrowth(prefill_done=True)


class MessageApplier:
    """The path from publishers' statements to our ledger."""

    def __init__(
        self,
        limits: CoreLimits,
        claims: Claims,
        lifecycle: Lifecycle,
        publishers: Publishers,
        resolver: Resolver,
        leases: SharedLeases,
        *,
        reports: LoadBook,
        cached_tokens: CachedTokensBook,
        sessions: SessionBook,
    ) -> None:
        self._limits = limits
        self._claims = claims
        self._counters = claims.counters
        self._lifecycle = lifecycle
        self._publishers = publishers
        self._resolver = resolver
        self._leases = leases
        self.reports = reports
        self._cached_tokens = cached_tokens
        self._sessions = sessions
        self.dynamo_peers = DynamoPeers(limits, claims, lifecycle, resolver, claims.counters)

    def apply(
        self, peer: str, message: ReplicaMessage, now: float, *, checked: bool = False
    ) -> None:
        """Apply one message; `checked`: it had a correct checksum."""
        router_id = _speaker(message)
        if router_id == self._claims.router_id:
            self._counters.namesakes += not self._is_echo(message)
            return
        self._counters.received += 1
        if isinstance(message, ReportMessage):
            self._apply_reports(peer, message, now, checked=checked)
        elif self._is_garbled(router_id, message, checked=checked):
            self._counters.garbled += 1
        elif isinstance(message, Heartbeat):
            self._heard_heartbeat(peer, message, now, checked=checked)
        elif isinstance(message, Said):
            view = self._publishers.heard_from(router_id, message.epoch, peer, now, checked=checked)
            if view is not None and self._is_new(view, message.seq, now):
                for item in message.items:
                    self._apply(view, item, now)
        else:
            self._heard_envelope(peer, message, now, checked=checked)

    def _is_garbled(
        self, router_id: int, message: ReplicaEnvelope | Heartbeat | Said, *, checked: bool
    ) -> bool:
        """Whether a message cannot be what its sender sent.

        Our older versions send no checksum, and the reference's selectors no stamp. A sender
        replaced by one of those is heard again once the earlier one counts as lost.
        """
        stamped = message.select_service if isinstance(message, ReplicaEnvelope) else message
        if stamped is not UNSET and stamped.seq >> SEQ_BITS != stamped.epoch - 1:
            return True  # not a number of that life
        if checked:
            return False
        view = self._publishers.views.get(router_id)
        return view is not None and not view.gone and (view.checked or stamped is UNSET)

    def _heard_heartbeat(self, peer: str, beat: Heartbeat, now: float, *, checked: bool) -> None:
        known = self._publishers.views.get(beat.router_id)
        if known is not None and known.is_old(beat):
            self._counters.repeated += 1  # no sign of life either: it may be a recording
            return
        view = self._publishers.heard_from(beat.router_id, beat.epoch, peer, now, checked=checked)
        if view is None:
            return
        view.follow(beat)
        if not view.announced(beat, now, self._limits):
            self._counters.digests_differed += 1
        if beat.left and beat.seq >= view.high:  # a `left` of this life, not of an earlier one
            self._publishers.lose(view)
        else:
            view.greet(beat, now, self._limits)

    def _apply_reports(
        self, peer: str, message: ReportMessage, now: float, *, checked: bool
    ) -> None:
        """Take in the reports of a publisher that is alive; late and repeated ones are old."""
        view = self._publishers.views.get(message.router_id)
        if view is None or view.gone or view.peer != peer or view.epoch != message.epoch:
            self._counters.ignored += 1
            return
        if view.checked and not checked:
            self._counters.garbled += 1
            return
        if (message.epoch, message.number) <= view.reports_applied:
            self._counters.repeated += 1
            return
        view.reports_applied = message.epoch, message.number
        if isinstance(message, RankLoads):
            for load in message.ranks:
                self.reports.apply(load, now)
        elif isinstance(message, SessionRanks):
            for session in message.sessions:
                self._apply_session(message.router_id, session, now)
        else:
            for name, cached_tokens in message.reports:
                self._cached_tokens.apply(name, cached_tokens, now)

    def _apply_session(self, sender: int, session: SessionRank, now: float) -> None:
        """Note a session's rank, if it is here; a name that is refused here is not taken either."""
        scope = Scope(session.model_name, session.tenant_id)
        place = self._resolver.place(scope, session.worker_id, session.dp_rank)
        if place is None or not 1 <= len(session.session_id) <= self._limits.id_length_max:
            self._counters.ignored += 1
            return
        is_later = self._sessions.apply(
            place[0],
            session.session_id,
            place[1],
            now,
            version=session.version,
            sender=sender,
            is_new=session.is_new,
        )
        if not is_later:
            self._sessions.queue(place[0], session.session_id)

    def _is_echo(self, message: ReplicaMessage) -> bool:
        """Whether we may have sent this; else another process runs on a copy of our state."""
        if isinstance(message, ReportMessage):
            return True  # states nothing of its own: heartbeats tell a namesake
        if isinstance(message, ReplicaEnvelope):
            stamp = message.select_service
            if stamp is UNSET:
                return True
            epoch, seq = stamp.epoch, stamp.seq
        else:
            epoch, seq = message.epoch, message.seq
        return epoch < self._claims.outbox.epoch or (
            epoch == self._claims.outbox.epoch and seq <= self._claims.outbox.seq
        )

    def _is_new(self, view: SequenceTracker, seq: int, now: float) -> bool:
        is_new = view.receive(seq, now, self._limits)
        self._counters.repeated += not is_new
        return is_new

    def _heard_envelope(
        self, peer: str, envelope: ReplicaEnvelope, now: float, *, checked: bool
    ) -> None:
        event, stamp = envelope.event, envelope.select_service
        if event is None:
            return
        if stamp is UNSET:
            self.dynamo_peers.apply(peer, envelope, event, now)
            return
        view = self._publishers.heard_from(event.router_id, stamp.epoch, peer, now, checked=checked)
        if view is None or not self._is_new(view, stamp.seq, now):
            return
        if isinstance(event.data, AddRequestData):
            self.claimed(view, claimed(envelope, event, event.data, stamp), now, live=True)
        elif event.data == "Free":
            for owner, born in stamp.of:
                end = Ended(event.request_id, owner, born, freed=not stamp.lapsed)
                self.ended(view, end, now, live=True)
            self._resolver.free_unclaimed(event.request_id, now)
        else:
            for owner, born in stamp.of:
                self.grown(view, Grown(event.request_id, owner, born, _DONE), now, live=True)
            self._resolver.complete_unclaimed(event.request_id, now)

    def _apply(self, view: SequenceTracker, item: Statement, now: float) -> None:
        if isinstance(item, ClaimRecord):
            self.claimed(view, item, now, live=True)
        elif isinstance(item, Renewed):
            self._leases.renewed(item, now, live=True)
        elif isinstance(item, Closed):
            self._leases.closed(item, now)
        elif isinstance(item, Grown):
            self.grown(view, item, now, live=True)
        else:
            self.ended(view, item, now)

    def claimed(
        self,
        view: SequenceTracker,
        record: ClaimRecord,
        now: float,
        *,
        live: bool = False,
        is_relayed: bool = False,
    ) -> None:
        """Apply a claim stated by its owner, or (`is_relayed`) by another that has heard it."""
        if len(record.hashes) % HASH_BYTES or len(view.claims) >= self._limits.replica_claims_max:
            self._counters.claims_refused += 1
            return
        claim = view.claims.find(record.reservation_id, record.born)
        is_new = live and claim is None and not record.adopts  # else it was made some time ago
        if claim is None:
            claim = Claim(view.router_id, record)
            claim.is_relayed = is_relayed
            before = view.claims.by_id.get(record.reservation_id)
            was_booked = before is not None and before.booked
            if not self._claims.learn(claim, now):
                self._end_what_it_took_over(view, claim, now)
                return
            if was_booked:  # its booking has no claim now, even if the new claim is over itself
                self._resolver.free_unclaimed(record.reservation_id, now)
        else:
            if not (live or is_relayed or claim.agrees(record)):  # in a snapshot of its owner
                self._resolver.unbook(claim, now)
                self._claims.correct(claim, record, now)
            if claim.is_relayed and not is_relayed and self._claims.believe_owner(claim, record):
                self._resolver.book_anew(claim, now)
            self.grown(view, Grown(record.reservation_id, *claim.key, record.growth), now)
            self._claims.learn_again(claim, record, now)
        if live and record.lease is not None:
            self._lifecycle.renewal.sign_of_life(record.lease.lease_id, now)
        if not claim.dead and self._claims.endings.is_freed(claim):
            self._resolver.unbook(claim, now)
            self._claims.end(claim, now, by_owner=False, freed=True)
        if claim.dead:  # its owner has missed the end of it
            self._claims.outbox.say_later(Ended(claim.reservation_id, *claim.key))
        self._resolver.resolve(claim.reservation_id, now, is_new=is_new)

    def _end_what_it_took_over(self, view: SequenceTracker, claim: Claim, now: float) -> None:
        """End the claims before one that was freed: that was heard before the adoption."""
        if self._claims.tombstones.was_freed(claim.reservation_id, claim.key):
            for key in claim.record.adopts:
                self.ended(view, Ended(claim.reservation_id, *key, freed=True), now)

    def grown(self, view: SequenceTracker, item: Grown, now: float, *, live: bool = False) -> None:
        """Apply growth of a claim, or keep it if the claim is not known yet."""
        key = item.owner, item.born
        owners = self._claims.sets.get(item.owner)
        claim = None if owners is None else owners.find(item.reservation_id, item.born)
        if claim is None:
            self._claims.grow_early(item.reservation_id, key, item.growth, view.router_id, now)
        names = {key} if claim is None else claim.names
        for kin in self._claims.kin_of(item.reservation_id, names):
            self._grows(view, kin, item.growth, now, live=live)

    def _grows(
        self, view: SequenceTracker, claim: Claim, growth: ClaimGrowth, now: float, *, live: bool
    ) -> None:
        has_grown = claim.join(growth)
        if has_grown and claim.owner == self._claims.router_id:
            self._claims.outbox.say_later(claim)  # for those that missed it
        elif has_grown and claim.owner != view.router_id:
            claim.reporters = (claim.reporters or set()) | {view.router_id}
        if claim.booked:
            self._resolver.follow(claim, now)
        if has_grown or live:  # a sign of life
            self._resolver.touch(claim, now)

    def ended(self, view: SequenceTracker, item: Ended, now: float, *, live: bool = False) -> None:
        """End a claim: with its reservation, or because another claim takes its place."""
        claims, key = self._claims, (item.owner, item.born)
        owners = claims.sets.get(item.owner)
        claim = None if owners is None else owners.find(item.reservation_id, item.born)
        by_owner = item.owner in (view.router_id, claims.router_id)
        is_succeeded = False
        if claim is not None and item.heir is not None and not claim.dead:
            self._succeed(claim, claims.tombstones.living(item.reservation_id, item.heir), now)
            is_succeeded = not claims.sets[item.owner].holds(claim)
            if is_succeeded and item.owner == claims.router_id:
                return  # booking its heir has shown that its rank is not here
            if is_succeeded:
                claim = None  # its owner has it again, under another number
        if claim is None:
            end = Tombstone(*key, by_owner, heir=item.heir, freed=item.freed)
            claims.endings.note(item.reservation_id, end, now, kept=is_succeeded)
        kin = [] if claim is None else [claim]
        if item.freed:
            names = {key} if claim is None else claim.names
            kin += [one for one in claims.kin_of(item.reservation_id, names) if one is not claim]
        for one in kin:
            if one is claim or not one.dead:
                self._end(one, item, now, live=live, by_owner=by_owner and one is claim)
        if kin:
            self._resolver.resolve(item.reservation_id, now)

    def _end(self, claim: Claim, item: Ended, now: float, *, live: bool, by_owner: bool) -> None:
        claims = self._claims
        ours = claim.owner == claims.router_id
        if ours and live:  # a caller there renews the reservation
            self._resolver.touch(claim, now)
        self._resolver.unbook(claim, now, freed=item.freed)
        heir = item.heir if claim.born == item.born else None
        if ours:
            claims.end_own(claim, now, heir=heir, freed=item.freed)
        else:
            claims.end(claim, now, by_owner=by_owner, heir=heir, freed=item.freed)
        if item.freed:
            claims.note_freed_before(claim, now)
        if by_owner and not ours:
            claims.forget(claim)

    def unlearn(self, claim: Claim, now: float) -> None:
        """Forget a claim its owner never stated: the message was garbled.

        No end is noted, as another claim has that name, or will have it.
        """
        self._resolver.unbook(claim, now)
        self._claims.forget(claim)
        self._counters.claims_corrected += 1
        self._resolver.resolve(claim.reservation_id, now)

    def _succeed(self, claim: Claim, heir: Key | None, now: float) -> None:
        """Record the claim that adopted an ending one, even if it was not heard yet.

        Otherwise the reservation would be unknown here, though it lives, until the adoption is
        heard. All but its terms follows from the old claim; if it is over, too, its owner does not
        have it.
        """
        if heir is None or heir[0] == self._claims.router_id:
            return
        view = self._publishers.relayed(heir[0], now)
        if view is None or view.has_heard(heir[1]):
            return
        view.mentioned(heir[1], now, self._limits)
        record = msgspec.structs.replace(
            claim.succeeded(heir[1]),
            hashes=self._resolver.chain(claim),
            lease=self._leases.terms(claim),
        )
        self.claimed(view, record, now, is_relayed=True)


def _speaker(message: ReplicaMessage) -> int:
    if isinstance(message, Heartbeat | Said | ReportMessage):
        return message.router_id
    return 0 if message.event is None else message.event.router_id
