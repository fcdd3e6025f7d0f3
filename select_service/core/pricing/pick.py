"""From costs to one candidate: the cheapest, or a weighted draw with a temperature.

It knows only numbers: the prices of candidates.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from select_service.core.columns import Floats


FEW: Final = 64
"""Up to this many costs, plain Python numbers are faster than numpy."""


def pick(costs: Floats, temperature: float, rng: random.Random) -> int:
    """Return the position of the chosen candidate.

    Temperature 0: the smallest cost, exact ties drawn uniformly. Above: position k with probability
    ∝ exp(-(cost_k - min) / ((max - min)·temperature)), uniform if all are equal or some are
    infinite, as with huge weights.
    """
    if temperature == 0.0:
        return cheapest(costs, rng.random)
    low, high = float(costs.min()), float(costs.max())
    spread = (high - low) * temperature
    if not 0.0 < spread < math.inf:  # the spread of infinite costs is not a number
        return rng.randrange(len(costs))
    weights = [math.exp(-(float(cost) - low) / spread) for cost in costs]
    return rng.choices(range(len(weights)), weights)[0]


def cheapest(costs: Floats, draw: Callable[[], float]) -> int:
    """Return the position of the smallest cost; `draw`, in [0, 1), decides among equals."""
    if len(costs) <= FEW:
        return cheapest_of_few(costs.tolist(), draw)
    best = int(costs.argmin())
    ties = (costs == costs[best]).nonzero()[0]
    return best if len(ties) == 1 else int(ties[int(draw() * len(ties))])


def cheapest_of_few(costs: list[float], draw: Callable[[], float]) -> int:
    """Do the same with plain Python numbers."""
    low = min(costs)
    ties, at = costs.count(low), costs.index(low)
    if ties == 1:
        return at
    which = int(draw() * ties)
    if ties == len(costs):  # an idle fleet
        return which
    for _ in range(which):
        at = costs.index(low, at + 1)
    return at
