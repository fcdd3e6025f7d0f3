"""The real core as a router: the classes the server runs, one instance per replica.

Each replica has its own ledger. Bookings at one reach the others after `sync_delay_s`, in the
messages of the replica plane. All replicas get a worker's events at the same moment, so their
indexes would always be equal: they share one, which KV events enter through the methods the event
writer calls. Only bytes are left out: bodies, frames, the decoding of events. Requests are dealt to
the replicas in turn, and calls about a request go to its replica.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from indexer.core.packing import pack_names
from indexer.core.registry import StreamRegistry
from indexer.types import HASH_BYTES, WorkerRank
from select_service.core.admission.queue import Ticket
from select_service.core.effects import NOTHING
from select_service.core.service import ProcessLife, SelectionCore
from select_service.errors import ServiceError
from select_service.simulator.core.kv_events import Stored
from select_service.simulator.core.routers import Placed, Refused
from select_service.types import (
    CacheThreshold,
    CoreLimits,
    PairLeg,
    PairSelection,
    RouterConfig,
    Scope,
    SelectAndReserveRequest,
    Selection,
    SelectPairRequest,
    WorkerSpec,
)
from select_service.types.admission import AdmissionSettings
from select_service.types.workers import DrainRequest

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from indexer.core.index import KvIndex
    from indexer.types import PackedHashes
    from select_service.core.effects import Effects, Pull
    from select_service.core.replication.messages import ReplicaMessage
    from select_service.simulator.core.kv_events import KvEvent
    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.routers import Verdict
    from select_service.simulator.core.worker import EngineWorker
    from select_service.types import Answer, KvEvents

_SCOPE: Final = Scope("default", "default")
REPLICA_TICK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The server's settings, and the number of replicas."""

    config: RouterConfig = field(default_factory=RouterConfig)
    admission: AdmissionSettings | None = None
    replicas: int = 1
    sync_delay_s: float = 0.005
    session_ttl_s: float = 0.0  # 0: sessions have no worker of their own
    kv_events: KvEvents = "engine"  # otherwise workers send none


class _Registry(StreamRegistry):
    """The streams of one replica, on indexes shared by all.

    What a core itself does to an index (a rank comes, goes, is cleared; a sweep) is idempotent at
    the same moment, and all replicas learn of workers at the same moment.
    """

    def __init__(self, shared: dict[Scope, KvIndex]) -> None:
        super().__init__()
        self._shared = shared  # never dropped: a replica may want one back while others have it

    def open_index(self, scope: Scope, block_size: int, *, is_eagle: bool = False) -> KvIndex:
        """See Registry."""
        if self.index(scope) is None and scope in self._shared:
            self.adopt_index(scope, self._shared[scope])
        index = super().open_index(scope, block_size, is_eagle=is_eagle)
        self._shared[scope] = index
        return index


def _shown_to_nobody(_: PackedHashes) -> list[int]:
    """Replace the hash numbers in answers: a thousand per request, and never read."""
    return []


class _Replica:
    """One core and its inbox of messages from the others."""

    def __init__(
        self,
        number: int,
        settings: CoreSettings,
        rng: random.Random,
        indexes: dict[Scope, KvIndex],
    ) -> None:
        self.name = f"sim://{number}"
        self.router_id = number + 1 if settings.replicas > 1 else 0
        self.registry = _Registry(indexes)
        self.core = SelectionCore(
            self.registry,
            settings.config,
            rng,
            limits=CoreLimits(
                reservation_ttl_s=0.0,
                decision_ring=0,  # records of decisions cost time, and are not read here
                session_ttl_s=settings.session_ttl_s,
            ),
            life=ProcessLife(self.router_id),
            admission=settings.admission,
        )
        self.core.lifecycle.show_hashes = _shown_to_nobody
        self.inbox: deque[tuple[float, str, ReplicaMessage]] = deque()


class CoreRouter:
    """Chooses with the service's own core; see Router for the methods."""

    def __init__(self, settings: CoreSettings, rngs: Sequence[random.Random]) -> None:
        """Build the replicas.

        Args:
            settings: of all of them.
            rngs: one per replica, independent of each other.
        """
        assert len(rngs) == settings.replicas
        self.settings = settings
        self._indexes: dict[Scope, KvIndex] = {}
        self.replicas = [
            _Replica(number, settings, rng, self._indexes) for number, rng in enumerate(rngs)
        ]
        self._home: dict[str, _Replica] = {}  # by key, of booked and waiting requests
        self._waiting: dict[Ticket, str] = {}
        self._answered: list[tuple[str, Verdict]] = []
        self._has_pairs = False
        self._has_sessions = settings.session_ttl_s > 0.0  # otherwise session names are ignored
        self._turn = 0
        self._replica_ticked = -math.inf

    # -- workers -------------------------------------------------------------------------------

    def add(self, worker: EngineWorker, now: float) -> None:
        """See Router."""
        uses_events = self.settings.kv_events == "engine" and self.settings.config.use_kv_events
        spec = WorkerSpec(
            worker_id=worker.worker_id,
            endpoint=f"sim://{worker.worker_id}",
            block_size=worker.block_size,
            kv_events_endpoint=f"tcp://127.0.0.1:{1 + worker.worker_id}" if uses_events else None,
            max_num_batched_tokens=worker.settings.step_tokens_max,
            total_kv_blocks=worker.pool.capacity,
            max_num_seqs=worker.settings.sequences_max,
            role=None if worker.role == "aggregated" else worker.role,
            kv_events=None if uses_events else self.settings.kv_events,
        )
        self._has_pairs |= worker.role != "aggregated"
        for replica in self.replicas:
            self._did(replica, replica.core.workers.upsert_worker(spec, now)[1], now)

    def drain(self, worker_id: int, now: float) -> None:
        """See Router."""
        for replica in self.replicas:
            self._did(replica, replica.core.drains.drain(worker_id, DrainRequest(), now)[1], now)

    def remove(self, worker_id: int, now: float) -> None:
        """See Router."""
        for replica in self.replicas:
            self._did(replica, replica.core.workers.delete_worker(worker_id, now)[1], now)

    # -- requests ------------------------------------------------------------------------------

    def route(self, key: str, request: ClientRequest, now: float) -> Verdict | None:
        """See Router."""
        self._catch_up(now)
        replica = self.replicas[self._turn % len(self.replicas)]
        self._turn += 1
        index = replica.registry.index(_SCOPE)
        if index is None:
            return Refused("no_schedulable_worker")
        hashes = pack_names(request.blocks)[: request.isl // index.block_size * HASH_BYTES]
        groups = index.find_matches(hashes).groups
        best = max(groups)[0] if groups else 0
        kind = SelectPairRequest if self._has_pairs else SelectAndReserveRequest
        asked = kind(
            reservation_id=key,
            block_hashes=hashes,
            sequence_hashes=hashes,
            isl_tokens=request.isl,
            expected_output_tokens=request.expected_osl,
            slo_class=request.slo_class or None,
            slo_ttft_ms=None if request.slo_ttft_s is None else request.slo_ttft_s * 1e3,
            fairness_id=request.tenant or None,
            session_id=(request.session or None) if self._has_sessions else None,
        )
        try:
            answer, effects = replica.core.selection.select_and_reserve(asked, now)
        except ServiceError as refusal:
            return Refused(refusal.code)
        self._did(replica, effects, now)
        if isinstance(answer, Ticket):
            self._waiting[answer] = key
            self._home[key] = replica
            return None
        return self._verdict(key, answer, replica, best * index.block_size)

    def _verdict(
        self, key: str, answer: Answer, replica: _Replica, best_tokens: int | None = None
    ) -> Verdict:
        if isinstance(answer, CacheThreshold):
            return Refused("cache_threshold")
        self._home[key] = replica
        computes: Selection | PairLeg
        if isinstance(answer, PairSelection):
            first, computes = answer.prefill, answer.prefill or answer.decode
            computing = None if first is None else first.worker_id
            placed = Placed(answer.decode.worker_id, computing, answer.reason)
        else:
            computes, placed = answer, Placed(answer.worker_id, None, _reason(answer, best_tokens))
        source = computes.kv_source
        if not source:
            return placed
        held = computes.overlap.longest_matched // answer.block_size  # on all tiers of its one rank
        return placed._replace(
            source_worker_id=source.worker_id, pulled_blocks=held + source.blocks
        )

    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        """See Router."""
        replica = self._home.get(key)
        if replica is not None:
            self._catch_up(now)
            try:
                effects = replica.core.reservations.prefill_complete(key, now, cached_tokens)
            except ServiceError:
                return  # its worker was removed, and the booking with it
            self._did(replica, effects, now)

    def finished(self, key: str, now: float) -> None:
        """See Router."""
        replica = self._home.pop(key, None)
        if replica is not None:
            self._catch_up(now)
            try:
                effects = replica.core.reservations.free(key, now)
            except ServiceError:
                return
            self._did(replica, effects, now)

    # -- events of workers ---------------------------------------------------------------------

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        """See Router."""
        if self.settings.kv_events != "engine":
            return
        rank, index = WorkerRank(worker_id, 0), self._indexes.get(_SCOPE)
        if index is None or index.slot_of(rank) is None:
            return
        for event in events:
            if isinstance(event, Stored):
                blocks = event.blocks
                index.store(rank, event.tier, event.parent, blocks, pack_names(blocks))
            else:
                index.remove(rank, event.tier, event.blocks)

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """See Router."""
        self._catch_up(now)
        for replica in self.replicas:
            more = True
            while more:
                more, effects = replica.core.tick(now)
                self._did(replica, effects, now)

    def next_deadline(self) -> float:
        """See Router."""
        return min(replica.core.next_deadline() for replica in self.replicas)

    def answered(self) -> list[tuple[str, Verdict]]:
        """See Router."""
        answered, self._answered = self._answered, []
        return answered

    def _did(self, replica: _Replica, effects: Effects, now: float) -> None:
        if effects is NOTHING:
            return
        for ticket in effects.answered:
            key = self._waiting.pop(ticket)
            answer = ticket.answer
            if isinstance(answer, ServiceError) or answer is None:
                self._home.pop(key, None)
                code = "shutting_down" if answer is None else answer.code
                self._answered.append((key, Refused(code)))
            else:
                self._answered.append((key, self._verdict(key, answer, replica)))
        for message in effects.published:
            due = now + self.settings.sync_delay_s
            for other in self.replicas:
                if other is not replica:
                    other.inbox.append((due, replica.name, message))
        for pull in effects.pulls:
            self._pull(replica, pull, now)

    def _catch_up(self, now: float) -> None:
        """Deliver due messages to the replicas, and let them send what they deferred."""
        if len(self.replicas) == 1:
            return
        if now - self._replica_ticked >= REPLICA_TICK_S:
            self._replica_ticked = now
            for replica in self.replicas:
                more = True
                while more:
                    more, effects = replica.core.replica_operations.tick(now)
                    self._did(replica, effects, now)
        for replica in self.replicas:
            inbox = replica.inbox
            while inbox and inbox[0][0] <= now:
                due, peer, message = inbox.popleft()
                effects = replica.core.replica_operations.receive(peer, message, max(due, 0.0))
                if effects is not NOTHING:  # usually
                    self._did(replica, effects, now)

    def _pull(self, replica: _Replica, pull: Pull, now: float) -> None:
        source = next(one for one in self.replicas if one.name == pull.peer)
        parts = source.core.replica_operations.snapshot(now)
        head = next(parts)
        if not replica.core.replica_operations.snapshot_begin(pull, head, now):  # type: ignore[arg-type]
            return
        for part in parts:
            self._did(
                replica,
                replica.core.replica_operations.snapshot_part(pull.router_id, part, now),
                now,
            )
        ended = replica.core.replica_operations.snapshot_end(pull.router_id, now, complete=True)
        self._did(replica, ended, now)

    def check(self) -> None:
        """See Router."""
        for index in self._indexes.values():
            index.check()
        for replica in self.replicas:
            replica.core.check()
            for stream in replica.registry.streams():
                stream.check()
            assert all(self._indexes[scope] is one for scope, one in replica.registry.indexes())
            if not self._home and not replica.inbox:
                booked = len(replica.core.lifecycle.bookings)
                assert not booked, f"{booked} reservations are left in the ledger"


def _reason(answer: Selection, best_tokens: int | None) -> str:
    """Return the reason in short; `best_tokens` is the longest prefix on any worker."""
    if best_tokens is None:
        return "after waiting"
    if not best_tokens:
        return "no rank holds any"
    if answer.overlap.longest_matched >= best_tokens:
        return "longest prefix"
    return "load before prefix"
