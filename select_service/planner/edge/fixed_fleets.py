"""Fleets that never change: the rivals that any scaling has to beat, known only afterwards.

Who reads a trace to its end can say which fixed fleet would have kept the target with the fewest
GPUs. A planner that costs more, or serves fewer in time, is worse than no planner. The frontier
tells for every price how many requests a fixed fleet serves in time.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.surface import Surface

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.planner.core.profile import Profile
    from select_service.planner.core.warm_up import TracedRequest
    from select_service.planner.edge.trace_replay import (
        Fleet,
        ReplaySettings,
        Result,
        TraceReplay,
    )
    from select_service.planner.types import Load, PoolKey, PoolState, Window

__all__ = ["FixedFleets", "FixedPoint", "engines_of_use"]

TARGET: Final = 0.99
"""Share of requests in time where the settings promise none."""
_POOLS: Final = ("prefill", "decode")
_NEARLY: Final = 0.005
"""Where no number of engines keeps the target, a share this close to the most is as good."""
_LONGER: Final = 2.0
"""How much longer requests are taken to stay than a lone one of the profile does."""
_STEPS: Final = 12
"""Fleets tried below the best one, and above it, for the frontier."""


class FixedPoint(NamedTuple):
    """One fleet of the frontier."""

    prefill: int
    decode: int
    gpu_hours: float
    attainment: float


class _Unchanged:
    """Scales nothing."""

    def __init__(self, fleet: Fleet) -> None:
        self.name = f"static ({fleet[0]} + {fleet[1]})"

    def slow(
        self, window: Window, states: dict[PoolKey, PoolState], now: float
    ) -> dict[PoolKey, int]:
        """See Policy."""
        return {}

    def fast(self, load: Load, states: dict[PoolKey, PoolState], now: float) -> dict[PoolKey, int]:
        """See Policy."""
        return {}


class FixedFleets:
    """Fixed fleets on one trace; every fleet is simulated once.

    Args:
        run: of the trace.
        settings: the environment.
        gpus_max: of all engines together.
        useful: prefill and decode engines beyond which more change nothing.
        told: called after each simulation.
    """

    def __init__(
        self,
        run: TraceReplay,
        settings: ReplaySettings,
        gpus_max: int,
        useful: Fleet,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._useful = useful
        self._gpus = (settings.prefill_gpus, settings.decode_gpus)
        self._gpus_max = gpus_max
        self._told = told
        self.target = TARGET if settings.attainment is None else settings.attainment
        """Share of requests that are to be in time."""
        self._results: dict[Fleet, Result] = {}
        self._best: Fleet | None = None

    def result(self, fleet: Fleet) -> Result:
        """Return what a fleet attains."""
        if fleet not in self._results:
            self._results[fleet] = self._run.run(_Unchanged(fleet), start=fleet)
            self._told()
        return self._results[fleet]

    @property
    def reachable(self) -> float:
        """The target, or less where prompts are too long for any number of engines."""
        most = self.unlimited.attainment
        return self.target if most >= self.target else most - _NEARLY

    @property
    def unlimited(self) -> Result:
        """What is attained where each pool has all engines of use that there are GPUs for."""
        return self.result((self._most(0), self._most(1)))

    @property
    def best(self) -> Fleet:
        """The cheapest fleet that keeps the target, or comes as close to it as any does.

        No engine less would do. About a dozen simulations: each pool is searched while the other
        has all GPUs, and what both do to each other is mended afterwards.
        """
        if self._best is None:
            most = [self._most(pool) for pool in range(2)]
            prefill = self._fewest(0, lambda count: (count, most[1]))
            decode = self._fewest(1, lambda count: (prefill, count))
            self._best = self._trimmed(self._grown((prefill, decode)))
        return self._best

    def _keeps(self, fleet: Fleet) -> bool:
        return self.result(fleet).attainment >= self.reachable

    def frontier(self, gpu_hours: float) -> list[FixedPoint]:
        """Return fleets of which none is cheaper and serves more in time than another.

        Args:
            gpu_hours: cheaper fleets are not looked for.
        """
        fleet = self.best
        for _ in range(_STEPS):  # more engines, while a request is late
            late = self.result(fleet).late
            more = self._more(fleet)
            if more is None or not any(late.values()):
                break
            fleet = more
        fleet = self.best
        for _ in range(_STEPS):
            fewer = self._fewer(fleet)
            if not fewer or self.result(fleet).gpu_hours <= gpu_hours:
                break
            fleet = max(fewer, key=self._value)
        points = sorted(
            (
                FixedPoint(*fleet, one.gpu_hours, one.attainment)
                for fleet, one in self._results.items()
                if self._cost(fleet) <= self._gpus_max
            ),
            key=lambda one: (one.gpu_hours, -one.attainment),
        )
        found: list[FixedPoint] = []
        for one in points:
            if not found or one.attainment > found[-1].attainment:
                found.append(one)
        return found

    def _value(self, fleet: Fleet) -> float:
        """Return the late requests saved, per GPU, against a fleet of one engine each."""
        return self.result(fleet).in_time / self._cost(fleet)

    def _fewest(self, pool: int, fleet_of: Callable[[int], Fleet]) -> int:
        """Return the fewest engines of a pool that make as few late as the target allows."""
        name, unlimited = _POOLS[pool], self.unlimited
        least = len(unlimited.late[name]) + _NEARLY * unlimited.requests
        allowed = max((1.0 - self.target) * unlimited.requests, least)

        def suffice(count: int) -> bool:
            return len(self.result(fleet_of(count)).late[name]) <= allowed

        most, high = self._most(pool), 1
        while high < most and not suffice(high):
            high = min(2 * high, most)
        low = high // 2
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if suffice(middle) else (middle, high)
        return high

    def _grown(self, fleet: Fleet) -> Fleet:
        """Add engines to the pool that makes more late, until the target is kept."""
        while self._cost(fleet) > self._gpus_max:  # each pool had all GPUs
            fleet = max(self._fewer(fleet), key=self._value)
        while not self._keeps(fleet):
            more = self._more(fleet)
            if more is None:
                return fleet
            fleet = more
        return fleet

    def _trimmed(self, fleet: Fleet) -> Fleet:
        """Take engines away as long as the target is kept."""
        kept: Sequence[Fleet] = [fleet]
        while kept:
            fleet = min(kept, key=self._cost)
            kept = [one for one in self._fewer(fleet) if self._keeps(one)]
        return fleet

    def _more(self, fleet: Fleet) -> Fleet | None:
        """Return the fleet with one engine more where more are late; None: no GPU is left."""
        late = self.result(fleet).late
        pools = sorted(range(2), key=lambda pool: -len(late[_POOLS[pool]]))
        found = (_with(fleet, pool, 1) for pool in pools if fleet[pool] < self._most(pool))
        return next((one for one in found if self._cost(one) <= self._gpus_max), None)

    def _fewer(self, fleet: Fleet) -> list[Fleet]:
        return [_with(fleet, pool, -1) for pool in range(2) if fleet[pool] > 1]

    def _cost(self, fleet: Fleet) -> int:
        return fleet[0] * self._gpus[0] + fleet[1] * self._gpus[1]

    def _most(self, pool: int) -> int:
        """Return as many engines as are of use, and there are GPUs for beside one of the others."""
        affordable = max(1, (self._gpus_max - self._gpus[1 - pool]) // self._gpus[pool])
        return min(affordable, self._useful[pool])


def engines_of_use(profile: Profile, requests: Sequence[TracedRequest]) -> Fleet:
    """Return prefill and decode engines of which one would be idle at any time.

    With as many, no request shares an engine with another; however large a budget is, no fleet
    with more needs to be tried.
    """
    surface = Surface(profile)
    prefill: list[tuple[float, int]] = []
    decode: list[tuple[float, int]] = []
    for one in requests:
        computed = one.at_s + _LONGER * surface.prefill.ttft_ms(one.isl) / 1e3
        itl_ms = surface.decode.itl_ms(1.0, one.isl + one.osl)
        prefill += (one.at_s, 1), (computed, -1)
        decode += (one.at_s, 1), (computed + _LONGER * one.osl * itl_ms / 1e3, -1)
    return _most_at_once(prefill), _most_at_once(decode)


def _most_at_once(changes: Sequence[tuple[float, int]]) -> int:
    counts = accumulate(change for _, change in sorted(changes))
    return 1 + max(counts, default=0)


def _with(fleet: Fleet, pool: int, more: int) -> Fleet:
    return (fleet[0] + more, fleet[1]) if pool == 0 else (fleet[0], fleet[1] + more)
