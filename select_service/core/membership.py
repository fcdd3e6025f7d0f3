"""Workers enter, change and leave: the effect on partitions, load and event listeners.

The catalog judges a record alone; here it meets its scope: the pinned block size, the ranks that
stay or go, the event sources that are new. Reservations that lose their rank are counted.
`operations/registration.py` calls it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.types import Scope, WorkerRank
from select_service.core.effects import Listen
from select_service.core.fleet.catalog import (
    Worker,
    bad_sources,
    missing_parts,
    reconciliation_failed,
)
from select_service.core.fleet.outliers import OutlierTally
from select_service.core.fleet.pins import Pins
from select_service.core.ledger.cache_estimate import CacheEstimate
from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S
from select_service.core.partition import Partition
from select_service.core.pricing.policy import PolicyBook, PolicyError
from select_service.core.tenancy.shares import Shares
from select_service.errors import scope_text
from select_service.types import CoreLimits, RouterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from indexer.core.registry import StreamRegistry
    from indexer.core.stream import EventStream
    from select_service.core.effects import Effects
    from select_service.core.tenancy.shares import Bound
    from select_service.types import TrustSettings


_LOOKED_AT_MAX: Final = 4
"""Scopes without workers that are looked at to close one, when its place is needed."""


class _Source(NamedTuple):
    stream: EventStream
    endpoint: str
    replay_endpoint: str | None
    curve_key: str | None


class Lost(NamedTuple):
    """Reservations that lost their rank: all that a slot had."""

    partition: Partition
    slot: int
    reservations: int


def _is_used(partition: Partition) -> bool:
    """Whether anybody is or waits in a scope, or anything is booked there."""
    return bool(
        partition.fleet_slots.present or partition.pending_count or not partition.ledger.is_swept
    )


def _is_clean(partition: Partition) -> bool:
    """Whether nothing is left in a scope without workers."""
    index = partition.index
    return not (index.ranks() or index.stats.unswept or partition.ledger.live)


def _no_more(bound: Bound, tenant_id: str, things: str, setting: str) -> str:
    """Return why a tenant may open no more of these."""
    share = bound.refuse(tenant_id)
    if share is None:
        return f"{bound.most} {things} are open, no more may be ({setting})"
    return f"no more {things} may be open: {share.text}"


class Membership:
    """Every partition that ever had a schedulable worker, and every open event source."""

    def __init__(
        self,
        registry: StreamRegistry,
        policies: PolicyBook | PolicyError,
        *,
        limits: CoreLimits | None = None,
        cache_hit_threshold: float = 0.0,
        prefill_tokens_per_s: float = PRIOR_TOKENS_PER_S,
        trust: TrustSettings | None = None,
        shares: Shares | None = None,
        config: RouterConfig | None = None,
    ) -> None:
        self.registry = registry
        self._config = config or RouterConfig()
        self.partitions: dict[Scope, Partition] = {}
        self._in_order: list[Scope] = []  # of the partitions; sorting a thousand takes 1 ms
        self._policies = policies
        self.cache_hit_threshold = cache_hit_threshold  # of the process
        self._prefill_tokens_per_s = prefill_tokens_per_s  # of a rank, until it is measured
        self.is_watched = False  # whether decisions are kept, in partitions opened from now on
        self._follows_queues = False
        self._trust = trust  # when an index counts for less
        self.outlier_tally = OutlierTally()
        self._sources: dict[WorkerRank, _Source] = {}
        self._limits = bounds = limits or CoreLimits()
        shares = shares or Shares(bounds)
        self._scopes_of = shares.bound("scopes_max", lambda: bounds.scopes_max)
        # as many again may have just lost their last worker: what they held is to be swept first
        self._emptied_of = shares.bound("emptied_scopes", lambda: bounds.scopes_max)
        self._sources_of = shares.bound("event_sources_max", lambda: bounds.event_sources_max)
        self._estimates_of = shares.bound(
            "kv_estimate_blocks_max", lambda: bounds.kv_estimate_blocks_max
        )
        self.sources_refused = 0  # worker records that would have opened too many
        self.on_closed: Callable[[Partition], None] = lambda _: None
        """Called with a scope's partition after it has been closed."""
        self.scopes_refused = 0  # worker records that would have opened one too many
        self.scopes_closed = 0
        self.pins = Pins(shares)
        self.waiting_to_pin: dict[int, Scope] = {}
        """Incomplete workers, whose scope has another block size or EAGLE setting as long as it has
        other workers, in the order in which they were judged."""
        self._empty: dict[Scope, float] = {}  # scopes without workers, since when
        # the same, by tenant, as soon as the last worker has gone
        self._vacated: dict[str, dict[Scope, None]] = {}

    def scopes(self, model_name: str | None = None, tenant_id: str | None = None) -> list[Scope]:
        """Return the existing scopes in order, filtered by model, tenant, both or neither."""
        if model_name is None and tenant_id is None:
            return self._in_order.copy()
        return [
            scope
            for scope in self._in_order
            if model_name in {None, scope.model_name} and tenant_id in {None, scope.tenant_id}
        ]

    def streams_of(self, worker: Worker) -> list[EventStream]:
        """Return the open event streams of a worker, by rank."""
        return [
            self._sources[at].stream
            for rank in sorted(worker.event_sources)
            if (at := WorkerRank(worker.worker_id, rank)) in self._sources
        ]

    def doubtful_streams(self) -> dict[int, list[EventStream]]:
        """Return the open event streams in doubt, by worker id and then by rank."""
        found: dict[int, list[EventStream]] = {}
        for rank, source in self._sources.items():
            if source.stream.kv_state == "uncertain":
                found.setdefault(rank.worker_id, []).append(source.stream)
        for streams in found.values():
            streams.sort(key=lambda stream: stream.rank.dp_rank)
        return found

    def stream_at(self, rank: WorkerRank) -> EventStream | None:
        """Return the open event stream of a rank, if it has its own."""
        source = self._sources.get(rank)
        return None if source is None else source.stream

    def streams(self) -> list[EventStream]:
        """Return the open event streams of all ranks."""
        return self.registry.streams()  # nothing else opens any, and copying 1,000 is one step

    def sources(self) -> Iterator[tuple[EventStream, str, str | None]]:
        """Yield every open stream with its endpoint and its replay endpoint."""
        return (source[:3] for source in list(self._sources.values()))

    def judge(
        self, worker: Worker, before: Worker | None = None, *, is_patch: bool = False
    ) -> None:
        """Set lifecycle and reasons of a record that is about to enter its scope.

        `before` is the one that it replaces; the room of its scope and its event sources is
        free. A patch does not change what its own worker has pinned.
        """
        self.waiting_to_pin.pop(worker.worker_id, None)
        reasons = missing_parts(worker)
        if not reasons:
            reasons = self._differs(worker, is_patch=is_patch) or self._clashes(worker, before)
        worker.reasons = reasons
        worker.lifecycle = "incomplete" if reasons else "schedulable"
        if worker.drain is not None and not reasons:
            worker.lifecycle = "draining"
            worker.reasons = worker.drain_reasons

    def _differs(self, worker: Worker, *, is_patch: bool) -> list[str]:
        """Return why a record does not go with its scope's block size and EAGLE setting."""
        scope, partition = worker.scope, self.partitions.get(worker.scope)
        index = self.registry.index(scope)
        if index is None:
            return []
        where, is_known = scope_text(scope), partition is not None
        wanted, eagle = worker.spec.block_size, bool(worker.spec.is_eagle)
        if index.block_size != wanted:
            # the reference's comma, if the scope is known from a dump only
            comma = "" if is_known else ","
            sizes = f"existing={index.block_size}{comma} requested={wanted}"
            why = f"block_size mismatch for {where}: {sizes}"
        elif is_known and index.is_eagle != eagle:
            existing, requested = str(index.is_eagle).lower(), str(eagle).lower()
            why = f"is_eagle mismatch for {where}: existing={existing} requested={requested}"
        else:
            return []
        if self.unpin(scope):
            return []
        own = {worker.worker_id}
        if not is_patch or partition is None or partition.fleet_slots.present.keys() != own:
            self.waiting_to_pin[worker.worker_id] = scope
        return [reconciliation_failed(why)]

    def unpin(self, scope: Scope) -> bool:
        """Let the next worker pin a scope; False while it has workers, or what they left behind.

        A scope known from a dump only is free once its ranks have been given up.
        """
        partition = self.partitions.get(scope)
        if partition is None:
            return self.registry.index(scope) is None
        if _is_used(partition):
            return False
        partition.index.sweep(self._limits.swept_nodes_per_turn_max)
        if not _is_clean(partition):
            return False
        self._close_partition(scope, partition)
        return True

    def _clashes(self, worker: Worker, before: Worker | None) -> list[str]:
        crowded = self._crowded(worker, before)
        if crowded is not None:
            return [reconciliation_failed(crowded)]
        if bad := bad_sources(worker):
            return bad
        if isinstance(self._policies, PolicyError):
            return [reconciliation_failed(str(self._policies))]
        return []

    def _crowded(self, worker: Worker, before: Worker | None) -> str | None:
        """Return why there is no room for a worker's scope or its event sources, None if it is."""
        scope, tenant = worker.scope, worker.scope.tenant_id
        partition = self.partitions.get(scope)
        if partition is None or not partition.fleet_slots.present:
            may_open = partition is not None or self._emptied_of.has_room(tenant)
            if not may_open:
                self._make_room(tenant)
                may_open = self._emptied_of.has_room(tenant)
            left, vacates = tenant, False
            if before is not None and before.slots:
                left = before.scope.tenant_id
                there = self.partitions[before.scope].fleet_slots.present
                vacates = before.scope != scope and len(there) == 1
            if not may_open or not self._scopes_of.may_move(left, vacates, tenant, 1):
                self.scopes_refused += 1
                return _no_more(self._scopes_of, tenant, "scopes", "--scopes-max")
        count, held, left = len(worker.event_sources), 0, tenant
        if before is not None:
            left = before.scope.tenant_id
            held = sum(
                WorkerRank(worker.worker_id, rank) in self._sources for rank in before.event_sources
            )
        if not self._sources_of.may_move(left, held, tenant, count):
            self.sources_refused += 1
            return _no_more(self._sources_of, tenant, "event sources", "--event-sources-max")
        return None

    def close_if_empty(self, scope: Scope, partition: Partition, now: float) -> bool:
        """Close a scope that had no worker for `--scope-linger-s`.

        Nothing waits or is booked there, and the index is empty, so a request finds the same
        in a scope that does not exist.

        Returns:
            Whether it was closed.
        """
        if _is_used(partition):
            self._empty.pop(scope, None)
            return False
        is_over = len(self.partitions) > self._limits.scopes_max
        lingers = now - self._empty.setdefault(scope, now) < self._limits.scope_linger_s
        if (lingers and not is_over) or not _is_clean(partition):
            return False
        self._close_partition(scope, partition)
        return True

    def _make_room(self, tenant_id: str) -> None:
        """Close a scope without workers now, one of this tenant if it has any. O(1).

        Whatever goes is looked at in turn: what it held may still have to be swept.
        """
        vacated = self._vacated.get(tenant_id) or next(iter(self._vacated.values()), {})
        for scope in list(islice(vacated, _LOOKED_AT_MAX)):
            partition = self.partitions[scope]
            partition.index.sweep(self._limits.swept_nodes_per_turn_max // _LOOKED_AT_MAX)
            if not _is_used(partition) and _is_clean(partition):
                self._close_partition(scope, partition)
                return
            vacated[scope] = vacated.pop(scope)  # another one next time

    def _vacant(self, scope: Scope) -> None:
        self._vacated.setdefault(scope.tenant_id, {})[scope] = None
        self._emptied_of.take(scope.tenant_id)

    def _no_longer_vacant(self, scope: Scope) -> None:
        vacated = self._vacated.get(scope.tenant_id)
        if vacated is not None and scope in vacated:
            del vacated[scope]
            self._emptied_of.give(scope.tenant_id)
            if not vacated:
                del self._vacated[scope.tenant_id]

    def _close_partition(self, scope: Scope, partition: Partition) -> None:
        del self.partitions[scope]
        self._empty.pop(scope, None)
        self._no_longer_vacant(scope)
        del self._in_order[bisect_left(self._in_order, scope)]
        partition.fleet_snapshot = None  # it refers to its partition: break the cycle
        self.pins.put(scope, partition.index.block_size, is_eagle=partition.index.is_eagle)
        self.registry.drop_index(scope)
        self.scopes_closed += 1
        self.on_closed(partition)

    def replace(
        self, old: Worker | None, new: Worker | None, effects: Effects, now: float
    ) -> list[Lost]:
        """Replace `old` by `new`; either may be None or have no slot.

        Ranks that exist before and after in the same scope keep load and index; an unchanged event
        source keeps its stream. Everything else of `old` is dropped, also what was learnt of an
        engine at another endpoint.

        Returns:
            The slots whose reservations lost their rank.
        """
        if new is None and old is not None:
            self.waiting_to_pin.pop(old.worker_id, None)
        entering = new is not None and new.has_slot
        staying = (
            old is not None
            and new is not None
            and entering
            and bool(old.slots)
            and old.scope == new.scope
        )
        dropped: list[Lost] = []
        if old is not None and old.slots:
            kept = new.ranks if staying and new is not None else range(0)
            dropped = self._detach(old, kept, effects, keep=staying)
            if staying and new is not None and new.spec.endpoint != old.spec.endpoint:
                for slot in old.slots.values():
                    self.partitions[old.scope].replace_engine(slot, now)
        if new is not None and entering:
            self._attach(new, old if staying else None, effects)
        return dropped

    def _detach(self, worker: Worker, kept: range, effects: Effects, *, keep: bool) -> list[Lost]:
        partition = self.partitions[worker.scope]
        dropped: list[Lost] = []
        for rank, slot in list(worker.slots.items()):
            if rank not in kept:
                at = WorkerRank(worker.worker_id, rank)
                dropped.append(Lost(partition, slot, partition.ledger.drop_slot(slot)))
                partition.estimate.drop(slot)
                partition.trust.forget(slot)
                partition.outliers.forget(slot)
                # also a source that is still listed: its cursor must not outlive its blocks
                self._close(at, partition, effects)
                partition.index.detach(at)
                del worker.slots[rank]
        if not keep:
            for rank in worker.event_sources:
                self._close(WorkerRank(worker.worker_id, rank), partition, effects)
            partition.detach(worker)
            if not partition.fleet_slots.present:
                self._scopes_of.give(worker.scope.tenant_id)
                self._vacant(worker.scope)
        return dropped

    def _attach(self, worker: Worker, before: Worker | None, effects: Effects) -> None:
        partition = self.partitions.get(worker.scope) or self._open_partition(worker)
        if not partition.fleet_slots.present:
            self._scopes_of.take(worker.scope.tenant_id)
            self._no_longer_vacant(worker.scope)
        partition.attach(worker)
        wanted = worker.event_sources
        if before is not None:
            for rank in before.event_sources:
                if rank not in wanted:
                    self._close(WorkerRank(worker.worker_id, rank), partition, effects)
        replays, key = worker.replay_sources, worker.spec.curve_public_key
        for rank, endpoint in sorted(wanted.items()):
            where = (endpoint, replays.get(rank), key)
            self._follow(worker, rank, where, partition, effects)

    def _follow(
        self,
        worker: Worker,
        rank: int,
        where: tuple[str, str | None, str | None],
        partition: Partition,
        effects: Effects,
    ) -> None:
        """Listen to a rank's source; an unchanged source keeps its stream and cursor."""
        at = WorkerRank(worker.worker_id, rank)
        endpoint, replay, key = where
        source = self._sources.get(at)
        in_full = worker.reports_in_full
        if source is not None:
            # what was counted under the other mode is asked for anew
            if source[1:] == where and source.stream.reports_in_full == in_full:
                source.stream.worker_ranks = worker.ranks
                return
            self._close(at, partition, effects)
        stream = self.registry.open_stream(
            worker.scope,
            at,
            worker_ranks=worker.ranks,
            has_replay=replay is not None,
            reports_in_full=in_full,
        )
        self._sources[at] = _Source(stream, endpoint, replay, key)
        self._sources_of.take(worker.scope.tenant_id)
        effects.listen.append(Listen(stream, endpoint, replay, key))

    def _close(self, at: WorkerRank, partition: Partition, effects: Effects) -> None:
        """Stop listening, and forget what the source reported about its rank."""
        source = self._sources.pop(at, None)
        if source is None:
            return
        self._sources_of.give(partition.scope.tenant_id)
        self.registry.close_stream(source.stream)
        effects.unlisten.append(source.stream)
        if partition.index.slot_of(at) is None:
            return
        partition.index.clear(at)
        slot = partition.index.slot_of(at)
        if slot is not None:
            partition.trust.forget(slot)  # the distrust was of another source's index
        worker = partition.fleet_slots.present.get(at.worker_id)
        if worker is None or at.dp_rank not in worker.ranks:
            partition.index.detach(at)  # a listener's rank that was not selectable

    def _open_partition(self, worker: Worker) -> Partition:
        block_size = worker.spec.block_size
        assert block_size, "judged schedulable"
        assert isinstance(self._policies, PolicyBook), "judged schedulable"
        if len(self.partitions) >= self._limits.scopes_max:
            self._make_room(worker.scope.tenant_id)
        recovered = self.registry.index(worker.scope)
        if recovered is not None:
            recovered.is_eagle = bool(worker.spec.is_eagle)  # a dump does not say; the worker does
        index = self.registry.open_index(
            worker.scope, block_size, is_eagle=bool(worker.spec.is_eagle)
        )
        policy = self._policies.policy_for(worker.scope.model_name)
        partition = Partition(
            worker.scope,
            index,
            policy,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            trust=self._trust,
            limits=self._limits,
            outliers=self.outlier_tally,
            estimate=CacheEstimate(
                self._limits, bound=self._estimates_of, tenant_id=worker.scope.tenant_id
            ),
            config=self._config,
        )
        partition.holds_to_cache = self.cache_hit_threshold > 0.0
        partition.is_watched = self.is_watched
        partition.ledger.follow_queues(self._follows_queues)
        self.partitions[worker.scope] = partition
        insort(self._in_order, worker.scope)
        self.pins.discard(worker.scope)
        return partition

    def follow_queues(self, wanted: bool) -> None:  # noqa: FBT001 - a switch
        """Make ledgers follow queues, because prices or a recording need them, or stop it."""
        if wanted is not self._follows_queues:
            self._follows_queues = wanted
            for partition in self.partitions.values():
                partition.ledger.follow_queues(wanted)

    def check(self) -> None:
        """Assert all invariants: sources belong to attached workers, partitions are consistent."""
        assert self._in_order == sorted(self.partitions)
        vacant = {at for at, one in self.partitions.items() if not one.fleet_slots.present}
        assert vacant == {scope for one in self._vacated.values() for scope in one}
        self._scopes_of.check(at.tenant_id for at in self.partitions.keys() - vacant)
        self._emptied_of.check(at.tenant_id for at in vacant)
        self._sources_of.check(one.stream.scope.tenant_id for one in self._sources.values())
        self.pins.check()
        for partition in self.partitions.values():
            partition.check()
        for at, source in self._sources.items():
            assert not source.stream.closed
            worker = self.partitions[source.stream.scope].fleet_slots.present[at.worker_id]
            assert worker.event_sources[at.dp_rank] == source.endpoint
