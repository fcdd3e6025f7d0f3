"""What /metrics says of admission: decisions, classes, waiting, busy ranks; read at scrape time.

Labels are policies, gates, codes and classes, which are few and fixed, tenants as far as they have
a label (`admission/tallies.py`), and scopes as everywhere. Series of a rank go with its worker.
The field's names for some of them are kept as aliases, without our prefix.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
)
from typing_extensions import override

from select_service.core.admission.cache_hits import RATE_BOUNDS
from select_service.core.admission.wait_times import WaitTimes
from select_service.edge.metrics.families import (
    ROWS_PER_STEP,
    SCOPE,
    Collector,
    counter,
    gauge,
    histogram,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from select_service.config import Settings
    from select_service.core.admission.gatekeeping import Gatekeeper
    from select_service.core.partition import Partition
    from select_service.edge.driver import Driver
    from select_service.edge.metrics.families import Steps
    from select_service.edge.metrics.scope_series import ScopeGroups

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
            "Ranks that told of their load and do not any more.",
            value=sum(1 for _ in self._service.core.admitting.reports.stale()),
        )
        topic = self._service.load_topic
        yield counter(
            "worker_reports_heard", "Reports on workers' event endpoints.", value=topic.heard
        )
        yield counter(
            "worker_reports_bad", "Those of them that make no sense, or too long.", value=topic.bad
        )
        yield counter(
            "worker_reports_left_out", "Ranks that found no room in a while.", value=topic.left_out
        )

    # -- what became of requests ---------------------------------------------------------------

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
            counts: Counter[tuple[str, str]] = Counter()
            for keeper in _keepers(partitions):
                for name, tally in keeper.gate.tallies.of.items():
                    for outcome in (*_OUTCOMES, "waiting"):
                        counts[name, outcome] += getattr(tally, outcome)
            for (name, outcome), count in sorted(counts.items()):
                if outcome == "waiting":
                    waiting.add_metric([name, *scope], count)
                else:
                    requests.add_metric([name, outcome, *scope], count)
            for name, times in _wait_times(partitions).items():
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
            counts: Counter[tuple[str, ...]] = Counter()
            for keeper in _keepers(partitions):
                counts.update(keeper.gate.tallies.decisions)
            for labels, count in sorted(counts.items()):
                decisions.add_metric([*labels, *scope], count)
            for endpoint, count in sorted(_rejections(partitions).items()):
                rejected.add_metric([endpoint, *scope], count)
            yield None
        yield from (decisions, rejected)

    def _tenants(self) -> Steps:
        """Admissions and refusals by fairness id: each the busiest few, and the rest."""
        family = counter(
            "admission_tenant_requests", "Requests by who asked.", ("fairness_id", "outcome")
        )
        told = self._service.core.admitting.by_tenant()
        for outcome, tally in (("admitted", told.admitted), ("refused", told.refused)):
            for name, count in sorted(tally.counts.items()):
                family.add_metric([name, outcome], count)
        yield family

    # -- how it stands -------------------------------------------------------------------------

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
            keepers = list(_keepers(partitions))
            if not keepers:
                continue
            for keeper in keepers:
                keeper.refresh(keeper.now)  # it does so when somebody asks
            count = len(keepers)
            saturation.add_metric(scope, sum(one.pool.saturation for one in keepers) / count)
            drain.add_metric(scope, sum(one.pool.prefill_rate for one in keepers) / count)
            busy.add_metric(scope, sum(one.busy.count for one in keepers))
            full.add_metric(scope, sum(one.caps.full_slots for one in keepers))
            hang = sum(one.ledger.silent(keeper.now) for one in partitions)
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
        keepers, totals = admitting.keepers(), admitting.totals
        books = {id(keeper.gate.returns): keeper.gate.returns for keeper in keepers}  # some share
        held.add_metric((), sum(book.size for book in books.values()))
        ended.add_metric(["kept"], totals.promises.kept)
        ended.add_metric(["broken"], totals.promises.broken)
        for band, count in totals.bands_closed(keepers).items():
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
            "cache_threshold_fallbacks", "Those that were placed all the same.", SCOPE
        )
        guarded = counter(
            "cache_threshold_guarded", "Thresholds set aside after too many attempts.", SCOPE
        )
        for scope, partitions, _ in self._groups.found:
            tallies = [one.hit_tally for one in partitions]
            sources: Counter[str] = Counter()
            for tally in tallies:
                sources.update(tally.rejections)
            for source, count in sorted(sources.items()):
                refused.add_metric([source, *scope], count)
            counts = [sum(at) for at in zip(*(one.rates for one in tallies), strict=True)]
            total = sum(one.rate_sum for one in tallies)
            rates.add_metric(scope, _cumulated(RATE_BOUNDS, counts), total)
            fallbacks.add_metric(scope, sum(one.fallbacks for one in tallies))
            guarded.add_metric(scope, sum(one.guarded for one in tallies))
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
        seats = [
            (partition, partition.admission, rank)
            for partition in self._service.core.partitions.values()
            if partition.admission is not None
            for rank, _ in partition.seating.seats()[: self._ranks_max]
        ]
        for number, (partition, keeper, rank) in enumerate(seats[: self._ranks_max], 1):
            if not number % ROWS_PER_STEP:
                yield None
            slot = partition.seating.slot_of(rank)
            if slot is None:
                continue  # it went in a turn of others
            of_rank = (str(rank.worker_id), str(rank.dp_rank))
            busy.add_metric([*of_rank, *partition.scope], float(slot in keeper.busy.slots))
            role = partition.seating.rank_at(slot)[0].spec.role or _WORKER_TYPE
            blocks.add_metric([*of_rank, role], float(partition.ledger.decode[slot]))
            tokens.add_metric([*of_rank, role], float(partition.ledger.prefill[slot]))
        yield from (busy, blocks, tokens)

    def _aliases(self) -> Steps:
        rejected = CounterMetricFamily(
            "dynamo_frontend_model_rejection", "Alias.", labels=("model", "endpoint")
        )
        by_model: Counter[tuple[str, str]] = Counter()
        in_engine = queued = 0
        model_of: dict[Partition, str] = {}
        for scope, partitions, _ in self._groups.found:
            model_of |= dict.fromkeys(partitions, scope.model_name)
            queued += sum(keeper.caps.waiting for keeper in _keepers(partitions))
            in_engine += sum(one.ledger.live for one in partitions if one.admission is not None)
        shown = set(model_of.values())
        for partition in self._service.core.partitions.values():  # those without a worker, too
            keeper, model = partition.admission, partition.scope.model_name
            if keeper is None:
                continue
            model = model_of.get(partition, model)
            if model in shown:  # another tenant of it may have workers still
                for endpoint, count in keeper.rejections.items():
                    by_model[model, endpoint] += count
        admitting = self._service.core.admitting
        for model in shown:
            for endpoint, count in admitting.totals.rejections(model).items():
                by_model[model, endpoint] += count
        for (model, endpoint), count in sorted(by_model.items()):
            rejected.add_metric([model, endpoint], count)
        yield rejected
        requests = CounterMetricFamily("dynamo_rejection_request", "Alias: refused at N + Q.")
        requests.add_metric((), admitting.totals.at_capacity(admitting.keepers()))
        yield requests
        engine = GaugeMetricFamily("dynamo_engine_request", "Alias: requests on workers.")
        engine.add_metric((), in_engine)
        yield engine
        waiting = GaugeMetricFamily("dynamo_request_queue", "Alias: requests that wait for one.")
        waiting.add_metric((), queued)
        yield waiting


def _keepers(partitions: Iterable[Partition]) -> Iterator[Gatekeeper]:
    return (one.admission for one in partitions if one.admission is not None)


def _rejections(partitions: Iterable[Partition]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for keeper in _keepers(partitions):
        counts.update(keeper.rejections)
    return counts


def _wait_times(partitions: Iterable[Partition]) -> dict[str, WaitTimes]:
    summed: dict[str, WaitTimes] = {}
    for keeper in _keepers(partitions):
        for name, times in keeper.wait_times.items():
            total = summed.setdefault(name, WaitTimes())
            total.counts = [a + b for a, b in zip(total.counts, times.counts, strict=True)]
            total.seconds += times.seconds
    return summed


def _cumulated(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets
