"""Our side of the replica plane: sends what is due, and works off what is pending.

`apply_messages.py` handles peers' messages, `snapshots.py` their snapshots, `publishers.py` their
presence. The verbs call this module; the edge carries out the effects of a turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from select_service.core.effects import Effects, Pull
from select_service.core.replication.apply_messages import MessageApplier
from select_service.core.replication.messages import (
    CACHED_TOKENS_MAX,
    RANK_LOADS_MAX,
    SESSION_RANKS_MAX,
    CachedTokens,
    Heartbeat,
    RankLoads,
    SessionRanks,
)
from select_service.core.replication.publishers import Publishers
from select_service.core.replication.resolver import Resolver
from select_service.core.replication.shared_leases import SharedLeases
from select_service.core.replication.snapshots import ReplicaSnapshots

if TYPE_CHECKING:
    from select_service.core.membership import Membership
    from select_service.core.replication.claims import Claims
    from select_service.core.replication.load_book import CachedTokensBook, LoadBook, SessionBook
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.types import CoreLimits, ReplicaStatus

_BATCHES_PER_TURN = 4


class Replicas:
    """All replicas, as seen by this process."""

    def __init__(
        self,
        limits: CoreLimits,
        claims: Claims,
        lifecycle: Lifecycle,
        membership: Membership,
        *,
        reports: LoadBook,
        cached_tokens: CachedTokensBook,
        sessions: SessionBook,
    ) -> None:
        self.counters = claims.counters
        self.http_port = 0
        self.url: str | None = None
        self.is_leaving = False
        self.resolver = Resolver(claims, lifecycle, membership, self.counters)
        self.leases = SharedLeases(limits, claims, lifecycle, self.resolver)
        self._chores = self.leases.chores  # long work, done in slices
        self.publishers = Publishers(limits, claims, self._chores)
        parts = self.publishers, self.resolver, self.leases
        self.message_applier = MessageApplier(
            limits,
            claims,
            lifecycle,
            *parts,
            reports=reports,
            cached_tokens=cached_tokens,
            sessions=sessions,
        )
        self.snapshots = ReplicaSnapshots(
            limits, claims, self.publishers, self.message_applier, self.resolver, self.leases
        )
        self._limits = limits
        self._claims = claims
        self._beat_at: float | None = None
        self._beats = 0
        self._reports, self._cached_tokens, self._sessions = reports, cached_tokens, sessions
        self._reported = 0  # messages of reports sent
        self._listeners: set[tuple[int, int]] = set()  # replicas that were sent what we knew

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float, effects: Effects) -> bool:
        """Do one turn: detect silence, settle, send, beat, request pulls; True: more to do."""
        self.publishers.look_around(now)
        self.message_applier.dynamo_peers.tick(now)
        self.leases.tick(now)
        more = self._settle(now)
        claims = self._claims
        effects.published += claims.take_ready()
        claims.outbox.release_outputs(now)
        for _ in range(_BATCHES_PER_TURN):
            said = claims.batch(self._limits.replica_items_per_message_max)
            if said is None:
                break
            effects.published.append(said)
        if claims.outbox:
            return True  # a heartbeat must not count statements that were not sent
        if self._beat_at is None or now - self._beat_at >= self._limits.replica_heartbeat_s:
            self._beat_at = now
            effects.published.append(self._heartbeat())
            self._greet_newcomers(now)
        more |= self._tell_reports(now, effects)
        claims.purge(now, self._limits.expired_per_turn_max)
        for view in self.publishers.views.values():
            if view.wants_pull(now, self._limits):
                view.asks(now)
                effects.pulls.append(Pull(view.peer, view.router_id, view.http_port, view.url))
        return more

    def _greet_newcomers(self, now: float) -> None:
        """Tell all load reports and sessions to replicas that came or restarted.

        They know us by the heartbeat before. One that comes under another name is back before its
        old one counts as lost; hence the two heartbeats.
        """
        views, silent_since = self.publishers.views, now - 2 * self._limits.replica_heartbeat_s
        alive = {(name, view.epoch) for name, view in views.items() if not view.gone}
        if not alive <= self._listeners:
            self._reports.queue_all()
            speak = {name for name, _ in alive if views[name].heard_at >= silent_since}
            self._chores.append(self._sessions.queue_all(speak, now))
        self._listeners = alive

    def _tell_reports(self, now: float, effects: Effects) -> bool:
        """Publish the reports received here since the last turn; True: there may be more."""
        router_id, epoch = self._claims.router_id, self._claims.outbox.epoch
        for _ in range(_BATCHES_PER_TURN):
            ranks = self._reports.take_unsent(now, RANK_LOADS_MAX)
            found = self._cached_tokens.take_unsent(CACHED_TOKENS_MAX)
            sessions = self._sessions.take_unsent(SESSION_RANKS_MAX)
            if not (ranks or found or sessions):
                return False
            if ranks:
                self._reported += 1
                effects.published.append(RankLoads(router_id, epoch, self._reported, ranks))
            if found:
                self._reported += 1
                effects.published.append(CachedTokens(router_id, epoch, self._reported, found))
            if sessions:
                self._reported += 1
                effects.published.append(SessionRanks(router_id, epoch, self._reported, sessions))
        return True

    def leave(self) -> None:
        """Announce from the next turn on that we are leaving."""
        self.is_leaving = True
        self._beat_at = None

    def last_word(self) -> Heartbeat:
        """Return the message that peers take for our end; send it after all that `tick` sends."""
        return msgspec.structs.replace(self._heartbeat(), left=True)

    def _heartbeat(self) -> Heartbeat:
        claims = self._claims
        self._beats += 1
        return Heartbeat(
            claims.router_id,
            claims.outbox.epoch,
            claims.outbox.seq,
            len(claims.own),
            claims.own.digest,
            self.http_port,
            self.url,
            self.is_leaving,
            number=self._beats,
        )

    def _settle(self, now: float) -> bool:
        """Do a slice of the pending work; True while there is more."""
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

    # -- inspection ----------------------------------------------------------------------------

    def unsettled(self) -> list[str]:
        """Return, in words, which statements of replicas are not in the books yet."""
        behind = sum(one.state == "behind" for one in self.publishers.views.values())
        missing = [f"statements of {behind} replica{'s' if behind > 1 else ''}"] if behind else []
        return [*missing, "claims of replicas"] if self.resolver.again else missing

    def status(self, now: float) -> list[ReplicaStatus]:
        """Return every known publisher, by router id."""
        rows = self.publishers.status(now) + self.message_applier.dynamo_peers.status(now)
        return sorted(rows, key=lambda row: row.router_id)

    def check(self) -> None:
        """Assert all invariants."""
        self._claims.check()
        self.publishers.check()
        for view in self.publishers.views.values():
            for claim in view.claims.by_id.values():
                assert not (claim.booked and self.resolver.place_of(claim) is None)
                reservation = claim.reservation
                if claim.lease is not None and claim.booked and reservation is not None:
                    assert not reservation.ttl_s, "the copy of its lease watches its time"
