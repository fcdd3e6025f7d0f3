"""Metrics of admission: decisions, classes, waiting requests, busy ranks; read at scrape time.

Labels are policies, gates, codes and classes, which are few and fixed, tenants if they have a label
(`admission/tallies.py`), and scopes as everywhere. Series of a rank end with its worker. Some also
appear under names common in the field, as aliases without our prefix.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
)
from typing_extensions import override

from select_service.core.admission.hit_tally import RATE_BOUNDS
from select_service.core.admission.totals import bands_closed_by
from select_service.core.admission.wait_times import WaitTimes
from select_service.edge.metrics.families import (
    ROWS_PER_STEP,
    SCOPE,
    Collector,
    counter,
    gauge,
    histogram,
    paced,
)
from select_service.edge.metrics.scope_series import counts, totals

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from indexer.types import WorkerRank
    from select_service.core.admission.partition_admission import PartitionAdmission
    from select_service.core.partition import Partition
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.families import Steps
    from select_service.edge.metrics.scope_series import ScopeGroups
    from select_service.settings import Settings

_OUTCOMES: Final = ("offered", "admitted", "refused", "withdrawn")
_WORKER_TYPE: Final = "aggregated"


class AdmissionMetrics(Collector):
    """Every partition's gate, by scope."""

    def __init__(self, service: Driver, settings: Settings, groups: ScopeGroups) -> None:
        self._service = service
        self._groups = groups
        self._ranks_max = settings.metrics_rank_series_max

    @override
    def collect(self) -> Steps:
        yield from self._classes()
        yield from self._decisions()
        yield from self._tenants()
        yield from self._gauges()
        yield from self._promises()
        yield from self._cache()
        yield from self._ranks()
        yield from self._aliases()
        yield counter(
            "admission_clamped",
            "Requests that claimed too high a class.",
            value=self._service.core.admitting.clamped,
        )
        yield counter(
            "worker_reports_dropped",
            "Reports of ranks that the worker has not declared.",
            value=self._service.core.admitting.reports.dropped,
        )
        yield gauge(
            "worker_reports_stale",
            "Ranks whose load reports have stopped.",
            value=sum(1 for _ in self._service.core.admitting.reports.stale()),
        )
        topic = self._service.load_topic
        yield counter(
            "worker_reports_heard", "Reports on workers' event endpoints.", value=topic.heard
        )
        yield counter(
            "worker_reports_bad", "Such reports that are malformed or too long.", value=topic.bad
        )
        yield counter(
            "worker_reports_left_out",
            "Reports dropped because too many waited to be applied.",
            value=topic.left_out,
        )

    # -- outcomes of requests ------------------------------------------------------------------

    def _classes(self) -> Steps:
        requests = counter(
            "admission_requests",
            "Requests by what became of them; offered = admitted + refused + withdrawn + waiting.",
            ("slo_class", "outcome", *SCOPE),
        )
        waiting = gauge("admission_waiting", "Requests that wait, by class.", ("slo_class", *SCOPE))
        waits = histogram(
            "admission_wait_seconds",
            "How long requests waited, whatever became of them.",
            ("slo_class", *SCOPE),
        )
        for scope, partitions, _ in self._groups.found:
            became: Counter[tuple[str, str]] = Counter()
            for one in paced(partitions):
                if one is None:
                    yield None
                elif one.admission is not None:
                    for name, tally in one.admission.gate.tallies.of.items():
                        for outcome in (*_OUTCOMES, "waiting"):
                            became[name, outcome] += getattr(tally, outcome)
            for (name, outcome), count in sorted(became.items()):
                if outcome == "waiting":
                    waiting.add_metric([name, *scope], count)
                else:
                    requests.add_metric([name, outcome, *scope], count)
            for name, times in (yield from _wait_times(partitions)).items():
                buckets = _cumulated(WaitTimes.bounds, times.counts)
                waits.add_metric([name, *scope], buckets, times.seconds)
            yield None
        yield from (requests, waiting, waits)

    def _decisions(self) -> Steps:
        decisions = counter(
            "admission_decisions",
            "Refusals, waits and ends of waiting, by reason.",
            ("policy", "gate", "decision", "reason", "slo_class", *SCOPE),
        )
        rejected = counter(
            "admission_rejections", "Refusals for load, by endpoint.", ("endpoint", *SCOPE)
        )
        for scope, partitions, _ in self._groups.found:
            found = yield from counts(partitions, _decisions)
            for labels, count in sorted(found.items()):
                decisions.add_metric([*labels, *scope], count)
            ends = yield from counts(partitions, _rejections)
            for endpoint, count in sorted(ends.items()):
                rejected.add_metric([endpoint, *scope], count)
            yield None
        yield from (decisions, rejected)

    def _tenants(self) -> Steps:
        """Admissions and refusals by fairness id: each the busiest few, and the rest."""
        family = counter(
            "admission_tenant_requests", "Requests by tenant.", ("fairness_id", "outcome")
        )
        admitting = self._service.core.admitting
        for keeper in paced(admitting.keepers()):
            if keeper is None:
                yield None
            else:
                _ = keeper.gate.tallies  # reading it flushes pending counts of admissions
        told = admitting.totals.by_tenant
        for outcome, tally in (("admitted", told.admitted), ("refused", told.refused)):
            for name, count in sorted(tally.counts.items()):
                family.add_metric([name, outcome], count)
        yield family

    # -- current state -------------------------------------------------------------------------

    def _gauges(self) -> Steps:
        saturation = gauge("admission_saturation", "1 when the pool is full.", SCOPE)
        drain = gauge(
            "admission_drain_tokens_per_second", "Prefill tokens one rank computes.", SCOPE
        )
        busy = gauge("admission_busy_ranks", "Ranks above a busy threshold.", SCOPE)
        full = gauge("admission_full_ranks", "Ranks of workers at their cap.", SCOPE)
        silent = gauge(
            "admission_silent_ranks",
            "Ranks that seem to hang: they have prompts and say nothing of them.",
            SCOPE,
        )
        for scope, partitions, _ in self._groups.found:
            count, *means, busy_ranks, full_ranks, hang = yield from totals(partitions, _standing)
            if not count:
                continue
            saturation.add_metric(scope, means[0] / count)
            drain.add_metric(scope, means[1] / count)
            busy.add_metric(scope, busy_ranks)
            full.add_metric(scope, full_ranks)
            silent.add_metric(scope, hang)
            yield None
        yield from (saturation, drain, busy, full, silent)

    def _promises(self) -> Steps:
        held = gauge("admission_promises", "Returns that are promised a place.")
        ended = counter("admission_promises_ended", "Promises, by end.", ("end",))
        closed = counter(
            "admission_band_closed", "Times slo-shed closed a band to arrivals.", ("band",)
        )
        admitting = self._service.core.admitting
        books: dict[int, int] = {}  # by identity: some share one
        bands = Counter(admitting.totals.bands_closed(()))
        for keeper in paced(admitting.keepers()):
            if keeper is None:
                yield None
                continue
            books[id(keeper.gate.returns)] = keeper.gate.returns.size
            bands.update(bands_closed_by(keeper.gate))
        held.add_metric((), sum(books.values()))
        ended.add_metric(["kept"], admitting.totals.promises.kept)
        ended.add_metric(["broken"], admitting.totals.promises.broken)
        for band, count in sorted(bands.items()):
            closed.add_metric([str(band)], count)
        yield from (held, ended, closed)

    def _cache(self) -> Steps:
        refused = counter(
            "cache_threshold_rejections",
            "Requests that no worker held enough of.",
            ("source", *SCOPE),
        )
        rates = histogram(
            "cache_hit_rate", "Best hit rate of requests with a cache-hit threshold.", SCOPE
        )
        fallbacks = counter(
            "cache_threshold_fallbacks",
            "Requests below their threshold that were placed all the same.",
            SCOPE,
        )
        guarded = counter(
            "cache_threshold_guarded", "Thresholds set aside after too many attempts.", SCOPE
        )
        for scope, partitions, _ in self._groups.found:
            sources = yield from counts(partitions, lambda one: one.hit_tally.rejections)
            for source, count in sorted(sources.items()):
                refused.add_metric([source, *scope], count)
            total, fell_back, held_back, *hits = yield from totals(partitions, _hits)
            rates.add_metric(scope, _cumulated(RATE_BOUNDS, hits), total)
            fallbacks.add_metric(scope, fell_back)
            guarded.add_metric(scope, held_back)
            yield None
        yield from (refused, rates, fallbacks, guarded)

    def _ranks(self) -> Steps:
        """Busy bits, and load under the field's names: only where something is judged."""
        labels = ("worker_id", "dp_rank")
        busy = gauge("admission_rank_busy", "1 above a busy threshold.", (*labels, *SCOPE))
        names = (*labels, "worker_type")
        prefix = "dynamo_frontend_worker_active_"
        blocks = GaugeMetricFamily(prefix + "decode_blocks", "Alias.", labels=names)
        tokens = GaugeMetricFamily(prefix + "prefill_tokens", "Alias.", labels=names)
        seats: list[tuple[Partition, PartitionAdmission, WorkerRank]] = []
        for one in paced(list(self._service.core.partitions.values())):
            if one is None:
                yield None
            elif (keeper := one.admission) is not None and len(seats) < self._ranks_max:
                ranks = one.seating.seats()[: self._ranks_max - len(seats)]
                seats += [(one, keeper, rank) for rank, _ in ranks]
        for number, (partition, keeper, rank) in enumerate(seats, 1):
            if not number % ROWS_PER_STEP:
                yield None
            slot = partition.seating.slot_of(rank)
            if slot is None:
                continue  # deregistered since the last yield
            of_rank = (str(rank.worker_id), str(rank.dp_rank))
            busy.add_metric([*of_rank, *partition.scope], float(slot in keeper.busy.slots))
            role = partition.seating.rank_at(slot)[0].spec.role or _WORKER_TYPE
            blocks.add_metric([*of_rank, role], float(partition.ledger.loads.decode[slot]))
            tokens.add_metric([*of_rank, role], float(partition.ledger.loads.prefill[slot]))
        yield from (busy, blocks, tokens)

    def _aliases(self) -> Steps:
        rejected = CounterMetricFamily(
            "dynamo_frontend_model_rejection", "Alias.", labels=("model", "endpoint")
        )
        in_engine = queued = 0.0
        model_of: dict[Partition, str] = {}
        for scope, partitions, _ in self._groups.found:
            model_of |= dict.fromkeys(partitions, scope.model_name)
            found = yield from totals(partitions, _waiting_and_live)
            queued, in_engine = queued + found[0], in_engine + found[1]
            yield None
        by_model = yield from self._rejected(model_of)
        for (model, endpoint), count in sorted(by_model.items()):
            rejected.add_metric([model, endpoint], count)
        yield rejected
        admitting = self._service.core.admitting
        requests = CounterMetricFamily("dynamo_rejection_request", "Alias: refused at N + Q.")
        gates = (keeper.gate for keeper in admitting.keepers())
        requests.add_metric((), admitting.totals.at_capacity(gates))
        yield requests
        engine = GaugeMetricFamily("dynamo_engine_request", "Alias: requests on workers.")
        engine.add_metric((), in_engine)
        yield engine
        waiting = GaugeMetricFamily("dynamo_request_queue", "Alias: requests that wait for one.")
        waiting.add_metric((), queued)
        yield waiting

    def _rejected(
        self, model_of: Mapping[Partition, str]
    ) -> Generator[None, None, Counter[tuple[str, str]]]:
        """Count refusals by the name a model is told under, and by endpoint."""
        core, shown = self._service.core, set(model_of.values())
        by_model: Counter[tuple[str, str]] = Counter()
        for partition in paced(list(core.partitions.values())):  # those without a worker, too
            if partition is None:
                yield None
                continue
            model = model_of.get(partition, partition.scope.model_name)
            if model in shown:  # another tenant of the model may still have workers
                for endpoint, count in _rejections(partition).items():
                    by_model[model, endpoint] += count
        for told in paced(shown):
            if told is None:
                yield None
                continue
            for endpoint, count in core.admitting.totals.rejections(told).items():
                by_model[told, endpoint] += count
        return by_model


# -- readings of one scope, in one step ------------------------------------------------------------


def _decisions(one: Partition) -> Mapping[tuple[str, str, str, str, str], int]:
    return {} if one.admission is None else one.admission.gate.tallies.decisions


def _rejections(one: Partition) -> Mapping[str, int]:
    return {} if one.admission is None else one.admission.rejections


def _standing(one: Partition) -> tuple[float, ...]:
    """Return whether it has a gate; saturation, drain; ranks busy, full, and silent."""
    keeper = one.admission
    if keeper is None:
        return (0, 0.0, 0.0, 0, 0, 0)
    keeper.refresh(keeper.now)  # it refreshes lazily
    pool = keeper.pool
    busy, full = keeper.busy.count, keeper.caps.full_slots
    return (1, pool.saturation, pool.prefill_rate, busy, full, one.ledger.loads.silent(keeper.now))


def _hits(one: Partition) -> tuple[float, ...]:
    tally = one.hit_tally
    return (tally.rate_sum, tally.fallbacks, tally.guarded, *tally.rates)


def _waiting_and_live(one: Partition) -> tuple[int, int]:
    keeper = one.admission
    return (0, 0) if keeper is None else (keeper.caps.waiting, one.ledger.live)


def _wait_times(partitions: Iterable[Partition]) -> Generator[None, None, dict[str, WaitTimes]]:
    summed: dict[str, WaitTimes] = {}
    for one in paced(partitions):
        if one is None:
            yield None
            continue
        if one.admission is None:
            continue
        for name, times in one.admission.wait_times.items():
            total = summed.setdefault(name, WaitTimes())
            total.counts = [a + b for a, b in zip(total.counts, times.counts, strict=True)]
            total.seconds += times.seconds
    return summed


def _cumulated(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    total = 0.0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
