"""What publishers say, understood: views follow it, claims are booked, gaps are healed.

Whatever is heard changes claims (`claims.py`); then `resolver.py` makes the ledger say what the
claims on that id say. Both take statements in any order, so that what a publisher said and we
missed can come later, as its snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from indexer.types import HASH_BYTES
from select_service.core.effects import Effects, Pull
from select_service.core.replicas.claims import Claim, ClaimSet
from select_service.core.replicas.events import AddRequestData, ReplicaEnvelope
from select_service.core.replicas.foreigners import Foreigners, claimed
from select_service.core.replicas.messages import (
    ClaimRecord,
    Closed,
    Ended,
    Grown,
    Growth,
    Hearsay,
    Heartbeat,
    Renewed,
    Said,
    SnapshotEnd,
    SnapshotHead,
)
from select_service.core.replicas.resolver import Resolver
from select_service.core.replicas.shared_leases import SharedLeases
from select_service.core.replicas.view import Incoming, View
from select_service.types import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.booking.desk import Desk
    from select_service.core.membership import Membership
    from select_service.core.replicas.claims import Claims
    from select_service.core.replicas.ends import Key
    from select_service.core.replicas.messages import ReplicaMessage, SnapshotPart, Statement
    from select_service.types import CoreLimits

_BATCHES_PER_TURN = 4
_LOOKS_PER_STEP = 64
_DONE = Growth(prefill_done=True)
_NOTHING = Growth()


class Replicas:
    """All publishers heard of, and the way from their words into our ledger."""

    def __init__(
        self, limits: CoreLimits, claims: Claims, desk: Desk, membership: Membership
    ) -> None:
        self.counters = claims.counters
        self.views: dict[int, View] = {}
        self.http_port = 0
        self.url: str | None = None
        self.is_leaving = False
        self.resolver = Resolver(claims, desk, membership, self.counters)
        self._limits = limits
        self._claims = claims
        self._desk = desk
        self._membership = membership
        self.leases = SharedLeases(limits, claims, desk, self.resolver)
        self._foreigners = Foreigners(limits, claims, desk, self.resolver, self.counters)
        self._chores = self.leases.chores  # long work, done in slices
        self._beat_at: float | None = None
        self._beats = 0

    # -- what is heard -------------------------------------------------------------------------

    def heard(self, peer: str, message: ReplicaMessage, now: float) -> None:
        """Take in one message."""
        router_id = _speaker(message)
        if router_id == self._claims.router_id:
            self.counters.namesakes += not self._is_echo(message)
            return
        self.counters.heard += 1
        if isinstance(message, Heartbeat):
            self._heard_heartbeat(peer, message, now)
        elif isinstance(message, Said):
            view = self._view(router_id, message.epoch, peer, now)
            if view is not None and self._is_news(view, message.seq, now):
                for item in message.items:
                    self._apply(view, item, now)
        else:
            self._heard_envelope(peer, message, now)

    def _heard_heartbeat(self, peer: str, beat: Heartbeat, now: float) -> None:
        known = self.views.get(beat.router_id)
        if known is not None and known.is_old(beat):
            self.counters.repeated += 1  # no sign of life either: somebody may have kept it
            return
        view = self._view(beat.router_id, beat.epoch, peer, now)
        if view is None:
            return
        view.follow(beat)
        if not view.announced(beat, now, self._limits):
            self.counters.digests_differed += 1
        if beat.left and beat.seq >= view.high:  # of this life, and none before
            self._lose(view)
        else:
            view.greet(beat, now, self._limits)

    def _is_echo(self, message: ReplicaMessage) -> bool:
        """Whether we may have said this ourselves; else somebody lives on a copy of our state."""
        if isinstance(message, ReplicaEnvelope):
            stamp = message.select_service
            if stamp is UNSET:
                return True
            epoch, seq = stamp.epoch, stamp.seq
        else:
            epoch, seq = message.epoch, message.seq
        return epoch < self._claims.epoch or (
            epoch == self._claims.epoch and seq <= self._claims.seq
        )

    def _view(self, router_id: int, epoch: int, peer: str, now: float) -> View | None:
        view = self.views.get(router_id)
        if view is None:
            if len(self.views) >= self._limits.replica_publishers_max:
                self.counters.publishers_refused += 1
                return None
            view = self._open_view(router_id, epoch, now)
        elif view.peer != peer and not view.gone:
            # who speaks under a name keeps it as long as it is heard: nobody else may end its own
            self.counters.impostors += 1
            return None
        view.heard_at = now
        view.peer = peer
        if view.gone:
            view.gone = False
            self._claims.gone.discard(router_id)
            view.doubt()  # we may have let its claims expire
            self._chores.append(self._remind(view))
        return view

    def _open_view(self, router_id: int, epoch: int, now: float) -> View:
        claims = self._claims.sets.setdefault(router_id, ClaimSet())
        view = self.views[router_id] = View(router_id, epoch, claims, now)
        return view

    def _is_news(self, view: View, seq: int, now: float) -> bool:
        news = view.hear(seq, now, self._limits)
        self.counters.repeated += not news
        return news

    def _heard_envelope(self, peer: str, envelope: ReplicaEnvelope, now: float) -> None:
        event, stamp = envelope.event, envelope.select_service
        if event is None:
            return
        if stamp is UNSET:
            self._foreigners.heard(peer, envelope, event, now)
            return
        view = self._view(event.router_id, stamp.epoch, peer, now)
        if view is None or not self._is_news(view, stamp.seq, now):
            return
        if isinstance(event.data, AddRequestData):
            self._claimed(view, claimed(envelope, event, event.data, stamp), now, live=True)
        elif event.data == "Free":
            for owner, born in stamp.of:
                end = Ended(event.request_id, owner, born, freed=not stamp.lapsed)
                self._ended(view, end, now, live=True)
            self.resolver.free_unclaimed(event.request_id, now)
        else:
            for owner, born in stamp.of:
                self._grown(view, Grown(event.request_id, owner, born, _DONE), now, live=True)
            self.resolver.complete_unclaimed(event.request_id, now)

    def _apply(self, view: View, item: Statement, now: float) -> None:
        if isinstance(item, ClaimRecord):
            self._claimed(view, item, now, live=True)
        elif isinstance(item, Renewed):
            self.leases.renewed(item, now)
        elif isinstance(item, Closed):
            self.leases.closed(item, now)
        elif isinstance(item, Grown):
            self._grown(view, item, now, live=True)
        else:
            self._ended(view, item, now)

    def _claimed(
        self,
        view: View,
        record: ClaimRecord,
        now: float,
        *,
        live: bool = False,
        told_of: bool = False,
    ) -> None:
        """Its owner says so, or (`told_of`) somebody who has heard it."""
        if len(record.hashes) % HASH_BYTES or len(view.claims) >= self._limits.replica_claims_max:
            self.counters.claims_refused += 1
            return
        claim = view.claims.find(record.reservation_id, record.born)
        if claim is None:
            claim = Claim(view.router_id, record)
            claim.hearsay = told_of
            if not self._claims.learn(claim, now):
                return
        else:
            if claim.hearsay and not told_of and self._claims.believe_owner(claim, record):
                self.resolver.book_anew(claim, now)
            self._grown(view, Grown(record.reservation_id, *claim.key, record.growth), now)
            self._claims.learn_again(claim, record, now)
        if live and record.lease is not None:
            self._desk.sign_of_life(record.lease.lease_id, now)
        if claim.dead:  # its owner has missed the end of it
            self._claims.say_later(Ended(claim.reservation_id, *claim.key))
        self.resolver.resolve(claim.reservation_id, now)

    def _grown(self, view: View, item: Grown, now: float, *, live: bool = False) -> None:
        key = item.owner, item.born
        owners = self._claims.sets.get(item.owner)
        claim = None if owners is None else owners.find(item.reservation_id, item.born)
        if claim is None:
            self._claims.grow_early(key, item.growth, view.router_id, now)
        names = {key} if claim is None else claim.names
        for kin in self._claims.kin_of(item.reservation_id, names):
            self._grows(view, kin, item.growth, now, live=live)

    def _grows(self, view: View, claim: Claim, growth: Growth, now: float, *, live: bool) -> None:
        news = claim.join(growth)
        if news and claim.owner == self._claims.router_id:
            self._claims.say_later(claim)  # for those who missed who said it to us
        elif news and claim.owner != view.router_id:
            claim.tellers = (claim.tellers or set()) | {view.router_id}
        if claim.booked:
            self.resolver.follow(claim, now)
        if news or live:  # a sign of life
            self.resolver.touch(claim, now)

    def _ended(self, view: View, item: Ended, now: float, *, live: bool = False) -> None:
        claims, key = self._claims, (item.owner, item.born)
        owners = claims.sets.get(item.owner)
        claim = None if owners is None else owners.find(item.reservation_id, item.born)
        by_owner = item.owner in (view.router_id, claims.router_id)
        if claim is None:
            claims.note_end(
                *(item.reservation_id, key, now),
                by_owner=by_owner,
                heir=item.heir,
                freed=item.freed,
            )
        elif item.heir is not None and not claim.dead:
            self._succeed(claim, claims.ends.living(item.heir), now)
            if not claims.sets[item.owner].holds(claim):
                return  # ours, and booking its heir has shown that its rank is not here
        kin = [] if claim is None else [claim]
        if item.freed:
            names = {key} if claim is None else claim.names
            kin += [one for one in claims.kin_of(item.reservation_id, names) if one is not claim]
        for one in kin:
            if one is claim or not one.dead:
                self._end(one, item, now, live=live, by_owner=by_owner and one is claim)
        if kin:
            self.resolver.resolve(item.reservation_id, now)

    def _end(self, claim: Claim, item: Ended, now: float, *, live: bool, by_owner: bool) -> None:
        claims = self._claims
        ours = claim.owner == claims.router_id
        if ours and live:  # a caller of theirs, who lives
            self.resolver.touch(claim, now)
        self.resolver.unbook(claim, now)
        heir = item.heir if claim.born == item.born else None
        if ours:
            claims.end_own(claim, now, heir=heir, freed=item.freed)
        else:
            claims.end(claim, now, by_owner=by_owner, heir=heir, freed=item.freed)
        if item.freed:
            claims.note_freed_before(claim, now)
        if by_owner and not ours:
            claims.forget(claim)

    def _succeed(self, claim: Claim, heir: Key | None, now: float) -> None:
        """A claim ends because somebody has adopted it: know that one's claim, heard or not.

        Else the reservation would be unknown here, although it lives, until that is heard. All but
        its terms follows from the old one; if it is over too, its owner does not have it.
        """
        if heir is None or heir[0] in (claim.owner, self._claims.router_id):
            return
        view = self._view_told_of(heir[0], now)
        if view is None or view.has_heard(heir[1]):
            return
        view.mentioned(heir[1], now, self._limits)
        record = msgspec.structs.replace(
            claim.succeeded(heir[1]),
            hashes=self.resolver.chain(claim),
            lease=self.leases.terms(claim),
        )
        self._claimed(view, record, now, told_of=True)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float, effects: Effects) -> bool:
        """Say what has to be said, note who is silent, settle and resolve a few; more to do?"""
        self._look_around(now)
        self._foreigners.fade(now)
        self.leases.tick(now)
        more = self._settle(now)
        claims = self._claims
        effects.published += claims.ready
        claims.ready.clear()
        claims.release_outputs(now)
        for _ in range(_BATCHES_PER_TURN):
            said = claims.batch(self._limits.replica_items_per_message_max)
            if said is None:
                break
            effects.published.append(said)
        if claims.unsaid_count:
            return True  # a heartbeat must not speak of what has not been said
        if self._beat_at is None or now - self._beat_at >= self._limits.replica_heartbeat_s:
            self._beat_at = now
            effects.published.append(self._heartbeat())
        claims.purge(now, self._limits.expired_per_turn_max)
        for view in self.views.values():
            if view.wants_pull(now, self._limits):
                view.pulling_since = now
                view.pulls += 1
                effects.pulls.append(Pull(view.peer, view.router_id, view.http_port, view.url))
        return more

    def leave(self) -> None:
        """Say with the next turn, and from then on, that we shall go."""
        self.is_leaving = True
        self._beat_at = None

    def last_word(self) -> Heartbeat:
        """Return what peers take for our end, behind all that `tick` had to say."""
        return msgspec.structs.replace(self._heartbeat(), left=True)

    def _heartbeat(self) -> Heartbeat:
        claims = self._claims
        self._beats += 1
        return Heartbeat(
            claims.router_id,
            claims.epoch,
            claims.seq,
            len(claims.own),
            claims.own.digest,
            self.http_port,
            self.url,
            self.is_leaving,
            number=self._beats,
        )

    def _look_around(self, now: float) -> None:
        for view in list(self.views.values()):
            silent_s = now - view.heard_at
            if not view.gone and silent_s > self._limits.replica_timeout_s:
                self._lose(view)
            long_ago = silent_s > self._limits.replica_ended_s and now >= view.bury_at
            if view.gone and not view.buried and long_ago:
                view.buried = True
                view.bury_at = now + self._limits.replica_timeout_s
                self._chores.append(self._bury(view))

    def _lose(self, view: View) -> None:
        """It is silent, or has said its last word: whoever is told of what it owns adopts that."""
        view.gone = True
        view.pulling_since = view.incoming = None
        self._claims.gone.add(view.router_id)
        self._chores.append(self._repeat_last_words())

    def _bury(self, view: View) -> Iterator[None]:
        """Forget one that has been gone for long, with all it owned that has no load any more."""
        for claim in list(view.claims.by_id.values()):
            if not view.gone:
                break
            known = view.claims.find(claim.reservation_id, claim.born) is claim
            if known and not claim.booked:
                self._claims.forget(claim)
            yield
        view.buried = False  # what is still booked has been cared for lately: come again
        if view.gone and not view.claims:
            del self.views[view.router_id], self._claims.sets[view.router_id]
            self._claims.gone.discard(view.router_id)

    def _repeat_last_words(self) -> Iterator[None]:
        for view in list(self.views.values()):
            yield from self._remind(view)

    def _remind(self, view: View) -> Iterator[None]:
        """What the gone said about its claims it may have missed, and cannot ask them again."""
        for number, claim in enumerate(list(view.claims.by_id.values())):
            if view.gone:  # it is reminded when it comes back
                break
            if claim.dead:
                self._claims.say_later(Ended(claim.reservation_id, *claim.key))
            elif claim.tellers and any(map(self._claims.is_silent, claim.tellers)):
                self._claims.say_later(claim)
            if number % _LOOKS_PER_STEP == 0:
                yield

    def _settle(self, now: float) -> bool:
        """Do a slice of what is left over; True while there is more."""
        claims = self._claims
        budget = self._limits.replica_resolved_per_turn_max
        while budget > 0 and self._chores:
            budget -= 1
            if next(self._chores[0], self) is self:
                self._chores.pop(0)
        for _ in range(min(len(claims.homeless), budget)):
            self.resolver.again[claims.homeless.pop()] = None
        while budget > 0 and self.resolver.again:
            budget -= 1
            name = next(iter(self.resolver.again))
            del self.resolver.again[name]
            self.resolver.resolve(name, now)
        return bool(self.resolver.again or self._chores or claims.homeless)

    # -- snapshots -----------------------------------------------------------------------------

    def snapshot(self, now: float) -> Iterator[SnapshotPart]:
        """Yield what we know; what changes between two parts has a number above the head's.

        Claims of publishers we do not hear either go along: who asks may have come too late. One
        that restarts under another name is back before anybody calls the old one gone, hence two
        heartbeats.
        """
        claims = self._claims
        silent_since = now - 2 * self._limits.replica_heartbeat_s
        self.counters.snapshots_given += 1
        own = list(claims.own.by_id.values())
        yield SnapshotHead(claims.router_id, claims.epoch, claims.seq)
        given = 0
        for claim in own:
            if not claim.dead:
                given += 1
                yield self._record(claim)
        yield from claims.ends.retold()
        for view in list(self.views.values()):
            for claim in list(view.claims.by_id.values()):
                if claim.dead:
                    continue
                if not claim.aged and (view.gone or view.heard_at < silent_since):
                    yield Hearsay(claim.owner, self._record(claim))
                elif claim.noted:
                    yield Grown(claim.reservation_id, *claim.key, claim.growth())
        yield from self.leases.retold(now)
        yield SnapshotEnd(given)

    def _record(self, claim: Claim) -> ClaimRecord:
        return msgspec.structs.replace(
            claim.record,
            hashes=self.resolver.chain(claim),
            growth=claim.growth(),
            lease=self.leases.terms(claim),
        )

    def begin(self, router_id: int, head: SnapshotHead, now: float) -> bool:
        """A snapshot comes in; False when it is not whose we asked for."""
        view = self.views.get(router_id)
        if view is None or head.router_id != router_id or view.pulling_since is None:
            return False
        view.pulling_since = now
        view.incoming = Incoming(head.seq)
        return True

    def part(self, router_id: int, part: SnapshotPart, now: float) -> None:
        """Take in one part of it."""
        view = self.views.get(router_id)
        if view is None or view.incoming is None:
            return
        view.pulling_since = now  # it goes on
        if isinstance(part, SnapshotEnd):
            view.incoming.promised = part.claims
        elif isinstance(part, ClaimRecord):
            view.incoming.seen.add(part.born)
            if self._claims.ends.is_word_of_owner((router_id, part.born)):
                # its state was put back to what it was before that: somebody must remind it
                self._claims.say_later(Ended(part.reservation_id, router_id, part.born))
            self._claimed(view, part, now)
        elif isinstance(part, Grown):
            self._grown(view, part, now)
        elif isinstance(part, Ended):
            self._ended(view, part, now)
        elif isinstance(part, Renewed):
            self.leases.renewed(part, now)
        elif isinstance(part, Hearsay):
            self._hearsay(view, part, now)

    def _hearsay(self, teller: View, part: Hearsay, now: float) -> None:
        """Believe what is said about somebody we do not hear ourselves."""
        owner = part.owner
        view = self.views.get(owner)
        if owner == self._claims.router_id or (view is not None and not view.gone):
            claim = part.claim  # they are heard here, but what became of it may be news
            grown = Grown(claim.reservation_id, owner, claim.born, claim.growth)
            self._grown(teller, grown, now)
            return
        view = self._view_told_of(owner, now)
        if view is not None:
            self._claimed(view, part.claim, now, told_of=True)
            known = view.claims.find(part.claim.reservation_id, part.claim.born)
            if known is not None and part.claim.growth != _NOTHING:
                # the owner may not know, and the teller be gone by the time it is back
                known.tellers = (known.tellers or set()) | {teller.router_id}

    def _view_told_of(self, router_id: int, now: float) -> View | None:
        """Return what is known of a publisher that others have heard; to us it may be gone."""
        view = self.views.get(router_id)
        if view is None:
            if len(self.views) >= self._limits.replica_publishers_max:
                self.counters.publishers_refused += 1
                return None
            view = self._open_view(router_id, 1, now)
            view.gone = True
            view.doubt()
            self._claims.gone.add(router_id)
        return view

    def end(self, router_id: int, now: float, *, complete: bool) -> None:
        """It has come to its end, or has broken off."""
        view = self.views.get(router_id)
        if view is None:
            return
        incoming = view.incoming
        if not complete or incoming is None or incoming.promised != len(incoming.seen):
            view.pulled(None, now, self._limits)
            return
        view.incoming = None
        self._chores.append(self._forget_unseen(view, incoming, now))

    def _forget_unseen(self, view: View, incoming: Incoming, now: float) -> Iterator[None]:
        """What the publisher owned before the snapshot, and not in it, has ended."""
        for number, claim in enumerate(list(view.claims.by_id.values())):
            if claim.born <= incoming.seq and claim.born not in incoming.seen:
                if view.claims.find(claim.reservation_id, claim.born) is claim:
                    self._ended(view, Ended(claim.reservation_id, *claim.key), now)
                yield
            elif number % _LOOKS_PER_STEP == 0:
                yield
        view.pulled(incoming.seq, now, self._limits)

    # -- inspection ----------------------------------------------------------------------------

    def unsettled(self) -> list[str]:
        """Say in words what replicas have told, or tried to, that is not in the books yet."""
        behind = sum(one.state == "behind" for one in self.views.values())
        told = [f"statements of {behind} replica{'s' if behind > 1 else ''}"] if behind else []
        return [*told, "claims of replicas"] if self.resolver.again else told

    def status(self, now: float) -> list[ReplicaStatus]:
        """Return every publisher heard of, by router id."""
        rows = [
            ReplicaStatus(
                router_id=view.router_id,
                peer=view.peer,
                state=view.state,
                epoch=view.epoch,
                seq=view.high,
                missing=len(view.missing),
                claims=len(view.claims),
                unbooked=len(view.claims) - view.claims.tied,
                heard_s_ago=now - view.heard_at,
                pulls=view.pulls,
                pulls_failed=view.pulls_failed,
            )
            for view in self.views.values()
        ]
        rows += self._foreigners.status(now)
        return sorted(rows, key=lambda row: row.router_id)

    def check(self) -> None:
        """State every promise."""
        self._claims.check()
        for router_id, view in self.views.items():
            assert self._claims.sets[router_id] is view.claims
            view.claims.check()
            assert view.gone == (router_id in self._claims.gone)
        for view in self.views.values():
            for claim in view.claims.by_id.values():
                assert claim.owner == view.router_id
                assert not (claim.booked and self.resolver.seat(claim) is None)
                reservation = claim.reservation
                if claim.lease is not None and claim.booked and reservation is not None:
                    assert not reservation.ttl_s, "the copy of its lease watches its time"


def _speaker(message: ReplicaMessage) -> int:
    if isinstance(message, Heartbeat | Said):
        return message.router_id
    return 0 if message.event is None else message.event.router_id
