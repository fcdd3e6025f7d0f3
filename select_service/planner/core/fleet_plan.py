"""The whole decision: windows and loads in, replica counts with reasons out.

A `FleetPlan` has several models, each with a pool of engines per role; all share one budget of
GPUs. The slow loop (`slow`) forecasts and sizes, the fast one (`fast`) looks at the current load;
both end in the same constraints. Pure: nothing here waits or reads anything. `edge/loop.py` calls
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from select_service.planner.core.budget import PoolNeed, check_minima, share_out
from select_service.planner.core.model import PlannedModel
from select_service.planner.core.pool import PlannedPool
from select_service.planner.core.stabilization_window import PoolSettings
from select_service.planner.types import (
    Load,
    ModelKey,
    PoolKey,
    PoolState,
    ScalingDecision,
    Target,
    Window,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.core.model_report import ModelReport

__all__ = ["FleetPlan", "PlannedModel", "PoolSettings"]


class FleetPlan:
    """All models under one budget.

    Args:
        models: with their pools.
        gpus_max: of all models together.
        interval_s: between two calls of `slow`.
        correct: learn the deviation of engines from their profile.
        is_watched: `fast` is called, too.
        likens: similar times in the past may decide.

    Raises:
        InfeasiblePlan: the minima cost more GPUs than there are.
    """

    def __init__(
        self,
        models: Sequence[PlannedModel],
        gpus_max: int,
        interval_s: float,
        *,
        correct: bool = True,
        is_watched: bool = True,
        likens: bool = True,
    ) -> None:
        self.models = list(models)
        for one in self.models:
            one.demand.is_watched = is_watched
            one.analog_forecast.is_asked = is_watched and likens
            one.steady_fleet.is_asked = is_watched
        self.gpus_max = gpus_max
        self.interval_s = interval_s
        self._correct = correct
        self._looked_at: float | None = None
        check_minima([_need(model, pool, 0) for model, pool in self._pools()], gpus_max)

    def slow(
        self, windows: Mapping[ModelKey, Window], states: Mapping[PoolKey, PoolState], now: float
    ) -> ScalingDecision:
        """Decide after an interval; a pool in an unknown state keeps its count."""
        look_s = self._look(states, now)
        reports = [
            model.observe(windows[model.key], self.interval_s, now, look_s, correct=self._correct)
            for model in self.models
            if model.key in windows
        ]
        return self._decided(reports, states, now)

    def fast(
        self, loads: Mapping[ModelKey, Load], states: Mapping[PoolKey, PoolState], now: float
    ) -> ScalingDecision:
        """Decide by the current load."""
        look_s = self._look(states, now)
        reports = [
            model.react(loads[model.key], now, look_s)
            for model in self.models
            if model.key in loads
        ]
        return self._decided(reports, states, now)

    def affordable(
        self, targets: Sequence[Target], states: Mapping[PoolKey, PoolState]
    ) -> list[Target]:
        """Return the targets that can be requested now, those that free GPUs first.

        The targets of a decision keep the ceiling only together. If one of them was refused, the
        GPUs it would have freed are still in use: others get the rest, or nothing.
        """
        gpus = {pool.key: pool.settings.gpus for _, pool in self._pools()}
        held = {pool.key: pool.held for _, pool in self._pools()}
        held |= {pool: state.desired for pool, state in states.items()}
        left = self.gpus_max - sum(count * gpus[pool] for pool, count in held.items())
        found = []
        for one in sorted(targets, key=lambda one: one.replicas > held[one.pool]):
            more = min(one.replicas - held[one.pool], max(left, 0) // gpus[one.pool])
            if more:
                left -= more * gpus[one.pool]
                found.append(Target.of(one.pool, held[one.pool] + more))
        return found

    def _pools(self) -> list[tuple[PlannedModel, PlannedPool]]:
        return [(model, pool) for model in self.models for pool in model.pools]

    def _look(self, states: Mapping[PoolKey, PoolState], now: float) -> float:
        """Apply the states; returns the expected time until the next look."""
        look_s = self.interval_s if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        for _, pool in self._pools():
            if pool.key in states:
                pool.look(states[pool.key], now)
        return min(max(look_s, 0.0), self.interval_s)

    def _decided(
        self, reports: Sequence[ModelReport], states: Mapping[PoolKey, PoolState], now: float
    ) -> ScalingDecision:
        reasons = [text for one in reports for text in one.reasons]
        needs = []
        for model, pool in self._pools():
            state = pool.state
            if pool.key not in states:
                reasons.append(f"{pool.key}: its replicas could not be read: left alone")
                continue
            wanted = pool.wanted
            count, why = pool.steady.next(
                wanted, state.desired, pool.starting, now, None if pool.slow is None else pool.sure
            )
            if why:
                reasons.append(f"{pool.key}: {count}, not {wanted}: {why}")
            if pool.overdue:
                limit_s = pool.settings.give_up_s
                waited = f"{pool.overdue} have not started within {limit_s:.0f} s"
                reasons.append(f"{pool.key}: {waited}: not waited for")
            needs.append(_need(model, pool, count))
        # an unreadable pool keeps what it had, and no other can have that
        unread = sum(
            pool.held * pool.settings.gpus for _, pool in self._pools() if pool.key not in states
        )
        least = sum(one.least * one.gpus for one in needs)
        counts = share_out(needs, max(self.gpus_max - unread, least))
        for _, pool in self._pools():
            pool.held = max(pool.held, counts.get(pool.key, 0))
        reasons += [
            f"{one.pool}: {counts[one.pool]}, not {one.wanted}: {self.gpus_max} GPUs are allowed"
            for one in needs
            if counts[one.pool] < one.wanted
        ]
        return ScalingDecision(
            targets=tuple(Target.of(one.pool, counts[one.pool]) for one in needs),
            reasons=tuple(reasons),
            infeasible=tuple(text for one in reports for text in one.infeasible),
            gpus=unread + sum(counts[one.pool] * one.gpus for one in needs),
            terms={name: value for one in reports for name, value in one.terms.items()},
        )


def _need(model: PlannedModel, pool: PlannedPool, wanted: int) -> PoolNeed:
    # a plan that was exceeded, or none, does not show the need
    is_planned = pool.slow is not None and not pool.has_more
    engines = (pool.engines if is_planned else 0.0) or float(wanted)
    settings = pool.settings
    return PoolNeed(pool.key, settings.gpus, settings.least, wanted, engines, model.weight)
