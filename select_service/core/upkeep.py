"""Periodic work of each scope, for some scopes per turn.

An idle scope costs some µs, and there may be thousands: they are visited in rounds, second by
second. A scope with work left gets a turn every time, so that it need not wait until all others
were visited. `service.py` calls it in `tick`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.core.round_robin import RoundRobinNames
from select_service.core.effects import RankEjection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from indexer.types import Scope
    from select_service.core.decisions.trust_monitor import TrustMonitor
    from select_service.core.effects import Effects
    from select_service.core.membership import Membership
    from select_service.core.operations.waiting_requests import WaitingRequests
    from select_service.core.partition import Partition
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.types import CoreLimits


class Upkeep:
    """Visits the scopes: dropped and expired reservations, waiting requests, empty scopes."""

    def __init__(
        self,
        limits: CoreLimits,
        lifecycle: Lifecycle,
        waiting_requests: WaitingRequests,
        membership: Membership,
        trust_monitor: TrustMonitor,
    ) -> None:
        self._limits = limits
        self._lifecycle = lifecycle
        self._waiting_requests = waiting_requests
        self._membership = membership
        self._trust_monitor = trust_monitor
        self._open = membership.partitions
        self._round_robin: RoundRobinNames[Scope] = RoundRobinNames(limits.scopes_per_turn_max)
        self._rechecked_at: float | None = None
        self._rechecks = False

    def go_on(self, may_expire: int, now: float, effects: Effects) -> bool:
        """Look after the next scopes.

        Returns:
            Whether more is to be done at once: scopes of this round, or work in one.
        """
        if self._round_robin.is_new:
            # waiting requests are checked periodically, even if nothing happened
            last = now if self._rechecked_at is None else self._rechecked_at
            self._rechecks = now - last >= self._limits.queue_recheck_s
            self._rechecked_at = now if self._rechecks else last
        for partition in self._waiting_requests.unfinished:
            self._round_robin.has_more(partition.scope)
        self._look_after(self._round_robin.turn(lambda: self._open), may_expire, now, effects)
        return not self._round_robin.is_over or bool(self._waiting_requests.unfinished)

    def _look_after(
        self, scopes: Iterable[Scope], may_expire: int, now: float, effects: Effects
    ) -> None:
        may_drop = self._limits.dropped_per_turn_max
        for scope in scopes:
            partition = self._open.get(scope)
            if partition is None:  # it was closed meanwhile
                continue
            partition.drainage.follow()
            partition.demand.fade(now)
            may_drop -= self._lifecycle.sweep(partition, may_drop, now)
            expired = self._lifecycle.expire(partition, may_expire, now, effects)
            may_expire -= expired
            changes = partition.outliers.advance(now)
            for change in changes:
                at = partition.index.rank_of(change.slot)
                if at is not None:
                    effects.ejected.append(RankEjection(at, partition.scope, change))
            if self._waiting_requests.go_on(partition) or expired or self._rechecks or changes:
                self._waiting_requests.relieve(partition, now, effects)
            self._waiting_requests.look_on(partition, now, effects)
            ledger = partition.ledger
            if (
                partition.estimate.keep(now, self._limits.expired_per_turn_max)
                or self._keep_gate(partition, now, effects)
                or not ledger.is_swept
                or ledger.next_expiry() <= now
            ):
                self._round_robin.has_more(scope)
            effects.trusted += self._trust_monitor.look_at(partition)
            self._membership.close_if_empty(scope, partition, now)

    def _keep_gate(self, partition: Partition, now: float, effects: Effects) -> bool:
        """Continue judging requests that waited under another policy; True if some are left."""
        admission = partition.admission
        if admission is None:
            return False
        admission.refresh(now)
        if admission.waiting_count:
            limit = self._limits.judged_per_turn_max
            self._waiting_requests.judge_again(partition, now, limit, effects)
        return bool(admission.displaced)
