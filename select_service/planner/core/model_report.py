"""One model's part of a decision in texts and terms, as `/decisions` of the planner shows it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from select_service.planner.core.pool import SAME

if TYPE_CHECKING:
    from select_service.planner.core.pool import PlannedPool
    from select_service.planner.core.sizing import Need


class ModelReport:
    """One model's part of a decision, in texts and terms."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.infeasible: list[str] = []
        self.terms: dict[str, float] = {}

    def take(self, pool: PlannedPool, need: Need) -> None:
        """Add the need of a pool."""
        rate = need.terms["rate"]
        engines = f"{_up(need.engines)} engines serve them"
        self.reasons.append(f"{pool.key}: {rate:.2f} requests/s are expected, {engines}")
        if need.infeasible:
            self.infeasible.append(f"{pool.key}: {need.infeasible}")
        for name, value in need.terms.items():
            self.terms[f"{pool.key}:{name}"] = value
        self.terms[f"{pool.key}:engines"] = need.engines


def due(pool: PlannedPool) -> str:
    """Say why an unchanged plan asks for another count now."""
    needed = f"{_up(pool.engines)} engines are planned until engines ordered now have started"
    return f"{pool.key}: {pool.slow}: {needed}" + (f", and {pool.why}" if pool.why else "")


def _up(engines: float) -> str:
    """Format with two digits, such that it rounds up to the same whole engines."""
    return f"{math.ceil(100 * (engines - SAME)) / 100:.2f}"
