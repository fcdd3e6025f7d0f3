"""Metrics of admission: decisions, classes, waiting requests, busy ranks.

Labels are policies, gates, codes and classes, which are few and fixed, tenants if they have a label
(`admission/tallies.py`), and scopes as everywhere. Series of a rank end with its worker. Some also
appear under names common in the field, as aliases without our prefix.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.core.admission.tallies import RATE_BOUNDS, WaitTimes
from select_service.core.admission.totals import bands_closed_by
from select_service.edge.metrics.scope_series import RANK, SCOPE, by_scope
from select_service.metric_rows import (
    SERIES_PER_STEP,
    Buckets,
    MetricRow,
    MetricTable,
    Sum,
    histogram,
    paced,
    table,
    total,
    value,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from indexer.types import Scope, WorkerRank
    from select_service.core.admission.controller import AdmissionController
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.admission.tallies import HitTally
    from select_service.core.partition import Partition
    from select_service.core.service import SelectionCore
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.scope_series import ScopeGroups, Sources
    from select_service.metric_rows import Collector
    from select_service.settings import Settings

_OUTCOMES: Final = ("offered", "admitted", "refused", "withdrawn")
_WORKER_TYPE: Final = "aggregated"


# -- outcomes of requests --------------------------------------------------------------------------

_CLASSES: Final[tuple[MetricRow[PartitionAdmission], ...]] = (
    total(
        "admission_requests",
        "Requests by what became of them; offered = admitted + refused + withdrawn + waiting.",
        lambda one: {
            (name, outcome): getattr(tally, outcome)
            for name, tally in one.gate.tallies.of.items()
            for outcome in _OUTCOMES
        },
        "slo_class",
        "outcome",
    ),
    value(
        "admission_waiting",
        "Requests that wait, by class.",
        lambda one: {name: tally.waiting for name, tally in one.gate.tallies.of.items()},
        "slo_class",
    ),
    histogram(
        "admission_wait_seconds",
        "How long requests waited, whatever became of them.",
        lambda one: {
            name: Buckets(WaitTimes.bounds, times.counts, times.seconds)
            for name, times in one.wait_times.items()
        },
        "slo_class",
    ),
    total(
        "admission_decisions",
        "Refusals, waits and ends of waiting, by reason.",
        lambda one: one.gate.tallies.decisions,
        "policy",
        "gate",
        "decision",
        "reason",
        "slo_class",
    ),
    total(
        "admission_rejections",
        "Refusals for load, by endpoint.",
        lambda one: one.rejections,
        "endpoint",
    ),
)

_TENANTS: Final[tuple[MetricRow[AdmissionController], ...]] = (
    total(
        "admission_tenant_requests",
        "Requests by tenant.",
        lambda controller: {
            (name, outcome): count
            for outcome, tally in (
                ("admitted", controller.totals.by_tenant.admitted),
                ("refused", controller.totals.by_tenant.refused),
            )
            for name, count in tally.counts.items()
        },
        "fairness_id",
        "outcome",
    ),
)


# -- current state ---------------------------------------------------------------------------------


class _Gated(NamedTuple):
    partition: Partition
    admission: PartitionAdmission


_POOL: Final[tuple[MetricRow[_Gated], ...]] = (
    value(
        "admission_saturation",
        "1 when the pool is full.",
        lambda one: Sum(1, one.admission.pool.saturation),
    ),
    value(
        "admission_drain_tokens_per_second",
        "Prefill tokens one rank computes.",
        lambda one: Sum(1, one.admission.pool.prefill_rate),
    ),
    value(
        "admission_busy_ranks",
        "Ranks above a busy threshold.",
        lambda one: one.admission.busy.count,
    ),
    value(
        "admission_full_ranks",
        "Ranks of workers at their cap.",
        lambda one: one.admission.caps.full_slots,
    ),
    value(
        "admission_silent_ranks",
        "Ranks that seem to hang: they have prompts and say nothing of them.",
        lambda one: one.partition.ledger.loads.silent(one.admission.now),
    ),
)


class _Promises(NamedTuple):
    held: int
    kept: int
    broken: int
    bands_closed: Mapping[int, int]


_PROMISES: Final[tuple[MetricRow[_Promises], ...]] = (
    value("admission_promises", "Returns that are promised a place.", lambda one: one.held),
    total(
        "admission_promises_ended",
        "Promises, by end.",
        lambda one: {"kept": one.kept, "broken": one.broken},
        "end",
    ),
    total(
        "admission_band_closed",
        "Times slo-shed closed a band to arrivals.",
        lambda one: {str(band): count for band, count in one.bands_closed.items()},
        "band",
    ),
)

_CACHE_HITS: Final[tuple[MetricRow[HitTally], ...]] = (
    total(
        "cache_threshold_rejections",
        "Requests that no worker held enough of.",
        lambda tally: tally.rejections,
        "source",
    ),
    histogram(
        "cache_hit_rate",
        "Best hit rate of requests with a cache-hit threshold.",
        lambda tally: Buckets(RATE_BOUNDS, tally.rates, tally.rate_sum),
    ),
    total(
        "cache_threshold_fallbacks",
        "Requests below their threshold that were placed all the same.",
        lambda tally: tally.fallbacks,
    ),
    total(
        "cache_threshold_guarded",
        "Thresholds set aside after too many attempts.",
        lambda tally: tally.guarded,
    ),
)


class _Rank(NamedTuple):
    worker_id: str
    dp_rank: str
    scope: Scope
    role: str
    is_busy: bool
    decode_blocks: float
    prefill_tokens: float


_BY_RANK: Final[tuple[MetricRow[_Rank], ...]] = (
    value(
        "admission_rank_busy",
        "1 above a busy threshold.",
        lambda rank: {(rank.worker_id, rank.dp_rank, *rank.scope): float(rank.is_busy)},
        *RANK,
    ),
    value(
        "dynamo_frontend_worker_active_decode_blocks",
        "Alias.",
        lambda rank: {(rank.worker_id, rank.dp_rank, rank.role): rank.decode_blocks},
        "worker_id",
        "dp_rank",
        "worker_type",
        prefix="",
    ),
    value(
        "dynamo_frontend_worker_active_prefill_tokens",
        "Alias.",
        lambda rank: {(rank.worker_id, rank.dp_rank, rank.role): rank.prefill_tokens},
        "worker_id",
        "dp_rank",
        "worker_type",
        prefix="",
    ),
)


class _Aliases(NamedTuple):
    rejected: Mapping[tuple[str, str], int]
    at_capacity: int
    live: int
    waiting: int


_ALIASES: Final[tuple[MetricRow[_Aliases], ...]] = (
    total(
        "dynamo_frontend_model_rejection",
        "Alias.",
        lambda one: one.rejected,
        "model",
        "endpoint",
        prefix="",
    ),
    total(
        "dynamo_rejection_request",
        "Alias: refused at N + Q.",
        lambda one: one.at_capacity,
        prefix="",
    ),
    value("dynamo_engine_request", "Alias: requests on workers.", lambda one: one.live, prefix=""),
    value(
        "dynamo_request_queue",
        "Alias: requests that wait for one.",
        lambda one: one.waiting,
        prefix="",
    ),
)

_REPORTS: Final[tuple[MetricRow[Driver], ...]] = (
    total(
        "admission_clamped",
        "Requests that claimed too high a class.",
        lambda driver: driver.core.admission_controller.clamped,
    ),
    total(
        "worker_reports_dropped",
        "Reports of ranks that the worker has not declared.",
        lambda driver: driver.core.admission_controller.reports.dropped,
    ),
    value(
        "worker_reports_stale",
        "Ranks whose load reports have stopped.",
        lambda driver: sum(1 for _ in driver.core.admission_controller.reports.stale()),
    ),
    total(
        "worker_reports_heard",
        "Reports on workers' event endpoints.",
        lambda driver: driver.load_topic.received,
    ),
    total(
        "worker_reports_bad",
        "Such reports that are malformed or too long.",
        lambda driver: driver.load_topic.bad,
    ),
    total(
        "worker_reports_left_out",
        "Reports dropped because too many waited to be applied.",
        lambda driver: driver.load_topic.left_out,
    ),
)


def admission_tables(
    driver: Driver, settings: Settings, groups: ScopeGroups
) -> tuple[Collector, ...]:
    """Return every partition's gate by scope, ranks, aliases, and workers' reports."""
    core = driver.core
    controller = core.admission_controller
    return (
        MetricTable(_CLASSES, by_scope(groups, lambda one: one.admission), SCOPE, own_first=True),
        MetricTable(_TENANTS, lambda: [((), _tenants(controller))]),
        MetricTable(_POOL, by_scope(groups, _gated), SCOPE),
        MetricTable(_PROMISES, lambda: [((), _promises(controller))]),
        MetricTable(
            _CACHE_HITS, by_scope(groups, lambda one: one.hit_tally), SCOPE, own_first=True
        ),
        MetricTable(_BY_RANK, lambda: _by_rank(core, settings.metrics_rank_series_max)),
        MetricTable(_ALIASES, lambda: [((), _aliases(core, groups))]),
        table(_REPORTS, lambda: driver),
    )


def _tenants(controller: AdmissionController) -> Iterator[AdmissionController | None]:
    """Yield what counts admissions and refusals by fairness id, the busiest few and the rest."""
    for one in paced(controller.keepers()):
        if one is None:
            yield None
        else:
            _ = one.gate.tallies  # reading it flushes pending counts of admissions
    yield controller


def _gated(partition: Partition) -> _Gated | None:
    admission = partition.admission
    if admission is None:
        return None
    admission.refresh(admission.now)  # it refreshes lazily
    return _Gated(partition, admission)


def _promises(controller: AdmissionController) -> Iterator[_Promises | None]:
    held: dict[int, int] = {}  # by identity: some share one
    bands = Counter(controller.totals.bands_closed(()))
    for one in paced(controller.keepers()):
        if one is None:
            yield None
            continue
        held[id(one.gate.returns)] = one.gate.returns.size
        bands.update(bands_closed_by(one.gate))
    ended = controller.totals.promises
    yield _Promises(sum(held.values()), ended.kept, ended.broken, bands)


def _by_rank(core: SelectionCore, series_max: int) -> Sources[_Rank]:
    """Yield busy bits and loads of ranks: only where something is judged."""
    ranks: list[tuple[Partition, PartitionAdmission, WorkerRank]] = []
    for one in paced(list(core.partitions.values())):
        if one is None:
            yield None
        elif (admission := one.admission) is not None and len(ranks) < series_max:
            listed = one.fleet_slots.ranks_and_slots()[: series_max - len(ranks)]
            ranks += [(one, admission, rank) for rank, _ in listed]
    for number, (partition, admission, rank) in enumerate(ranks, 1):
        if not number % SERIES_PER_STEP:
            yield None
        slot = partition.fleet_slots.slot_of(rank)
        if slot is None:
            continue  # deregistered since the last yield
        loads = partition.ledger.loads
        found = _Rank(
            worker_id=str(rank.worker_id),
            dp_rank=str(rank.dp_rank),
            scope=partition.scope,
            role=partition.fleet_slots.rank_at(slot)[0].spec.role or _WORKER_TYPE,
            is_busy=slot in admission.busy.slots,
            decode_blocks=float(loads.decode[slot]),
            prefill_tokens=float(loads.prefill[slot]),
        )
        yield (), (found,)


def _aliases(core: SelectionCore, groups: ScopeGroups) -> Iterator[_Aliases | None]:
    live = waiting = 0
    model_of: dict[Partition, str] = {}
    for scope, partitions, _ in groups.found:
        model_of |= dict.fromkeys(partitions, scope.model_name)
        for one in paced(partitions):
            if one is None:
                yield None
            elif one.admission is not None:
                waiting, live = waiting + one.admission.caps.waiting, live + one.ledger.live
        yield None
    rejected = yield from _rejected(core, model_of)
    gates = (one.gate for one in core.admission_controller.keepers())
    yield _Aliases(rejected, core.admission_controller.totals.at_capacity(gates), live, waiting)


def _rejected(
    core: SelectionCore, model_of: Mapping[Partition, str]
) -> Generator[None, None, Counter[tuple[str, str]]]:
    """Count refusals by the name a model has in the text, and by endpoint."""
    shown = set(model_of.values())
    by_model: Counter[tuple[str, str]] = Counter()
    for one in paced(list(core.partitions.values())):  # those without a worker, too
        if one is None:
            yield None
            continue
        model = model_of.get(one, one.scope.model_name)
        if model in shown and one.admission is not None:  # another tenant may still have workers
            for endpoint, count in one.admission.rejections.items():
                by_model[model, endpoint] += count
    for model_name in paced(shown):
        if model_name is None:
            yield None
            continue
        for endpoint, count in core.admission_controller.totals.rejections(model_name).items():
            by_model[model_name, endpoint] += count
    return by_model
