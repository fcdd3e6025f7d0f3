"""The protocol of leases: the right to act, requested before every action.

If engines live in a cluster the lease lives there, too, where all possible scalers see it: a Lease
of Kubernetes (`kubernetes_lease.py`), an actor of Ray (`ray_lease.py`). If only this machine knows
the planner it is a lock on this machine (`file_lease.py`). A planner without it watches and learns,
and changes nothing.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Protocol

from select_service.planner.errors import ConnectorError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("select_planner")

DURATION_S: Final = 30.0
"""A lease unrenewed for this long is free: several looks at the load, and a pause."""
_LOOKS: Final = 3  # missed looks before a lease is lost
_SURE: Final = 2 / 3
"""The share of its duration in which its holder may begin to act without another renewal. The rest
is for actions in progress: see `ACT_S` of `edge/connectors/connector.py`."""


def duration_of(look_s: float) -> float:
    """Return the duration of a lease that is renewed this often."""
    return max(DURATION_S, _LOOKS * look_s)


class LeaderLease(Protocol):
    """The right to act.

    Attributes:
        problem: why the last request for it failed; empty: it was answered.
        failures: such requests.
    """

    problem: str
    failures: int

    async def held(self) -> bool:
        """Take or renew it; False: another planner has it."""

    @property
    def is_sure(self) -> bool:
        """Whether no other planner can have it yet, so that it need not be requested again."""

    async def close(self) -> None:
        """Release it."""


class Timed(ABC):
    """A lease that lapses unless renewed, kept by a service that may be unreachable.

    While it is, the holder goes on for two thirds of the duration, counted from before the last
    request: its actions are then over when another planner may take over. Clocks are never
    compared.

    Args:
        clock: monotonic seconds.
        duration_s: of the lease.
    """

    def __init__(self, clock: Callable[[], float], duration_s: float) -> None:
        self._clock = clock
        self._duration_s = duration_s
        self._renewed_at: float | None = None
        self.problem = ""
        self.failures = 0

    async def held(self) -> bool:
        """Create, take over or renew it."""
        asked_at = self._clock()
        try:
            is_ours = await self._ask()
        except ConnectorError as error:
            self.failures += 1
            if self.problem != str(error):
                self.problem = str(error)
                _log.warning("%s", error)
            return self.is_sure
        self.problem = ""
        self._renewed_at = asked_at if is_ours else None
        return self.is_sure

    @property
    def is_sure(self) -> bool:
        """Whether it was renewed within two thirds of its duration."""
        renewed = self._renewed_at
        return renewed is not None and self._clock() < renewed + _SURE * self._duration_s

    async def close(self) -> None:
        """Release it, so that a successor need not wait."""
        is_sure, self._renewed_at = self.is_sure, None
        if not is_sure:  # it may belong to another by now
            return
        try:
            await self._give_back()
        except ConnectorError:
            return  # it lapses by itself

    @abstractmethod
    async def _ask(self) -> bool:
        """Take or renew it, once; raises ConnectorError if there is no answer."""

    @abstractmethod
    async def _give_back(self) -> None:
        """Release it; raises ConnectorError if there is no answer."""
