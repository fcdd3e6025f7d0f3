"""A fleet whose replicas start at once, and what is reported to it."""

from __future__ import annotations

from typing import Any

from select_service.planner.core.demand import Predictors
from select_service.planner.core.engine_speed import EngineSpeed
from select_service.planner.core.fleet_plan import FleetPlan, PlannedModel, PoolSettings
from select_service.planner.core.prediction import Constant, Predictor
from select_service.planner.core.predictor_choice import ForecastModel
from select_service.planner.core.sizing import Goals
from select_service.planner.core.surface import surface_of
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.types import (
    Load,
    ModelKey,
    PoolKey,
    PoolState,
    ScalingDecision,
    Value,
    Window,
)
from tests.select_service.planner.golden import PROFILE

SURFACE = surface_of(read_profile(PROFILE))
KEY = ModelKey("m")
PREFILL, DECODE = PoolKey(KEY, "prefill"), PoolKey(KEY, "decode")
INTERVAL = 180.0
BUSY = Window(
    seconds=INTERVAL,
    requests=Value(5400.0),
    isl=Value(3000.0),
    osl=Value(300.0),
    ttft_ms=Value(150.0),
    itl_ms=Value(18.0),
    concurrency=Value(180.0),
)


def model(
    key: ModelKey = KEY,
    weight: float = 1.0,
    requests: ForecastModel | None = None,
    **limits: Any,
) -> PlannedModel:
    pool = PoolSettings(**{"step_up": 99, "step_down": 99, **limits})
    forecasts = (requests or Constant(), Constant(), Constant())
    predictors = Predictors(*(Predictor(one) for one in forecasts))
    goals = Goals(ttft_ms=500.0, itl_ms=20.0, pooled=False)
    speed = EngineSpeed(SURFACE)
    return PlannedModel(key, {"prefill": pool, "decode": pool}, speed, predictors, goals, weight)


class Run:
    """A fleet whose replicas start at once."""

    def __init__(
        self,
        *models: PlannedModel,
        gpus_max: int = 64,
        prefill: int = 3,
        decode: int = 6,
        correct: bool = False,
    ) -> None:
        self.fleet = FleetPlan(models or [model()], gpus_max, INTERVAL, correct=correct)
        self.states = {PREFILL: PoolState(prefill, prefill), DECODE: PoolState(decode, decode)}
        for one in models[1:]:
            self.states |= {pool.key: PoolState(1, 1) for pool in one.pools}
        self.now = 0.0

    def slow(self, window: Window, seconds: float = INTERVAL) -> ScalingDecision:
        self.now += seconds
        windows = {one.key: window for one in self.fleet.models}
        return self._apply(self.fleet.slow(windows, self.states, self.now))

    def slow_each(self, windows: dict[ModelKey, Window]) -> ScalingDecision:
        self.now += INTERVAL
        return self._apply(self.fleet.slow(windows, self.states, self.now))

    def fast(self, load: Load) -> ScalingDecision:
        self.now += 5.0
        return self._apply(self.fleet.fast({KEY: load}, self.states, self.now))

    def _apply(self, decision: ScalingDecision) -> ScalingDecision:
        for one in decision.targets:
            self.states[one.pool] = PoolState(one.replicas, one.replicas)
        return decision

    @property
    def counts(self) -> tuple[int, int]:
        return self.states[PREFILL].desired, self.states[DECODE].desired
