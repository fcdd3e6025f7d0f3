"""How many engines a model's pools need for a forecast, and what they would be late with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from select_service.planner.core.correction import Correction
from select_service.planner.core.forecast_errors import EXACT
from select_service.planner.core.marginal_value import table_of
from select_service.planner.core.pool import SAME
from select_service.planner.core.sizing import (
    Goals,
    Need,
    late_decode,
    late_prefill,
    size_decode,
    size_prefill,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.planner.core.demand import Forecast
    from select_service.planner.core.forecast_errors import Spread
    from select_service.planner.core.marginal_value import Table
    from select_service.planner.core.pool import PlannedPool
    from select_service.planner.core.profile import Floats
    from select_service.planner.core.surface import Surface

__all__ = ["ModelNeeds"]


class ModelNeeds:
    """One model's engines and targets.

    Args:
        surface: the engines' profile.
        goals: the targets.
    """

    def __init__(self, surface: Surface, goals: Goals) -> None:
        self.surface = surface
        self.goals = goals
        self.p_correction = Correction()
        self.d_correction = Correction()

    def _need(self, pool: PlannedPool, forecast: Forecast) -> Need:
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
        # in an engine that does both, each phase gets the time the other leaves
        return Need(prefill.engines + decode.engines, prefill.terms | decode.terms, infeasible)

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
            return late_prefill(self.surface, exact, self.goals, self.p_correction.factor)
        if pool.key.role == "decode":
            factor, gpus = self.d_correction.factor, pool.settings.gpus
            return late_decode(self.surface, exact, self.goals, factor, gpus=gpus)
        # of engines that do both, all requests are late, or none is
        return lambda rate, engines: float(self._needed(pool, exact, rate) > engines)
