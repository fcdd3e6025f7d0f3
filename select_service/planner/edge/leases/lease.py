"""What every lease is: the right to act, asked for before every action.

Where engines live in a cluster the lease lives there, too, so that it is seen by whoever could
scale them: a Lease of Kubernetes (`kubernetes.py`), an actor of Ray (`ray.py`). Where nobody but
this machine knows of the planner it is a lock on this machine (`file.py`). Who does not hold it
watches and learns, and asks for nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

from select_service.planner.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DURATION_S", "Lease", "NoLease", "Timed", "duration_of"]

DURATION_S: Final = 30.0
"""A lease that was not renewed for so long is anybody's: some looks at the load, and a pause."""
_LOOKS: Final = 3  # that may fail, before a lease is lost
_SURE: Final = 2 / 3
"""Of its duration, in which its holder begins to act without having heard again. The rest is for
what was begun: see `ACT_S` of `edge/connectors/connector.py`."""


def duration_of(look_s: float) -> float:
    """Return how long a lease lasts, whose holder renews it so often."""
    return max(DURATION_S, _LOOKS * look_s)


class Lease(Protocol):
    """The right to act."""

    async def held(self) -> bool:
        """Take it or keep it; False: another planner has it."""

    @property
    def is_sure(self) -> bool:
        """Nobody else can have it yet: it need not be asked for again."""

    async def close(self) -> None:
        """Let go of it."""


class NoLease:
    """There is nothing to fight about: a dry run."""

    async def held(self) -> bool:
        """Always."""
        return True

    @property
    def is_sure(self) -> bool:
        """Always."""
        return True

    async def close(self) -> None:
        """Nothing is held."""


class Timed(ABC):
    """A lease that lapses when it is not renewed, kept by somebody who may be out of reach.

    While he is, its holder goes on for two thirds of its duration, counted from before it was asked
    for last: what it does then is done when another may take over. Clocks are never compared.

    Args:
        clock: monotonic seconds.
        duration_s: of the lease.
    """

    def __init__(self, clock: Callable[[], float], duration_s: float) -> None:
        self._clock = clock
        self._duration_s = duration_s
        self._renewed_at: float | None = None

    async def held(self) -> bool:
        """Create, take over or renew it."""
        asked_at = self._clock()
        try:
            is_ours = await self._ask()
        except ConnectorError:
            return self.is_sure
        self._renewed_at = asked_at if is_ours else None
        return self.is_sure

    @property
    def is_sure(self) -> bool:
        """It was renewed within two thirds of its duration."""
        renewed = self._renewed_at
        return renewed is not None and self._clock() < renewed + _SURE * self._duration_s

    async def close(self) -> None:
        """Give it back, so that a successor need not wait."""
        is_sure, self._renewed_at = self.is_sure, None
        if not is_sure:  # it may be another's by now
            return
        try:
            await self._give_back()
        except ConnectorError:
            return  # it lapses by itself

    @abstractmethod
    async def _ask(self) -> bool:
        """Take or renew it, once; raises ConnectorError where nobody answers."""

    @abstractmethod
    async def _give_back(self) -> None:
        """Say that it is free; raises ConnectorError where nobody answers."""
