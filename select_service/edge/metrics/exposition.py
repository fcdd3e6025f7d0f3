"""GET /metrics: plain counters of the core and of the HTTP side, turned into Prometheus text.

Everything is read when somebody scrapes; no request pays for it. Series of a rank or scope exist
as long as its workers do. Labels are patterns, codes and registered names, never what a request
says. `app.py` makes one per app, with a registry of its own.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from indexer.compiled import kernels_in_use
from indexer.types import Tier
from select_service.edge.http.traffic import LATENCY_BUCKETS_S
from select_service.edge.metrics.admission import AdmissionMetrics
from select_service.edge.metrics.bounds import BoundsMetrics
from select_service.edge.metrics.decisions import DecisionMetrics
from select_service.edge.metrics.demand import DemandMetrics
from select_service.edge.metrics.doctor import DoctorMetrics
from select_service.edge.metrics.limits import limit_hits, limit_values
from select_service.edge.metrics.recording import RecordingMetrics
from select_service.edge.metrics.recovery import RecoveryMetrics
from select_service.edge.metrics.replicas import ReplicaMetrics
from select_service.edge.metrics.scope_series import groups_of, in_use
from select_service.edge.metrics.security import SecurityMetrics
from select_service.edge.metrics.shadow import ShadowMetrics
from select_service.edge.metrics.snapshots import SnapshotMetrics
from select_service.edge.metrics.state import StateMetrics
from select_service.edge.metrics.tracing import TracingMetrics
from select_service.edge.metrics.trust import TrustMetrics
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from indexer.core.stream import EventStream
    from indexer.core.tallies import Tallies
    from select_service.config import Settings
    from select_service.edge.driver import Driver
    from select_service.edge.http.traffic import RouteTraffic, Traffic
    from select_service.edge.metrics.scope_series import ScopeGroup
    from select_service.edge.reloading import Reloading

__all__ = ["Metrics"]

PREFIX: Final = "select_service_"
UNMATCHED: Final = ("other", "other")  # method and route of requests without a route
SCOPE: Final = ("model_name", "tenant_id")
RANK: Final = ("worker_id", "dp_rank", *SCOPE)
_LIFECYCLES: Final = ("incomplete", "schedulable", "draining", "unschedulable")
_STREAM_STATES: Final = ("silent", "current", "uncertain", "replaying")

_STREAM_COUNTERS: Final = (
    ("messages", "KV-event messages received live, good or bad."),
    ("batches", "KV-event batches applied, live or replayed."),
    ("blocks_stored", "Blocks in store events that were applied."),
    ("blocks_removed", "Blocks in removals that were applied."),
    ("stale_batches", "Batches that had been applied before."),
    ("gaps", "Times sequence numbers were missing."),
    ("lost_batches", "Batches that were never recovered."),
    ("restarts", "Engine restarts seen by the sequence number."),
    ("hidden_restarts", "Engine restarts seen only through a replay."),
    ("foreign_ranks", "Batches that named a rank the worker does not have."),
    ("replays_asked", "Replays asked for."),
    ("replayed_batches", "Batches applied from replays."),
)


class Metrics:
    """Renders /metrics for one app."""

    def __init__(
        self,
        service: Driver,
        traffic: Traffic,
        settings: Settings,
        reloading: Reloading | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Http(traffic))
        self._registry.register(_Service(service, settings))
        self._registry.register(AdmissionMetrics(service, PREFIX, settings))
        self._registry.register(DecisionMetrics(service, PREFIX))
        self._registry.register(DemandMetrics(service, PREFIX, settings))
        self._registry.register(TrustMetrics(service, PREFIX, settings))
        self._registry.register(ShadowMetrics(service, PREFIX, settings))
        self._registry.register(ReplicaMetrics(service, PREFIX))
        self._registry.register(RecoveryMetrics(service, PREFIX))
        self._registry.register(StateMetrics(service, PREFIX))
        self._registry.register(SnapshotMetrics(service, PREFIX))
        self._registry.register(RecordingMetrics(service, PREFIX))
        self._registry.register(SecurityMetrics(service, settings, PREFIX))
        self._registry.register(TracingMetrics(service, PREFIX))
        self._registry.register(DoctorMetrics(service, PREFIX))
        self._registry.register(BoundsMetrics(service, PREFIX, reloading))
        self._registry.register(_Limits(service, traffic, settings, reloading))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def families(self) -> Iterable[Metric]:
        """Return every family of series there is, also those that have no series yet."""
        return self._registry.collect()

    def render(self) -> tuple[bytes, str]:
        """Return (text, content type). A few microseconds per series, on the event loop."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def _counter(name: str, text: str, labels: Sequence[str] = ()) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=labels)


def _gauge(name: str, text: str, labels: Sequence[str] = ()) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


class _Http(Collector):
    """Requests and connections."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    @override
    def collect(self) -> Iterator[Metric]:
        labels = ("method", "route")
        requests = _counter("http_requests", "Requests answered.", (*labels, "status"))
        latency = HistogramMetricFamily(
            PREFIX + "http_request_duration_seconds",
            "From the end of the request head to the answer, waiting in the queue included.",
            labels=labels,
        )
        for names, stats in self._routes():
            for status, count in sorted(stats.statuses.items()):
                requests.add_metric([*names, str(status)], count)
            if stats.statuses:
                latency.add_metric(names, _cumulated(stats), stats.seconds)
        yield requests
        yield latency
        yield from self._connections()

    def _routes(self) -> Iterator[tuple[tuple[str, str], RouteTraffic]]:
        yield from self._traffic.routes.items()
        yield UNMATCHED, self._traffic.unmatched

    def _connections(self) -> Iterator[Metric]:
        counts = self._traffic.connections
        in_flight = _gauge("http_requests_in_flight", "Requests under way or waiting.")
        in_flight.add_metric((), self._traffic.in_flight)
        yield in_flight
        crashes = _counter("http_crashes", "Requests that failed through an error of ours.")
        crashes.add_metric((), self._traffic.crashes)
        yield crashes
        connections = _gauge("http_connections", "Open connections.")
        connections.add_metric((), counts.open)
        yield connections
        unread = _gauge("http_unread_bytes", "Bytes of answers that clients have yet to read.")
        unread.add_metric((), counts.unread_bytes)
        yield unread
        shaking = _gauge("tls_handshakes", "TLS handshakes under way.")
        shaking.add_metric((), counts.handshakes)
        yield shaking
        accepted = _counter("http_connections_accepted", "Connections accepted.")
        accepted.add_metric((), counts.accepted)
        yield accepted
        yield from self._console()
        cut = _counter("http_connections_cut", "Connections closed for a fault.", ("reason",))
        for reason in (
            "refused",
            "header_timeouts",
            "body_timeouts",
            "write_timeouts",
            "unread",
            "malformed",
        ):
            cut.add_metric([reason.removesuffix("s")], getattr(counts, reason))
        yield cut

    def _console(self) -> Iterator[Metric]:
        counts = self._traffic.console
        clients = _gauge("console_clients", "Pages of the console kept up to date.")
        clients.add_metric((), counts.clients)
        yield clients
        ended = _counter("console_clients_ended", "Pages sent away, by reason.", ("reason",))
        ended.add_metric(["refused"], counts.refused)
        ended.add_metric(["slow"], counts.dropped)
        yield ended
        rounds = _counter("console_rounds", "Times the console was told what is new.", ("outcome",))
        rounds.add_metric(["told"], counts.rounds)
        rounds.add_metric(["fault"], counts.faults)
        yield rounds


def _cumulated(stats: RouteTraffic) -> list[tuple[str, float]]:
    bounds = [*map(str, LATENCY_BUCKETS_S), "+Inf"]
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, stats.buckets, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


class _Service(Collector):
    """Catalog, load, index and event streams."""

    def __init__(self, service: Driver, settings: Settings) -> None:
        self._service = service
        self._rank_series_max = settings.metrics_rank_series_max
        self._scope_series_max = settings.metrics_scope_series_max

    @override
    def collect(self) -> Iterator[Metric]:
        build = _gauge("build_info", "Which build this is.", ("version",))
        build.add_metric([__version__], 1)
        yield build
        compiled = _gauge("compiled", "Kernels: 1 compiled, 0 their plain twin.", ("module",))
        for kernel, taken in kernels_in_use().items():
            compiled.add_metric([kernel], taken)
        yield compiled
        faults = _counter("housekeeping_faults", "Turns of housekeeping that failed by our error.")
        faults.add_metric((), self._service.housekeeping_faults)
        yield faults
        yield from self._dumps()
        yield from self._catalog()
        groups = groups_of(self._service.core, self._scope_series_max)
        yield from self._scopes()
        yield from self._selections(groups)
        yield from self._reservations(groups)
        yield from self._leases()
        yield from self._ranks()
        yield from self._indexes(groups)
        yield from self._streams()
        yield from self._events(groups)

    def _dumps(self) -> Iterator[Metric]:
        running = _gauge("dumps_running", "GET /dump under way.")
        running.add_metric((), self._service.dumps.running)
        yield running
        dumps = _counter("dumps", "GET /dump that ended, or were refused.", ("outcome",))
        for outcome, count in self._service.dumps.outcomes.items():
            dumps.add_metric([outcome], count)
        yield dumps

    def _catalog(self) -> Iterator[Metric]:
        workers = _gauge("workers", "Registered workers.", ("lifecycle",))
        lifecycles = [worker.lifecycle for worker in self._service.core.catalog]
        for lifecycle in _LIFECYCLES:
            workers.add_metric([lifecycle], lifecycles.count(lifecycle))
        yield workers
        core = self._service.core
        drains = _counter("drains", "Workers that were drained, or put back.", ("event",))
        drains.add_metric(["begun"], core.counters.drains_begun)
        drains.add_metric(["undone"], core.counters.drains_undone)
        yield drains
        left = _gauge("draining_reservations", "Live reservations of workers that drain.")
        drained = [worker.worker_id for worker in core.catalog if worker.drain is not None]
        left.add_metric((), sum(core.drain_status(one).reservations for one in drained))
        yield left

    def _scopes(self) -> Iterator[Metric]:
        count = len(in_use(self._service.core))
        scopes = _gauge("scopes", "Scopes with workers.")
        scopes.add_metric((), count)
        yield scopes
        unlisted = _gauge("scopes_unlisted", "Scopes summed up under `other`: too many.")
        unlisted.add_metric((), max(0, count - self._scope_series_max))
        yield unlisted

    def _selections(self, groups: Sequence[ScopeGroup]) -> Iterator[Metric]:
        counters = self._service.core.counters
        selections = _counter("selections", "Selections answered with a worker.")
        selections.add_metric((), counters.selections)
        yield selections
        for name, what, count in (
            ("selected_isl_tokens", "Tokens of their prompts.", counters.selected_isl_tokens),
            (
                "selected_prefill_tokens",
                "Of them, tokens the chosen worker had yet to compute.",
                counters.selected_prefill_tokens,
            ),
        ):
            family = _counter(name, what)
            family.add_metric((), count)
            yield family
        for name, what, count in (
            ("waves", "Waves of prompts, POST /select_batch.", counters.waves),
            ("wave_samples", "Samples in them.", counters.wave_samples),
            ("waves_undone", "Of all or none: none.", counters.waves_undone),
        ):
            family = _counter(name, what)
            family.add_metric((), count)
            yield family
        sessions = self._service.core.sessions
        gauge = _gauge("sessions", "Sessions whose next request goes where the last one went.")
        gauge.add_metric((), len(sessions))
        yield gauge
        for name, what, count in (
            ("sessions_expired", "Sessions silent for too long.", sessions.counters.expired),
            ("sessions_evicted", "Forgotten for later ones.", sessions.counters.evicted),
        ):
            family = _counter(name, what)
            family.add_metric((), count)
            yield family
        family = _counter("session_requests", "Requests with a session, by outcome.", ("outcome",))
        for outcome in ("begun", "kept", "moved_busy", "moved_ineligible", "released"):
            family.add_metric([outcome], getattr(sessions.counters, outcome))
        yield family
        waited = _counter("selections_queued", "Selections that had to wait for capacity.")
        waited.add_metric((), counters.selections_waited)
        yield waited
        withdrawn = _counter("selections_withdrawn", "Waiting selections whose client went.")
        withdrawn.add_metric((), counters.selections_withdrawn)
        yield withdrawn
        failed = _counter("selections_failed", "Selections that were refused.", ("code",))
        for code, count in sorted(counters.selections_failed.items()):
            failed.add_metric([code], count)
        yield failed
        for name, what, counts in (
            ("pairs", "Requests that may take a pair, by what they were given.", counters.pairs),
            ("advised", "Selections where workers have roles, by advice.", counters.advised),
        ):
            metric = _counter(name, what, ("mode", "reason"))
            for labels, count in sorted(counts.items()):
                metric.add_metric(labels, count)
            yield metric
        pending = _gauge("pending_requests", "Selections waiting for capacity.", SCOPE)
        tokens = _gauge("pending_isl_tokens", "Prompt tokens of waiting selections.", SCOPE)
        for scope, partitions, _ in groups:
            pending.add_metric(scope, sum(one.pending_count for one in partitions))
            tokens.add_metric(scope, sum(one.pending_isl_tokens for one in partitions))
        yield pending
        yield tokens

    def _reservations(self, groups: Sequence[ScopeGroup]) -> Iterator[Metric]:
        core = self._service.core
        live = _gauge("reservations", "Live reservations.", ("state", *SCOPE))
        for scope, partitions, _ in groups:
            prefilling = sum(one.ledger.prefilling for one in partitions)
            total = sum(one.ledger.live for one in partitions)
            live.add_metric(["prefill", *scope], prefilling)
            live.add_metric(["decode", *scope], total - prefilling)
        yield live
        freed = _gauge("freed_reservation_ids", "Ids of ended reservations still remembered.")
        freed.add_metric((), core.desk.bookings.freed_count)
        yield freed
        remembered = _gauge("remembered_bytes", "Memory of what has ended and is remembered.")
        bookings, claims = core.desk.bookings, core.desk.announcer.claims
        pins = core.membership.pins
        remembered.add_metric((), bookings.freed_bytes + claims.ended_bytes + pins.nbytes)
        yield remembered
        counters = core.counters
        ends = _counter("reservation_events", "What happened to reservations.", ("event",))
        for event in (
            *("booked", "repeated", "conflicting"),
            *("freed", "expired", "lease_ended", "dropped"),
        ):
            ends.add_metric([event], getattr(counters, f"reservations_{event}"))
        yield ends

    def _leases(self) -> Iterator[Metric]:
        leases = self._service.core.desk.leases
        opened = _gauge("leases", "Open leases.")
        opened.add_metric((), len(leases))
        yield opened
        ended = _gauge("ended_leases", "Ids of ended leases still remembered.")
        ended.add_metric((), leases.ended_count)
        yield ended
        events = _counter("lease_events", "What happened to leases.", ("event",))
        for event in ("opened", "renewed", "closed", "expired", "refused", "reopening"):
            events.add_metric([event], getattr(leases, event))
        yield events

    def _ranks(self) -> Iterator[Metric]:
        prefill = _gauge("rank_prefill_tokens", "Active prefill tokens of a rank.", RANK)
        decode = _gauge("rank_decode_blocks", "Active KV blocks of a rank.", RANK)
        requests = _gauge("rank_requests", "Live reservations of a rank.", RANK)
        ranks = 0
        for scope, partition in self._service.core.partitions.items():
            ledger = partition.ledger
            for rank, slot in partition.seating.seats():
                ranks += 1
                if ranks > self._rank_series_max:
                    continue
                labels = (str(rank.worker_id), str(rank.dp_rank), *scope)
                prefill.add_metric(labels, float(ledger.prefill[slot]))
                decode.add_metric(labels, float(ledger.decode[slot]))
                requests.add_metric(labels, float(ledger.requests[slot]))
        yield from (prefill, decode, requests)
        seats = _gauge("ranks", "Ranks of workers that are schedulable or drain.")
        seats.add_metric((), ranks)
        yield seats
        unlisted = _gauge("ranks_unlisted", "Ranks without series of their own: too many.")
        unlisted.add_metric((), max(0, ranks - self._rank_series_max))
        yield unlisted

    def _indexes(self, groups: Sequence[ScopeGroup]) -> Iterator[Metric]:
        nodes = _gauge("index_nodes", "Nodes of the radix tree.", SCOPE)
        blocks = _gauge("index_blocks", "Distinct blocks in the index.", SCOPE)
        holdings = _gauge("index_holdings", "(rank, block) pairs held.", (*SCOPE, "tier"))
        size = _gauge("index_bytes", "Memory of the index, estimated.", SCOPE)
        unswept = _gauge("index_unswept", "Removals put off and not done yet.", SCOPE)
        orphans = _gauge("index_orphan_blocks", "Blocks that wait for their parent.", SCOPE)
        dropped = _counter("index_orphan_blocks_dropped", "Orphans that gave way.", SCOPE)
        refused = _counter("index_events_refused", "Stores that contradict themselves.", SCOPE)
        for scope, partitions, _ in groups:
            stats = [one.index.stats for one in partitions]
            nodes.add_metric(scope, sum(one.nodes for one in stats))
            blocks.add_metric(scope, sum(one.blocks for one in stats))
            size.add_metric(scope, sum(one.bytes for one in stats))
            unswept.add_metric(scope, sum(one.unswept for one in stats))
            orphans.add_metric(scope, sum(one.orphan_blocks for one in stats))
            dropped.add_metric(scope, sum(one.orphan_blocks_dropped for one in stats))
            refused.add_metric(scope, sum(one.events_refused for one in stats))
            for tier in Tier:
                held = sum(one.holdings[tier] for one in stats)
                holdings.add_metric([*scope, tier.wire_name], held)
        yield from (nodes, blocks, holdings, size, unswept, orphans, dropped, refused)

    def _streams(self) -> Iterator[Metric]:
        by_state = _gauge("kv_listeners", "KV-event listeners.", ("state",))
        streams = self._service.core.registry.streams()
        states = [_state(stream) for stream in streams]
        for state in _STREAM_STATES:
            by_state.add_metric([state], states.count(state))
        yield by_state
        listener = _gauge("kv_listener_state", "1 for the state it is in.", (*RANK, "state"))
        lag = _gauge(
            "kv_listener_lag_seconds", "Age of the last KV event, by the engine's clock.", RANK
        )
        wall_now = time.time()  # noqa: TID251 - compared with the engines' wall clocks
        for stream, state in islice(zip(streams, states, strict=True), self._rank_series_max):
            labels = (str(stream.rank.worker_id), str(stream.rank.dp_rank), *stream.scope)
            listener.add_metric([*labels, state], 1)
            seconds = stream.lag(wall_now)
            if seconds is not None:
                lag.add_metric(labels, seconds)
        yield listener
        yield lag

    def _events(self, groups: Sequence[ScopeGroup]) -> Iterator[Metric]:
        tallies = [(one.scope, one.tallies) for one in groups]
        for name, text in _STREAM_COUNTERS:
            family = _counter(f"kv_{name}", text, SCOPE)
            for scope, tally in tallies:
                family.add_metric(scope, getattr(tally, name))
            yield family
        yield _labelled("kv_events", "KV events.", ("kind", "dialect", "outcome"), tallies)
        yield _labelled("kv_bad_messages", "Messages that are no batch.", ("reason",), tallies)
        yield _labelled("kv_replays", "Replays that have ended.", ("outcome",), tallies)


class _Limits(Collector):
    """Limits in force, and how often they were reached."""

    def __init__(
        self, service: Driver, traffic: Traffic, settings: Settings, reloading: Reloading | None
    ) -> None:
        self._service = service
        self._traffic = traffic
        self._settings = settings
        self._reloading = reloading

    @override
    def collect(self) -> Iterator[Metric]:
        values = _gauge("limit", "What a limit is set to.", ("name",))
        settings = self._settings if self._reloading is None else self._reloading.settings
        for name, value in limit_values(settings).items():
            values.add_metric([name], value)
        yield values
        orphans_dropped = self._service.core.registry.orphan_blocks_dropped
        hits = _counter("limit_hits", "Times a limit was reached, where counted.", ("name",))
        for name, count in limit_hits(self._service, self._traffic, orphans_dropped).items():
            hits.add_metric([name], count)
        yield hits


def _state(stream: EventStream) -> str:
    if stream.is_replaying:
        return "replaying"
    if stream.kv_state == "uncertain":
        return "uncertain"
    return "silent" if stream.last_event_at is None else "current"


def _labelled(
    name: str, text: str, labels: Sequence[str], tallies: Iterable[tuple[Sequence[str], Tallies]]
) -> Metric:
    """Turn one dict of every tally into a family; its keys are label values."""
    family = _counter(name, text, (*SCOPE, *labels))
    for scope, tally in tallies:
        counts: dict[str | tuple[str, ...], int] = getattr(tally, name.removeprefix("kv_"))
        for key, count in sorted(counts.items(), key=str):
            values = (key,) if isinstance(key, str) else key
            family.add_metric([*scope, *values], count)
    return family
