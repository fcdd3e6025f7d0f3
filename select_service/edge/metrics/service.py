"""What /metrics says of the catalog, of selections, reservations, leases and load of the ranks.

Series of a rank or scope exist as long as its workers do, and no more of them than the settings
allow: see `scope_series.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.registry import Collector
from typing_extensions import override

from indexer.compiled import kernels_in_use
from select_service.edge.metrics.families import RANK, SCOPE, counter, counters, gauge
from select_service.edge.metrics.scope_series import groups_of, in_use
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from select_service.config import Settings
    from select_service.edge.driver import Driver
    from select_service.edge.metrics.scope_series import ScopeGroup

__all__ = ["ServiceMetrics"]

_LIFECYCLES: Final = ("incomplete", "schedulable", "draining", "unschedulable")


class ServiceMetrics(Collector):
    """Catalog and load."""

    def __init__(self, service: Driver, settings: Settings) -> None:
        self._service = service
        self._rank_series_max = settings.metrics_rank_series_max
        self._scope_series_max = settings.metrics_scope_series_max

    @override
    def collect(self) -> Iterator[Metric]:
        build = gauge("build_info", "Which build this is.", ("version",))
        build.add_metric([__version__], 1)
        yield build
        compiled = gauge("compiled", "Kernels: 1 compiled, 0 their plain twin.", ("module",))
        for kernel, taken in kernels_in_use().items():
            compiled.add_metric([kernel], taken)
        yield compiled
        yield counter(
            "housekeeping_faults",
            "Turns of housekeeping that failed by our error.",
            value=self._service.housekeeping_faults,
        )
        yield from self._dumps()
        yield from self._catalog()
        groups = groups_of(self._service.core, self._scope_series_max)
        yield from self._scopes()
        yield from self._selections()
        yield from self._sessions()
        yield from self._waiting(groups)
        yield from self._reservations(groups)
        yield from self._leases()
        yield from self._ranks()

    def _dumps(self) -> Iterator[Metric]:
        yield gauge("dumps_running", "GET /dump under way.", value=self._service.dumps.running)
        dumps = counter("dumps", "GET /dump that ended, or were refused.", ("outcome",))
        for outcome, count in self._service.dumps.outcomes.items():
            dumps.add_metric([outcome], count)
        yield dumps

    def _catalog(self) -> Iterator[Metric]:
        workers = gauge("workers", "Registered workers.", ("lifecycle",))
        lifecycles = [worker.lifecycle for worker in self._service.core.catalog]
        for lifecycle in _LIFECYCLES:
            workers.add_metric([lifecycle], lifecycles.count(lifecycle))
        yield workers
        core = self._service.core
        drains = counter("drains", "Workers that were drained, or put back.", ("event",))
        drains.add_metric(["begun"], core.counters.drains_begun)
        drains.add_metric(["undone"], core.counters.drains_undone)
        yield drains
        left = gauge("draining_reservations", "Live reservations of workers that drain.")
        drained = [worker.worker_id for worker in core.catalog if worker.drain is not None]
        left.add_metric((), sum(core.drain_status(one).reservations for one in drained))
        yield left

    def _scopes(self) -> Iterator[Metric]:
        count = len(in_use(self._service.core))
        yield gauge("scopes", "Scopes with workers.", value=count)
        yield gauge(
            "scopes_unlisted",
            "Scopes summed up under `other`: too many.",
            value=max(0, count - self._scope_series_max),
        )

    def _selections(self) -> Iterator[Metric]:
        core = self._service.core.counters
        for name, what, count in (
            ("selections", "Selections answered with a worker.", core.selections),
            ("selected_isl_tokens", "Tokens of their prompts.", core.selected_isl_tokens),
            (
                "selected_prefill_tokens",
                "Of them, tokens the chosen worker had yet to compute.",
                core.selected_prefill_tokens,
            ),
            ("waves", "Waves of prompts, POST /select_batch.", core.waves),
            ("wave_samples", "Samples in them.", core.wave_samples),
            ("waves_undone", "Of all or none: none.", core.waves_undone),
            (
                "selections_queued",
                "Selections that had to wait for capacity.",
                core.selections_waited,
            ),
            (
                "selections_withdrawn",
                "Waiting selections whose client went.",
                core.selections_withdrawn,
            ),
        ):
            yield counter(name, what, value=count)
        failed = dict(sorted(core.selections_failed.items()))
        yield counters("selections_failed", "Selections that were refused.", "code", failed)
        for name, what, counts in (
            ("pairs", "Requests that may take a pair, by what they were given.", core.pairs),
            ("advised", "Selections where workers have roles, by advice.", core.advised),
        ):
            metric = counter(name, what, ("mode", "reason"))
            for labels, count in sorted(counts.items()):
                metric.add_metric(labels, count)
            yield metric

    def _sessions(self) -> Iterator[Metric]:
        sessions = self._service.core.sessions
        counts = sessions.counters
        yield gauge(
            "sessions",
            "Sessions whose next request goes where the last one went.",
            value=len(sessions),
        )
        yield counter("sessions_expired", "Sessions silent for too long.", value=counts.expired)
        yield counter("sessions_evicted", "Forgotten for later ones.", value=counts.evicted)
        outcomes = ("begun", "kept", "moved_busy", "moved_ineligible", "released")
        yield counters(
            *("session_requests", "Requests with a session, by outcome.", "outcome"),
            {outcome: getattr(counts, outcome) for outcome in outcomes},
        )

    def _waiting(self, groups: Sequence[ScopeGroup]) -> Iterator[Metric]:
        pending = gauge("pending_requests", "Selections waiting for capacity.", SCOPE)
        tokens = gauge("pending_isl_tokens", "Prompt tokens of waiting selections.", SCOPE)
        for scope, partitions, _ in groups:
            pending.add_metric(scope, sum(one.pending_count for one in partitions))
            tokens.add_metric(scope, sum(one.pending_isl_tokens for one in partitions))
        yield from (pending, tokens)

    def _reservations(self, groups: Sequence[ScopeGroup]) -> Iterator[Metric]:
        core = self._service.core
        live = gauge("reservations", "Live reservations.", ("state", *SCOPE))
        for scope, partitions, _ in groups:
            prefilling = sum(one.ledger.prefilling for one in partitions)
            total = sum(one.ledger.live for one in partitions)
            live.add_metric(["prefill", *scope], prefilling)
            live.add_metric(["decode", *scope], total - prefilling)
        yield live
        yield gauge(
            "freed_reservation_ids",
            "Ids of ended reservations still remembered.",
            value=core.desk.bookings.freed_count,
        )
        remembered = gauge("remembered_bytes", "Memory of what has ended and is remembered.")
        bookings, claims = core.desk.bookings, core.desk.announcer.claims
        pins = core.membership.pins
        remembered.add_metric((), bookings.freed_bytes + claims.ended_bytes + pins.nbytes)
        yield remembered
        events = ("booked", "repeated", "conflicting", "freed", "expired", "lease_ended", "dropped")
        yield counters(
            *("reservation_events", "What happened to reservations.", "event"),
            {event: getattr(core.counters, f"reservations_{event}") for event in events},
        )

    def _leases(self) -> Iterator[Metric]:
        leases = self._service.core.desk.leases
        yield gauge("leases", "Open leases.", value=len(leases))
        yield gauge(
            "ended_leases", "Ids of ended leases still remembered.", value=leases.ended_count
        )
        events = ("opened", "renewed", "closed", "expired", "refused", "reopening")
        yield counters(
            *("lease_events", "What happened to leases.", "event"),
            {event: getattr(leases, event) for event in events},
        )

    def _ranks(self) -> Iterator[Metric]:
        prefill = gauge("rank_prefill_tokens", "Active prefill tokens of a rank.", RANK)
        decode = gauge("rank_decode_blocks", "Active KV blocks of a rank.", RANK)
        requests = gauge("rank_requests", "Live reservations of a rank.", RANK)
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
        yield gauge("ranks", "Ranks of workers that are schedulable or drain.", value=ranks)
        yield gauge(
            "ranks_unlisted",
            "Ranks without series of their own: too many.",
            value=max(0, ranks - self._rank_series_max),
        )
