"""The driver's operations that say how it stands: /ready, and the doctor behind it.

The conditions of readiness are in `edge/readiness.py`, the examination in `edge/doctor.py`, which
is loaded on first use.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from select_service.edge.cooperative import ended
from select_service.edge.driver.core_calls import CoreCalls
from select_service.edge.readiness import WORKER
from select_service.types import BriefReady, Ready

if TYPE_CHECKING:
    from indexer.edge.addresses import Addresses
    from select_service.edge.canary_watch import CanaryWatch
    from select_service.edge.discovery.followers import Discovery
    from select_service.edge.doctor import Doctor
    from select_service.edge.driver.driver_options import EdgeLimits
    from select_service.edge.driver.effects_executor import EffectsExecutor
    from select_service.edge.driver.sources import EventSources
    from select_service.edge.readiness import ReadinessGate
    from select_service.types.doctor import PeerLink

EXAMINED_AFTER_S = 5.0
"""From the start to the first examination, which loads its modules unless a request already has."""


class HealthOperations(CoreCalls):
    """What one driver reports about its own state.

    Attributes:
        diagnosed: the doctor, once something has needed it.
    """

    readiness: ReadinessGate
    discovery: Discovery | None
    sources: EventSources
    addresses: Addresses
    diagnosed: Doctor | None = None
    _limits: EdgeLimits
    _effects_executor: EffectsExecutor
    _canaries: CanaryWatch | None = None
    _examining: tuple[asyncio.Task[None], ...] = ()

    def _start_examining(self) -> None:
        """Start periodic examinations and canary prompts, unless they are turned off."""
        loop, limits = asyncio.get_running_loop(), self._limits.doctor
        if limits.interval_s:
            self._examining += (loop.create_task(self._examine()),)
        if limits.probe_workers:
            from select_service.edge.canary_watch import CanaryWatch  # with httpx, if asked for

            self._canaries = CanaryWatch(self.core, self.addresses, self._clock)
            self._examining += (loop.create_task(self._canaries.watch()),)

    async def _stop_examining(self) -> None:
        """Stop. Idempotent."""
        tasks, self._examining = self._examining, ()
        await ended(*tasks)

    def ready(self, *, with_workers: bool = True) -> Ready:
        """GET /ready."""
        ready = self.core.workers.ready(with_workers=with_workers)
        missing = self.readiness.missing()
        waiting_for = missing if ready.ready else [WORKER, *missing]
        state = UNSET if self.keeper is None else self.keeper.status()
        return Ready(not waiting_for, ready.schedulable_workers, ready.workers, waiting_for, state)

    def is_ready(self) -> bool:
        """Whether GET /ready would say ready; costs next to nothing."""
        return self.core.reader.schedulable > 0 and not self.readiness.missing()

    def ready_for_traffic(self) -> BriefReady:
        """GET /ready?for=traffic: whether to send requests here, even while there is no worker.

        A fleet at zero is woken by the requests that it cannot serve yet.
        """
        missing = self.readiness.missing()
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

            self.diagnosed = Doctor(
                self.core,
                self._limits.doctor,
                link_of=self.sources.link,
                peers=self._peer_links,
                sources=lambda: [] if self.discovery is None else self.discovery.links(),
                canaries=lambda: () if self._canaries is None else self._canaries.suspects(),
                clock=self._clock,
            )
        return self.diagnosed

    def _peer_links(self) -> list[PeerLink]:
        plane = self._effects_executor.replicas
        return [] if plane is None else plane.subscriptions.links()

    async def _examine(self) -> None:
        await asyncio.sleep(min(EXAMINED_AFTER_S, self._limits.doctor.interval_s))
        await self.doctor().watch()
