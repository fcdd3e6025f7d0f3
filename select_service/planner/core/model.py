"""One model's part of a decision: its traffic, targets and pools, and the need of each pool.

The slow loop forecasts and sizes, the fast one looks at the current load and may only add; where
the past shows how traffic continues from here, that decides instead (`analog_forecast.py`), and a
fixed number where nothing can follow (`steady_fleet.py`).
`fleet_plan.py` calls both loops.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from select_service.planner.core.analog_forecast import AnalogForecast
from select_service.planner.core.correction import Correction, expected_itl_ms
from select_service.planner.core.demand import Demand
from select_service.planner.core.forecast_errors import EXACT
from select_service.planner.core.model_needs import ModelNeeds
from select_service.planner.core.model_report import ModelReport, due
from select_service.planner.core.parts import PARTS
from select_service.planner.core.pool import SAME, NeedStretch, PlannedPool
from select_service.planner.core.reactive import ArrivalRate, Surge, rate_ended
from select_service.planner.core.steady_fleet import SteadyFleet
from select_service.planner.types import (
    Idle,
    Load,
    Missing,
    ModelKey,
    PoolKey,
    Role,
    Value,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.core.demand import Forecast, Interval, Predictors, Stretch
    from select_service.planner.core.engine_speed import EngineSpeed
    from select_service.planner.core.sizing import Goals, Need
    from select_service.planner.core.stabilization_window import PoolSettings

MISSED_MAX: Final = 3
"""Intervals without data after which the pool follows its load alone."""
# largest share of a forecast attributed to chance, even with few requests
_CHANCE_MOST: Final = 0.05
_BACK_MOST_S: Final = 600.0  # how old a plan may be that counts are still compared with


class PlannedModel(ModelNeeds):
    """One model's traffic, targets and pools.

    Args:
        key: of the model.
        pools: settings by role: prefill and decode, or aggregated.
        speed: of its engines.
        predictors: of its traffic.
        goals: its targets.
        weight: its share of a short budget, relative to other models.
    """

    def __init__(
        self,
        key: ModelKey,
        pools: Mapping[Role, PoolSettings],
        speed: EngineSpeed,
        predictors: Predictors,
        goals: Goals,
        weight: float = 1.0,
    ) -> None:
        super().__init__(speed, goals, Demand(predictors))
        self.key = key
        self.pools = [PlannedPool(PoolKey(key, role), settings) for role, settings in pools.items()]
        self.weight = weight
        self.forecast: Forecast | None = None
        """For the next interval."""
        self._arrivals = ArrivalRate()
        self._rates: list[tuple[float, float, float]] = []  # planned: from, to, requests per second
        self._planned = 0.0  # the most of them at the last look
        self._back_s = 0.0  # how long ago the arrivals of the last count began
        self._span_s = 0.0  # their seconds
        self._behind_s = 0.0  # how old counts have been at most since the slow loop last ran
        self._interval_s = 0.0  # of forecasts
        self._counted_until: float | None = None  # end of the last counted arrivals
        self._began: float | None = None  # begin of the first observed interval
        self._observed_at: float | None = None  # end of the last one
        self._taken_in = 0  # intervals since then, including skipped ones
        late_most = None if goals.attainment is None else 1.0 - goals.attainment
        self.analog_forecast = AnalogForecast(late_most)
        self.steady_fleet = SteadyFleet(late_most)

    def observe(
        self, window: Window, interval_s: float, now: float, look_s: float, *, correct: bool
    ) -> ModelReport:
        """Run the slow loop for this model; the next look is in `look_s` seconds."""
        report = ModelReport()
        steps = self._look_ahead(interval_s, look_s)
        if self._began is None:
            self._began = now - interval_s
        if not isinstance(window.requests, Missing):
            # from the total time passed: one late interval does not shift all later ones
            passed = round((now - self._began) / interval_s)
            self._skip(passed - self._taken_in - 1)
            self._taken_in = max(passed, self._taken_in + 1)
        is_counted = isinstance(window.arrived, Value | Idle)  # up to now
        if is_counted:
            requests = window.arrived.value if isinstance(window.arrived, Value) else 0.0
            self._count(requests, window.arrived_s, now)
        remarks = self.demand.observe(window, now, interval_s)
        before, self._observed_at = self._observed_at, now
        remarks += self._learn_speed(window, window.seconds if before is None else now - before)
        report.reasons += [f"{self.key}: {text}" for text in remarks]
        if self.speed.surface is None:
            self.forecast = None
        if self.demand.missed:
            self.analog_forecast.lose()
            self._hold(report)
            return report
        self.analog_forecast.learn(self.demand.history[-1])
        if self.speed.surface is None:
            self._hold_to_learn(report, "how fast its engines are is not known")
            return report
        if correct:
            self._correct(window)
        # one more than this decision needs: the fast loop continues the plan
        known = self.demand.stretches(interval_s, steps + 1)
        report.reasons += [f"{self.key}: {text}" for text in self.demand.doubts]
        self.forecast = known[0].forecast if known else None
        self._judge_reach(self.forecast)
        self._expect(known, now, is_counted=is_counted)
        self._liken(interval_s, look_s)
        self._try_steady(look_s)
        self._behind_s = 0.0
        if known:
            self._plan(known, window, report, now, look_s)
            self._keep_steady(report)
        else:
            self._without_lengths(report)
        return report

    def _expect(self, known: Sequence[Stretch], now: float, *, is_counted: bool) -> None:
        """Let arrivals be compared with new forecasts, and those not counted yet with the former.

        If all up to now are counted, no former forecast is needed.
        """
        past = [(begin, min(end, now), rate) for begin, end, rate in self._rates if begin < now]
        recent = [one for one in past if one[1] > now - _BACK_MOST_S]
        self._rates = [] if is_counted else recent
        self._rates += [(now + one.begin_s, now + one.end_s, one.forecast.rate) for one in known]
        self._arrivals.forget()

    def _plan(
        self,
        known: Sequence[Stretch],
        window: Window,
        report: ModelReport,
        now: float,
        look_s: float,
    ) -> None:
        """Plan every pool by the coming stretches."""
        for pool in self.pools:
            needs = [self._need(pool, one.forecast) for one in known]
            sure = self._sure(pool, known, needs, window)
            courses = [
                NeedStretch(
                    now + one.begin_s,
                    now + one.end_s,
                    need.engines,
                    self._least(pool, one.forecast),
                    engines,
                )
                for one, need, engines in zip(known, needs, sure, strict=True)
            ]
            pool.plan(courses, now if self.demand.recurs else None)
            pool.follow(now, self._back_s, look_s)
            greatest = max(needs, key=lambda one: one.engines)
            report.take(pool, next((one for one in needs if one.engines >= pool.engines), greatest))
            planned = math.ceil(pool.engines - SAME)
            if not self._go_by_analog(pool, report, planned) and pool.why:
                report.reasons.append(f"{pool.key}: {pool.slow}, not {planned}: {pool.why}")
            if pool.has_more:
                text = f"{pool.fast}, not {pool.slow}: at the last look {pool.surge_why}"
                report.reasons.append(f"{pool.key}: {text}")

    def _without_lengths(self, report: ModelReport) -> None:
        """Plan without lengths: no request has come yet, or their lengths are unknown."""
        missing = self.demand.missing_lengths
        if missing:
            self._hold_to_learn(report, f"no source reports any {' and '.join(missing)}")
            return
        for pool in self.pools:
            pool.hold(0)

    def _hold_to_learn(self, report: ModelReport, why: str) -> None:
        """Hold replicas, and at least one of each kind: engines that serve show what is unknown."""
        are_all_there = all(pool.state.desired for pool in self.pools)
        what = "replicas are held" if are_all_there else "one replica each, to learn it"
        report.reasons.append(f"{self.key}: {why}: {what}")
        for pool in self.pools:
            pool.hold(max(1, pool.state.desired))

    def _least(self, pool: PlannedPool, forecast: Forecast) -> float:
        """Return the engines for a rate one standard deviation of an interval's count lower."""
        chance = min(1 / math.sqrt(max(forecast.rate * self._interval_s, 1.0)), _CHANCE_MOST)
        return self._need(pool, forecast._replace(rate=forecast.rate * (1 - chance))).engines

    def _sure(
        self, pool: PlannedPool, known: Sequence[Stretch], needs: Sequence[Need], window: Window
    ) -> list[float | None]:
        """Return for each stretch the engines that suffice in any case; None: unknown."""
        usual = self.demand.forecast_errors.usual
        if usual is None:
            return [None] * len(known)
        if self.demand.recurs and self.goals.attainment is not None:
            return [one.engines for one in needs]  # forecast errors are already included
        rates = [_as_wrong_as_usual(one.forecast.rate, usual, window.seconds) for one in known]
        if not self.demand.recurs:
            if isinstance(window.requests, Value):
                rates.append(window.requests.value / window.seconds)
            rates = [max(rates)] * len(known)
        return [
            self._need(pool, one.forecast._replace(rate=rate)).engines
            for one, rate in zip(known, rates, strict=False)
        ]

    @property
    def arrivals_per_s(self) -> float | None:
        """As counted last by the fast loop; None: not counted."""
        return self._arrivals.latest

    def warm_up(self, history: Sequence[Interval], interval_s: float) -> None:
        """Learn from a past, including how wrong its forecasts would have been."""
        self._look_ahead(interval_s, 0.0)
        self.demand.warm_up(history)
        self._learn(history, interval_s)

    def _learn(self, history: Sequence[Interval], interval_s: float) -> None:
        for one in history:
            self.analog_forecast.learn(one)
            parts = one.parts if one.parts or one.requests else (0.0,) * PARTS
            for requests in parts:
                self.steady_fleet.observe(requests, interval_s / PARTS)
            if not parts:
                self.steady_fleet.skip(interval_s)

    def _skip(self, intervals: int) -> None:
        if intervals > 0:
            self.demand.skip(intervals)
            self.analog_forecast.skip()

    def _look_ahead(self, interval_s: float, look_s: float) -> int:
        """Judge forecasts at the time engines can have started; returns that in intervals."""
        self._interval_s = interval_s
        steps = max(pool.steps(interval_s) for pool in self.pools)
        self.demand.look_ahead(steps, self._behind_s + look_s + self._start_s, interval_s)
        return steps

    def recall(
        self,
        history: Sequence[Interval],
        computed: float,
        p_correction: float,
        d_correction: float,
        interval_s: float,
        since: int = 0,
    ) -> None:
        """Continue where an earlier planner stopped, `since` intervals ago."""
        self._look_ahead(interval_s, 0.0)
        self.demand.recall(history)
        self._learn(history, interval_s)
        self._skip(since)
        self.steady_fleet.skip(since * interval_s)
        self.demand.computed = computed
        self.p_correction = Correction(p_correction)
        self.d_correction = Correction(d_correction)

    def react(self, load: Load, now: float, look_s: float) -> ModelReport:
        """Run the fast loop for this model."""
        report = ModelReport()
        if load.is_counted:
            self._count(load.requests, load.seconds, now - load.ago_s)
            self._span_s = load.seconds or self._span_s
            self._behind_s = max(self._behind_s, load.ago_s)
        else:
            self._span_s = 0.0
            self.analog_forecast.lose()
        self._back_s = load.ago_s + self._span_s
        planned = self._rate_planned(now, look_s)
        if planned < self._planned:
            self._arrivals.forget()  # arrivals under a higher plan do not count against a lower one
        self._planned = planned
        counted = self._arrivals.observe(load, planned, self.demand.lumps.dispersion)
        for pool in self.pools:
            pool.follow(now, self._back_s, look_s)
            is_planned = self._go_by_analog(pool, report, pool.state.desired)
            pool.fast, pool.surge_why = self._reaction(
                pool, load, now, None if is_planned else counted
            )
            if pool.slow is None:
                continue
            if pool.fast is not None:
                pool.surge()
            if not pool.has_more:
                if not is_planned and pool.slow != pool.state.desired:
                    report.reasons.append(due(pool))
            elif pool.wanted > pool.state.desired:
                report.reasons.append(f"{pool.key}: {pool.fast} at once: {pool.surge_why}")
            else:
                report.reasons.append(f"{pool.key}: {pool.fast}, not {pool.slow}: {pool.surge_why}")
        self._keep_steady(report)
        return report

    def _count(self, requests: float, seconds: float, end: float) -> None:
        """Add the arrivals of the seconds until `end`, if any were counted."""
        if seconds > 0:
            if self._counted_until is not None:
                self.steady_fleet.skip(end - seconds - self._counted_until)
            self._counted_until = end
            self.demand.count(requests, seconds, end)
            self.analog_forecast.observe(requests, seconds, end)
            self.steady_fleet.observe(requests, seconds)

    def _liken(self, interval_s: float, look_s: float) -> None:
        """Let similar times in the past predict the coming interval, where they can."""
        forecast, lead_s = self.forecast, self._behind_s + look_s + self._start_s
        if forecast is None:
            return
        exact = forecast._replace(spread=EXACT)
        late_most = 1.0 - (self.goals.attainment or 1.0)
        self.analog_forecast.plan(
            interval_s / PARTS,
            lead_s,
            is_known=self.demand.is_foreseen(late_most)
            or any(self._need(pool, exact).infeasible for pool in self.pools),
            tables_of=lambda grid: {
                pool.key: self._table(pool, exact, grid) for pool in self.pools
            },
        )

    def _try_steady(self, look_s: float) -> None:
        """Try a fixed number of engines on the last hour, beside following its traffic."""
        if self.forecast is None:
            return
        lengths = self.forecast.lengths
        usual = lengths.scaled(self.demand.usual_isl / lengths.mean)
        exact = self.forecast._replace(spread=EXACT, lengths=usual)
        self.steady_fleet.plan(
            self._start_s + look_s,
            is_known=self.analog_forecast.price is not None
            or self.demand.is_foreseen(1.0 - (self.goals.attainment or 1.0)),
            late_of={pool.key: self._late_of(pool, exact) for pool in self.pools},
        )

    def _keep_steady(self, report: ModelReport) -> None:
        """Keep to a fixed number of engines where traffic cannot be followed."""
        if self.forecast is None or self.demand.missed:
            return
        self.steady_fleet.follow(
            {pool.key: pool.wanted for pool in self.pools},
            {pool.key: pool.state.desired for pool in self.pools},
        )
        for pool in self.pools:
            engines = self.steady_fleet.engines(pool.key)
            if engines is None or engines == pool.wanted:
                continue
            report.reasons.append(
                f"{pool.key}: {engines}, not {pool.wanted}: {self.steady_fleet.why}"
            )
            pool.keep(engines)

    def _go_by_analog(self, pool: PlannedPool, report: ModelReport, otherwise: int) -> bool:
        """Let similar times in the past decide about a pool; returns whether they do.

        The reason is reported if the count differs from the current one, or from `otherwise`.
        """
        current = pool.state.desired
        wanted = self.analog_forecast.engines(pool.key, current)
        if wanted is None:
            return False
        pool.slow = pool.sure = wanted
        pool.engines = float(wanted)
        if wanted != otherwise:
            text = f"{self.analog_forecast.why}; {self.analog_forecast.worth(pool.key, wanted)}"
            report.reasons.append(f"{pool.key}: {wanted}, not {otherwise}: {text}")
        elif wanted != current:
            report.reasons.append(f"{pool.key}: {wanted}: {self.analog_forecast.why}")
        return True

    @property
    def _start_s(self) -> float:
        return max(pool.start_time.seconds for pool in self.pools)

    def _hold(self, report: ModelReport) -> None:
        is_reactive = self.demand.missed > MISSED_MAX and self.speed.surface is not None
        for pool in self.pools:
            pool.hold(None if is_reactive else pool.state.desired)
        what = "the load alone decides" if is_reactive else "replicas are held"
        report.reasons.append(f"{self.key}: {self.demand.missed} intervals missing: {what}")

    def _rate_planned(self, now: float, look_s: float) -> float:
        """The highest planned rate between the last count and the start of engines ordered now."""
        until = now + look_s + self._start_s
        since = now - self._back_s
        rates = [rate for begin, end, rate in self._rates if end > since and begin < until]
        return max(rates or [rate for _, _, rate in self._rates[-1:]], default=0.0)

    def _reaction(
        self, pool: PlannedPool, load: Load, now: float, counted: Surge | None
    ) -> tuple[int | None, str]:
        forecast = self.forecast
        if forecast is None:
            return None, ""
        if not isinstance(load.context_tokens, Value):
            load = replace(load, context_tokens=Value(forecast.lengths.mean + forecast.osl / 2))
        surges = [
            None if counted is None else self._going_on(counted),
            *self._queues(pool, forecast, load, now, self._arrivals.latest),
        ]
        found = [
            (
                max(
                    self._engines_at(pool, forecast, one.rate, one.spread),
                    self._engines("prefill", one.engines_least),
                ),
                one.why,
            )
            for one in surges
            if one is not None
        ]
        if found:
            engines, why = max(found)
            return math.ceil(engines - SAME), why
        if pool.slow is None:
            return self._blind(pool, load, forecast)
        return None, ""

    def _going_on(self, counted: Surge) -> Surge:
        """Extend a counted surge by the usual forecast errors, until its engines have started."""
        if self.demand.recurs:
            return counted  # its course is known
        return counted._replace(
            spread=self.demand.forecast_errors.spread(counted.rate * self._interval_s)
        )

    def _blind(self, pool: PlannedPool, load: Load, forecast: Forecast) -> tuple[int | None, str]:
        """Without surge and forecast: return the engines that the current load requires."""
        rate, why = self._arrivals.rate, ""
        live, context = load.concurrency, load.context_tokens
        answering = [one for one in self.pools if one.key.role != "prefill"]
        if rate is not None:
            why = f"{rate:.2f} requests/s come"
        elif isinstance(live, Value) and isinstance(context, Value) and answering:
            engines = self._servers("decode", max(1, answering[0].state.ready))
            osl = forecast.osl * self.d_correction.factor
            rate = rate_ended(self.surface, live.value, context.value, osl=osl, engines=engines)
            why = f"{live.value:.0f} requests are live, as of {rate:.2f} requests/s"
        if rate is None:
            return None, ""  # a short queue shows that engines suffice, not how many are needed
        return math.ceil(self._engines_at(pool, forecast, rate) - SAME), why

    def _correct(self, window: Window) -> None:
        self.demand.lumps.judge()
        samples = window.requests.value if isinstance(window.requests, Value) else 0.0
        if self.steady_fleet.is_clumped:
            return  # prompts wait for each other, not for slow engines
        for pool in self.pools:
            steady, engines = pool.was_steady, pool.state.ready
            if not engines:
                continue
            if pool.key.role != "decode":
                self._correct_prefill(window, engines, samples, steady=steady)
            if pool.key.role != "prefill":
                servers = self._servers("decode", engines)
                expected = expected_itl_ms(self.surface, window, servers)
                self.d_correction.observe(window.itl_ms, expected, samples, steady=steady)


def _as_wrong_as_usual(rate: float, usual: float, seconds: float) -> float:
    return (math.sqrt(rate * seconds) + usual) ** 2 / seconds
