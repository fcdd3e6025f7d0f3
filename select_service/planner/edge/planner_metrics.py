"""What the planner's /metrics shows: pools, models, and the loop itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client.registry import Collector
from typing_extensions import override

from select_service.metric_rows import MetricRow, MetricTable, table, total, value
from select_service.planner.edge.connectors.virtual import VirtualConnector
from select_service.planner.edge.sources.selector import SelectorSource
from select_service.planner.types import Idle, number_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from select_service.planner.core.model import PlannedModel
    from select_service.planner.core.pool import PlannedPool
    from select_service.planner.edge.engine_drain import EngineDrain
    from select_service.planner.edge.loop import Loop
    from select_service.planner.types import Load, PoolKey, PoolState, Window

_PREFIX: Final = "select_planner_"
_MODEL: Final = ("model_name", "tenant_id")
_POOL: Final = (*_MODEL, "role")
_OBSERVED: Final = (
    "requests",
    "isl",
    "osl",
    "ttft_ms",
    "itl_ms",
    "request_s",
    "effective_isl",
    "concurrency",
)


class _Pool(NamedTuple):
    pool: PlannedPool
    state: PoolState | None


_POOLS: Final[tuple[MetricRow[_Pool], ...]] = (
    value(
        "replicas_desired",
        "Replicas asked for.",
        lambda one: None if one.state is None else one.state.desired,
    ),
    value(
        "replicas_ready",
        "Of them, able to serve.",
        lambda one: None if one.state is None else one.state.ready,
    ),
    value(
        "replicas_overdue",
        "Not there, and not waited for any more.",
        lambda one: one.pool.overdue,
    ),
    value("engines_needed", "By the last forecast, not rounded.", lambda one: one.pool.engines),
    value(
        "start_seconds",
        "From a decision to replicas that serve.",
        lambda one: one.pool.start_time.seconds,
    ),
)

_TARGETS: Final[tuple[MetricRow[Loop], ...]] = (
    value(
        "infeasible_targets",
        "Targets no number of replicas meets.",
        lambda loop: len(loop.infeasible),
    ),
)


class _Model(NamedTuple):
    model: PlannedModel
    window: Window | None
    load: Load | None


def _observed(one: _Model) -> dict[str, float]:
    """Return what is known of the last interval."""
    if one.window is None:
        return {}
    found = {name: number_of(getattr(one.window, name)) for name in _OBSERVED}
    if isinstance(one.window.requests, Idle):
        found["requests"] = 0.0  # a number; lengths and times without requests are none
    return {name: number for name, number in found.items() if number is not None}


def _looked(one: _Model) -> dict[str, float]:
    """Return what is known of the last look of the fast loop."""
    if one.load is None:
        return {}
    names = ("prefill_backlog_tokens", "concurrency")
    numbers = {name: number_of(getattr(one.load, name)) for name in names}
    found = {name: number for name, number in numbers.items() if number is not None}
    if one.model.arrivals_per_s is not None:
        found["arrivals_per_s"] = one.model.arrivals_per_s
        found["arrivals_age_s"] = one.load.ago_s
    return found


def _predicted(one: _Model) -> dict[str, float]:
    forecast = one.model.forecast
    if forecast is None:
        return {}
    return {"requests_per_s": forecast.rate, "isl": forecast.lengths.mean, "osl": forecast.osl}


_MODELS: Final[tuple[MetricRow[_Model], ...]] = (
    value("observed", "Of the last interval, where known.", _observed, "what"),
    value("looked", "At the last look of the fast loop, where known.", _looked, "what"),
    value("predicted", "For the next interval.", _predicted, "what"),
    value(
        "correction_factor",
        "Measured over profiled.",
        lambda one: {
            "prefill": one.model.p_correction.factor,
            "decode": one.model.d_correction.factor,
        },
        "phase",
    ),
    value(
        "planned_by_measurement",
        "1: engines are taken to be as fast as selectors measured, 0: as profiled.",
        lambda one: {
            phase: float(phase in one.model.speed.by_measurement)
            for phase in one.model.speed.learnt
        },
        "phase",
    ),
    value(
        "speed_measurements",
        "Measurements that the learnt speed stands on, older ones faded.",
        lambda one: {phase: line.sums.samples for phase, line in one.model.speed.learnt.items()},
        "phase",
    ),
    value(
        "speed_age_seconds",
        "How long before the last interval's end the latest of them came.",
        lambda one: {
            phase: line.age_s for phase, line in one.model.speed.learnt.items() if line.sums.samples
        },
        "phase",
    ),
    value(
        "likeness_price",
        "Late requests/s a GPU is spared for, where the past decides.",
        lambda one: one.model.analog_forecast.price,
    ),
    value(
        "missing_intervals",
        "In a row, of which nothing is known.",
        lambda one: one.model.demand.missed,
    ),
    total(
        "fit_failures",
        "Fits of predictors that failed or were late.",
        lambda one: one.model.demand.fit_failures,
    ),
)

_LOOP: Final[tuple[MetricRow[Loop], ...]] = (
    value("leader", "1: this planner acts.", lambda loop: loop.is_leader),
    total(
        "lease_failures",
        "Requests for the lease that were refused or not answered.",
        lambda loop: loop.lease.failures,
    ),
    value(
        "state_damaged",
        "1: the state file found at the start was damaged.",
        lambda loop: loop.is_past_damaged,
    ),
    total("intervals", "Intervals that are over.", lambda loop: loop.counts.intervals),
    total("changes", "Replica counts that were changed.", lambda loop: loop.counts.changes),
    total(
        "failures",
        "Replica counts that could not be changed.",
        lambda loop: loop.counts.failures,
    ),
    total(
        "overrides",
        "Replica counts that another one changed.",
        lambda loop: loop.counts.overrides,
    ),
    total(
        "starts_given_up",
        "Replicas that had not started when fewer were asked for.",
        lambda loop: loop.counts.starts_given_up,
    ),
    total(
        "gpu_seconds",
        "GPUs of ready replicas over time.",
        lambda loop: loop.counts.gpu_seconds,
    ),
    total(
        "state_failures",
        "Times the state file could not be written.",
        lambda loop: loop.counts.state_failures,
    ),
    total("faults", "Turns of a loop that failed.", lambda loop: loop.counts.faults),
    total(
        "decisions",
        "Decisions made.",
        lambda loop: loop.counts.decisions,
        "loop",
    ),
)

_LEAVING: Final[tuple[MetricRow[Sequence[object]], ...]] = (
    value("workers_leaving", "Drained, their count not lowered yet.", len),
)

_DRAINS: Final[tuple[MetricRow[EngineDrain], ...]] = (
    total(
        "leavers",
        "Workers that were to go: idle when they went, late, or they stayed after all.",
        lambda drain: drain.ends,
        "end",
    ),
    total(
        "drain_failures",
        "Turns in which no source could be asked.",
        lambda drain: drain.failures,
    ),
)

_SELECTORS: Final[tuple[MetricRow[SelectorSource], ...]] = (
    value(
        "selectors",
        "Addresses of selectors; several: more than one answers there, and none is believed.",
        lambda source: source.states,
        "state",
    ),
    value(
        "selectors_unseen",
        "Replicas that selectors know, and that are not asked for their counts.",
        lambda source: source.unseen,
    ),
)

_VIRTUAL: Final[tuple[MetricRow[VirtualConnector], ...]] = (
    total(
        "decision_ends",
        "Decisions issued, by what was reported of them; timed_out: nothing, taken for done.",
        lambda connector: connector.ends,
        "end",
    ),
)


class PlannerMetrics(Collector):
    """The loop's state, read at scrape time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._tables = (
            MetricTable(_POOLS, self._pools, _POOL, prefix=_PREFIX),
            table(_TARGETS, lambda: loop, prefix=_PREFIX),
            MetricTable(_MODELS, self._models, _MODEL, prefix=_PREFIX),
            table(_LOOP, lambda: loop, prefix=_PREFIX),
        )

    @override
    def collect(self) -> Iterator[Metric]:
        """Return what there is; nothing of drains and reports that are not in use."""
        tables: list[MetricTable[Any]] = [*self._tables]
        drain, connector = self._loop.retiring, self._loop.connector
        if drain is not None:
            leaving = [(_names(pool), [one.named]) for pool, one in drain.pools.items()]
            tables.append(MetricTable(_LEAVING, lambda: leaving, _POOL, prefix=_PREFIX))
            tables.append(table(_DRAINS, lambda: drain, prefix=_PREFIX))
        source = self._loop.source
        if isinstance(source, SelectorSource):
            tables.append(table(_SELECTORS, lambda: source, prefix=_PREFIX))
        if isinstance(connector, VirtualConnector):
            tables.append(table(_VIRTUAL, lambda: connector, prefix=_PREFIX))
        for one in tables:
            yield from (step for step in one.collect() if step is not None)

    def _pools(self) -> Iterator[tuple[Sequence[str], Sequence[_Pool]]]:
        for model in self._loop.fleet.models:
            for pool in model.pools:
                yield _names(pool.key), (_Pool(pool, self._loop.states.get(pool.key)),)

    def _models(self) -> Iterator[tuple[Sequence[str], Sequence[_Model]]]:
        windows, loads = self._loop.windows, self._loop.loads
        for model in self._loop.fleet.models:
            found = _Model(model, windows.get(model.key), loads.get(model.key))
            yield (model.key.model_name, model.key.tenant_id), (found,)


def _names(pool: PoolKey) -> tuple[str, str, str]:
    return (pool.model.model_name, pool.model.tenant_id, pool.role)
