"""Fills the index before the first event: from a dump, a snapshot, or what engines replay.

`indexer/edge/recovery.py` and `edge/state/warm_start.py` do the work, each imported only if used,
which keeps other starts fast. This file starts and stops them and makes /ready wait for them.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from select_service.edge.cooperative import ended
from select_service.edge.readiness import DISCOVERY, INDEX_RECOVERY, INDEX_SNAPSHOT, PAST_EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from indexer.core.stream import EventStream
    from indexer.edge.addresses import Addresses
    from indexer.edge.listener import Listeners
    from indexer.edge.recovery import Recovery
    from indexer.types import RecoveryLimits, SnapshotLimits
    from select_service.core.service import SelectionCore
    from select_service.edge.readiness import ReadinessGate
    from select_service.edge.security.credentials import Credentials
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.warm_start import WarmStart


class StartupRecovery:
    """Recovery of one driver's index.

    Attributes:
        recovery: from a peer; None: no peers configured.
        warm_start: from disk, and to it; None: the index ends with the process.
    """

    def __init__(
        self, core: SelectionCore, readiness: ReadinessGate, clock: Callable[[], float]
    ) -> None:
        """Start with an empty index.

        Args:
            core: owner of the index.
            readiness: waits for the recoveries configured below.
            clock: monotonic seconds.
        """
        self._core, self._readiness, self._clock = core, readiness, clock
        self.recovery: Recovery | None = None
        self.warm_start: WarmStart | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._is_fleet_known: Callable[[], bool] = lambda: True
        self._unpublished: list[EventStream] | None = None  # None: not known yet

    @property
    def is_running(self) -> bool:
        """Whether recovery from a peer is running; until it ends, no stream is followed."""
        return self.recovery is not None and self.recovery.outcome == "running"

    def ask_peers(
        self,
        peers: Sequence[str],
        limits: RecoveryLimits | None,
        credentials: Credentials | None,
        addresses: Addresses,
    ) -> None:
        """Configure recovery from the first of these peers that answers, if there are any.

        Args:
            peers: base URLs.
            limits: budgets.
            credentials: presented to peers.
            addresses: where connections may lead.
        """
        self._created = partial(
            self._create, limits=limits, credentials=credentials, addresses=addresses
        )
        if not peers:
            return
        self.recovery = self._created(peers)
        self._readiness.wait_for(INDEX_RECOVERY, lambda: not self.is_running)

    def _create(
        self,
        peers: Sequence[str],
        limits: RecoveryLimits | None,
        credentials: Credentials | None,
        addresses: Addresses,
    ) -> Recovery:
        from indexer.edge.recovery import Recovery

        return Recovery(
            self._core.registry,
            peers,
            self._core.make_room,
            limits=limits,
            clock=self._clock,
            **({} if credentials is None else credentials.for_recovery()),
            addresses=addresses,
        )

    async def recover_from(self, peers: Sequence[str]) -> bool:
        """Fill the running index from the first of these peers that answers; False: none does.

        Streams are followed meanwhile.
        """
        recovery = self._created(peers)
        is_recovered = await recovery.run() == "recovered"
        self._core.note_recovered(recovery.recovered, self._clock())
        return is_recovered

    def look_back(
        self,
        keeper: Keeper | None,
        limits: SnapshotLimits | None,
        is_fleet_known: Callable[[], bool],
    ) -> None:
        """Configure restoring and writing the index snapshot, if both arguments are given.

        Args:
            keeper: has the directory.
            limits: budgets.
            is_fleet_known: whether the workers of the saved streams are registered by now.
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

    def ask_engines(self, within_s: float, is_fleet_known: Callable[[], bool]) -> None:
        """Make /ready wait for what the engines known at the start replay of their past.

        Args:
            within_s: for so long at most; 0: not at all.
            is_fleet_known: whether they are registered by now.
        """
        if within_s:
            self._is_fleet_known = is_fleet_known
            self._readiness.wait_for(
                PAST_EVENTS,
                self._have_engines_published,
                within_s=within_s,
                after=(DISCOVERY, INDEX_SNAPSHOT),
            )

    def _have_engines_published(self) -> bool:
        if self._unpublished is None:
            if not self._is_fleet_known():
                return False
            self._unpublished = self._core.registry.streams()
        self._unpublished = [stream for stream in self._unpublished if stream.awaits_past]
        return not self._unpublished

    async def open(self, listeners: Listeners) -> None:
        """Read what is on disk, before the first stream is opened."""
        if self.warm_start is not None:
            await self.warm_start.open(listeners)

    def start(self, let_in: Callable[[], None]) -> None:
        """Start, on the running loop.

        Args:
            let_in: called when recovery from a peer is over and event sources may be listened to.
        """
        if self.recovery is not None:
            work = self._recover(self.recovery, let_in)
            self._task = asyncio.get_running_loop().create_task(work)
        if self.warm_start is not None:
            self.warm_start.start(self._core.membership.sources)
        self._readiness.missing()  # engines that are registered later are not waited for

    async def finished(self, timeout_s: float) -> bool:
        """Wait for the end of index recovery, successful or not; False on timeout."""
        if self._task is None:
            return True
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        return bool(done)

    async def stop(self) -> None:
        """Cancel recovery from peers. Idempotent."""
        self._is_stopped = True
        task, self._task = self._task, None
        await ended(task)

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
