"""Workers enter, change and leave: the effect on partitions, load and event listeners (1.5).

The catalog judges a record alone; here it meets its scope: the pinned block size, the ranks that
stay or go, the event sources that are new. Reservations that lose their rank are counted.
`verbs/registering.py` calls it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

from indexer.types import Scope, WorkerRank
from select_service.core.books.drain_meter import PRIOR_TOKENS_PER_S
from select_service.core.effects import Listen
from select_service.core.fleet.catalog import (
    Worker,
    bad_sources,
    missing_parts,
    reconciliation_failed,
)
from select_service.core.fleet.pins import Pins
from select_service.core.partition import Partition
from select_service.core.pricing.policy import PolicyBook, PolicyError
from select_service.errors import scope_text
from select_service.types import CoreLimits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.registry import Registry
    from indexer.core.stream import EventStream
    from select_service.core.effects import Effects
    from select_service.types import TrustSettings


class _Source(NamedTuple):
    stream: EventStream
    endpoint: str
    replay_endpoint: str | None
    curve_key: str | None


class Membership:
    """Every partition that ever had a schedulable worker, and every open event source."""

    def __init__(
        self,
        registry: Registry,
        policies: PolicyBook | PolicyError,
        *,
        use_kv_events: bool,
        limits: CoreLimits | None = None,
        cache_hit_threshold: float = 0.0,
        prefill_tokens_per_s: float = PRIOR_TOKENS_PER_S,
        trust: TrustSettings | None = None,
    ) -> None:
        self.registry = registry
        self.partitions: dict[Scope, Partition] = {}
        self._in_order: list[Scope] = []  # of the partitions; sorting a thousand takes 1 ms
        self._policies = policies
        self._use_kv_events = use_kv_events
        self.cache_hit_threshold = cache_hit_threshold  # of the process
        self._prefill_tokens_per_s = prefill_tokens_per_s  # of a rank, until it is measured
        self.is_watched = False  # whether decisions are kept, in partitions opened from now on
        self._follows_queues = False
        self._trust = trust  # when an index counts for less
        self._sources: dict[WorkerRank, _Source] = {}
        self._limits = limits or CoreLimits()
        self.scopes_refused = 0  # worker records that would have opened one too many
        self.scopes_closed = 0
        self.pins = Pins()
        self._empty: dict[Scope, float] = {}  # scopes without workers, since when

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

    def judge(self, worker: Worker) -> None:
        """Set lifecycle and reasons of a record that is about to enter its scope."""
        reasons = missing_parts(worker, use_kv_events=self._use_kv_events)
        if not reasons:
            reasons = self._clashes(worker)
        worker.reasons = reasons
        worker.lifecycle = "incomplete" if reasons else "schedulable"
        if worker.drain is not None and not reasons:
            worker.lifecycle = "draining"
            worker.reasons = [f"draining: {worker.drain}" if worker.drain else "draining"]

    def _clashes(self, worker: Worker) -> list[str]:
        where = scope_text(worker.scope)
        wanted, eagle = worker.spec.block_size, bool(worker.spec.is_eagle)
        pinned, is_known = self._pinned(worker.scope)
        if pinned is not None and pinned[0] != wanted:
            # the reference's comma, if the scope is known from a dump only
            comma = "" if is_known else ","
            sizes = f"existing={pinned[0]}{comma} requested={wanted}"
            why = f"block_size mismatch for {where}: {sizes}"
            return [reconciliation_failed(why)]
        if is_known and pinned is not None and pinned[1] != eagle:
            existing, requested = str(pinned[1]).lower(), str(eagle).lower()
            why = f"is_eagle mismatch for {where}: existing={existing} requested={requested}"
            return [reconciliation_failed(why)]
        most = self._limits.scopes_max
        if worker.scope not in self.partitions and len(self.partitions) >= most:
            self.scopes_refused += 1
            return [reconciliation_failed(f"{most} scopes are open, no more may be (--scopes-max)")]
        if self._use_kv_events and (bad := bad_sources(worker)):
            return bad
        if isinstance(self._policies, PolicyError):
            return [reconciliation_failed(str(self._policies))]
        return []

    def _pinned(self, scope: Scope) -> tuple[tuple[int, bool] | None, bool]:
        """Return a scope's pinned block size and is_eagle, and whether a worker pinned them."""
        index = self.registry.index(scope)
        if index is not None:
            return (index.block_size, index.is_eagle), scope in self.partitions
        pin = self.pins.get(scope)
        return pin, pin is not None

    def close_if_empty(self, scope: Scope, partition: Partition, now: float) -> bool:
        """Close a scope that had no worker for `--scope-linger-s`; its pins are kept.

        Nobody waits there, nothing is booked, and the index is empty, so a request finds the same
        in a scope that does not exist.

        Returns:
            Whether it was closed.
        """
        if partition.seating.present or partition.pending_count or not partition.ledger.is_swept:
            self._empty.pop(scope, None)
            return False
        index = partition.index
        if now - self._empty.setdefault(scope, now) < self._limits.scope_linger_s or (
            index.ranks() or index.stats.unswept or partition.ledger.live
        ):
            return False
        self._close_partition(scope, partition)
        return True

    def _close_partition(self, scope: Scope, partition: Partition) -> None:
        del self.partitions[scope], self._empty[scope]
        del self._in_order[bisect_left(self._in_order, scope)]
        partition.lookout = None  # it refers to its partition: break the cycle
        self.pins.put(scope, partition.index.block_size, is_eagle=partition.index.is_eagle)
        self.registry.drop_index(scope)
        self.scopes_closed += 1

    def replace(self, old: Worker | None, new: Worker | None, effects: Effects) -> int:
        """Replace `old` by `new`; either may be None or have no seat.

        Ranks that exist before and after in the same scope keep load and index; an unchanged event
        source keeps its stream. Everything else of `old` is dropped.

        Returns:
            How many reservations lost their rank.
        """
        entering = new is not None and new.has_seat
        staying = (
            old is not None
            and new is not None
            and entering
            and bool(old.slots)
            and old.scope == new.scope
        )
        dropped = 0
        if old is not None and old.slots:
            kept = new.ranks if staying and new is not None else range(0)
            dropped = self._unseat(old, kept, effects, keep=staying)
        if new is not None and entering:
            self._seat(new, old if staying else None, effects)
        return dropped

    def _unseat(self, worker: Worker, kept: range, effects: Effects, *, keep: bool) -> int:
        partition = self.partitions[worker.scope]
        dropped = 0
        for rank, slot in list(worker.slots.items()):
            if rank not in kept:
                at = WorkerRank(worker.worker_id, rank)
                dropped += partition.ledger.drop_slot(slot)
                partition.trust.forget(slot)
                # also a source that is still listed: its cursor must not outlive its blocks
                self._close(at, partition, effects)
                partition.index.detach(at)
                del worker.slots[rank]
        if not keep:
            for rank in worker.event_sources:
                self._close(WorkerRank(worker.worker_id, rank), partition, effects)
            partition.unseat(worker)
        return dropped

    def _seat(self, worker: Worker, before: Worker | None, effects: Effects) -> None:
        partition = self.partitions.get(worker.scope) or self._open_partition(worker)
        partition.seat(worker)
        if not self._use_kv_events:
            return
        wanted = worker.event_sources
        if before is not None:
            for rank in before.event_sources:
                if rank not in wanted:
                    self._close(WorkerRank(worker.worker_id, rank), partition, effects)
        for rank, endpoint in sorted(wanted.items()):
            self._follow(worker, rank, endpoint, partition, effects)

    def _follow(
        self, worker: Worker, rank: int, endpoint: str, partition: Partition, effects: Effects
    ) -> None:
        """Listen to a rank's source; an unchanged source keeps its stream and cursor."""
        at = WorkerRank(worker.worker_id, rank)
        replay, key = worker.spec.replay_endpoint, worker.spec.curve_public_key
        source = self._sources.get(at)
        if source is not None:
            if source[1:] == (endpoint, replay, key):
                source.stream.worker_ranks = worker.ranks
                return
            self._close(at, partition, effects)
        stream = self.registry.open_stream(
            worker.scope, at, worker_ranks=worker.ranks, has_replay=replay is not None
        )
        self._sources[at] = _Source(stream, endpoint, replay, key)
        effects.listen.append(Listen(stream, endpoint, replay, key))

    def _close(self, at: WorkerRank, partition: Partition, effects: Effects) -> None:
        """Stop listening, and forget what the source said about its rank."""
        source = self._sources.pop(at, None)
        if source is None:
            return
        self.registry.close_stream(source.stream)
        effects.unlisten.append(source.stream)
        if partition.index.slot_of(at) is None:
            return
        partition.index.clear(at)
        slot = partition.index.slot_of(at)
        if slot is not None:
            partition.trust.forget(slot)  # the distrust was of another source's index
        worker = partition.seating.present.get(at.worker_id)
        if worker is None or at.dp_rank not in worker.ranks:
            partition.index.detach(at)  # a listener's rank that was not selectable

    def _open_partition(self, worker: Worker) -> Partition:
        block_size = worker.spec.block_size
        assert block_size, "judged schedulable"
        assert isinstance(self._policies, PolicyBook), "judged schedulable"
        recovered = self.registry.index(worker.scope)
        if recovered is not None:
            recovered.is_eagle = bool(worker.spec.is_eagle)  # a dump does not say; the worker does
        index = self.registry.open_index(
            worker.scope, block_size, is_eagle=bool(worker.spec.is_eagle)
        )
        policy = self._policies.policy_for(worker.scope.model_name)
        partition = Partition(
            *(worker.scope, index, policy),
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            trust=self._trust,
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
        """Assert all invariants: sources belong to seated workers, partitions are consistent."""
        assert self._in_order == sorted(self.partitions)
        for partition in self.partitions.values():
            partition.check()
        for at, source in self._sources.items():
            assert not source.stream.closed
            worker = self.partitions[source.stream.scope].seating.present[at.worker_id]
            assert worker.event_sources[at.dp_rank] == source.endpoint
