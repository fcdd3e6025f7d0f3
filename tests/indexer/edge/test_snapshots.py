"""Snapshots of streams without sockets: who is left out, who is not taken back, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from indexer.core.registry import StreamRegistry
from indexer.core.stream import EventStream
from indexer.edge import snapshots as module
from indexer.edge.listener import Listeners
from indexer.edge.snapshot_file import NAME, RankEnd, RankSnapshot, SnapshotReader, SnapshotWriter
from indexer.edge.snapshots import IndexSnapshots, SnapshotSource
from indexer.types import EventLossPolicy, Scope, SnapshotLimits, WorkerRank
from tests import wait
from tests.coroutines import run_by
from tests.indexer.encoding import encode_batch, end_marker, message, reply, stored

SCOPE = Scope("m", "t")
ENDPOINT, REPLAY = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


def batch(number: int, rank: int | None = None) -> bytes:
    event = stored([number + 1], [number * 16 + at for at in range(16)])
    return encode_batch([event], ts=float(number), rank=rank)


async def until(condition: Callable[[], Any]) -> None:
    """Look at every turn: what is waited for may be over at the next one."""
    await wait.until(condition, pause_s=0)


class Harness:
    """A registry, and the snapshots of one directory."""

    built: ClassVar[list[Harness]] = []

    def __init__(self, directory: Path, *, block_size: int = 16, **options: Any) -> None:
        self.built.append(self)
        self.now = 0.0
        policy = options.pop("policy", EventLossPolicy.KEEP)
        self.registry = StreamRegistry(on_event_loss=policy)
        self.index = self.registry.open_index(SCOPE, block_size)
        self.listeners = Listeners(self.registry)
        self.snapshots = IndexSnapshots(
            directory, self.registry, SnapshotLimits(**options), lambda: self.now
        )

    def source(
        self,
        worker: int = 1,
        *numbers: int,
        replay: str | None = REPLAY,
        rank: int = 0,
        in_full: bool = False,
    ) -> SnapshotSource:
        stream = self.registry.open_stream(
            SCOPE,
            WorkerRank(worker, rank),
            worker_ranks=range(2),
            has_replay=replay is not None,
            reports_in_full=in_full,
        )
        for number in numbers:
            self.live(stream, number)
        return SnapshotSource(stream, ENDPOINT, replay)

    def live(self, stream: EventStream, number: int, rank: int | None = None) -> None:
        stream.on_live(message(number, batch(number, rank)), self.now)

    async def write(self, *sources: SnapshotSource) -> bool:
        return await self.snapshots.write(sources, self.listeners)

    async def load(self, source: SnapshotSource) -> bool:
        await self.snapshots.open()
        loaded = await self.snapshots.load(source)
        self.registry.check()
        assert loaded == source.stream.is_unproven
        return loaded


def run(use: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        try:
            await use()
        finally:
            while Harness.built:
                harness = Harness.built.pop()
                harness.snapshots.close()
                await harness.listeners.close()

    wait.run(whole())


@run_by(run)
async def test_there_and_back(*, tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert await harness.write(harness.source(1, 0, 1, 2), harness.source(2, 0), harness.source(3))
    assert harness.snapshots.left_out == {"silent": 1}
    assert (harness.snapshots.ranks, harness.snapshots.blocks) == (2, 4)
    assert harness.snapshots.written_at == (tmp_path / NAME).stat().st_mtime
    assert harness.snapshots.bytes == (tmp_path / NAME).stat().st_size
    other = Harness(tmp_path)
    source = other.source()
    assert await other.load(source)
    source.stream.on_replay(reply(2, batch(2)), 0.0)
    source.stream.on_replay(end_marker(), 0.0)
    assert other.index.stats.holdings[0] == 3
    assert source.stream.kv_state == "current"
    assert not await other.snapshots.load(source), "once only"
    assert len(other.snapshots._entries) == 1


@pytest.mark.parametrize(
    ("there", "here", "is_taken"),
    [
        (REPLAY, "tcp://127.0.0.1:3", True),
        (REPLAY, REPLAY, True),
        (REPLAY, "tcp://127.0.0.1:4", False),
        (None, REPLAY, False),
    ],
)
@run_by(run)
async def test_a_rank_that_was_asked_at_the_configured_port_is_taken_back(
    *, there: str | None, here: str, is_taken: bool, tmp_path: Path
) -> None:
    """Snapshots of earlier builds name the same replay endpoint for each rank of a worker."""
    harness = Harness(tmp_path)
    assert await harness.write(harness.source(1, 0, 1, 2, replay=there, rank=1))
    other = Harness(tmp_path)
    source = other.source(replay=here, rank=1)
    assert await other.load(source) is is_taken


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 32}, "other_blocks"),
        ({"in_full": True}, "other_report_mode"),
        ({"replay": None}, "other_endpoint"),
        ({"first": [0]}, "recovered"),
        ({"closed": True}, "closed"),
        ({"policy": EventLossPolicy.DROP}, "uncertain"),
    ],
)
@run_by(run)
async def test_what_is_not_taken_back(
    *, change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    harness = Harness(tmp_path)
    source = harness.source(1, 0, 1, 5, replay=None)  # something was lost
    assert await harness.write(source._replace(replay_endpoint=REPLAY))
    replay = change.pop("replay", REPLAY)
    first, is_closed = change.pop("first", []), change.pop("closed", False)
    in_full = change.pop("in_full", False)
    other = Harness(tmp_path, **change)
    source = other.source(1, *first, replay=replay, in_full=in_full)
    if is_closed:
        other.registry.close_stream(source.stream)
    assert not await other.load(source)
    assert other.snapshots.rejected == {reason: 1}


@run_by(run)
async def test_what_a_strict_life_has_kept_a_strict_life_takes_back(*, tmp_path: Path) -> None:
    harness = Harness(tmp_path, policy=EventLossPolicy.DROP)
    assert await harness.write(harness.source(1, 0, 5, 6, replay=None))
    other = Harness(tmp_path, policy=EventLossPolicy.DROP)
    assert await other.load(other.source(1, replay=None))
    assert other.index.stats.holdings[0] == 2, "what came after the loss"


@run_by(run)
async def test_ranks_that_are_written_by_several_are_left_out(*, tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    one, two = harness.source(1, 0), harness.source(1, 0)
    assert await harness.write(one, two)
    assert harness.snapshots.left_out == {"shared": 2}
    harness.registry.close_stream(two.stream)
    harness.live(one.stream, 1, rank=1)
    assert await harness.write(two, one)
    assert harness.snapshots.left_out == {"shared": 1, "closed": 1}


@pytest.mark.parametrize("happens", ["slow", "changed", "closed"])
@run_by(run)
async def test_what_befalls_a_rank_that_is_being_noted_down(
    *, happens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is held, so only a bug or a leaving worker can change it; nothing is written."""
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    harness = Harness(tmp_path, hold_s=1.0)
    source = harness.source(1, *range(20))
    writing = asyncio.ensure_future(harness.write(source))
    await until(lambda: harness.index._dumps)
    if happens == "slow":
        harness.now = 2.0
    elif happens == "changed":
        harness.live(source.stream, 20)
    else:
        harness.registry.close_stream(source.stream)
    assert await writing
    assert harness.snapshots.left_out == {happens: 1}
    assert harness.index._dumps == 0
    with closing(SnapshotReader(tmp_path / NAME)) as reader:
        assert not reader.entries


@run_by(run)
async def test_a_worker_that_leaves_while_its_blocks_come_back(
    *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    harness = Harness(tmp_path)
    assert await harness.write(harness.source(1, *range(20)))
    other = Harness(tmp_path)
    source = other.source()
    loading = asyncio.ensure_future(other.load(source))
    await until(lambda: other.index.holds_anything(source.stream.rank))
    other.registry.close_stream(source.stream)
    other.index.detach(source.stream.rank)
    assert not await loading
    assert other.snapshots.rejected == {"closed": 1}
    assert other.index.stats.holdings[0] == 0


@run_by(run)
async def test_a_load_that_is_interrupted_keeps_what_there_is_for_the_next_life(
    *, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    harness = Harness(tmp_path)
    assert await harness.write(harness.source(1, *range(20)))
    other = Harness(tmp_path)
    source = other.source()
    loading = asyncio.ensure_future(other.load(source))
    await until(lambda: other.index.holds_anything(source.stream.rank))
    loading.cancel()
    await asyncio.gather(loading, return_exceptions=True)
    assert not other.index.holds_anything(source.stream.rank)
    assert await other.write(source)
    assert other.snapshots.ranks == 1
    last = Harness(tmp_path)
    assert await last.load(last.source())


@pytest.mark.parametrize("lie", ["runs", "blocks", "order", "frost"])
@run_by(run)
async def test_a_file_that_contradicts_itself(*, lie: str, tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert await harness.write(harness.source(1, 0, 1))
    with closing(SnapshotReader(tmp_path / NAME)) as reader:
        (entry,) = reader.entries.values()
        pieces, end = reader.read(entry), entry.end
    if lie == "runs":
        end = RankEnd(end.runs + 1, end.blocks)
    elif lie == "blocks":
        end = RankEnd(end.runs, [1, 1, 0, 0])
    elif lie == "order":
        pieces = [*pieces, *pieces]
    else:
        pieces = [msgspec.msgpack.encode("no runs")]
    writer = SnapshotWriter(tmp_path)
    writer.add(RankSnapshot(msgspec.msgpack.encode(entry.head), pieces, end))
    writer.finish()
    other = Harness(tmp_path)
    source = other.source()
    assert not await other.load(source)
    assert other.snapshots.rejected == {"damaged": 1}
    assert not other.index.holds_anything(source.stream.rank)
    other.live(source.stream, 0)
    assert other.index.stats.holdings[0] == 1


@run_by(run)
async def test_nobody_waits_for_ever_for_a_worker(*, tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert await harness.write(harness.source(1, 0))
    other = Harness(tmp_path, unclaimed_s=60.0)
    await other.snapshots.open()
    other.now = 59.0
    assert await other.write()
    assert other.snapshots.ranks == 1, "it goes over as it is"
    other.now = 60.0
    other.snapshots.forget_unclaimed()
    assert len(other.snapshots._entries) == 0
    assert other.snapshots.rejected == {"unclaimed": 1}


@run_by(run)
async def test_a_directory_in_place_of_the_file(*, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    harness = Harness(tmp_path)
    await harness.snapshots.open()
    assert harness.snapshots.damage == {"unreadable": 1}
    assert not await harness.write(harness.source(1, 0))
    assert harness.snapshots.failures == {"unwritable": 1}
