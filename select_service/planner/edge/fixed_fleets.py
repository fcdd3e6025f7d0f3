"""Fleets that never change: the baselines that any scaling has to beat, known only afterwards.

A reader of the whole trace can say which fixed fleet would have kept the target with the fewest
GPUs. A planner that costs more, or serves fewer in time, is worse than no planner. The frontier
shows for every price how many requests a fixed fleet serves in time.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.planner.core.surface import surface_of
from select_service.planner.edge.trace_replay import ScalingPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from select_service.planner.core.profile import Profile
    from select_service.planner.core.warm_up import TracedRequest
    from select_service.planner.edge.trace_replay import (
        Fleet,
        ReplaySettings,
        Result,
        States,
        TraceReplay,
    )
    from select_service.planner.types import PoolKey, Window

TARGET: Final = 0.99
"""Share of requests in time where the settings promise none."""
_POOLS: Final = ("prefill", "decode")
_NEARLY: Final = 0.005
"""Where no number of engines keeps the target, a share this close to the most is as good."""
_LONGER: Final = 2.0
"""How much longer requests are taken to stay than a lone one of the profile does."""
_STEPS: Final = 12
"""Fleets tried below the best one, and above it, for the frontier."""


class SearchBudget:
    """How many requests a search may simulate, and whether it had to stop for that.

    Requests and no seconds: the same trace has the same answer on every machine.
    """

    def __init__(self, requests: int) -> None:
        self.left = requests
        self.is_spent = False
        """Whether something was not tried."""

    def may(self, requests: int) -> bool:
        """Return whether as many may be simulated."""
        self.is_spent |= requests > self.left
        return requests <= self.left


class FixedPoint(NamedTuple):
    """One fleet of the frontier."""

    prefill: int
    decode: int
    gpu_hours: float
    attainment: float


class _Unchanged(ScalingPolicy):
    """Scales nothing."""

    def __init__(self, fleet: Fleet) -> None:
        self.name = f"static ({fleet[0]} + {fleet[1]})"

    def slow(self, window: Window, states: States, now: float) -> dict[PoolKey, int]:
        """See ScalingPolicy."""
        return {}


class FixedFleets:
    """Fixed fleets on one trace; every fleet is simulated once.

    Args:
        run: of the trace.
        settings: the environment.
        gpus_max: of all engines together.
        useful: prefill and decode engines beyond which more change nothing.
        budget: of all simulations; what has to be known is simulated beyond it.
        part: fleets on the busiest part of a trace that is too long to be searched; the search
            begins with the best of them.
    """

    def __init__(
        self,
        run: TraceReplay,
        settings: ReplaySettings,
        gpus_max: int,
        useful: Fleet,
        budget: SearchBudget,
        part: FixedFleets | None = None,
    ) -> None:
        self._run = run
        self.budget = budget
        self._part = part
        self._useful = useful
        self._gpus = (settings.prefill_gpus, settings.decode_gpus)
        self._gpus_max = gpus_max
        self.target = TARGET if settings.attainment is None else settings.attainment
        """Share of requests that are to be in time."""
        self.on_progress: Callable[[float], None] = lambda _: None
        """Called with the simulations so far; of the one in progress a part."""
        self.simulated = 0
        self._results: dict[Fleet, Result] = {}
        self._best: Fleet | None = None

    def result(self, fleet: Fleet) -> Result:
        """Return what a fleet attains."""
        if fleet not in self._results:
            self._results[fleet] = self.simulate(_Unchanged(fleet), fleet)
        return self._results[fleet]

    def simulate(self, policy: ScalingPolicy, start: Fleet) -> Result:
        """Return what a policy attains, at the expense of the budget."""
        self.budget.left -= self._run.requests
        before = self.simulated
        result = self._run.run(policy, lambda share: self.on_progress(before + share), start)
        self.simulated += 1
        return result

    def may_simulate(self) -> bool:
        """Return whether there is budget for another simulation."""
        return self.budget.may(self._run.requests)

    @property
    def is_whole(self) -> bool:
        """Whether everything was tried so far that was to be."""
        return not self.budget.is_spent and (self._part is None or self._part.is_whole)

    def _may(self, *fleets: Fleet) -> bool:
        """Return whether what these attain is known, or may be simulated."""
        new = sum(fleet not in self._results for fleet in fleets)
        return not new or self.budget.may(new * self._run.requests)

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

        No engine less would do, unless the budget is spent. About a dozen simulations: each pool
        is searched while the other has all GPUs, and what both do to each other is mended
        afterwards. Of a trace that is too long for that, what its busiest part needs comes first.
        """
        if self._best is None:
            if self._part is not None:
                self._part.on_progress = self.on_progress
                fleet = self._part.best
            else:
                most = [self._most(pool) for pool in range(2)]
                prefill = self._fewest(0, lambda count: (count, most[1]))
                fleet = prefill, self._fewest(1, lambda count: (prefill, count))
            self._best = self._trimmed(self._grown(fleet))
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
            if more is None or not any(late.values()) or not self._may(more):
                break
            fleet = more
        fleet = self.best
        for _ in range(_STEPS):
            fewer = self._fewer(fleet)
            if not fewer or self.result(fleet).gpu_hours <= gpu_hours or not self._may(*fewer):
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
        while high < most and (not self._may(fleet_of(high)) or not suffice(high)):
            high = min(2 * high, most)
        low = high // 2
        while low + 1 < high and self._may(fleet_of((low + high) // 2)):
            middle = (low + high) // 2
            low, high = (low, middle) if suffice(middle) else (middle, high)
        return high

    def _grown(self, fleet: Fleet) -> Fleet:
        """Add engines to the pool that makes more late, until the target is kept."""
        while self._cost(fleet) > self._gpus_max:  # each pool had all GPUs
            fewer = self._fewer(fleet)
            fleet = max(fewer, key=self._value) if self._may(*fewer) else min(fewer, key=self._cost)
        while not self._keeps(fleet):
            more = self._more(fleet)
            if more is None or not self._may(more):
                return fleet
            fleet = more
        return fleet

    def _trimmed(self, fleet: Fleet) -> Fleet:
        """Take engines away as long as the target is kept."""
        kept: Sequence[Fleet] = [fleet]
        while kept:
            fleet = min(kept, key=self._cost)
            kept = [one for one in self._fewer(fleet) if self._may(one) and self._keeps(one)]
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


def busiest(requests: Sequence[TracedRequest], count: int) -> list[TracedRequest]:
    """Return so many successive requests that came in the fewest seconds, the first at 0."""
    count = max(1, min(count, len(requests)))
    starts = range(len(requests) - count + 1)
    at = min(starts, key=lambda one: requests[one + count - 1].at_s - requests[one].at_s)
    first = requests[at].at_s
    return [one._replace(at_s=one.at_s - first) for one in requests[at : at + count]]


def engines_of_use(profile: Profile, requests: Sequence[TracedRequest]) -> Fleet:
    """Return prefill and decode engines of which one would be idle at any time.

    With as many, no request shares an engine with another; however large a budget is, no fleet
    with more needs to be tried.
    """
    surface = surface_of(profile)
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
