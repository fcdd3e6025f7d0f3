"""The protocol of connectors: they read states and set targets."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

from select_service.planner.errors import ConnectorError
from select_service.planner.types import PoolState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.types import PoolKey, Target

READS_AT_ONCE: Final = 8
"""Pools that are read at the same time: a look has five seconds for hundreds of them."""
ACT_S: Final = 10.0
"""Limit for setting one pool, including conflicts: a third of the shortest lease."""


class ScalingOutcome:
    """The outcome of setting targets: the accepted ones, and the errors of the others."""

    def __init__(self) -> None:
        self.done: list[Target] = []
        self.failed: dict[PoolKey, str] = {}


class Connector(Protocol):
    """Starts and stops replicas."""

    sets_all_at_once: bool
    """A decision is atomic: no part of it can be refused while another is carried out."""

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Return the readable states; unreadable pools are omitted, with a reason in `problems`."""

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> ScalingOutcome:
        """Request these replicas, without waiting for them to start."""

    @property
    def problems(self) -> Mapping[PoolKey, str]:
        """Pools whose state could not be read the last time, with the reason."""

    async def close(self) -> None:
        """Close the connections."""


class OneByOne(ABC):
    """Reads and sets pools each by itself: a failure does not affect the others."""

    sets_all_at_once = False

    def __init__(self) -> None:
        self.problems: dict[PoolKey, str] = {}

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Read every pool, some at once: a server that hangs takes its time for each."""
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def read(pool: PoolKey) -> PoolState | str:
            async with gate:
                try:
                    return await self._state(pool)
                except ConnectorError as error:
                    return str(error)

        states = dict(zip(pools, await asyncio.gather(*map(read, pools)), strict=True))
        self.problems = {pool: one for pool, one in states.items() if isinstance(one, str)}
        return {pool: one for pool, one in states.items() if isinstance(one, PoolState)}

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> ScalingOutcome:
        """Set every pool."""
        outcome = ScalingOutcome()
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
    """Changes nothing, and assumes that requested changes happen."""

    sets_all_at_once = True

    def __init__(self, start: Mapping[PoolKey, int]) -> None:
        self._counts = dict(start)
        self.problems: dict[PoolKey, str] = {}

    async def states(self, pools: Sequence[PoolKey]) -> dict[PoolKey, PoolState]:
        """Return the last requested counts, as if they were all ready."""
        return {pool: PoolState(self._counts[pool], self._counts[pool]) for pool in pools}

    async def apply(self, targets: Sequence[Target], reasons: Sequence[str]) -> ScalingOutcome:
        """Remember the targets."""
        outcome = ScalingOutcome()
        for target in targets:
            self._counts[target.pool] = target.replicas
            outcome.done.append(target)
        return outcome

    async def close(self) -> None:
        """Nothing to close."""
