"""What the index knows before the first event: from a peer's dump, from an earlier life's snapshot.

`indexer/edge/recovery.py` and `edge/state/warm_start.py` do it, each loaded by those who ask for
it alone: a start should not pay for the others. Here is when they begin and end, and that /ready
waits for them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from select_service.edge.readiness import INDEX_RECOVERY, INDEX_SNAPSHOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from indexer.edge.addresses import Addresses
    from indexer.edge.listener import Listeners
    from indexer.edge.recovery import Recovery
    from indexer.types import RecoveryLimits, SnapshotLimits
    from select_service.core.service import SelectionCore
    from select_service.edge.readiness import Readiness
    from select_service.edge.security.credentials import Credentials
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.warm_start import WarmStart

__all__ = ["Recovering"]


class Recovering:
    """How one driver's index comes back.

    Attributes:
        recovery: from a peer; None: nobody is asked.
        warm_start: from disk, and to it; None: it ends with the process.
    """

    def __init__(
        self, core: SelectionCore, readiness: Readiness, clock: Callable[[], float]
    ) -> None:
        """Have the index begin empty.

        Args:
            core: whose index it is.
            readiness: waits for what is asked for below.
            clock: monotonic seconds.
        """
        self._core, self._readiness, self._clock = core, readiness, clock
        self.recovery: Recovery | None = None
        self.warm_start: WarmStart | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    @property
    def is_running(self) -> bool:
        """Whether a peer is still asked, so that no stream is followed yet."""
        return self.recovery is not None and self.recovery.outcome == "running"

    def ask_peers(
        self,
        peers: Sequence[str],
        limits: RecoveryLimits | None,
        credentials: Credentials | None,
        addresses: Addresses,
    ) -> None:
        """Have the index of whichever of these answers, if there are any.

        Args:
            peers: base URLs.
            limits: budgets.
            credentials: what is shown to them.
            addresses: where connections may lead.
        """
        if not peers:
            return
        from indexer.edge.recovery import Recovery

        self.recovery = Recovery(
            *(self._core.registry, peers, self._core.make_room),
            limits=limits,
            clock=self._clock,
            **({} if credentials is None else credentials.for_recovery()),
            addresses=addresses,
        )
        self._readiness.wait_for(INDEX_RECOVERY, lambda: not self.is_running)

    def look_back(
        self,
        keeper: Keeper | None,
        limits: SnapshotLimits | None,
        is_fleet_known: Callable[[], bool],
    ) -> None:
        """Have what an earlier life wrote down, and write it again, where both are given.

        Args:
            keeper: has the directory.
            limits: budgets.
            is_fleet_known: whether the workers are there whose streams it is about.
        """
        if keeper is None or limits is None:
            return
        from select_service.edge.state.warm_start import WarmStart

        directory = keeper.journal.store.directory
        warm = self.warm_start = WarmStart(directory, self._core.registry, limits, self._clock)
        self._readiness.wait_for(
            INDEX_SNAPSHOT,
            lambda: not self.is_running and is_fleet_known() and warm.is_judged,
        )

    async def open(self, listeners: Listeners) -> None:
        """Look at what is on disk, before the first stream is opened."""
        if self.warm_start is not None:
            await self.warm_start.open(listeners)

    def start(self, let_in: Callable[[], None]) -> None:
        """Begin, on the running loop.

        Args:
            let_in: called when event sources may be heard, since what a peer knew is in place.
        """
        if self.recovery is not None:
            work = self._recover(self.recovery, let_in)
            self._task = asyncio.get_running_loop().create_task(work)
        if self.warm_start is not None:
            self.warm_start.start(self._core.membership.sources)

    async def finished(self, timeout_s: float) -> bool:
        """Wait until the index is recovered, or will not be, for so long; False if it runs on."""
        if self._task is None:
            return True
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        return bool(done)

    async def stop(self) -> None:
        """Ask nobody any longer. Idempotent."""
        self._is_stopped = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Write a last snapshot, while the listeners are open. Idempotent."""
        if self.warm_start is not None:
            await self.warm_start.close()

    async def _recover(self, recovery: Recovery, let_in: Callable[[], None]) -> None:
        try:
            await recovery.run()
            self._core.note_recovered(recovery.recovered, self._clock())
        finally:
            if not self._is_stopped:
                let_in()
