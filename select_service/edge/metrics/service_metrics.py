"""Metrics of the catalog, selections, reservations, leases, and the load of ranks.

Series of a rank or scope exist as long as its workers do, within the limits of the settings: see
`scope_series.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.compiled import kernels_in_use
from select_service.edge.logs import LOST
from select_service.edge.metrics.scope_series import RANK, SCOPE, by_scope
from select_service.metric_rows import SERIES_PER_STEP, MetricRow, MetricTable, table, total, value
from select_service.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.partition import Partition
    from select_service.core.service import SelectionCore
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.scope_series import ScopeGroups, Sources
    from select_service.metric_rows import Collector
    from select_service.settings import Settings

_LIFECYCLES: Final = ("incomplete", "schedulable", "draining", "unschedulable")
_SESSION_OUTCOMES: Final = ("begun", "kept", "moved_busy", "moved_ineligible", "released")
_RESERVATION_EVENTS: Final = (
    "booked",
    "repeated",
    "conflicting",
    "freed",
    "withdrawn",
    "expired",
    "expired_early",
    "lease_ended",
    "dropped",
)
_LEASE_EVENTS: Final = ("opened", "renewed", "closed", "expired", "refused", "reopening")

_PROCESS: Final[tuple[MetricRow[Driver], ...]] = (
    value("build_info", "Which build this is.", lambda _: {__version__: 1}, "version"),
    value(
        "instance_info",
        "Which instance this is: an id of its own, another after each start.",
        lambda driver: {driver.instance_id: 1},
        "instance_id",
    ),
    value(
        "compiled", "Kernels: 1 compiled, 0 their plain twin.", lambda _: kernels_in_use(), "module"
    ),
    total(
        "housekeeping_faults",
        "Turns of housekeeping that failed by our error.",
        lambda driver: driver.housekeeping_faults,
    ),
    total(
        "consistency_checks",
        "Times GET /debug/consistency looked at all loads, by what it found.",
        lambda driver: driver.consistency_checks,
        "outcome",
    ),
    total("log_lines_lost", "Log lines lost because nothing read them.", lambda _: LOST, "reason"),
    value("dumps_running", "GET /dump under way.", lambda driver: driver.dumps.running),
    total(
        "dumps",
        "GET /dump that ended, or were refused.",
        lambda driver: driver.dumps.outcomes,
        "outcome",
    ),
)


def _lifecycles(core: SelectionCore) -> dict[str, int]:
    counts = Counter(worker.lifecycle for worker in core.catalog)
    return {lifecycle: counts[lifecycle] for lifecycle in _LIFECYCLES}


_CATALOG: Final[tuple[MetricRow[SelectionCore], ...]] = (
    value("workers", "Registered workers.", _lifecycles, "lifecycle"),
    total(
        "drains",
        "Workers that were drained, or put back.",
        lambda core: {"begun": core.counters.drains_begun, "undone": core.counters.drains_undone},
        "event",
    ),
)

_DRAINING: Final[tuple[MetricRow[int], ...]] = (
    value(
        "draining_reservations",
        "Live reservations of workers that drain.",
        lambda reservations: reservations,
    ),
)

_SCOPES: Final[tuple[MetricRow[ScopeGroups], ...]] = (
    value("scopes", "Scopes with workers.", lambda groups: groups.in_use),
    value(
        "scopes_unlisted",
        "Scopes summed up under `other`, beyond --metrics-scope-series-max.",
        lambda groups: groups.unlisted,
    ),
)

_SELECTIONS: Final[tuple[MetricRow[SelectionCore], ...]] = (
    total(
        "selections", "Selections answered with a worker.", lambda core: core.counters.selections
    ),
    total(
        "selected_isl_tokens",
        "Prompt tokens of selections answered with a worker.",
        lambda core: core.counters.selected_isl_tokens,
    ),
    total(
        "selected_prefill_tokens",
        "Prompt tokens that the chosen worker had yet to compute.",
        lambda core: core.counters.selected_prefill_tokens,
    ),
    total(
        "selected_forgone_tokens",
        "Prompt tokens to compute that another candidate held.",
        lambda core: core.counters.selected_forgone_tokens,
    ),
    total(
        "selections_forgoing",
        "Selections that passed over a candidate with more of the prompt.",
        lambda core: core.counters.selections_forgoing,
    ),
    total(
        "selections_pulling",
        "Selections whose rank is to pull blocks of the prompt from another.",
        lambda core: core.counters.selections_pulling,
    ),
    total(
        "selected_pulled_tokens",
        "Prompt tokens to be pulled from another rank, not computed.",
        lambda core: core.counters.selected_pulled_tokens,
    ),
    total(
        "select_batches",
        "Batches of prompts, POST /select_batch.",
        lambda core: core.counters.batches,
    ),
    total(
        "select_batch_samples",
        "Samples in batches of prompts.",
        lambda core: core.counters.batch_samples,
    ),
    total(
        "select_batches_undone",
        "Batches of all or none that placed none.",
        lambda core: core.counters.batches_undone,
    ),
    total(
        "selections_queued",
        "Selections that had to wait for capacity.",
        lambda core: core.counters.selections_waited,
    ),
    total(
        "selections_withdrawn",
        "Waiting selections whose client disconnected.",
        lambda core: core.counters.selections_withdrawn,
    ),
    total(
        "selections_failed",
        "Selections that were refused.",
        lambda core: core.counters.selections_failed,
        "code",
    ),
    total(
        "pairs",
        "Requests that may take a pair, by what they were given.",
        lambda core: core.counters.pairs,
        "mode",
        "reason",
    ),
    total(
        "advised",
        "Selections where workers have roles, by advice.",
        lambda core: core.counters.advised,
        "mode",
        "reason",
    ),
    value(
        "sessions",
        "Sessions remembered, also those that were silent for too long by their own gaps.",
        lambda core: len(core.sessions),
    ),
    total(
        "sessions_expired",
        "Sessions silent for too long.",
        lambda core: core.sessions.counters.expired,
    ),
    total(
        "sessions_evicted",
        "Sessions forgotten to make room for newer ones.",
        lambda core: core.sessions.counters.evicted,
    ),
    total(
        "session_requests",
        "Requests with a session, by outcome.",
        lambda core: {
            outcome: getattr(core.sessions.counters, outcome) for outcome in _SESSION_OUTCOMES
        },
        "outcome",
    ),
)

_BY_SCOPE: Final[tuple[MetricRow[Partition], ...]] = (
    value("pending_requests", "Selections waiting for capacity.", lambda one: one.pending_count),
    value(
        "pending_isl_tokens",
        "Prompt tokens of waiting selections.",
        lambda one: one.pending_isl_tokens,
    ),
    value(
        "reservations",
        "Live reservations.",
        lambda one: {
            "prefill": one.ledger.loads.prefilling,
            "decode": one.ledger.live - one.ledger.loads.prefilling,
        },
        "state",
    ),
)

_RESERVATIONS: Final[tuple[MetricRow[SelectionCore], ...]] = (
    value(
        "freed_reservation_ids",
        "Ids of ended reservations still remembered.",
        lambda core: len(core.lifecycle.bookings.freed),
    ),
    value(
        "remembered_bytes",
        "Memory of what has ended and is remembered.",
        lambda core: (
            core.lifecycle.bookings.freed.nbytes
            + core.lifecycle.announcer.claims.endings.nbytes
            + core.replicas.message_applier.dynamo_peers.early.nbytes
            + core.membership.pins.nbytes
        ),
    ),
    total(
        "reservation_events",
        "What happened to reservations.",
        lambda core: {
            event: getattr(core.counters, f"reservations_{event}") for event in _RESERVATION_EVENTS
        },
        "event",
    ),
    value("leases", "Open leases.", lambda core: len(core.lifecycle.leases)),
    value(
        "ended_leases",
        "Ids of ended leases still remembered.",
        lambda core: core.lifecycle.leases.ended_count,
    ),
    total(
        "lease_events",
        "What happened to leases.",
        lambda core: {event: getattr(core.lifecycle.leases, event) for event in _LEASE_EVENTS},
        "event",
    ),
)


class _RankLoad(NamedTuple):
    prefill_tokens: float
    decode_blocks: float
    requests: int


class _RankLoads:
    """Loads of ranks, as many as may have series.

    Attributes:
        ranks: how many there were at the last look, those without series included.
        series_max: how many may have series.
    """

    def __init__(self, core: SelectionCore, series_max: int) -> None:
        self._core, self.series_max = core, series_max
        self.ranks = 0

    def by_rank(self) -> Sources[_RankLoad]:
        ranks = 0
        for scope, partition in list(self._core.partitions.items()):
            slots = partition.fleet_slots.ranks_and_slots()
            listed, ranks = slots[: max(0, self.series_max - ranks)], ranks + len(slots)
            loads = partition.ledger.loads
            # Copied at once: slots may change occupants between two steps.
            prefill, decode = loads.prefill.tolist(), loads.decode.tolist()
            requests = list(loads.requests)
            for number, (rank, slot) in enumerate(listed, 1):
                labels = (str(rank.worker_id), str(rank.dp_rank), *scope)
                yield labels, (_RankLoad(prefill[slot], decode[slot], requests[slot]),)
                if not number % SERIES_PER_STEP:
                    yield None
            yield None
        self.ranks = ranks


_BY_RANK: Final[tuple[MetricRow[_RankLoad], ...]] = (
    value(
        "rank_prefill_tokens", "Active prefill tokens of a rank.", lambda load: load.prefill_tokens
    ),
    value("rank_decode_blocks", "Active KV blocks of a rank.", lambda load: load.decode_blocks),
    value("rank_requests", "Live reservations of a rank.", lambda load: load.requests),
)

_RANKS: Final[tuple[MetricRow[_RankLoads], ...]] = (
    value("ranks", "Ranks of workers that are schedulable or drain.", lambda loads: loads.ranks),
    value(
        "ranks_unlisted",
        "Ranks without series of their own, beyond --metrics-rank-series-max.",
        lambda loads: max(0, loads.ranks - loads.series_max),
    ),
)


def _outliers(core: SelectionCore) -> dict[str, int]:
    tally = core.membership.outlier_tally
    found: Counter[str] = Counter(dict.fromkeys(tally.ejections, 0))
    if tally.ranks:
        for partition in core.partitions.values():
            found.update(partition.outliers.ejected.values())
    return dict(found)


_OUTLIERS: Final[tuple[MetricRow[SelectionCore], ...]] = (
    value("outlier_ranks", "Ranks that are passed over now, by reason.", _outliers, "reason"),
    total(
        "outlier_ejections",
        "Times a rank began to be passed over, by reason.",
        lambda core: dict(core.membership.outlier_tally.ejections),
        "reason",
    ),
    total(
        "reservation_outcomes",
        "Reservations of which callers said how they ended.",
        lambda core: core.counters.outcomes,
        "outcome",
    ),
)


def service_tables(
    driver: Driver, settings: Settings, groups: ScopeGroups
) -> tuple[Collector, ...]:
    """Return what the process is, its workers, selections, reservations and ranks."""
    core = driver.core
    loads = _RankLoads(core, settings.metrics_rank_series_max)
    return (
        table(_PROCESS, lambda: driver),
        table(_CATALOG, lambda: core),
        MetricTable(_DRAINING, lambda: [((), _draining(core))]),
        table(_SCOPES, lambda: groups),
        table(_SELECTIONS, lambda: core),
        MetricTable(_BY_SCOPE, by_scope(groups, lambda one: one), SCOPE, own_first=True),
        table(_RESERVATIONS, lambda: core),
        MetricTable(_BY_RANK, loads.by_rank, RANK),
        table(_RANKS, lambda: loads),
        table(_OUTLIERS, lambda: core),
    )


def _draining(core: SelectionCore) -> Iterator[int | None]:
    """Yield the reservations of each worker that drains, and 0 where none does."""
    yield 0
    for worker in [one for one in core.catalog if one.drain is not None]:
        if core.catalog.find(worker.worker_id) is worker:  # still there after the yield
            yield core.drains.status(worker.worker_id).reservations
        yield None
