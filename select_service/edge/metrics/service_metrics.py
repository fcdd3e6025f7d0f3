"""Metrics of the catalog, selections, reservations, leases, and the load of ranks.

Series of a rank or scope exist as long as its workers do, within the limits of the settings: see
`scope_series.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from indexer.compiled import kernels_in_use
from select_service.edge.log_writer import LOST
from select_service.edge.metrics.families import (
    RANK,
    ROWS_PER_STEP,
    SCOPE,
    Collector,
    counter,
    counters,
    gauge,
)
from select_service.edge.metrics.scope_series import totals
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.families import Steps
    from select_service.edge.metrics.scope_series import ScopeGroups
    from select_service.settings import Settings

__all__ = ["ServiceMetrics"]

_LIFECYCLES: Final = ("incomplete", "schedulable", "draining", "unschedulable")


class ServiceMetrics(Collector):
    """Catalog and load."""

    def __init__(self, service: Driver, settings: Settings, groups: ScopeGroups) -> None:
        self._service = service
        self._groups = groups
        self._rank_series_max = settings.metrics_rank_series_max

    @override
    def collect(self) -> Steps:
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
        checks = counter(
            "consistency_checks",
            "Times GET /debug/consistency looked at all loads, by what it found.",
            ("outcome",),
        )
        for outcome, count in self._service.consistency_checks.items():
            checks.add_metric([outcome], count)
        yield checks
        lost = counter("log_lines_lost", "Log lines lost because nothing read them.", ("reason",))
        for reason, count in LOST.items():
            lost.add_metric([reason], count)
        yield lost
        yield from self._dumps()
        yield from self._catalog()
        yield from self._scopes()
        yield from self._selections()
        yield from self._sessions()
        yield from self._waiting()
        yield from self._reservations()
        yield from self._leases()
        yield from self._ranks()

    def _dumps(self) -> Iterator[Metric]:
        yield gauge("dumps_running", "GET /dump under way.", value=self._service.dumps.running)
        dumps = counter("dumps", "GET /dump that ended, or were refused.", ("outcome",))
        for outcome, count in self._service.dumps.outcomes.items():
            dumps.add_metric([outcome], count)
        yield dumps

    def _catalog(self) -> Steps:
        workers = gauge("workers", "Registered workers.", ("lifecycle",))
        core = self._service.core
        lifecycles = Counter(worker.lifecycle for worker in core.catalog)
        for lifecycle in _LIFECYCLES:
            workers.add_metric([lifecycle], lifecycles[lifecycle])
        yield workers
        drains = counter("drains", "Workers that were drained, or put back.", ("event",))
        drains.add_metric(["begun"], core.counters.drains_begun)
        drains.add_metric(["undone"], core.counters.drains_undone)
        yield drains
        left = gauge("draining_reservations", "Live reservations of workers that drain.")
        reservations = 0
        for worker in [one for one in core.catalog if one.drain is not None]:
            if core.catalog.find(worker.worker_id) is worker:  # still there after the yield
                reservations += core.drains.status(worker.worker_id).reservations
            yield None
        left.add_metric((), reservations)
        yield left

    def _scopes(self) -> Iterator[Metric]:
        groups = self._groups
        yield gauge("scopes", "Scopes with workers.", value=groups.in_use)
        yield gauge(
            "scopes_unlisted",
            "Scopes summed up under `other`, beyond --metrics-scope-series-max.",
            value=groups.unlisted,
        )

    def _selections(self) -> Iterator[Metric]:
        core = self._service.core.counters
        for name, what, count in (
            ("selections", "Selections answered with a worker.", core.selections),
            (
                "selected_isl_tokens",
                "Prompt tokens of selections answered with a worker.",
                core.selected_isl_tokens,
            ),
            (
                "selected_prefill_tokens",
                "Prompt tokens that the chosen worker had yet to compute.",
                core.selected_prefill_tokens,
            ),
            (
                "selected_forgone_tokens",
                "Prompt tokens to compute that another candidate held.",
                core.selected_forgone_tokens,
            ),
            (
                "selections_forgoing",
                "Selections that passed over a candidate with more of the prompt.",
                core.selections_forgoing,
            ),
            ("waves", "Waves of prompts, POST /select_batch.", core.waves),
            ("wave_samples", "Samples in waves of prompts.", core.wave_samples),
            ("waves_undone", "Waves of all or none that placed none.", core.waves_undone),
            (
                "selections_queued",
                "Selections that had to wait for capacity.",
                core.selections_waited,
            ),
            (
                "selections_withdrawn",
                "Waiting selections whose client disconnected.",
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
        yield counter(
            "sessions_evicted",
            "Sessions forgotten to make room for newer ones.",
            value=counts.evicted,
        )
        outcomes = ("begun", "kept", "moved_busy", "moved_ineligible", "released")
        yield counters(
            "session_requests",
            "Requests with a session, by outcome.",
            "outcome",
            {outcome: getattr(counts, outcome) for outcome in outcomes},
        )

    def _waiting(self) -> Steps:
        pending = gauge("pending_requests", "Selections waiting for capacity.", SCOPE)
        tokens = gauge("pending_isl_tokens", "Prompt tokens of waiting selections.", SCOPE)
        for scope, partitions, _ in self._groups.found:
            waiting = yield from totals(
                partitions, lambda one: (one.pending_count, one.pending_isl_tokens)
            )
            pending.add_metric(scope, waiting[0])
            tokens.add_metric(scope, waiting[1])
            yield None
        yield from (pending, tokens)

    def _reservations(self) -> Steps:
        core = self._service.core
        live = gauge("reservations", "Live reservations.", ("state", *SCOPE))
        for scope, partitions, _ in self._groups.found:
            prefilling, total = yield from totals(
                partitions, lambda one: (one.ledger.loads.prefilling, one.ledger.live)
            )
            live.add_metric(["prefill", *scope], prefilling)
            live.add_metric(["decode", *scope], total - prefilling)
            yield None
        yield live
        yield gauge(
            "freed_reservation_ids",
            "Ids of ended reservations still remembered.",
            value=core.desk.bookings.freed_count,
        )
        remembered = gauge("remembered_bytes", "Memory of what has ended and is remembered.")
        bookings, claims = core.desk.bookings, core.desk.announcer.claims
        pins = core.membership.pins
        ended = claims.ended_bytes + core.replicas.hearing.foreigners.early.nbytes
        remembered.add_metric((), bookings.freed_bytes + ended + pins.nbytes)
        yield remembered
        events = (
            "booked",
            "repeated",
            "conflicting",
            "freed",
            "expired",
            "expired_early",
            "lease_ended",
            "dropped",
        )
        yield counters(
            "reservation_events",
            "What happened to reservations.",
            "event",
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
            "lease_events",
            "What happened to leases.",
            "event",
            {event: getattr(leases, event) for event in events},
        )

    def _ranks(self) -> Steps:
        prefill = gauge("rank_prefill_tokens", "Active prefill tokens of a rank.", RANK)
        decode = gauge("rank_decode_blocks", "Active KV blocks of a rank.", RANK)
        requests = gauge("rank_requests", "Live reservations of a rank.", RANK)
        ranks = 0
        for scope, partition in list(self._service.core.partitions.items()):
            seats = partition.seating.seats()
            listed, ranks = seats[: max(0, self._rank_series_max - ranks)], ranks + len(seats)
            loads = partition.ledger.loads
            # Copied at once: slots may change occupants between two steps.
            columns = loads.prefill.tolist(), loads.decode.tolist(), list(loads.requests)
            for number, (rank, slot) in enumerate(listed, 1):
                labels = (str(rank.worker_id), str(rank.dp_rank), *scope)
                for family, column in zip((prefill, decode, requests), columns, strict=True):
                    family.add_metric(labels, column[slot])
                if not number % ROWS_PER_STEP:
                    yield None
            yield None
        yield from (prefill, decode, requests)
        yield gauge("ranks", "Ranks of workers that are schedulable or drain.", value=ranks)
        yield gauge(
            "ranks_unlisted",
            "Ranks without series of their own, beyond --metrics-rank-series-max.",
            value=max(0, ranks - self._rank_series_max),
        )
