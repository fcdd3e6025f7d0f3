"""Keeps the index across restarts: writes snapshots, and restores streams from the last one.

It connects the driver, which opens streams, to `indexer/edge/snapshots.py`, which knows the file. A
stream in the snapshot is subscribed at once and held until its blocks are restored; they become
visible only once its engine has confirmed them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from indexer.edge.snapshots import IndexSnapshots, SnapshotSource
from select_service.edge.cooperative import ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from indexer.core.registry import StreamRegistry
    from indexer.core.stream import EventStream
    from indexer.edge.listener import Listeners
    from indexer.types import SnapshotLimits
    from select_service.core.effects import Listen

_log = logging.getLogger("select_service")


class WarmStart:
    """The index snapshot of one driver.

    Attributes:
        snapshots: the file and its counters.
        load_seconds: time spent restoring streams.
    """

    def __init__(
        self,
        directory: Path,
        registry: StreamRegistry,
        limits: SnapshotLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.snapshots = IndexSnapshots(directory, registry, limits, clock)
        self.load_seconds = 0.0
        self._registry = registry
        self._clock = clock
        self._listeners: Listeners | None = None
        self._sources: Callable[[], Iterable[tuple[EventStream, str, str | None]]] = tuple
        self._waiting: deque[SnapshotSource] = deque()  # held until their blocks are restored
        self._loading: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None

    # -- lifecycle -----------------------------------------------------------------------------

    async def open(self, listeners: Listeners) -> None:
        """Read the snapshot's contents, before the first stream is opened."""
        self._listeners = listeners
        await self.snapshots.open()

    def start(self, sources: Callable[[], Iterable[tuple[EventStream, str, str | None]]]) -> None:
        """Start to write snapshots; `sources` returns all streams open at the time of the call."""
        self._sources = sources
        self._writing = asyncio.get_running_loop().create_task(self._keep_writing())

    async def close(self) -> None:
        """Write a last snapshot if there is time, while the listeners are open. Idempotent."""
        tasks = self._loading, self._writing
        is_started, self._loading, self._writing = self._writing is not None, None, None
        await ended(*tasks)
        if is_started:
            try:
                async with asyncio.timeout(self.snapshots.limits.shutdown_s):
                    await self.write()
            except TimeoutError:
                _log.warning("index snapshot: no time for a last one, the one before stays")
        self.snapshots.close()

    # -- streams of an earlier run -------------------------------------------------------------

    def knows(self, stream: EventStream) -> bool:
        """Return whether a new stream must be held until `give_back` has restored it."""
        return self.snapshots.knows(stream)

    def give_back(self, listen: Listen) -> None:
        """Restore the blocks of a held stream and release it."""
        self._waiting.append(SnapshotSource(listen.stream, listen.endpoint, listen.replay_endpoint))
        if self._loading is None:
            self._loading = asyncio.get_running_loop().create_task(self._load_all())

    async def _load_all(self) -> None:
        assert self._listeners is not None
        started = self._clock()
        while self._waiting:
            source = self._waiting[0]
            await self.snapshots.load(source)
            self._waiting.popleft()
            self._listeners.release(source.stream)
        self.load_seconds += self._clock() - started
        self._loading = None

    @property
    def unproven(self) -> int:
        """Ranks waiting for their blocks, or for their engine's confirmation."""
        return len(self._waiting) + sum(s.is_unproven for s in self._registry.streams())

    @property
    def is_judged(self) -> bool:
        """Whether all engines that can be asked have answered; others confirm by later events."""
        return not self._waiting and not any(
            stream.is_unproven and stream.has_replay for stream in self._registry.streams()
        )

    # -- writing -------------------------------------------------------------------------------

    async def write(self) -> bool:
        """Write a snapshot now."""
        assert self._listeners is not None
        try:
            return await self.snapshots.write(
                map(SnapshotSource._make, self._sources()), self._listeners
            )
        except Exception:  # noqa: BLE001 - it costs one snapshot and nothing else
            _log.exception("index snapshot: not written through an error of ours")
            self.snapshots.failures["internal"] += 1
            return False

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(self.snapshots.limits.interval_s)
            if not self._waiting:
                await self.write()
