"""Policies for a replay: ours, the reference's formulas, a purely reactive one, and an oracle."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from select_service.planner.core.budget import PoolNeed, share_out
from select_service.planner.core.compatible_lookup import CompatibleLookup
from select_service.planner.core.compatible_sizing import (
    CompatibleDemand,
    CompatibleLimits,
    plan_as_they,
    terms_of,
)
from select_service.planner.core.decode_sizing import size_decode
from select_service.planner.core.demand import Forecast, Predictors
from select_service.planner.core.engine_speed import EngineSpeed, SpeedSettings
from select_service.planner.core.fleet_plan import FleetPlan, PlannedModel, PoolSettings
from select_service.planner.core.lengths import Lengths, from_values
from select_service.planner.core.prefill_sizing import size_prefill
from select_service.planner.core.sizing import Goals
from select_service.planner.core.surface import surface_of
from select_service.planner.edge.fixed_fleets import (
    FixedFleets,
    SearchBudget,
    busiest,
    engines_of_use,
)
from select_service.planner.edge.predictors import PredictorSettings, make_predictor
from select_service.planner.edge.trace_replay import (
    DECODE,
    KEY,
    PREFILL,
    ScalingPolicy,
    TraceReplay,
)
from select_service.planner.types import Load, PoolKey, Role, Value, Window, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from select_service.planner.core.profile import Profile
    from select_service.planner.core.warm_up import TracedRequest
    from select_service.planner.edge.trace_replay import Fleet, ReplaySettings, Result, States

SIMULATIONS: Final = 32
"""As many as finding the best fixed fleet, the oracle's plan and the frontier takes. A trace with
which so many are beyond the budget is searched in its busiest part first."""
_SEARCHED: Final = 4
"""The search has a part like this of what may be simulated, however long playing takes."""
_BUSY: Final = 0.7  # utilization a reactive scaler aims for


class Ours:
    """The planner as `run` runs it."""

    def __init__(
        self, profile: Profile, tuning: PredictorSettings, settings: ReplaySettings, gpus_max: int
    ) -> None:
        self.name = f"slo ({tuning.name})"
        gpus: dict[Role, int] = {"prefill": settings.prefill_gpus, "decode": settings.decode_gpus}
        pools = {
            role: PoolSettings(
                gpus=count,
                step_up=64,
                step_down=8,
                stabilisation_s=3 * settings.interval_s,
                start_s=settings.startup_s,
            )
            for role, count in gpus.items()
        }
        predictors = Predictors(*(make_predictor(tuning) for _ in range(3)))
        goals = _goals(settings)
        speed = EngineSpeed(
            surface_of(profile), settings.decode_gpus, SpeedSettings(settings.engine_speed)
        )
        model = PlannedModel(KEY, pools, speed, predictors, goals)
        self._fleet = FleetPlan([model], gpus_max, settings.interval_s, likens=settings.likens)
        model.warm_up(settings.warmup, settings.interval_s)

    def slow(self, window: Window, states: States, now: float) -> dict[PoolKey, int]:
        """See ScalingPolicy."""
        return _counts(self._fleet.slow({KEY: window}, states, now))

    def fast(self, load: Load, states: States, now: float) -> dict[PoolKey, int]:
        """See ScalingPolicy."""
        return _counts(self._fleet.fast({KEY: load}, states, now))


def _goals(settings: ReplaySettings) -> Goals:
    return Goals(ttft_ms=settings.ttft_ms, itl_ms=settings.itl_ms, attainment=settings.attainment)


def _counts(decision: object) -> dict[PoolKey, int]:
    return {one.pool: one.replicas for one in decision.targets}  # type: ignore[attr-defined]


class Reference(ScalingPolicy):
    """The reference's formulas on its own look-ups, with its corrections."""

    def __init__(
        self, profile: Profile, tuning: PredictorSettings, settings: ReplaySettings, gpus_max: int
    ) -> None:
        self.name = f"compatible ({tuning.name})"
        self._lookup = CompatibleLookup(profile)
        self._predictors = [make_predictor(tuning) for _ in range(3)]
        for one in settings.warmup:
            for predictor, value in zip(self._predictors, one[:3], strict=True):
                predictor.add(value or 0.0)
        self._limits = CompatibleLimits(
            interval_s=settings.interval_s,
            itl_ms=settings.itl_ms,
            gpus_max=gpus_max,
            endpoints_min=1,
            prefill_gpus=settings.prefill_gpus,
            decode_gpus=settings.decode_gpus,
        )

    def slow(self, window: Window, states: States, now: float) -> dict[PoolKey, int]:
        """See ScalingPolicy."""
        measured = [_zero(window, name) for name in ("requests", "isl", "osl")]
        for predictor, value in zip(self._predictors, measured, strict=True):
            predictor.add(value)
        if any(not isinstance(getattr(window, name), Value) for name in _NEEDED):
            return {}
        requests, isl, osl = measured
        ready = max(1, states[DECODE].ready)
        live = requests / ready * _zero(window, "request_s") / self._limits.interval_s
        p_correction = _zero(window, "ttft_ms") / self._lookup.prefill.ttft_ms(isl)
        d_correction = _zero(window, "itl_ms") / self._lookup.decode.at(live, isl + osl / 2)[0]
        demand = CompatibleDemand(
            requests=self._predictors[0].predict(),
            isl=self._predictors[1].predict(),
            osl=self._predictors[2].predict(),
            p_correction=p_correction,
            d_correction=d_correction,
        )
        plan = plan_as_they(terms_of(self._lookup, demand, self._limits), self._limits)
        return {PREFILL: plan.num_p, DECODE: plan.num_d}


_NEEDED: Final = ("isl", "osl", "ttft_ms", "itl_ms", "request_s")


def _zero(window: Window, name: str) -> float:
    return number_of(getattr(window, name)) or 0.0


class Ceiling:
    """The GPUs there are, for policies that know of none: as hard as for ours.

    Raises:
        InfeasiblePlan: one engine of each kind costs more.
    """

    def __init__(self, settings: ReplaySettings, gpus_max: int) -> None:
        self._gpus = (settings.prefill_gpus, settings.decode_gpus)
        self._gpus_max = gpus_max
        self.below(1, 1)

    def below(self, prefill: int, decode: int) -> dict[PoolKey, int]:
        """Return as many of the wanted replicas as there are GPUs for."""
        pools = ((PREFILL, self._gpus[0], prefill), (DECODE, self._gpus[1], decode))
        needs = [PoolNeed(pool, gpus, 1, wanted, float(wanted)) for pool, gpus, wanted in pools]
        return share_out(needs, self._gpus_max)


class Reactive(ScalingPolicy):
    """Keeps the measured load at 70 % of capacity, without forecasts.

    Like horizontal autoscalers: up at once, down after five minutes of less load.
    """

    name = "reactive"

    def __init__(self, profile: Profile, settings: ReplaySettings, ceiling: Ceiling) -> None:
        self._surface = surface_of(profile)
        self._settings = settings
        self._ceiling = ceiling
        self._wanted: list[tuple[float, int, int]] = []

    def slow(self, window: Window, states: States, now: float) -> dict[PoolKey, int]:
        """See ScalingPolicy."""
        if not (isinstance(window.requests, Value) and isinstance(window.isl, Value)):
            return {}
        rate = window.requests.value / window.seconds
        work = rate * self._surface.prefill.ttft_ms(window.isl.value) / 1e3
        osl = _zero(window, "osl") or 1.0
        best = self._surface.decode.best(self._settings.itl_ms, window.isl.value + osl / 2)
        live = _zero(window, "concurrency")
        decode = math.ceil(live / best.concurrency / _BUSY) if best else states[DECODE].desired
        self._wanted.append((now, max(1, math.ceil(work / _BUSY)), max(1, decode)))
        self._wanted = [one for one in self._wanted if one[0] > now - 300.0]
        return self._ceiling.below(
            max(one[1] for one in self._wanted), max(one[2] for one in self._wanted)
        )


class Contest:
    """All policies on one trace, under one budget.

    Args:
        profile: of the engines.
        requests: sorted by time, from 0.
        settings: the environment.
        gpus_max: of all engines together.
        plays: policies that will be played; what they simulate is part of what may be.

    Raises:
        InfeasiblePlan: one engine of each kind costs more GPUs than there are.
    """

    def __init__(
        self,
        profile: Profile,
        requests: Sequence[TracedRequest],
        settings: ReplaySettings,
        gpus_max: int,
        plays: int = 0,
    ) -> None:
        self._profile, self._requests = profile, requests
        self._settings, self._gpus_max = settings, gpus_max
        self._ceiling = Ceiling(settings, gpus_max)
        self._run = TraceReplay(profile, requests, settings)
        useful, limit = engines_of_use(profile, requests), settings.search_requests
        limit = max(limit - plays * len(requests), limit // _SEARCHED)
        part = None
        if len(requests) * SIMULATIONS > limit:
            some = busiest(requests, limit // (2 * SIMULATIONS))
            of_part, half = TraceReplay(profile, some, settings), SearchBudget(limit // 2)
            part = FixedFleets(of_part, settings, gpus_max, useful, half)
        budget = SearchBudget(limit if part is None else limit // 2)
        self.fixed = FixedFleets(self._run, settings, gpus_max, useful, budget, part)

    def policy(self, name: str, tuning: PredictorSettings) -> ScalingPolicy | None:
        """Return a new policy; None: it is found by trying, as `result` does.

        Raises:
            MissingExtra: the reference's look-ups, or the predictor, are not installed.
        """
        profile, settings, gpus_max = self._profile, self._settings, self._gpus_max
        if name == "slo":
            return Ours(profile, tuning, settings, gpus_max)
        if name == "compatible":
            return Reference(profile, tuning, settings, gpus_max)
        return Reactive(profile, settings, self._ceiling) if name == "reactive" else None

    def result(
        self,
        name: str,
        policy: ScalingPolicy | None,
        start: Fleet | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> Result:
        """Return what a policy attains.

        Args:
            name: of the policy.
            policy: as `policy` made it.
            start: engines that are there at the beginning; None: those of the settings. What is
                found by trying has its own.
            progress: called with the share that is done.
        """
        if policy is not None:
            return self._run.run(policy, progress, start)
        with self.watched(progress):
            if name == "static":
                return self.fixed.result(self.fixed.best)
            oracle = Oracle(self._profile, self._requests, self._settings, self._ceiling.below)
            return oracle_result(oracle, self.fixed)

    @contextmanager
    def watched(self, progress: Callable[[float], None]) -> Iterator[None]:
        """Tell of a search: the share of the simulations that one takes about."""
        before = self.fixed.simulated
        self.fixed.on_progress = lambda done: progress(min(1.0, (done - before) / SIMULATIONS))
        yield
        self.fixed.on_progress = lambda _: None


# What knows the future: the yardstick that keeps the target with few GPU-hours. An oracle plans
# every half minute of the trace and orders engines in time. Its first plan is lean: what the half
# minute's requests need on average. Where that made too many late it is repaired, until the replay
# itself shows that the target is kept.

PLANNED_S: Final = 30.0
"""Shorter stretches would be chance."""
REPAIRS_MOST: Final = 16
_ALLOWED: Final = 0.9
"""The part of the late requests allowed that is left where it is: repairs move queues."""
_GROWTH: Final = 0.15
"""Share of its engines that a repair adds to a half minute; one at the least."""


class Oracle:
    """Knows the traffic: always has what is planned until engines could have started."""

    name = "oracle"

    def __init__(
        self,
        profile: Profile,
        requests: Sequence[TracedRequest],
        settings: ReplaySettings,
        ceiling: Callable[[int, int], dict[PoolKey, int]],
    ) -> None:
        self._surface = surface_of(profile)
        self._settings = settings
        self._ceiling = ceiling
        self._goals = Goals(ttft_ms=settings.ttft_ms, itl_ms=settings.itl_ms)
        bins: list[list[TracedRequest]] = []
        for one in requests:
            index = int(one.at_s / PLANNED_S)
            while len(bins) <= index:
                bins.append([])
            bins[index].append(one)
        self._plan = {
            PREFILL: [self._need(found)[0] for found in bins],
            DECODE: [self._need(found)[1] for found in bins],
        }

    @property
    def start(self) -> Fleet:
        """The engines that it has had started before the first request."""
        counts = self._at(0.0)
        return counts[PREFILL], counts[DECODE]

    def slow(self, window: Window, states: States, now: float) -> dict[PoolKey, int]:
        """See ScalingPolicy."""
        return self._at(now)

    def fast(self, load: Load, states: States, now: float) -> dict[PoolKey, int]:
        """See ScalingPolicy."""
        return self._at(now)

    def repair(self, late: Mapping[str, Sequence[float]], spare: float) -> bool:
        """Add engines to the half minutes that made most requests late, all but a few.

        Returns whether that changes anything: GPUs may be short.

        Args:
            late: by pool, when the requests came that more engines may have served in time.
            spare: how many of them may stay late.
        """
        before = self._affordable
        counts = Counter(
            (pool, min(int(at / PLANNED_S), len(plan) - 1))
            for pool, plan in self._plan.items()
            for at in late[pool.role]
        )
        left = _ALLOWED * spare  # of both pools together
        for (pool, index), count in sorted(counts.items(), key=lambda one: one[1]):
            left -= count
            if left < 0:
                plan = self._plan[pool]
                plan[index] += max(1, round(_GROWTH * plan[index]))
        return self._affordable != before

    @property
    def _affordable(self) -> list[dict[PoolKey, int]]:
        return [self._ceiling(*counts) for counts in zip(*self._plan.values(), strict=True)]

    def _need(self, found: Sequence[TracedRequest]) -> Fleet:
        if not found:
            return 1, 1
        lengths = Lengths.of(from_values(one.isl for one in found))
        osl = sum(one.osl for one in found) / len(found)
        forecast = Forecast(len(found) / PLANNED_S, lengths or Lengths.single(1.0), osl, 1.0)
        prefill = size_prefill(self._surface, forecast, self._goals, 1.0)
        gpus = self._settings.decode_gpus
        decode = size_decode(self._surface, forecast, self._goals, 1.0, gpus=gpus)
        return max(1, math.ceil(prefill.engines)), max(1, math.ceil(decode.engines))

    def _at(self, now: float) -> dict[PoolKey, int]:
        settings = self._settings
        first = max(0, int(now / PLANNED_S))
        # what is requested now is there after the start: look until then, and one look further
        last = int((now + settings.startup_s + settings.fast_s) / PLANNED_S)
        prefill, decode = (max(plan[first : last + 1] or [1]) for plan in self._plan.values())
        return self._ceiling(prefill, decode)


def oracle_result(oracle: Oracle, fixed: FixedFleets) -> Result:
    """Return the cheapest result found that keeps the target, or the one that comes closest.

    What never changes is a plan, too: no oracle does worse than the best fixed fleet.
    """
    target, found = fixed.reachable, [fixed.result(fixed.best)]
    hopeless = {name: set(times) for name, times in fixed.unlimited.late.items()}
    spare = (1.0 - target) * found[0].requests - len(set[float]().union(*hopeless.values()))
    for _ in range(REPAIRS_MOST):
        if len(found) > 1 and not fixed.may_simulate():
            break  # its first plan is always played
        found.append(fixed.simulate(oracle, oracle.start))
        late = {
            name: [at for at in times if at not in hopeless[name]]
            for name, times in found[-1].late.items()
        }
        if found[-1].attainment >= target or not oracle.repair(late, spare):
            break
    kept = [one for one in found if one.attainment >= target]
    if kept:
        best = min(kept, key=lambda one: one.gpu_hours)
    else:
        best = max(found, key=lambda one: one.attainment)
    return replace(best, name=oracle.name)
