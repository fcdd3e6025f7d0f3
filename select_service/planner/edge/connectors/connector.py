"""What every connector does: read states, and set targets."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

from select_service.planner.errors import ConnectorError
from select_service.planner.types import PoolState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.types import PoolKey, Target

__all__ = ["ACT_S", "Connector", "DryRun", "OneByOne", "Outcome"]

ACT_S: Final = 10.0
"""Setting one pool, conflicts and all, is over within that time: a third of the shortest lease."""


class Outcome:
    """What came of setting targets: which were accepted, and what was wrong with the others."""

    def __init__(self) -> None:
        self.done: list[Target] = []
        self.failed: dict[PoolKey, str] = {}


class Connector(Protocol):
    """Somebody who can start and stop replicas."""

    tells_all_at_once: bool
    """A decision is one thing: no part of it can be refused while another is carried out."""

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Return what can be read; a pool that cannot is left out, and `problems` says why."""

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> Outcome:
        """Ask for these replicas. Does not wait for them to be there."""

    @property
    def problems(self) -> Mapping[PoolKey, str]:
        """Pools whose state could not be read the last time."""

    async def close(self) -> None:
        """Let go of connections."""


class OneByOne(ABC):
    """Reads and sets one pool after the other: one that fails keeps no other from its turn."""

    tells_all_at_once = False

    def __init__(self) -> None:
        self.problems: dict[PoolKey, str] = {}

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Read every pool."""
        self.problems = {}
        found = {}
        for pool in pools:
            try:
                found[pool] = await self._state(pool)
            except ConnectorError as error:
                self.problems[pool] = str(error)
        return found

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> Outcome:
        """Set every pool."""
        outcome = Outcome()
        for target in targets:
            try:
                async with asyncio.timeout(ACT_S):
                    await self._set(target.pool, target.replicas)
            except TimeoutError:
                outcome.failed[target.pool] = f"{target.pool}: not done within {ACT_S:g} s"
            except ConnectorError as error:
                outcome.failed[target.pool] = str(error)
            else:
                outcome.done.append(target)
        return outcome

    @abstractmethod
    async def _state(self, pool: PoolKey) -> PoolState:
        """Read one; raises ConnectorError."""

    @abstractmethod
    async def _set(self, pool: PoolKey, replicas: int) -> None:
        """Set one; raises ConnectorError."""


class DryRun:
    """Nothing is changed; what would be is taken for granted."""

    tells_all_at_once = True

    def __init__(self, start: Mapping[PoolKey, int]) -> None:
        self._counts = dict(start)
        self.problems: dict[PoolKey, str] = {}

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Tell what was asked for last; all of it is there at once."""
        return {pool: PoolState(self._counts[pool], self._counts[pool]) for pool in pools}

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> Outcome:
        """Remember them."""
        outcome = Outcome()
        for target in targets:
            self._counts[target.pool] = target.replicas
            outcome.done.append(target)
        return outcome

    async def close(self) -> None:
        """Nothing is open."""
