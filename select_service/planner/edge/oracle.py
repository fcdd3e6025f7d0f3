"""Who knows the future: the yardstick that keeps the target with few GPU-hours.

An oracle plans every half minute of the trace and orders engines in time. Its first plan is lean:
what the half minute's requests need on average. Where that made too many late it is repaired, until
the replay itself shows that the target is kept.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from select_service.planner.core.demand import Forecast
from select_service.planner.core.lengths import Lengths, from_values
from select_service.planner.core.sizing import Goals, size_decode, size_prefill
from select_service.planner.core.surface import surface_of
from select_service.planner.edge.trace_replay import DECODE, PREFILL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from select_service.planner.core.profile import Profile
    from select_service.planner.core.warm_up import TracedRequest
    from select_service.planner.edge.fixed_fleets import FixedFleets
    from select_service.planner.edge.trace_replay import (
        Fleet,
        ReplaySettings,
        Result,
    )
    from select_service.planner.types import Load, PoolKey, PoolState, Window

__all__ = ["Oracle", "oracle_result"]

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

    def slow(
        self, window: Window, states: dict[PoolKey, PoolState], now: float
    ) -> dict[PoolKey, int]:
        """See Policy."""
        return self._at(now)

    def fast(self, load: Load, states: dict[PoolKey, PoolState], now: float) -> dict[PoolKey, int]:
        """See Policy."""
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
