"""Whether the service is ready, and what is misconfigured: /ready, and the doctor behind it.

The conditions of readiness are in `edge/readiness.py`, the examination in `edge/doctor.py`, which
is loaded on first use.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from select_service.edge.cooperative import ended
from select_service.edge.readiness import WORKER
from select_service.types import BriefReady, Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from indexer.edge.addresses import Addresses
    from select_service.edge.canary_watch import CanaryWatch
    from select_service.edge.doctor import Doctor
    from select_service.edge.driver.core_calls import CallContext
    from select_service.edge.driver.effects_executor import EffectsExecutor
    from select_service.edge.readiness import ReadinessGate
    from select_service.edge.state.keeper import Keeper
    from select_service.types.doctor import DoctorLimits, SourceLink

EXAMINED_AFTER_S = 5.0
"""From the start to the first examination, which loads its modules unless a request already has."""


class Health:
    """What one driver reports about its own state.

    Attributes:
        diagnosed: the doctor, once something has needed it.
    """

    def __init__(
        self,
        turn: CallContext,
        effects_executor: EffectsExecutor,
        readiness: ReadinessGate,
        keeper: Keeper | None,
        limits: DoctorLimits,
        *,
        sources: Callable[[], Sequence[SourceLink]],
        addresses: Addresses,
    ) -> None:
        """Examine nothing yet.

        Args:
            turn: of the core to report on.
            effects_executor: has the connections to examine.
            readiness: the conditions of readiness.
            keeper: has the state on disk.
            limits: how often to examine the fleet.
            sources: of discovery.
            addresses: says which endpoints may be asked.
        """
        self._core, self._clock, _ = turn
        self._effects_executor = effects_executor
        self._readiness = readiness
        self._keeper = keeper
        self._limits = limits
        self._sources = sources
        self._addresses = addresses
        self._canaries: CanaryWatch | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.diagnosed: Doctor | None = None

    def start(self) -> None:
        """Start periodic examinations and canary prompts, unless they are turned off."""
        loop = asyncio.get_running_loop()
        if self._limits.interval_s:
            self._tasks.append(loop.create_task(self._examine()))
        if self._limits.probe_workers:
            from select_service.edge.canary_watch import CanaryWatch  # with httpx, for who asks

            self._canaries = CanaryWatch(self._core, self._addresses, self._clock)
            self._tasks.append(loop.create_task(self._canaries.watch()))

    async def close(self) -> None:
        """Stop. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await ended(*tasks)

    def ready(self, *, with_workers: bool = True) -> Ready:
        """GET /ready."""
        ready = self._core.workers.ready(with_workers=with_workers)
        missing = self._readiness.missing()
        waiting_for = missing if ready.ready else [WORKER, *missing]
        state = UNSET if self._keeper is None else self._keeper.status()
        return Ready(not waiting_for, ready.schedulable_workers, ready.workers, waiting_for, state)

    def is_ready(self) -> bool:
        """Whether GET /ready would say ready; costs next to nothing."""
        return self._core.reader.schedulable > 0 and not self._readiness.missing()

    def ready_for_traffic(self) -> BriefReady:
        """GET /ready?for=traffic: whether to send requests here, even while there is no worker.

        A fleet at zero is woken by the requests that it cannot serve yet.
        """
        missing = self._readiness.missing()
        return BriefReady(not missing, missing)

    async def ready_verbose(self, *, with_workers: bool = True, examines: bool = False) -> Ready:
        """GET /ready?verbose=true: includes the doctor's findings.

        Args:
            with_workers: whether to list the workers.
            examines: whether to examine the fleet now, and include what is only suspected.
        """
        report = await self.doctor().report(examines=examines)
        return msgspec.structs.replace(
            self.ready(with_workers=with_workers),
            findings=report.findings,
            findings_left_out=report.left_out or UNSET,
            suspected=report.suspected if examines else UNSET,
        )

    def doctor(self) -> Doctor:
        """Return the doctor, created on first use."""
        if self.diagnosed is None:
            from select_service.edge.doctor import Doctor  # see `lazy_imports.py`

            effects_executor = self._effects_executor
            self.diagnosed = Doctor(
                self._core,
                self._limits,
                link_of=effects_executor.sources.link,
                peers=lambda: (
                    []
                    if effects_executor.replicas is None
                    else effects_executor.replicas.subscriptions.links()
                ),
                sources=self._sources,
                canaries=lambda: () if self._canaries is None else self._canaries.suspects(),
                clock=self._clock,
            )
        return self.diagnosed

    async def _examine(self) -> None:
        await asyncio.sleep(min(EXAMINED_AFTER_S, self._limits.interval_s))
        await self.doctor().watch()
