"""Whether the service is ready, and what is wired wrong: /ready, and the doctor it asks.

What must be there first is in `edge/readiness.py`, what is examined in `edge/doctor.py`, which is
loaded with the first who wants to know.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from select_service.edge.readiness import WORKER
from select_service.types import Ready

if TYPE_CHECKING:
    from select_service.edge.doctor import Doctor
    from select_service.edge.driving.carrying import Carrier
    from select_service.edge.driving.turn import Turn
    from select_service.edge.readiness import Readiness
    from select_service.edge.state.keeper import Keeper
    from select_service.types.doctor import DoctorLimits

__all__ = ["Health"]

EXAMINED_AFTER_S = 5.0
"""From the start to the first examination: what it needs is loaded then, and some is there."""


class Health:
    """What one driver says of its own state.

    Attributes:
        diagnosed: who examines the fleet, once there was reason to.
    """

    def __init__(
        self,
        turn: Turn,
        carrier: Carrier,
        readiness: Readiness,
        keeper: Keeper | None,
        limits: DoctorLimits,
    ) -> None:
        """Examine nothing yet.

        Args:
            turn: whose core it is.
            carrier: has the connections that are looked at.
            readiness: what must be there first.
            keeper: says what became of the state on disk.
            limits: how often the fleet is examined.
        """
        self._core, self._clock, _ = turn
        self._carrier = carrier
        self._readiness = readiness
        self._keeper = keeper
        self._limits = limits
        self._examining: asyncio.Task[None] | None = None
        self.diagnosed: Doctor | None = None

    def start(self) -> None:
        """Examine the fleet now and then, if that is wanted."""
        if self._limits.interval_s:
            self._examining = asyncio.get_running_loop().create_task(self._examine())

    async def close(self) -> None:
        """End. Idempotent."""
        task, self._examining = self._examining, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def ready(self, *, with_workers: bool = True) -> Ready:
        """GET /ready."""
        ready = self._core.ready(with_workers=with_workers)
        missing = self._readiness.missing()
        waiting_for = missing if ready.ready else [WORKER, *missing]
        state = UNSET if self._keeper is None else self._keeper.status()
        return Ready(not waiting_for, ready.schedulable_workers, ready.workers, waiting_for, state)

    def is_ready(self) -> bool:
        """Whether GET /ready says so; costs next to nothing."""
        return self._core.reader.schedulable > 0 and not self._readiness.missing()

    async def ready_verbose(self, *, with_workers: bool = True) -> Ready:
        """GET /ready?verbose=true: what is wired wrong as well."""
        report = await self.doctor().report()
        return msgspec.structs.replace(
            self.ready(with_workers=with_workers),
            findings=report.findings,
            findings_left_out=report.left_out or UNSET,
        )

    def doctor(self) -> Doctor:
        """Return who examines the fleet."""
        if self.diagnosed is None:
            from select_service.edge.doctor import Doctor  # see `late`

            carrier = self._carrier
            self.diagnosed = Doctor(
                *(self._core, self._limits),
                link_of=carrier.sources.link,
                peers=lambda: (
                    [] if carrier.replicas is None else carrier.replicas.subscriptions.links()
                ),
                clock=self._clock,
            )
        return self.diagnosed

    async def _examine(self) -> None:
        await asyncio.sleep(min(EXAMINED_AFTER_S, self._limits.interval_s))
        await self.doctor().watch()
