"""The whole decision: windows and loads in, replica counts with reasons out.

One `Fleet` has several models, each with a pool of engines per role; all of them share one number
of GPUs. The slow loop (`slow`) forecasts and sizes, the fast one (`fast`) looks at the load of this
moment and may only add; both end in the same constraints. Nothing here waits or asks anybody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from select_service.planner.core.budget import PoolNeed, check_minima, share_out
from select_service.planner.core.correcting import Correction
from select_service.planner.core.demand import Demand
from select_service.planner.core.lengths import Lengths
from select_service.planner.core.prefill_sizing import PrefillQueue
from select_service.planner.core.reacting import ArrivalRate, Backlog, Surge
from select_service.planner.core.sizing import Goals, Need, size_decode, size_prefill
from select_service.planner.core.steadying import PoolLimits, StartTime, Steady
from select_service.planner.core.surprises import EXACT
from select_service.planner.types import (
    Decision,
    Load,
    ModelKey,
    PoolKey,
    PoolState,
    Role,
    Target,
    Value,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.core.demand import Forecast, Interval, Predictors
    from select_service.planner.core.surface import Surface

__all__ = ["Fleet", "Model", "PoolSettings"]

MISSED_MAX: Final = 3
"""Intervals without data after which the pool follows its load alone."""
STEPS_MOST: Final = 10
"""Intervals ahead that are forecast at most, however long engines take to start."""
_BUSY_MOST: Final = 0.9  # a queue that is fuller says nothing about the profile
_SAME: Final = 1e-9  # what rounding may add to a whole number of engines


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Engines of one role."""

    gpus: int = 1
    limits: PoolLimits = field(default_factory=PoolLimits)


class _Pool:
    """One role of one model, between two decisions."""

    def __init__(self, key: PoolKey, settings: PoolSettings) -> None:
        self.key = key
        self.settings = settings
        self.steady = Steady(settings.limits)
        self.start_time = StartTime(settings.limits.start_s)
        self.state = PoolState(settings.limits.least, settings.limits.least)
        self.was_steady = False
        self.slow: int | None = None
        self.fast: int | None = None
        self.prefills, self.decodes = Backlog(), Backlog()
        self.engines = 0.0
        self.sure: int | None = None
        self.has_surged = False  # since the slow loop looked last

    def look(self, state: PoolState, now: float) -> None:
        """Take in what the connector reads."""
        self.was_steady = state == self.state and not state.starting
        self.state = state
        self.start_time.follow(state.starting, now)

    @property
    def wanted(self) -> int:
        """Forecast and load together: the load may add, and decides where nothing is forecast."""
        known = [one for one in (self.slow, self.fast) if one is not None]
        return max(known) if known else self.state.desired

    def want(self, engines: float, sure: float | None) -> None:
        """Take in what the slow loop computes: the need, and what would do in any case."""
        self.engines = engines
        self.slow = math.ceil(engines - _SAME)
        # who was surprised a moment ago is sure of nothing
        self.sure = None if sure is None or self.has_surged else math.ceil(sure - _SAME)
        self.has_surged = False

    def steps(self, interval_s: float) -> int:
        """How many intervals ahead a decision of now matters: until one of the next can."""
        return min(1 + math.ceil(self.start_time.seconds / interval_s - _SAME), STEPS_MOST)


class Model:
    """One model's traffic, targets and pools.

    Args:
        key: whose.
        pools: settings by role: prefill and decode, or aggregated.
        surface: its engines' profile.
        predictors: of its traffic.
        goals: its targets.
        weight: its share of a budget that is short, against other models.
    """

    def __init__(
        self,
        key: ModelKey,
        pools: Mapping[Role, PoolSettings],
        surface: Surface,
        predictors: Predictors,
        goals: Goals,
        weight: float = 1.0,
    ) -> None:
        self.key = key
        self.pools = [_Pool(PoolKey(key, role), settings) for role, settings in pools.items()]
        self.surface = surface
        self.demand = Demand(predictors)
        self.goals = goals
        self.weight = weight
        self.p_correction = Correction()
        self.d_correction = Correction()
        self.forecast: Forecast | None = None
        """For the next interval."""
        self._arrivals = ArrivalRate()
        self._planned = 0.0  # requests a second, at most, until another decision matters

    def observe(self, window: Window, interval_s: float, *, correct: bool) -> _Told:
        """Run the slow loop for this model."""
        told = _Told(str(self.key))
        steps = max(pool.steps(interval_s) for pool in self.pools)
        self.demand.look_ahead(steps)
        told.reasons += [f"{self.key}: {text}" for text in self.demand.observe(window, interval_s)]
        if self.demand.missed:
            self._hold(told)
            return told
        if correct:
            self._correct(window)
        # what recurs may begin anywhere in its interval, whose mean is then too little for it
        edge = int(self.demand.recurs)
        forecasts = [self.demand.forecast(interval_s, step) for step in range(1, steps + edge + 1)]
        known = [one for one in forecasts if one is not None]
        told.reasons += [f"{self.key}: {text}" for text in self.demand.doubts]
        self.forecast = known[0] if known else None
        self._planned = max((one.rate for one in known), default=0.0)
        self._arrivals.forget()
        for pool in self.pools:
            if not known:
                pool.want(0.0, None)
                continue
            needs = [self._need(pool, one) for one in known[: pool.steps(interval_s) + edge]]
            need = max(needs, key=lambda one: one.engines)
            pool.want(need.engines, self._sure(pool, known, window))
            told.take(pool, need)
        return told

    def _sure(self, pool: _Pool, known: list[Forecast], window: Window) -> float | None:
        """Return the engines that do even if forecasts are as wrong as usual; None: who knows."""
        usual = self.demand.surprises.usual
        if usual is None:
            return None
        rates = [(math.sqrt(one.rate * window.seconds) + usual) ** 2 for one in known]
        if isinstance(window.requests, Value) and not self.demand.recurs:
            rates.append(window.requests.value)
        return self._need(pool, known[0]._replace(rate=max(rates) / window.seconds)).engines

    def warm_up(self, history: Sequence[Interval], interval_s: float) -> None:
        """Learn a past; how far off forecasts of it would have been is learnt, too."""
        self.demand.look_ahead(max(pool.steps(interval_s) for pool in self.pools))
        self.demand.warm_up(history)

    def recall(
        self,
        history: Sequence[Interval],
        computed: float,
        p_correction: float,
        d_correction: float,
        interval_s: float,
    ) -> None:
        """Go on where a planner before us has stopped."""
        self.warm_up(history, interval_s)
        self.demand.computed = computed
        self.p_correction = Correction(p_correction)
        self.d_correction = Correction(d_correction)

    def react(self, load: Load, now: float) -> _Told:
        """Run the fast loop for this model."""
        told = _Told(str(self.key))
        counted = self._arrivals.hear(load, self._planned)
        for pool in self.pools:
            pool.fast = None
            wanted, why = self._reaction(pool, load, now, counted)
            if wanted is None:
                continue
            pool.fast = wanted
            if pool.slow is None:
                continue
            pool.has_surged, pool.sure = True, None
            if wanted > max(pool.slow, pool.state.desired):
                told.reasons.append(f"{pool.key}: {wanted} at once: {why}")
        return told

    def _hold(self, told: _Told) -> None:
        for pool in self.pools:
            if self.demand.missed > MISSED_MAX:
                pool.slow = None
            else:
                pool.slow = pool.state.desired
        is_reactive = self.demand.missed > MISSED_MAX
        what = "the load alone decides" if is_reactive else "replicas are held"
        told.reasons.append(f"{self.key}: {self.demand.missed} intervals missing: {what}")

    def _need(self, pool: _Pool, forecast: Forecast) -> Need:
        role, gpus = pool.key.role, pool.settings.gpus
        prefill = size_prefill(self.surface, forecast, self.goals, self.p_correction.factor)
        if role == "prefill":
            return prefill
        decode = size_decode(
            self.surface, forecast, self.goals, self.d_correction.factor, gpus=gpus
        )
        if role == "decode":
            return decode
        infeasible = "; ".join(one for one in (prefill.infeasible, decode.infeasible) if one)
        # an engine that does both gives each the time the other leaves
        return Need(prefill.engines + decode.engines, prefill.terms | decode.terms, infeasible)

    def _reaction(
        self, pool: _Pool, load: Load, now: float, counted: Surge | None
    ) -> tuple[int | None, str]:
        forecast = self.forecast
        if forecast is None:
            return None, ""
        ready, role = pool.state.ready, pool.key.role
        itl_ms = self.goals.itl_ms / self.d_correction.factor
        if not isinstance(load.context_tokens, Value):
            load = replace(load, context_tokens=Value(forecast.lengths.mean + forecast.osl / 2))
        surges = [counted]
        if role != "decode":
            target_ms, isl = self.goals.ttft_ms, forecast.lengths.mean * forecast.computed
            surges.append(
                pool.prefills.prefill(
                    self.surface, load, now, target_ms=target_ms, isl=isl, ready=ready
                )
            )
        if role != "prefill":
            osl = forecast.osl
            surges.append(
                pool.decodes.decode(self.surface, load, now, itl_ms=itl_ms, osl=osl, ready=ready)
            )
        found = [
            (max(self._engines_at(pool, forecast, one.rate), one.engines_least), one.why)
            for one in surges
            if one is not None
        ]
        if found:
            engines, why = max(found)
            return math.ceil(engines - _SAME), why
        if pool.slow is None:
            return self._blind(pool, load, forecast, itl_ms)
        return None, ""

    def _engines_at(self, pool: _Pool, forecast: Forecast, rate: float) -> float:
        return self._need(pool, forecast._replace(rate=rate, spread=EXACT)).engines

    def _blind(
        self, pool: _Pool, load: Load, forecast: Forecast, itl_ms: float
    ) -> tuple[int | None, str]:
        """Nothing surges, and nobody forecasts: what does the load of this moment take?"""
        rate = self._arrivals.rate
        if rate is not None:
            engines = self._engines_at(pool, forecast, rate)
            return math.ceil(engines - _SAME), f"{rate:.2f} requests/s come"
        answers: list[tuple[int, str]] = []
        if pool.key.role != "decode" and isinstance(load.prefill_backlog_tokens, Value):
            tokens = load.prefill_backlog_tokens.value
            answers.append((math.ceil(tokens / self._in_time(forecast)), "the queue is short"))
        live, context = load.concurrency, load.context_tokens
        if pool.key.role != "prefill" and isinstance(live, Value) and isinstance(context, Value):
            best = self.surface.decode.best(itl_ms, context.value)
            if best is not None:
                engines = math.ceil(live.value / best.concurrency)
                answers.append((engines, f"{live.value:.0f} requests are live"))
        return max(answers) if answers else (None, "")

    def _in_time(self, forecast: Forecast) -> float:
        """Return the tokens that one engine computes within the TTFT."""
        isl = max(1.0, forecast.lengths.mean * forecast.computed)
        return max(isl, isl * self.goals.ttft_ms / self.surface.prefill.ttft_ms(isl))

    def _correct(self, window: Window) -> None:
        samples = window.requests.value if isinstance(window.requests, Value) else 0.0
        for pool in self.pools:
            steady, engines = pool.was_steady, pool.state.ready
            if not engines:
                continue
            if pool.key.role != "decode":
                expected = self._expected_ttft(window, engines)
                self.p_correction.hear(window.ttft_ms, expected, samples, steady=steady)
            if pool.key.role != "prefill":
                expected = self._expected_itl(window, engines)
                self.d_correction.hear(window.itl_ms, expected, samples, steady=steady)

    def _expected_ttft(self, window: Window, engines: int) -> float:
        """In ms, the wait included; 0 where the queue is too full to compare.

        Between what the best placement would make of the wait and what queues of their own would,
        whatever was measured says nothing about the engines: it is as expected.
        """
        if not isinstance(window.requests, Value) or not isinstance(window.isl, Value):
            return 0.0
        lengths = Lengths.of(window.isl_mix, window.isl.value) or Lengths.single(window.isl.value)
        queue = PrefillQueue(self.surface.prefill, lengths.scaled(self.demand.computed))
        rho = window.requests.value / window.seconds * queue.mean_s / engines
        if rho > _BUSY_MOST:
            return 0.0
        longest = 1e3 * (queue.mean_s + queue.wait_s(rho))
        if not self.goals.pooled or not isinstance(window.ttft_ms, Value):
            return longest
        shortest = 1e3 * (queue.mean_s + queue.wait_s(rho, engines, rho**engines))
        return min(max(window.ttft_ms.value, shortest), longest)

    def _expected_itl(self, window: Window, engines: int) -> float:
        """In ms, at the concurrency there was; 0 where that is not known."""
        live, isl, osl = window.concurrency, window.isl, window.osl
        if not (isinstance(live, Value) and isinstance(isl, Value) and isinstance(osl, Value)):
            return 0.0
        return self.surface.decode.itl_ms(live.value / engines, isl.value + osl.value / 2)


class _Told:
    """What one model's part of a decision says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reasons: list[str] = []
        self.infeasible: list[str] = []
        self.terms: dict[str, float] = {}

    def take(self, pool: _Pool, need: Need) -> None:
        """Note what a pool needs."""
        rate = need.terms["rate"]
        self.reasons.append(
            f"{pool.key}: {rate:.2f} requests/s are expected, {need.engines:.2f} engines serve them"
        )
        if need.infeasible:
            self.infeasible.append(f"{pool.key}: {need.infeasible}")
        for name, value in need.terms.items():
            self.terms[f"{pool.key}:{name}"] = value
        self.terms[f"{pool.key}:engines"] = need.engines


class Fleet:
    """Every model under one budget.

    Raises:
        InfeasiblePlan: the minima cost more GPUs than there are.
    """

    def __init__(
        self,
        models: Sequence[Model],
        gpus_max: int,
        interval_s: float,
        *,
        correct: bool = True,
    ) -> None:
        self.models = list(models)
        self.gpus_max = gpus_max
        self.interval_s = interval_s
        self._correct = correct
        check_minima([_need(model, pool, 0) for model, pool in self._pools()], gpus_max)

    def slow(
        self, windows: Mapping[ModelKey, Window], states: Mapping[PoolKey, PoolState], now: float
    ) -> Decision:
        """Decide after an interval; a pool whose state is not known keeps its count."""
        self._look(states, now)
        told = [
            model.observe(windows[model.key], self.interval_s, correct=self._correct)
            for model in self.models
            if model.key in windows
        ]
        return self._decided(told, states, now)

    def fast(
        self, loads: Mapping[ModelKey, Load], states: Mapping[PoolKey, PoolState], now: float
    ) -> Decision:
        """Decide by the load of this moment."""
        self._look(states, now)
        told = [model.react(loads[model.key], now) for model in self.models if model.key in loads]
        return self._decided(told, states, now)

    def _pools(self) -> list[tuple[Model, _Pool]]:
        return [(model, pool) for model in self.models for pool in model.pools]

    def _look(self, states: Mapping[PoolKey, PoolState], now: float) -> None:
        for _, pool in self._pools():
            if pool.key in states:
                pool.look(states[pool.key], now)

    def _decided(
        self, told: Sequence[_Told], states: Mapping[PoolKey, PoolState], now: float
    ) -> Decision:
        reasons = [text for one in told for text in one.reasons]
        needs = []
        for model, pool in self._pools():
            state = pool.state
            if pool.key not in states:
                reasons.append(f"{pool.key}: its replicas could not be read: left alone")
                needs.append(_need(model, pool, state.desired))
                continue
            wanted = pool.wanted
            count, why = pool.steady.next(
                wanted, state.desired, state.starting, now, None if pool.slow is None else pool.sure
            )
            if why:
                reasons.append(f"{pool.key}: {count}, not {wanted}: {why}")
            needs.append(_need(model, pool, count))
        counts = share_out(needs, self.gpus_max)
        reasons += [
            f"{one.pool}: {counts[one.pool]}, not {one.wanted}: {self.gpus_max} GPUs are allowed"
            for one in needs
            if counts[one.pool] < one.wanted
        ]
        return Decision(
            targets=tuple(
                _target(one.pool, counts[one.pool]) for one in needs if one.pool in states
            ),
            reasons=tuple(reasons),
            infeasible=tuple(text for one in told for text in one.infeasible),
            gpus=sum(counts[one.pool] * one.gpus for one in needs),
            terms={name: value for one in told for name, value in one.terms.items()},
        )


def _need(model: Model, pool: _Pool, wanted: int) -> PoolNeed:
    engines = pool.engines or float(wanted)
    settings = pool.settings
    return PoolNeed(pool.key, settings.gpus, settings.limits.least, wanted, engines, model.weight)


def _target(pool: PoolKey, replicas: int) -> Target:
    return Target(pool.model.model_name, pool.model.tenant_id, pool.role, replicas)
