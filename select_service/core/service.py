"""Every public verb of the service, pure: typed request and `now` in, (answer, Effects) out.

The operations are methods of the objects that `SelectionCore` holds (`workers`, `selection`,
`reservations`, `admission`, `queries` and so on); the driver calls them there. This file only has
the time, which concerns all of them, and the state that outlives the process.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from select_service.core.admission.cache_hits import CacheHits
from select_service.core.admission.controller import AdmissionController
from select_service.core.batches.batch_selection import BatchSelection
from select_service.core.changes import (
    ADMISSION,
    CLAIM,
    CLOSING,
    CONFIG,
    END,
    LEASE,
    LEASE_TERMS,
    PEER,
    RESERVATION,
    SESSION,
    THRESHOLD,
    WORKER,
    Changes,
)
from select_service.core.counters import Counters
from select_service.core.decisions.cached_tokens import CachedTokenReports
from select_service.core.decisions.decision_log import DecisionLog
from select_service.core.decisions.shadow import ShadowControl
from select_service.core.decisions.trust_monitor import TrustMonitor
from select_service.core.dict_compaction import DictCompaction, all_tables
from select_service.core.effects import Effects
from select_service.core.fleet.catalog import Catalog
from select_service.core.fleet.recovered_ranks import RecoveredRanks
from select_service.core.fleet.unschedulable import UnschedulableWorkers
from select_service.core.instrumentation.instrumented import CoreObservers
from select_service.core.membership import Membership
from select_service.core.operations.admission_control import AdmissionControl
from select_service.core.operations.drain import Drain
from select_service.core.operations.pair_selection import PairSelector
from select_service.core.operations.queries import Queries
from select_service.core.operations.registration import Registration
from select_service.core.operations.replica_operations import ReplicaOperations
from select_service.core.operations.reservation_calls import ReservationCalls
from select_service.core.operations.scale_down import ScaleDown
from select_service.core.operations.waiting_requests import WaitingRequests
from select_service.core.pricing.policy import default_policy, overtaking
from select_service.core.replication.durable_rows import (
    ClaimRows,
    ClosedLeaseRows,
    LeaseTermsRows,
    TombstoneRows,
)
from select_service.core.replication.plane import Replicas
from select_service.core.reservations.lifecycle import Lifecycle
from select_service.core.reservations.pairs import Pairs
from select_service.core.reservations.session_section import SessionSection
from select_service.core.reservations.sessions import Sessions
from select_service.core.routing.place import Placer
from select_service.core.routing.read import RequestReader
from select_service.core.state import (
    AdmissionSection,
    LeaseSection,
    Overrides,
    PeerEndpoints,
    Reservations,
    State,
    ThresholdSection,
    Workers,
)
from select_service.core.tenancy.shares import Shares
from select_service.core.upkeep import Upkeep
from select_service.types import CoreLimits, TrustSettings
from select_service.types.admission import AdmissionSettings

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

    from indexer.core.registry import StreamRegistry
    from indexer.types import Scope, WorkerRank
    from select_service.core.partition import Partition
    from select_service.core.pricing.policy import PolicyBook, PolicyError
    from select_service.types import KvEventsDefault, RouterConfig
    from select_service.types.shadow import ShadowSettings


class ProcessLife(Struct, frozen=True):
    """Which process this is, and which of its lives."""

    router_id: int = 0
    """Not 0 if a replica plane is on, in which case bookings are published."""
    epoch: int = 1
    """The number of this life of the id, from 1."""
    first_decision: int = 1
    """Number of the first decision record; not used in an earlier life."""


class SelectionCore:
    """The whole state of one process, and the objects whose methods change it."""

    def __init__(
        self,
        registry: StreamRegistry,
        config: RouterConfig,
        rng: random.Random,
        *,
        policies: PolicyBook | PolicyError | None = None,
        limits: CoreLimits | None = None,
        admission: AdmissionSettings | None = None,
        trust: TrustSettings | None = None,
        life: ProcessLife | None = None,
        watch: CoreObservers | None = None,
    ) -> None:
        """Start empty.

        Args:
            registry: the index side; its streams feed the partitions opened here.
            config: weights and switches.
            rng: draws ties, temperatures and reservation ids.
            policies: parsed policy file, or why it cannot be used; None: one fcfs class.
            limits: bounds.
            admission: which requests are admitted; default: all.
            trust: when the index's data counts for less.
            life: identity of the process; default: first life without replicas.
            watch: observers; default: none.

        Raises:
            ValueError: the settings are invalid.
        """
        settings, trust = admission or AdmissionSettings(), trust or TrustSettings()
        life, watch = life or ProcessLife(), watch or CoreObservers()
        self.registry = registry
        self.limits = limits or CoreLimits()
        self.counters = Counters()
        self.shares = Shares(self.limits)
        """What each tenant may hold of every bound."""
        registry.budget.parts = self.shares
        kv_events: KvEventsDefault = config.kv_events_default if config.use_kv_events else "none"
        self.catalog = Catalog(self.limits, self.shares, kv_events_default=kv_events)
        self._rng = rng
        if watch.decision_recorder is not None:
            watch.decision_recorder.settings = settings
        self.membership = Membership(
            registry,
            policies or default_policy(config.queue_threshold, overtaking(config)),
            limits=self.limits,
            cache_hit_threshold=settings.cache_hit_threshold,
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
            trust=trust,
            shares=self.shares,
            config=config,
        )
        self.partitions = self.membership.partitions
        """Every scope that ever had a schedulable worker."""
        self.admission_controller = AdmissionController(
            settings=settings,
            catalog=self.catalog,
            partitions=self.partitions,
            limits=self.limits,
            shares=self.shares,
        )
        self.membership.on_closed = self._forget
        self._open_books(trust, life, watch)
        self.reader = RequestReader(
            config=config,
            partitions=self.partitions,
            pins=self.membership.pins,
            held_back=UnschedulableWorkers(self.catalog),
            limits=self.limits,
            rng=rng,
        )
        self.shadow_control = ShadowControl(config, self.partitions, watch.stopwatch)
        # a recording must show what any other policy would have done
        self._prices_queues = (
            watch.decision_recorder is not None or self.reader.weights.reads_queues
        )
        self.membership.follow_queues(self._prices_queues)
        self._open_line(config, watch)
        self._open_operations(watch)
        self._open_state()

    def _open_books(self, trust: TrustSettings, life: ProcessLife, watch: CoreObservers) -> None:
        """Create the stores: bookings, decisions, trust, replicas' messages."""
        limits = self.limits
        self.lifecycle = Lifecycle(
            limits=limits,
            counters=self.counters,
            router_id=life.router_id,
            epoch=life.epoch,
            shares=self.shares,
            tracer=watch.tracer,
            recorder=watch.decision_recorder,
        )
        self.decisions = DecisionLog(
            self.catalog,
            self.membership.stream_at,
            self.partitions,
            count_max=limits.decision_ring,
            bytes_max=limits.decision_ring_bytes,
            first=life.first_decision,
            shares=self.shares,
            recorder=watch.decision_recorder,
        )
        self.membership.is_watched = self.decisions.is_wanted
        self.trust_monitor = TrustMonitor(
            settings=trust,
            membership=self.membership,
            counters=self.counters,
            limits=limits,
        )
        self.cached_tokens = CachedTokenReports(
            membership=self.membership,
            bookings=self.lifecycle.bookings,
            counters=self.counters,
            shares=self.shares,
            limits=limits,
            may_be_known_elsewhere=self.lifecycle.may_be_known_elsewhere,
        )
        self.lifecycle.on_ended = self.cached_tokens.note_ended
        self.sessions = self.lifecycle.sessions = Sessions(self.limits, self.shares)
        self.sessions.is_shared = self.lifecycle.announcer.is_on
        self.replicas = Replicas(
            limits=limits,
            claims=self.lifecycle.announcer.claims,
            lifecycle=self.lifecycle,
            membership=self.membership,
            reports=self.admission_controller.reports,
            cached_tokens=self.cached_tokens,
            sessions=self.sessions,
        )
        self.recovered = RecoveredRanks(
            self.registry, self.partitions, unclaimed_s=limits.recovery_unclaimed_s
        )

    def _open_line(self, config: RouterConfig, watch: CoreObservers) -> None:
        """Set up the line of a request: what selects, places, and lets wait."""
        rng = self._rng
        self.pairs = Pairs(self.lifecycle, self.counters)
        cache_hits = CacheHits(self.admission_controller.settings)
        pair_selector = PairSelector(
            pairs=self.pairs,
            cache_hits=cache_hits,
            counters=self.counters,
            rng=rng,
        )
        placer = self.selection = Placer(
            reader=self.reader,
            controller=self.admission_controller,
            lifecycle=self.lifecycle,
            cache_hits=cache_hits,
            pair_selector=pair_selector,
            decisions=self.decisions,
            counters=self.counters,
            rng=rng,
            trace_decisions=watch.trace_decisions,
            tracer=watch.tracer,
            recorder=watch.decision_recorder,
        )
        placer.filters.sessions = self.sessions
        self.waiting_requests = WaitingRequests(
            placer=placer,
            lifecycle=self.lifecycle,
            controller=self.admission_controller,
            counters=self.counters,
            limits=self.limits,
        )
        placer.admitter.waiting_requests = self.waiting_requests

    def _open_operations(self, watch: CoreObservers) -> None:
        """Create the operations, grouped by what they concern."""
        self.workers = Registration(
            catalog=self.catalog,
            membership=self.membership,
            lifecycle=self.lifecycle,
            replicas=self.replicas,
            reader=self.reader,
            limits=self.limits,
            controller=self.admission_controller,
            waiting_requests=self.waiting_requests,
        )
        self.drains = Drain(
            catalog=self.catalog,
            partitions=self.partitions,
            registration=self.workers,
            waiting_requests=self.waiting_requests,
            replicas=self.replicas,
            counters=self.counters,
        )
        self.scale_down = ScaleDown(self.partitions)
        self.reservations = ReservationCalls(
            reader=self.reader,
            lifecycle=self.lifecycle,
            waiting_requests=self.waiting_requests,
            leases=self.replicas.leases,
            limits=self.limits,
            controller=self.admission_controller,
            pairs=self.pairs,
            cached_tokens=self.cached_tokens,
            outliers=self.membership.outlier_tally,
            counters=self.counters,
            decisions=self.decisions,
            new_id=self.selection.new_id,
        )
        self.batch_selection = BatchSelection(
            reader=self.reader,
            lifecycle=self.lifecycle,
            placer=self.selection,
            counters=self.counters,
            rng=self._rng,
            limits=self.limits,
            free=partial(self.reservations.free, outcome="cancelled", is_taken_back=True),
            withdraw=self.reservations.withdraw,
            recorder=watch.decision_recorder,
        )
        self.admission = AdmissionControl(
            controller=self.admission_controller,
            membership=self.membership,
            waiting_requests=self.waiting_requests,
            limits=self.limits,
        )
        self.queries = Queries(self.reader, self.membership)
        self.replica_operations = ReplicaOperations(self.replicas, self.waiting_requests)
        self._upkeep = Upkeep(
            limits=self.limits,
            lifecycle=self.lifecycle,
            waiting_requests=self.waiting_requests,
            membership=self.membership,
            trust_monitor=self.trust_monitor,
        )
        self.dict_compaction = DictCompaction(
            lambda: all_tables(self.registry, self.lifecycle, self.partitions)
        )

    def _open_state(self) -> None:
        """Register the tables that outlive the process."""
        self.peer_endpoints, self.overrides = PeerEndpoints(), Overrides()
        claims, leases = self.lifecycle.announcer.claims, self.replicas.leases
        self.state = State(
            {
                CONFIG: self.overrides,
                ADMISSION: AdmissionSection(self.admission_controller),
                THRESHOLD: ThresholdSection(self.admission_controller),
                WORKER: Workers(self.catalog, self.workers.restore),
                LEASE: LeaseSection(self.lifecycle.leases),
                PEER: self.peer_endpoints,
                END: TombstoneRows(claims),
                SESSION: SessionSection(self.sessions, self.partitions),
                RESERVATION: Reservations(
                    lifecycle=self.lifecycle,
                    catalog=self.catalog,
                    partitions=self.partitions,
                ),
                CLOSING: ClosedLeaseRows(claims, leases),
                LEASE_TERMS: LeaseTermsRows(claims),
                CLAIM: ClaimRows(claims, self.replicas.snapshots),
            }
        )

    def name_tenants(self, tenants: Iterable[str], *, others: bool) -> None:
        """Keep a part of every bound for each of these tenants from now on.

        `tenants` are those of the token file; `others`: callers of none of them may book or
        register.
        """
        self.shares.name(tenants, others=others)
        self.decisions.follow_tenants()
        if self.shares.parties:
            self.lifecycle.follow_tenants(self.partitions.values())

    def follow_shadow(self, settings: ShadowSettings | None, now: float) -> None:
        """Compare decisions with other weights from now on; None: stop."""
        shadow = self.selection.filters.shadow = self.shadow_control.follow(settings, now)
        looks = shadow is not None and shadow.weights.reads_queues
        self.membership.follow_queues(self._prices_queues or looks)

    # -- an index from a dump --------------------------------------------------------------------

    def note_recovered(self, ranks: Mapping[Scope, list[WorkerRank]], now: float) -> None:
        """Note that a dump was loaded: its ranks wait to be claimed by workers."""
        for scope, some in ranks.items():
            self.recovered.note(scope, some, now)

    def _forget(self, partition: Partition) -> None:
        """Let go of what is kept of a partition that was closed."""
        self.admission_controller.left(partition)
        self.cached_tokens.forget(partition)
        self.waiting_requests.forget(partition)

    def make_room(self, scope: Scope) -> None:
        """Grow a partition's columns, because its index has ranks without a worker."""
        partition = self.partitions.get(scope)
        if partition is not None:
            partition.ensure_columns()

    # -- time ----------------------------------------------------------------------------------

    def tick(self, now: float) -> tuple[bool, Effects]:
        """Do a bounded turn of housekeeping: dropped and expired reservations, old ids, the queue.

        Returns:
            (more, effects): `more` if another turn is due at once.
        """
        effects = Effects()
        limits = self.limits
        more = self.registry.sweep(limits.swept_nodes_per_turn_max)
        more |= self.lifecycle.bookings.freed.purge(now, limits.expired_per_turn_max) > 0
        more |= self.sessions.forget(now, limits.expired_per_turn_max)
        self.registry.weigh(limits.sources_weighed_per_turn_max)
        more |= self.recovered.age(now, limits.dropped_per_turn_max)
        may_expire = limits.expired_per_turn_max
        leases = self.lifecycle.leases
        leases.expire(now, may_expire)
        steps, lighter = self.lifecycle.clear_leases(may_expire, now, effects)
        may_expire -= steps
        more |= leases.purge_ended(now, limits.expired_per_turn_max) > 0
        more |= steps > 0 or leases.next_expiry() <= now
        for partition in lighter:  # only after what else is due has expired there, too
            self.waiting_requests.relieve_later(partition)
        more |= self._upkeep.go_on(may_expire, now, effects)
        self.workers.repin(now, effects)
        self.cached_tokens.purge(now)
        more |= self.trust_monitor.keep(now)
        effects.reread += self.trust_monitor.take_rereads()
        for partition in self.admission_controller.reports.age(
            now, self.admission_controller.settings
        ):
            self.waiting_requests.relieve_later(partition)
            more = True
        self.refuse_late(now, effects)
        self.dict_compaction.go_on(now)
        return more, effects

    def next_deadline(self) -> float:
        """When `refuse_late` will next have something to do; infinity: never, as things are."""
        return self.waiting_requests.next_deadline()

    def refuse_late(self, now: float, effects: Effects | None = None) -> Effects:
        """Refuse the first of the requests that have waited too long."""
        limit = self.limits.expired_per_turn_max
        return self.waiting_requests.refuse_late(
            now, limit, Effects() if effects is None else effects
        )

    # -- what outlives the process -----------------------------------------------------------------

    def keep_changes(self) -> Changes:
        """Record changes from now on, to be written to disk; see `core/state.py`."""
        changes = Changes()
        bookings = self.lifecycle.bookings
        self.catalog.changes = bookings.changes = bookings.freed.changes = changes
        self.lifecycle.leases.changes = self.peer_endpoints.changes = changes
        self.admission_controller.changes = self.overrides.changes = self.sessions.changes = changes
        claims = self.lifecycle.announcer.claims
        claims.endings.changes = claims.copies.changes = changes
        return changes

    def check(self) -> None:
        """Assert all invariants of the whole service."""
        self.catalog.check()
        self.sessions.check()
        self.lifecycle.bookings.check()
        self.lifecycle.leases.check()
        self.membership.check()
        self.replicas.check()
        self.decisions.check()
        self.waiting_requests.check(self.partitions.values())
        self.admission_controller.totals.check(
            one.gate for one in self.admission_controller.keepers()
        )
        live = sum(int(p.ledger.loads.requests.sum()) for p in self.partitions.values())
        assert live == len(self.lifecycle.bookings), (
            "every reservation has one id, and every id one"
        )
        assert self.reader.schedulable == sum(
            len(p.fleet_slots.workers) for p in self.partitions.values()
        )
