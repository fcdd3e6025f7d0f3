"""From costs to one candidate: the cheapest, or a draw when temperature asks for one.

Knows only numbers; `partition.py` stands before and after it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random

    from select_service.core.columns import Floats


_FEW: Final = 64
"""Up to so many costs are looked through faster as Python's own numbers."""


def pick(costs: Floats, temperature: float, rng: random.Random) -> int:
    """Return the position of the chosen candidate (contract 3.3).

    Temperature 0: the smallest cost, exact ties drawn uniformly. Above: position k with
    probability ∝ exp(-(cost_k - min) / ((max - min)·temperature)), uniform when all are equal
    or some are infinite, as huge weights make them.

    Args:
        costs: one cost per candidate, at least one.
        temperature: ≥ 0.
        rng: the service's seeded generator.
    """
    if temperature == 0.0:
        if len(costs) <= _FEW:
            few = costs.tolist()
            return _pick_of_few(few, min(few), rng)
        best = int(costs.argmin())
        ties = (costs == costs[best]).nonzero()[0]
        return best if len(ties) == 1 else int(ties[int(rng.random() * len(ties))])
    low, high = float(costs.min()), float(costs.max())
    spread = (high - low) * temperature
    if not 0.0 < spread < math.inf:  # the spread of infinite costs is no number
        return rng.randrange(len(costs))
    weights = [math.exp(-(float(cost) - low) / spread) for cost in costs]
    return rng.choices(range(len(weights)), weights)[0]


def _pick_of_few(costs: list[float], low: float, rng: random.Random) -> int:
    ties = costs.count(low)
    at = costs.index(low)
    if ties == 1:
        return at
    which = int(rng.random() * ties)
    if ties == len(costs):  # an idle fleet
        return which
    for _ in range(which):
        at = costs.index(low, at + 1)
    return at
