"""How many engines a model's pools need for a forecast, and what they would be late with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from select_service.planner.core.correction import (
    SAMPLES_MIN,
    Correction,
    expected_ttft_ms,
    measured_queue,
)
from select_service.planner.core.decode_sizing import BACK, NEAR, late_decode, size_decode
from select_service.planner.core.forecast_errors import EXACT
from select_service.planner.core.marginal_value import table_of
from select_service.planner.core.pool import SAME
from select_service.planner.core.prefill_sizing import late_prefill, size_prefill
from select_service.planner.core.sizing import Need
from select_service.planner.types import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from select_service.planner.core.demand import Demand, Forecast
    from select_service.planner.core.engine_speed import EngineSpeed, Phase
    from select_service.planner.core.forecast_errors import Spread
    from select_service.planner.core.marginal_value import Table
    from select_service.planner.core.pool import PlannedPool
    from select_service.planner.core.profile import Floats
    from select_service.planner.core.reactive import Surge
    from select_service.planner.core.sizing import Goals
    from select_service.planner.core.surface import Surface
    from select_service.planner.types import Load, Window


class ModelNeeds:
    """One model's engines and targets.

    Args:
        speed: of the engines.
        goals: the targets.
        demand: what comes.
    """

    def __init__(self, speed: EngineSpeed, goals: Goals, demand: Demand) -> None:
        self.speed = speed
        self.goals = goals
        self.demand = demand
        self.p_correction = Correction()
        self.d_correction = Correction()
        self._reach = NEAR  # of the ITL target

    @property
    def surface(self) -> Surface:
        """The engines' speed; only to be asked for where it is known."""
        assert self.speed.surface is not None, "nothing is planned without a speed"
        return self.speed.surface

    def _learn_speed(self, window: Window, passed_s: float) -> list[str]:
        """Learn how fast the engines are; returns what is to be reported of it.

        What a profile was corrected by says nothing of a speed that was measured, nor the other
        way around.
        """
        before = self.speed.by_measurement
        remarks = self.speed.learn(window, self.demand.computed, passed_s, self.goals.itl_ms)
        changed = before ^ self.speed.by_measurement
        if "prefill" in changed:
            self.p_correction = Correction()
        if "decode" in changed:
            self.d_correction = Correction()
        return remarks

    def _correct_prefill(
        self, window: Window, engines: int, samples: float, *, steady: bool
    ) -> None:
        engines = self._servers("prefill", engines)
        lumps, ttft_ms, computed = self.demand.lumps, window.ttft_ms, self.demand.computed
        most_s = lumps.most_s(samples, window.seconds)
        expected = expected_ttft_ms(self.surface, self.goals, computed, window, engines, most_s)
        self.p_correction.observe(ttft_ms, expected, samples, steady=steady)
        if steady and samples >= SAMPLES_MIN and isinstance(ttft_ms, Value):
            slowness = self.p_correction.factor
            found = measured_queue(self.surface, computed, window, engines, slowness)
            if found is not None:
                queue, rho = found
                lumps.learn(queue.lump_s(ttft_ms.value / 1e3, rho), most_s)

    def _judge_reach(self, forecast: Forecast | None) -> None:
        """Judge whether the ITL target is out of reach: once an interval, and for all of it."""
        if forecast is not None:
            self._reach = BACK if self._decode(forecast, 1).infeasible else NEAR

    def _decode(self, forecast: Forecast, gpus: int) -> Need:
        slowness = self.d_correction.factor
        return size_decode(
            self.surface, forecast, self.goals, slowness, gpus=gpus, reach=self._reach
        )

    def _servers(self, phase: Phase, engines: int) -> int:
        """Return how many prompts, or batches, so many engines compute at once."""
        return round(engines * self.speed.servers(phase))

    def _units(self, phase: Phase) -> str:
        """Return what those are called."""
        return "rank" if self.speed.servers(phase) > 1.0 else "engine"

    def _engines(self, phase: Phase, servers: float) -> float:
        return servers / self.speed.servers(phase)

    def _need(self, pool: PlannedPool, forecast: Forecast) -> Need:
        role, gpus = pool.key.role, pool.settings.gpus
        prefill = size_prefill(self.surface, forecast, self.goals, self.p_correction.factor)
        prefill = prefill._replace(engines=self._engines("prefill", prefill.engines))
        if role == "prefill":
            return prefill
        decode = self._decode(forecast, gpus)
        decode = decode._replace(engines=self._engines("decode", decode.engines))
        if role == "decode":
            return decode
        infeasible = "; ".join(one for one in (prefill.infeasible, decode.infeasible) if one)
        # in an engine that does both, each phase gets the time the other leaves
        return Need(prefill.engines + decode.engines, prefill.terms | decode.terms, infeasible)

    def _queues(
        self, pool: PlannedPool, forecast: Forecast, load: Load, now: float, arriving: float | None
    ) -> Iterator[Surge | None]:
        """Look at what waits in a pool, prompts and live requests."""
        ready, role = pool.state.ready, pool.key.role
        if role != "decode":
            yield pool.prefills.prefill(
                self.surface,
                load,
                now,
                target_ms=self.goals.ttft_ms,
                isl=forecast.lengths.mean * forecast.computed,
                ready=self._servers("prefill", ready),
                arriving=arriving,
                units=self._units("prefill"),
            )
        if role != "prefill":
            yield pool.decodes.decode(
                self.surface,
                load,
                now,
                itl_ms=self.goals.itl_ms / self.d_correction.factor,
                osl=forecast.osl,
                ready=self._servers("decode", ready),
                units=self._units("decode"),
            )

    def _engines_at(
        self, pool: PlannedPool, forecast: Forecast, rate: float, spread: Spread = EXACT
    ) -> float:
        return self._need(pool, forecast._replace(rate=rate, spread=spread)).engines

    def _table(self, pool: PlannedPool, exact: Forecast, grid: Floats) -> Table:
        def needed(rate: float) -> int:
            return self._needed(pool, exact, rate)

        return table_of(grid, needed, self._late_of(pool, exact), pool.settings.gpus)

    def _needed(self, pool: PlannedPool, exact: Forecast, rate: float) -> int:
        return math.ceil(self._need(pool, exact._replace(rate=rate)).engines - SAME)

    def _late_of(self, pool: PlannedPool, exact: Forecast) -> Callable[[float, int], float]:
        """Return a function from rate and engines to the share of late requests."""
        if pool.key.role == "prefill":
            late = late_prefill(self.surface, exact, self.goals, self.p_correction.factor)
            return lambda rate, engines: late(rate, self._servers("prefill", engines))
        if pool.key.role == "decode":
            factor, gpus = self.d_correction.factor, pool.settings.gpus
            slow = late_decode(
                self.surface, exact, self.goals, factor, gpus=gpus, reach=self._reach
            )
            return lambda rate, engines: slow(rate, self._servers("decode", engines))
        # of engines that do both, all requests are late, or none is
        return lambda rate, engines: float(self._needed(pool, exact, rate) > engines)
