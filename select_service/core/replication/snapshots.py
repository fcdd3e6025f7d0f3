"""Snapshots of the replica plane: ours, sent part by part, and the effects of a peer's here.

`plane.py` decides when to fetch one, the edge transfers it. Its parts are applied like live
statements (`apply_messages.py`); earlier claims of the publisher that it does not contain have
ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from select_service.core.replication.messages import (
    NO_GROWTH,
    ClaimRecord,
    Ended,
    Grown,
    RelayedClaim,
    Renewed,
    SnapshotEnd,
    SnapshotHead,
)
from select_service.core.replication.publishers import LOOKS_PER_STEP
from select_service.core.replication.statement_outbox import SEQ_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.replication.apply_messages import MessageApplier
    from select_service.core.replication.claim import Claim
    from select_service.core.replication.claims import Claims
    from select_service.core.replication.messages import SnapshotPart
    from select_service.core.replication.publishers import Publishers
    from select_service.core.replication.resolver import Resolver
    from select_service.core.replication.sequence_tracker import Incoming, SequenceTracker
    from select_service.core.replication.shared_leases import SharedLeases
    from select_service.types import CoreLimits


class ReplicaSnapshots:
    """Gives our snapshot, and applies those of others."""

    def __init__(
        self,
        limits: CoreLimits,
        claims: Claims,
        publishers: Publishers,
        message_applier: MessageApplier,
        resolver: Resolver,
        leases: SharedLeases,
    ) -> None:
        self._limits = limits
        self._claims = claims
        self._counters = claims.counters
        self._publishers = publishers
        self._message_applier = message_applier
        self._resolver = resolver
        self._leases = leases

    def give(self, now: float) -> Iterator[SnapshotPart]:
        """Yield our snapshot; changes between two parts have numbers above the head's.

        It includes claims of publishers we do not hear, as the requester may have come too late to
        hear them. A publisher that restarts under another name is back before its old one counts as
        lost; hence the two heartbeats.
        """
        claims = self._claims
        silent_since = now - 2 * self._limits.replica_heartbeat_s
        own = list(claims.own.by_id.values())
        yield SnapshotHead(claims.router_id, claims.outbox.epoch, claims.outbox.seq)
        given = 0
        for claim in own:
            if not claim.dead:
                given += 1
                yield self.record(claim)
        yield from claims.tombstones.retold()
        for view in list(self._publishers.views.values()):
            for claim in list(view.claims.by_id.values()):
                if claim.dead:
                    continue
                if not claim.aged and (view.gone or view.heard_at < silent_since):
                    yield RelayedClaim(claim.owner, self.record(claim))
                elif claim.noted and claim.growth != NO_GROWTH:
                    yield Grown(claim.reservation_id, *claim.key, claim.growth)
        yield from self._leases.retold(now)
        for closed in claims.closings.retold():
            yield SnapshotEnd(given, closed)
        yield SnapshotEnd(given)

    def record(self, claim: Claim) -> ClaimRecord:
        """Return all there is to say of a claim now."""
        return msgspec.structs.replace(
            claim.record,
            hashes=self._resolver.chain(claim),
            growth=claim.growth,
            lease=self._leases.terms(claim),
        )

    def begin(self, router_id: int, head: SnapshotHead, now: float) -> bool:
        """Begin a snapshot; False if it is not from the publisher we asked."""
        view = self._publishers.views.get(router_id)
        if view is None or head.router_id != router_id or view.pulling_since is None:
            return False
        if head.seq >> SEQ_BITS != head.epoch - 1:
            return False
        self._counters.numbers_corrected += not view.comes_in(head.seq, now)
        return True

    def part(self, router_id: int, part: SnapshotPart, now: float) -> None:
        """Apply one part of a snapshot."""
        view = self._publishers.views.get(router_id)
        if view is None or view.incoming is None:
            return
        view.pulling_since = now  # it makes progress
        if isinstance(part, SnapshotEnd):
            view.incoming.promised = part.claims
            for closed in part.closed:
                self._leases.closed(closed, now)
        elif isinstance(part, ClaimRecord):
            name, key = part.reservation_id, (router_id, part.born)
            view.incoming.seen[part.born] = name
            if self._claims.tombstones.is_word_of_owner(name, key):
                # its state was reset to a time before that end: remind it
                self._claims.outbox.say_later(Ended(name, *key))
            self._message_applier.claimed(view, part, now)
        elif isinstance(part, Grown):
            self._message_applier.grown(view, part, now)
        elif isinstance(part, Ended):
            self._message_applier.ended(view, part, now)
        elif isinstance(part, Renewed):
            self._leases.renewed(part, now)
        elif isinstance(part, RelayedClaim):
            self._apply_relayed(view, part, now)

    def _apply_relayed(self, sender: SequenceTracker, part: RelayedClaim, now: float) -> None:
        """Accept a claim of a publisher that we do not hear ourselves."""
        owner, claim = part.owner, part.claim
        if claim.growth != NO_GROWTH:
            # it may be news to one that we hear its owner, or of what has taken this claim over
            grown = Grown(claim.reservation_id, owner, claim.born, claim.growth)
            self._message_applier.grown(sender, grown, now)
        view = self._publishers.views.get(owner)
        if owner == self._claims.router_id or (view is not None and not view.gone):
            return
        view = self._publishers.relayed(owner, now)
        if view is not None:
            self._message_applier.claimed(view, part.claim, now, is_relayed=True)
            known = view.claims.find(part.claim.reservation_id, part.claim.born)
            if known is not None and part.claim.growth != NO_GROWTH:
                # the owner may not know, and the sender may be gone when it returns
                known.reporters = (known.reporters or set()) | {sender.router_id}

    def recall(
        self, owner: int, record: ClaimRecord, now: float, *, aged: bool, wanted: bool
    ) -> None:
        """Take over a claim from an earlier life, see `Claims.note`."""
        if owner == self._claims.router_id:
            self._claims.recall(record)
            self._resolver.resolve(record.reservation_id, now)
            return
        view = self._publishers.relayed(owner, now)
        if view is None:
            return
        self._message_applier.claimed(view, record, now, is_relayed=True)
        claim = view.claims.find(record.reservation_id, record.born)
        if claim is None or claim.dead:
            return
        claim.noted = True
        claim.wanted = wanted
        if wanted and claim.is_held:
            self._claims.homeless.append(record.reservation_id)
        if aged:
            hashes = self._resolver.chain(claim)
            self._resolver.unbook(claim, now)
            claim.hashes = hashes
            self._claims.age(claim)

    def end(self, router_id: int, now: float, *, complete: bool) -> None:
        """End a snapshot, complete or broken off."""
        view = self._publishers.views.get(router_id)
        if view is None:
            return
        incoming = view.incoming
        view.asked_high = None
        if not complete or incoming is None or incoming.promised != len(incoming.seen):
            view.pulled(None, now, self._limits)
            return
        view.incoming = None
        self._leases.chores.append(self._forget_unseen(view, incoming))

    def _forget_unseen(self, view: SequenceTracker, incoming: Incoming) -> Iterator[None]:
        """End the publisher's claims from before the snapshot that are not in it.

        Claims it has under another id, or under numbers it has not reached yet, never existed.
        """
        for number, claim in enumerate(list(view.claims.by_id.values())):
            named = incoming.seen.get(claim.born)
            is_false = (
                claim.born > max(view.high, incoming.seq)
                if named is None
                else named != claim.reservation_id
            )
            if is_false or (named is None and claim.born <= incoming.seq):
                if not view.claims.holds(claim):
                    pass
                elif is_false:
                    self._message_applier.unlearn(claim, self._leases.now)
                elif not (
                    # in the life that stated it, its owner has ended it, however long ago
                    claim.born >> SEQ_BITS < incoming.seq >> SEQ_BITS
                    and self._resolver.keep(claim, self._leases.now)
                ):
                    end = Ended(claim.reservation_id, *claim.key)
                    self._message_applier.ended(view, end, self._leases.now)
                yield
            elif number % LOOKS_PER_STEP == 0:
                yield
        view.pulled(incoming.seq, self._leases.now, self._limits)
