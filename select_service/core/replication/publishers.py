"""All publishers heard of on the replica plane: present, lost, and to be forgotten.

A `SequenceTracker` says how far each has been heard. Their statements are not interpreted here.
Slices of work remind a returned publisher of what it may have missed, and clear what a lost one
leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.core.replication.claim import ClaimSet
from select_service.core.replication.messages import Ended
from select_service.core.replication.sequence_tracker import SequenceTracker
from select_service.types import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.replication.claims import Claims
    from select_service.types import CoreLimits

LOOKS_PER_STEP = 64
"""Claims visited in one step of a chore without being changed."""


class Publishers:
    """The views of all publishers, by router id."""

    def __init__(self, limits: CoreLimits, claims: Claims, chores: list[Iterator[None]]) -> None:
        self.views: dict[int, SequenceTracker] = {}
        self._limits = limits
        self._claims = claims
        self._counters = claims.counters
        self._chores = chores
        self._ages_at: float | None = 0.0  # when claims of absent workers age; None: now

    def heard_from(
        self, router_id: int, epoch: int, peer: str, now: float, *, checked: bool
    ) -> SequenceTracker | None:
        """Return the view of a sender; None: it is not listened to."""
        view = self.views.get(router_id)
        if view is None:
            view = self._open_view(router_id, epoch, now)
            if view is None:
                return None
        elif view.peer != peer and not view.gone:
            # a live publisher keeps its name: no other may end its claims
            self._counters.impostors += 1
            return None
        view.heard_at = now
        view.peer = peer
        view.checked = checked
        if view.gone:
            view.gone = False
            self._claims.gone.discard(router_id)
            view.doubt()  # we may have let its claims expire
            self._chores.append(self._remind(view))
        return view

    def relayed(self, router_id: int, now: float) -> SequenceTracker | None:
        """Return the view of a publisher that others have heard; to us it may be lost."""
        view = self.views.get(router_id)
        if view is None:
            view = self._open_view(router_id, 1, now)
            if view is not None:
                view.gone = True
                view.doubt()
                self._claims.gone.add(router_id)
        return view

    def _open_view(self, router_id: int, epoch: int, now: float) -> SequenceTracker | None:
        """Begin to listen to a publisher; None: there are as many as are remembered."""
        if len(self.views) >= self._limits.replica_publishers_max:
            self._counters.publishers_refused += 1
            return None
        claims = self._claims.sets.setdefault(router_id, ClaimSet())
        view = self.views[router_id] = SequenceTracker(router_id, epoch, claims, now)
        return view

    def look_around(self, now: float) -> None:
        """Mark silent publishers as lost, and bury those silent for long."""
        for view in list(self.views.values()):
            silent_s = now - view.heard_at
            if not view.gone and silent_s > self._limits.replica_timeout_s:
                self.lose(view)
            long_ago = silent_s > self._limits.replica_ended_s and now >= view.bury_at
            if view.gone and not view.buried and long_ago:
                view.buried = True
                view.bury_at = now + self._limits.replica_timeout_s
                self._chores.append(self._bury(view))
        if self._claims.gone and self._ages_at is not None and now >= self._ages_at:
            self._ages_at = None
            self._chores.append(self._age_unbooked(now))

    def _age_unbooked(self, now: float) -> Iterator[None]:
        """Age what lost publishers left on workers that are not here, as the ledger ages the rest.

        Claims under a lease age with it.
        """
        claims, default_s = self._claims, self._limits.replica_orphan_ttl_s
        for number, claim in enumerate(list(claims.waiting)):
            view = self.views.get(claim.owner)
            if view is not None and view.gone and claim.lease is None and not claim.dead:
                ttl_s = claims.copies.orphan_ttl(claim.record, default_s)
                if ttl_s and now - max(claim.touched, view.heard_at) >= ttl_s:
                    claims.age(claim)
                    claims.counters.orphans_expired += 1
            if number % LOOKS_PER_STEP == 0:
                yield
        self._ages_at = now + self._limits.replica_heartbeat_s

    def lose(self, view: SequenceTracker) -> None:
        """Mark a publisher as silent, or left: callers' lifecycle calls now adopt its claims."""
        view.gone = True
        view.pulling_since = view.incoming = None
        self._claims.gone.add(view.router_id)
        self._chores.append(self._repeat_last_words())

    def _bury(self, view: SequenceTracker) -> Iterator[None]:
        """Forget a long-lost publisher, with all its claims that have no load any more."""
        for claim in list(view.claims.by_id.values()):
            if not view.gone:
                break
            known = view.claims.find(claim.reservation_id, claim.born) is claim
            if known and not claim.booked:
                self._claims.forget(claim)
            yield
        view.buried = False  # remaining bookings were renewed lately: try again later
        if view.gone and not view.claims:
            del self.views[view.router_id], self._claims.sets[view.router_id]
            self._claims.gone.discard(view.router_id)

    def _repeat_last_words(self) -> Iterator[None]:
        for view in list(self.views.values()):
            yield from self._remind(view)

    def _remind(self, view: SequenceTracker) -> Iterator[None]:
        """Repeat statements of lost publishers about its claims: it may have missed them."""
        for number, claim in enumerate(list(view.claims.by_id.values())):
            if view.gone:  # it is reminded when it comes back
                break
            if claim.dead:
                self._claims.outbox.say_later(Ended(claim.reservation_id, *claim.key))
            elif claim.reporters and any(map(self._claims.is_silent, claim.reporters)):
                self._claims.outbox.say_later(claim)
            if number % LOOKS_PER_STEP == 0:
                yield

    def status(self, now: float) -> list[ReplicaStatus]:
        """Return the status of every publisher of our own kind."""
        return [
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

    def check(self) -> None:
        """Assert all invariants."""
        for router_id, view in self.views.items():
            assert self._claims.sets[router_id] is view.claims
            view.claims.check()
            assert view.gone == (router_id in self._claims.gone)
            assert all(claim.owner == router_id for claim in view.claims.by_id.values())
