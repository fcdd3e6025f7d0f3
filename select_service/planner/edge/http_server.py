"""The planner's HTTP server: /health, /ready, /metrics, /decisions; and /v1/decision.

It listens on the loopback interface by default. Clients of the virtual connector's routes can
report work that was never done; nothing here can change a target.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from typing_extensions import override

from select_service.planner.edge.connectors.virtual import Completion, VirtualConnector
from select_service.planner.edge.loop import measured
from select_service.planner.types import Idle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

    from select_service.planner.edge.loop import Loop
    from select_service.planner.types import Load

__all__ = ["PlannerMetrics", "create_app"]

BODY_MAX: Final = 65_536
ID_MOST: Final = 2**53
"""JSON readers round ids beyond it."""
PREFIX: Final = "select_planner_"
_POOL: Final = ("model_name", "tenant_id", "role")
_MODEL: Final = ("model_name", "tenant_id")
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
_TOLD: Final = 50  # decisions, without a limit in the request
_OK, _NOTHING, _BAD, _NOT_FOUND, _TOO_LARGE, _NOT_READY = 200, 204, 400, 404, 413, 503


def create_app(loop: Loop) -> Starlette:
    """Return the application; the virtual connector's routes only if that is used."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PlannerMetrics(loop))

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(_: Request) -> Response:
        waiting = [f"{pool}: {why}" for pool, why in loop.connector.problems.items()]
        if not loop.counts.intervals:
            waiting.append("the first interval is not over")
        body = {"ready": loop.is_ready, "leader": loop.is_leader, "waiting_for": waiting}
        return _json(body, _OK if loop.is_ready else _NOT_READY)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def decisions(request: Request) -> Response:
        asked = _whole(request.query_params.get("limit", ""))
        count = _TOLD if asked is None else asked
        newest = list(loop.decisions)[-count:] if count else []
        return _json({"decisions": newest[::-1]})

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/decisions", decisions),
    ]
    if isinstance(loop.connector, VirtualConnector):
        routes += _virtual(loop.connector)
    return Starlette(routes=routes)


def _virtual(connector: VirtualConnector) -> list[Route]:
    async def decision(request: Request) -> Response:
        try:
            after = int(request.query_params.get("after", "0"))
            wait_s = float(request.query_params.get("wait_s", "0"))
        except ValueError:
            return _json({"error": "after and wait_s are numbers"}, _BAD)
        if math.isnan(wait_s):  # it would wait for ever
            return _json({"error": "wait_s is not a number"}, _BAD)
        if not 0 <= after < ID_MOST:
            return _json({"error": f"after is not within 0 and {ID_MOST}"}, _BAD)
        found = await connector.next(after, wait_s)
        return Response(status_code=_NOTHING) if found is None else _json(found)

    async def complete(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():  # a chunked request does not announce its length
            body += part
            if len(body) > BODY_MAX:
                return _json({"error": f"the body is longer than {BODY_MAX}"}, _TOO_LARGE)
        try:
            completion = msgspec.json.decode(body, type=Completion)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return _json({"error": str(error)}, _BAD)
        decision_id = _whole(request.path_params["decision_id"])
        if decision_id is None or not connector.complete(decision_id, completion):
            return _json({"error": "no such decision"}, _NOT_FOUND)
        return _json({"status": "ok"})

    return [
        Route("/v1/decision", decision),
        Route("/v1/decision/{decision_id}/complete", complete, methods=["POST"]),
    ]


def _whole(text: str) -> int | None:
    """Return a decimal number; None: it is none, or has more digits than `int` reads."""
    try:
        return int(text) if text.isdecimal() else None
    except ValueError:
        return None


def _json(body: object, status: int = _OK) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class PlannerMetrics(Collector):
    """The loop's state as metrics, read at scrape time."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    @override
    def collect(self) -> Iterator[Metric]:
        yield from self._pools()
        yield from self._models()
        yield from self._loops()

    def _pools(self) -> Iterator[Metric]:
        desired = _gauge("replicas_desired", "Replicas asked for.", _POOL)
        ready = _gauge("replicas_ready", "Of them, able to serve.", _POOL)
        overdue = _gauge("replicas_overdue", "Not there, and not waited for any more.", _POOL)
        needed = _gauge("engines_needed", "By the last forecast, not rounded.", _POOL)
        start = _gauge("start_seconds", "From a decision to replicas that serve.", _POOL)
        for model in self._loop.fleet.models:
            for pool in model.pools:
                labels = (model.key.model_name, model.key.tenant_id, pool.key.role)
                state = self._loop.states.get(pool.key)
                if state is not None:
                    desired.add_metric(labels, state.desired)
                    ready.add_metric(labels, state.ready)
                overdue.add_metric(labels, pool.overdue)
                needed.add_metric(labels, pool.engines)
                start.add_metric(labels, pool.start_time.seconds)
        yield from (desired, ready, overdue, needed, start)
        infeasible = _gauge("infeasible_targets", "Targets no number of replicas meets.", ())
        infeasible.add_metric((), len(self._loop.infeasible))
        yield infeasible

    def _models(self) -> Iterator[Metric]:
        seen = _gauge("observed", "Of the last interval, where known.", (*_MODEL, "what"))
        looked = _gauge(
            "looked", "At the last look of the fast loop, where known.", (*_MODEL, "what")
        )
        expected = _gauge("predicted", "For the next interval.", (*_MODEL, "what"))
        factors = _gauge("correction_factor", "Measured over profiled.", (*_MODEL, "phase"))
        price = _gauge(
            "likeness_price", "Late requests/s a GPU is spared for, where the past decides.", _MODEL
        )
        missed = _gauge("missing_intervals", "In a row, of which nothing is known.", _MODEL)
        fits = CounterMetricFamily(
            PREFIX + "fit_failures", "Fits of predictors that failed or were late.", labels=_MODEL
        )
        for model in self._loop.fleet.models:
            labels = (model.key.model_name, model.key.tenant_id)
            window = self._loop.windows.get(model.key)
            for name in _OBSERVED if window is not None else ():
                assert window is not None, "there are names only then"
                value = measured(window, name)
                if name == "requests" and isinstance(window.requests, Idle):
                    value = 0.0  # a number; lengths and times that nobody had are none
                if value is not None:
                    seen.add_metric([*labels, name], value)
            for name, value in _looked(self._loop.loads.get(model.key), model.arrivals_per_s):
                looked.add_metric([*labels, name], value)
            forecast = model.forecast
            if forecast is not None:
                expected.add_metric([*labels, "requests_per_s"], forecast.rate)
                expected.add_metric([*labels, "isl"], forecast.lengths.mean)
                expected.add_metric([*labels, "osl"], forecast.osl)
            factors.add_metric([*labels, "prefill"], model.p_correction.factor)
            factors.add_metric([*labels, "decode"], model.d_correction.factor)
            if model.likeness.price is not None:
                price.add_metric(labels, model.likeness.price)
            missed.add_metric(labels, model.demand.missed)
            fits.add_metric(labels, model.demand.fit_failures)
        yield from (seen, looked, expected, factors, price, missed, fits)

    def _loops(self) -> Iterator[Metric]:
        counts = self._loop.counts
        leader = _gauge("leader", "1: this planner acts.", ())
        leader.add_metric((), self._loop.is_leader)
        yield leader
        damaged = _gauge("state_damaged", "1: the state file found at the start was damaged.", ())
        damaged.add_metric((), self._loop.is_past_damaged)
        yield damaged
        for name, text, value in (
            ("intervals", "Intervals that are over.", counts.intervals),
            ("changes", "Replica counts that were changed.", counts.changes),
            ("failures", "Replica counts that could not be changed.", counts.failures),
            ("overrides", "Replica counts that somebody else changed.", counts.overrides),
            ("gpu_seconds", "GPUs of ready replicas over time.", counts.gpu_seconds),
            ("state_failures", "Times the state file could not be written.", counts.state_failures),
            ("faults", "Turns of a loop that failed.", counts.faults),
        ):
            family = CounterMetricFamily(PREFIX + name, text)
            family.add_metric((), value)
            yield family
        decided = CounterMetricFamily(PREFIX + "decisions", "Decisions made.", labels=("loop",))
        for name, value in sorted(counts.decisions.items()):
            decided.add_metric([name], value)
        yield decided
        yield from self._retired()
        connector = self._loop.connector
        if isinstance(connector, VirtualConnector):
            ends = CounterMetricFamily(
                PREFIX + "decision_ends",
                "Decisions told, by what was reported of them; timed_out: nothing, taken for done.",
                labels=("end",),
            )
            for end, count in connector.ends.items():
                ends.add_metric([end], count)
            yield ends

    def _retired(self) -> Iterator[Metric]:
        retiring = self._loop.retiring
        if retiring is None:
            return
        leaving = _gauge("workers_leaving", "Drained, their count not lowered yet.", _POOL)
        for pool, one in retiring.pools.items():
            labels = (pool.model.model_name, pool.model.tenant_id, pool.role)
            leaving.add_metric(labels, len(one.named))
        yield leaving
        ends = CounterMetricFamily(
            PREFIX + "leavers",
            "Workers that were to go: idle when they went, late, or they stayed after all.",
            labels=("end",),
        )
        for end, count in retiring.ends.items():
            ends.add_metric([end], count)
        yield ends
        failed = CounterMetricFamily(PREFIX + "drain_failures", "Turns that nobody could be asked.")
        failed.add_metric((), retiring.failures)
        yield failed


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _looked(load: Load | None, arrivals_per_s: float | None) -> Iterator[tuple[str, float]]:
    """Yield what is known of a look."""
    if load is None:
        return
    for name in ("prefill_backlog_tokens", "concurrency"):
        value = measured(load, name)
        if value is not None:
            yield name, value
    if arrivals_per_s is not None:
        yield "arrivals_per_s", arrivals_per_s
        yield "arrivals_age_s", load.ago_s
