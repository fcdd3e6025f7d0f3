"""A stream over the naive index, and short words for what tests do to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from indexer.core.hashing import block_hashes
from indexer.core.stream import EventStream
from indexer.types import Scope, StreamLimits, WorkerRank
from tests.indexer.encoding import encode_batch, end_marker, message, reply, stored
from tests.indexer.naive_index import NaiveIndex

RANK = WorkerRank(1, 0)
LIMITS = StreamLimits(backlog_batches_max=50, replay_useless_max=20, replay_replies_max=500)


def tokens(number: int) -> list[int]:
    return [number * 16 + at for at in range(16)]


ENGINES = ("old", "new", "third")  # processes one after the other behind the same endpoint


def batch(number: int, *, engine: str = "old", rank: int | None = None) -> bytes:
    """Batch `number` stores block `number`; another engine writes other bytes."""
    ts = number + 0.1 * ENGINES.index(engine)
    shift = 5_000 * ENGINES.index(engine)
    return encode_batch([stored([number + 1], tokens(number + shift))], ts=ts, rank=rank)


def numbered(told: Sequence[int | bytes | None]) -> Iterator[tuple[int, bytes | None]]:
    """Each number with the payload that follows it, if one does."""
    for at, one in enumerate(told):
        if isinstance(one, int):
            after = told[at + 1] if at + 1 < len(told) else None
            yield one, None if isinstance(after, int) else after


def stream_of(index: object, **options: Any) -> EventStream:
    """A stream of a worker's only rank, without replays, into an index of either kind."""
    options = {"worker_ranks": range(1), "has_replay": False} | options
    return EventStream(Scope("m", "t"), RANK, index, **options)  # type: ignore[arg-type]


class Bench:
    """A stream over the naive index, and short words for what tests do to it."""

    def __init__(self, *, has_replay: bool = True, **options: Any) -> None:
        self.index = NaiveIndex(16, is_eagle=options.pop("is_eagle", False))
        options.setdefault("limits", LIMITS)
        options.setdefault("worker_ranks", range(2))
        self.stream = stream_of(self.index, has_replay=has_replay, **options)
        self.now = 0.0

    def live(self, *told: int | bytes | None, **kwargs: Any) -> None:
        """Batches by their numbers; what is no number is the payload of the one before it."""
        for seq, payload in numbered(told):
            self.stream.on_live(message(seq, payload or batch(seq, **kwargs)), self.now)
            self.stream.check()

    def reply(self, *told: int | bytes | None, **kwargs: Any) -> None:
        """The same of a replay."""
        for seq, payload in numbered(told):
            self.stream.on_replay(reply(seq, payload or batch(seq, **kwargs)), self.now)
            self.stream.check()

    def end(self, frames: int = 4) -> None:
        self.stream.on_replay(end_marker(frames), self.now)
        self.stream.check()

    def wait(self, *pauses_s: float) -> None:
        for seconds in pauses_s:
            self.now += seconds
            self.stream.on_timer(self.now)
            self.stream.check()

    def busy(self) -> bool:
        return self.stream.is_busy

    def state(self) -> str:
        return self.stream.kv_state

    def asked(self) -> int | None:
        return None if self.stream.request is None else self.stream.request.start

    def blocks(self, count: int = 60, *, engine: str = "old", rank: WorkerRank = RANK) -> set[int]:
        """Numbers of the batches whose block is held."""
        shift = 5_000 * ENGINES.index(engine)
        return {
            n for n in range(count) if self.index.row(rank, block_hashes(tokens(n + shift), 16))[0]
        }

    @property
    def outcomes(self) -> dict[str, int]:
        return self.stream.tallies.replays
