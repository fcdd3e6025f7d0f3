"""Writes the index to disk periodically, and restores streams from it after a restart.

Each rank is frozen at one moment between two batches (`core/checkpoint.py`): its stream is held
while its nodes are copied, a slice per turn of the loop, and continues before anything is written.
Restored blocks stay invisible until the engine has proven to be the same (`Repair.recall`). No
failure here is fatal: without a snapshot the start is merely cold. `snapshot_file.py` does the file
format, `listener.py` holds the streams.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import msgspec

from indexer.core.checkpoint import BadCheckpoint, CheckpointRun, RankChanged
from indexer.core.endpoint import at_rank
from indexer.edge.io_threads import IoThreads
from indexer.edge.snapshot_file import (
    NAME,
    PIECE_BYTES,
    BadSnapshot,
    RankEnd,
    RankHead,
    RankSnapshot,
    SnapshotEntry,
    SnapshotReader,
    SnapshotWriter,
)
from indexer.types import EventLossPolicy, Scope, SnapshotLimits, WorkerRank

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable
    from pathlib import Path

    from indexer.core.checkpoint import CheckpointRestore
    from indexer.core.index import KvIndex
    from indexer.core.registry import StreamRegistry
    from indexer.core.stream import EventStream
    from indexer.edge.listener import Listeners

_log = logging.getLogger("indexer")

SLICE_S: Final = 0.0002
"""How long the work may hold the loop before it yields."""

REST_TURNS: Final = 200
"""Turns of the loop in which a stream may come to the end of a batch."""

LOOKED_AT: Final = 64
"""Streams checked in one go for progress; 1.5 µs each."""

_Positions: TypeAlias = "dict[tuple[Scope, WorkerRank], int | None]"
"""The last batch of each stream."""

_NOWHERE: Final = -1  # no stream has this position
_RUN_BYTES: Final = 48  # approximate size of a frozen run besides its hashes
_encode: Final = msgspec.msgpack.Encoder().encode
_decode_runs: Final = msgspec.msgpack.Decoder(list[CheckpointRun]).decode


class SnapshotSource(NamedTuple):
    """A stream and where it listens."""

    stream: EventStream
    endpoint: str
    replay_endpoint: str | None

    @property
    def key(self) -> tuple[Scope, WorkerRank]:
        """Scope and rank."""
        return self.stream.scope, self.stream.rank


class _LeftOut(Exception):
    """A rank that is not written, or not restored; the argument is the reason in one word."""


class IndexSnapshots:
    """The snapshot of one state directory; lives on the event loop it is used from.

    Attributes:
        written_at: when the file was written, in wall-clock seconds; None: there is no file.
        seconds, bytes, blocks, ranks: of the last snapshot written.
        writes: number of snapshots written.
        failures: failed writes, by kind.
        left_out: ranks missing from the last snapshot, by reason.
        damage: faults in the file found at the start, by kind.
        rejected: ranks in it that were not even offered to their engine, by reason.
    """

    def __init__(
        self,
        directory: Path,
        registry: StreamRegistry,
        limits: SnapshotLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.written_at: float | None = None
        self.seconds = 0.0
        self.bytes = self.blocks = self.ranks = self.writes = 0
        self.failures: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.damage: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self._directory = directory
        self._disk = IoThreads("index-snapshot")
        self._registry = registry
        self._clock = clock
        self._reader: SnapshotReader | None = None
        self._entries: dict[tuple[Scope, WorkerRank], SnapshotEntry] = {}
        self._offered: dict[EventStream, SnapshotEntry] = {}  # their engines have yet to prove them
        self._is_loading = False
        self._unclaimed_until = 0.0
        self._positions: _Positions = {}  # as of the last write
        self._is_writing = False
        self._turn_ends = 0.0

    # -- reading -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the file left by the previous process."""
        try:
            reader = await self._disk.do(SnapshotReader, self._directory / NAME)
        except FileNotFoundError:
            return
        except OSError as error:
            _log.error("index snapshot: cannot be read, the index starts empty: %s", error)
            self.damage["unreadable"] = 1
            return
        self._reader, self._entries, self.damage = reader, reader.entries, reader.damage
        self._unclaimed_until = self._clock() + self.limits.unclaimed_s
        if self.damage:
            facts = {"damage": self.damage, "ranks_left": len(self._entries)}
            _log.error("index snapshot: damaged, what is whole is used: %s", facts)
        _log.info("index snapshot: %d ranks of an earlier life", len(self._entries))

    def forget_unclaimed(self) -> None:
        """Drop ranks whose worker has not come in time, and close the file once it is used up."""
        if self._entries and self._clock() >= self._unclaimed_until:
            self.rejected["unclaimed"] += len(self._entries)
            self._entries = {}
        if self._reader is not None and not (self._entries or self._offered or self._is_loading):
            self._reader.close()
            self._reader = None

    def knows(self, stream: EventStream) -> bool:
        """Say whether the file has something for a stream."""
        return (stream.scope, stream.rank) in self._entries

    def close(self) -> None:
        """Close the file and stop the thread. Idempotent."""
        self._entries, self._offered = {}, {}
        self.forget_unclaimed()
        self._disk.close()

    async def load(self, source: SnapshotSource) -> bool:
        """Restore a stream that has heard nothing yet; False: it starts cold.

        The stream must be held meanwhile.
        """
        entry = self._entries.pop(source.key, None)
        if entry is None:
            return False
        stream = source.stream
        self._is_loading = True
        try:
            index = self._check(entry.head, source)
            await self._thaw(entry, stream, index)
        except _LeftOut as reason:
            self.rejected[str(reason)] += 1
        except (BadSnapshot, BadCheckpoint, OSError, ValueError) as error:
            _log.error("index snapshot: worker %d: %s", stream.rank.worker_id, error)
            self.rejected["damaged"] += 1
        except asyncio.CancelledError:
            self._entries[source.key] = entry  # the snapshot written at shutdown still includes it
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the stream begins cold
            _log.exception("index snapshot: an error of ours")
            self.rejected["internal"] += 1
        finally:
            self._is_loading = False
        if stream.is_unproven:
            self._offered[stream] = entry
        return stream.is_unproven

    def _check(self, head: RankHead, source: SnapshotSource) -> KvIndex:
        stream = source.stream
        index = self._registry.index(stream.scope)
        if stream.closed or index is None:
            raise _LeftOut("closed")
        # some are of a time when every rank was asked at the engine's configured endpoint
        replays = {head.replay_endpoint}
        if head.replay_endpoint is not None:
            replays.add(at_rank(head.replay_endpoint, head.dp_rank))
        if head.endpoint != source.endpoint or source.replay_endpoint not in replays:
            raise _LeftOut("other_endpoint")
        if (head.block_size, head.is_eagle) != (index.block_size, index.is_eagle):
            raise _LeftOut("other_blocks")
        if head.reports_in_full != stream.reports_in_full:
            raise _LeftOut("other_report_mode")
        if head.is_uncertain and self._registry.on_event_loss is EventLossPolicy.DROP:
            raise _LeftOut("uncertain")
        if index.holds_anything(stream.rank):
            # a peer's fresh dump is already in use; a replay from the beginning repairs it
            raise _LeftOut("recovered")
        return index

    async def _thaw(self, entry: SnapshotEntry, stream: EventStream, index: KvIndex) -> None:
        assert self._reader is not None
        pieces = await self._disk.do(self._reader.read, entry)
        if stream.closed or index.holds_anything(stream.rank):
            raise _LeftOut("closed" if stream.closed else "recovered")
        thaw = index.thaw(stream.rank, entry.head.home)
        try:
            runs = await self._add_all(thaw, pieces, index)
            if entry.end == RankEnd(runs, thaw.holder.blocks):
                stream.recall(entry.head.memory, self._clock())
        finally:
            if index.is_filled_by(thaw) and not stream.is_unproven:
                index.clear(stream.rank)
        if not stream.is_unproven:
            raise BadSnapshot("less or more than was written")

    async def _add_all(self, thaw: CheckpointRestore, pieces: list[bytes], index: KvIndex) -> int:
        runs = 0
        self._turn_ends = self._clock() + SLICE_S
        for piece in pieces:
            for run in _decode_runs(piece):
                thaw.add(run)
                runs += 1
                if await self._give_way() and not index.is_filled_by(thaw):
                    raise _LeftOut("closed")
        return runs

    async def _give_way(self) -> bool:
        if self._clock() < self._turn_ends:
            return False
        await asyncio.sleep(0)
        self._turn_ends = self._clock() + SLICE_S
        return True

    # -- writing -----------------------------------------------------------------------------------

    async def write(self, sources: Iterable[SnapshotSource], listeners: Listeners) -> bool:
        """Write a new snapshot that replaces the old one; False: the old one stays.

        Nothing is written if no stream has moved. Restored ranks that are not claimed yet, or
        whose engine has yet to prove them, are carried over unchanged.

        Args:
            sources: all streams open at the time of the call; iterated in slices.
            listeners: hold a stream while it is copied.
        """
        if self._is_writing or self._is_loading:
            return False
        self._is_writing = True
        try:
            known: list[SnapshotSource] = []
            positions: _Positions = {}
            has_moved = not self.writes
            for source in sources:
                known.append(source)
                key, last = source.key, source.stream.cursor.last
                has_moved |= self._positions.get(key, _NOWHERE) != last
                positions[key] = last
                if not len(known) % LOOKED_AT:
                    await asyncio.sleep(0)
            if not has_moved and len(positions) == len(self._positions):
                return False
            return await self._write(known, positions, listeners)
        finally:
            self._is_writing = False

    async def _write(
        self, sources: list[SnapshotSource], positions: _Positions, listeners: Listeners
    ) -> bool:
        started = self._clock()
        left_out: Counter[str] = Counter()
        ranks = blocks = 0
        writer: SnapshotWriter | None = None
        try:
            writer = await self._disk.do(SnapshotWriter, self._directory)
            async for rank in self._ranks(sources, listeners, left_out):
                if writer.written + rank.size > self.limits.bytes_max:
                    left_out["no_room"] += 1
                    continue
                ranks += 1
                blocks += sum(rank.end.blocks)
                await self._disk.do(writer.add, rank)
            await self._disk.do(writer.finish)
        except OSError as error:
            self._failed(error)
            return False
        finally:
            if writer is not None:
                self._disk.begin(writer.abandon)  # a no-op once it has finished
        if left_out.get("no_room"):
            _log.warning(
                "index snapshot: %d ranks left out, more than %d bytes",
                left_out["no_room"],
                self.limits.bytes_max,
            )
        path = self._directory / NAME
        self.written_at = (await self._disk.do(path.stat)).st_mtime
        self.seconds = self._clock() - started
        self.bytes, self.blocks, self.left_out = writer.written, blocks, left_out
        self.ranks = ranks
        self.writes += 1
        self._positions = positions
        return True

    async def _ranks(
        self, sources: list[SnapshotSource], listeners: Listeners, left_out: Counter[str]
    ) -> AsyncIterator[RankSnapshot]:
        self.forget_unclaimed()
        self._offered = {s: entry for s, entry in self._offered.items() if s.is_unproven}
        for source in sources:
            carried = self._offered.get(source.stream)
            try:
                yield (
                    await self._freeze(source, listeners)
                    if carried is None
                    else await self._carry_over(carried)
                )
            except _LeftOut as reason:
                left_out[str(reason)] += 1
        for entry in list(self._entries.values()):
            try:
                yield await self._carry_over(entry)
            except _LeftOut as reason:
                left_out[str(reason)] += 1

    async def _carry_over(self, entry: SnapshotEntry) -> RankSnapshot:
        assert self._reader is not None
        try:
            pieces = await self._disk.do(self._reader.read, entry)
        except BadSnapshot:
            raise _LeftOut("damaged") from None
        return RankSnapshot(_encode(entry.head), pieces, entry.end)

    def _failed(self, error: OSError) -> None:
        is_full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        self.failures["disk_full" if is_full else "unwritable"] += 1
        _log.error("index snapshot: not written, the old one stays: %s", error)

    async def _freeze(self, source: SnapshotSource, listeners: Listeners) -> RankSnapshot:
        """Copy a rank as it is after its last batch.

        Raises:
            _LeftOut: there is no such moment, or nothing to copy.
        """
        stream = source.stream
        index = self._registry.index(stream.scope)
        for _ in range(REST_TURNS):
            if stream.closed or index is None:
                raise _LeftOut("closed")
            if self._is_shared(stream):
                raise _LeftOut("shared")
            if stream.is_at_rest:
                break
            if stream.is_unproven or stream.cursor.last is None:
                raise _LeftOut("unproven" if stream.is_unproven else "silent")
            await asyncio.sleep(0)
        else:
            raise _LeftOut("busy")
        listeners.hold(stream)
        try:
            return await self._freeze_held(source, index)
        except RankChanged:
            raise _LeftOut("closed") from None
        finally:
            listeners.release(stream)

    def _is_shared(self, stream: EventStream) -> bool:
        """Whether another stream has written for this rank too, or this one for others."""
        return stream.ranks_written != {stream.rank} or any(
            stream.rank in other.ranks_written
            for other in self._registry.streams()
            if other is not stream and other.scope == stream.scope
        )

    async def _freeze_held(self, source: SnapshotSource, index: KvIndex) -> RankSnapshot:
        stream = source.stream
        memory = stream.memory()
        head = RankHead(
            *stream.scope,
            block_size=index.block_size,
            is_eagle=index.is_eagle,
            worker_id=stream.rank.worker_id,
            dp_rank=stream.rank.dp_rank,
            endpoint=source.endpoint,
            replay_endpoint=source.replay_endpoint,
            home=index.holder(stream.rank).home,
            is_uncertain=bool(memory.lost_batches)
            and self._registry.on_event_loss is EventLossPolicy.KEEP,
            memory=memory,
            reports_in_full=stream.reports_in_full,
        )
        blocks = index.blocks_of(stream.rank)
        until = self._clock() + self.limits.hold_s
        self._turn_ends = self._clock() + SLICE_S
        pieces: list[bytes] = []
        batch: list[CheckpointRun] = []
        size = runs = 0
        with closing(index.freeze(stream.rank)) as freezing:
            for run in freezing:
                batch.append(run)
                runs += 1
                size += len(run.edge) + len(run.names) + _RUN_BYTES
                size += 0 if run.limiting is None else len(run.limiting.names)
                if size >= PIECE_BYTES:
                    pieces.append(_encode(batch))
                    batch, size = [], 0
                if await self._give_way() and self._clock() >= until:
                    raise _LeftOut("slow")
        pieces.append(_encode(batch))
        if not stream.is_at_rest or stream.memory() != memory:
            raise _LeftOut("changed")
        return RankSnapshot(_encode(head), pieces, RankEnd(runs, blocks))
