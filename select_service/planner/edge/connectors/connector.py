"""What every connector does: read states, and set targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from select_service.planner.types import PoolState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.types import PoolKey, Target

__all__ = ["Connector", "DryRun", "Outcome"]


class Outcome:
    """What came of setting targets: which were accepted, and what was wrong with the others."""

    def __init__(self) -> None:
        self.done: list[Target] = []
        self.failed: dict[PoolKey, str] = {}


class Connector(Protocol):
    """Somebody who can start and stop replicas."""

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Return what can be read; a pool that cannot is left out, and `problems` says why."""

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> Outcome:
        """Ask for these replicas. Does not wait for them to be there."""

    @property
    def problems(self) -> Mapping[PoolKey, str]:
        """Pools whose state could not be read the last time."""

    async def close(self) -> None:
        """Let go of connections."""


class DryRun:
    """Nothing is changed; what would be is taken for granted."""

    def __init__(self, start: Mapping[PoolKey, int]) -> None:
        self._counts = dict(start)
        self.problems: dict[PoolKey, str] = {}

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Tell what was asked for last; all of it is there at once."""
        return {pool: PoolState(self._counts[pool], self._counts[pool]) for pool in pools}

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> Outcome:  # noqa: ARG002 - a Connector
        """Remember them."""
        outcome = Outcome()
        for target in targets:
            self._counts[target.pool] = target.replicas
            outcome.done.append(target)
        return outcome

    async def close(self) -> None:
        """Nothing is open."""
