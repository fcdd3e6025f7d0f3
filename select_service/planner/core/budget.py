"""Distributes one budget of GPUs over several pools: minima first, then the largest gains.

The ceiling is hard. The gain of a replica is the pool's class weight times the unmet share of its
need; so pools fill up like connected vessels, and none gets more than it needs. The reference
rounds shares, and its minima may exceed the budget.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from select_service.planner.errors import InfeasiblePlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.planner.types import PoolKey


class PoolNeed(NamedTuple):
    """The need of one pool."""

    pool: PoolKey
    gpus: int
    """Per replica."""
    least: int
    wanted: int
    engines: float
    """The need before rounding up; the marginal gain is computed from it."""
    weight: float = 1.0


def check_minima(needs: Sequence[PoolNeed], gpus_max: int) -> None:
    """Verify that the minima fit the budget.

    Raises:
        InfeasiblePlan: they do not, whatever the load.
    """
    total = sum(one.least * one.gpus for one in needs)
    if total > gpus_max:
        minima = " + ".join(f"{one.least} x {one.gpus} ({one.pool})" for one in needs)
        raise InfeasiblePlan(f"the minima need {total} GPUs, {gpus_max} are allowed: {minima}")


def share_out(needs: Sequence[PoolNeed], gpus_max: int) -> dict[PoolKey, int]:
    """Return replicas of every pool, together never above the ceiling. O(replicas log pools).

    Raises:
        InfeasiblePlan: the minima alone are above it.
    """
    check_minima(needs, gpus_max)
    counts = {one.pool: one.least for one in needs}
    left = gpus_max - sum(one.least * one.gpus for one in needs)
    queue = [(-_gain(one, one.least), index) for index, one in enumerate(needs)]
    heapify(queue)
    while queue:
        _, index = heappop(queue)
        one = needs[index]
        have = counts[one.pool]
        if have >= one.wanted or one.gpus > left:
            continue  # it has enough, or can never be afforded again
        counts[one.pool] = have + 1
        left -= one.gpus
        heappush(queue, (-_gain(one, have + 1), index))
    return counts


def _gain(one: PoolNeed, have: int) -> float:
    """Overload relieved per GPU: a pool at half its need goes before one at nine tenths."""
    if have == 0:
        return float("inf")
    return one.weight * (min(one.engines, one.wanted) / have) / one.gpus
