"""What has been applied of a stream, and what was lost.

The base class of a stream's layers: `repair` fills gaps by replay, and `stream` on top takes live
messages. It has the cursor and the writer, and decides what becomes of the blocks when batches are
lost or the engine restarts.
"""

from __future__ import annotations

from collections import deque
from math import isfinite
from typing import TYPE_CHECKING, Final, Literal

from indexer.core.cursor import Cursor, StreamMemory
from indexer.core.events import Oversized, size_of
from indexer.core.stream_counters import StreamCounters
from indexer.core.wire import BatchDecoder
from indexer.core.writer import IndexWriter
from indexer.types import EventLossPolicy

if TYPE_CHECKING:
    from indexer.core.events import EventBatch
    from indexer.core.index import KvIndex
    from indexer.core.replay import Staged
    from indexer.types import WorkerRank

SEQUENCE_BYTES: Final = 8
END_MARKER: Final = (1 << 64) - 1
"""Sequence number of the message that ends a replay; it has no meaning on the live stream."""

NAMES_REMEMBERED: Final = 64
"""Names (ranks) an engine may report for itself on one stream before we stop recording them."""

DIGESTS_KEPT: Final = 64
"""Digests of last batches saved for the next process; the last proves identity, the others identify
copies."""

UNUSABLE_REMEMBERED: Final = 1024
"""Numbers of batches remembered because asking for them again is of no use; beyond that the oldest
is forgotten, and may be counted once more."""

BEHEADED_BELIEVED: Final = 2
"""Replays without their beginning before it counts as gone: one may be lost in transit, not all."""

PLAUSIBLE_LAG_S: Final = 86_400.0
"""If an engine's clock is off by more than a day, no lag is reported."""


class StreamProgress:
    """Batches applied in order, batches lost, engines gone.

    Attributes:
        is_unproven: Whether the blocks are from before a restart and the engine has yet to prove
            that they are its own; until then no answer names them.
        unknown_batches: Of the lost ones, those from before anything was held that they could make
            wrong: of the past of an engine that was joined late, or of blocks that were dropped.
    """

    def __init__(
        self,
        rank: WorkerRank,
        index: KvIndex,
        *,
        worker_ranks: range,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
    ) -> None:
        self.rank = rank
        self.worker_ranks = worker_ranks
        self.lost_batches = 0
        self.unknown_batches = 0
        self.last_event_at: float | None = None  # our clock, at the last live message
        self.last_batch_ts: float | None = None  # the engine's wall clock
        self.delivery = Delivery()
        self.tallies = StreamCounters()
        self.cursor = Cursor()
        self._on_event_loss = on_event_loss
        self._decoder = BatchDecoder(is_eagle=index.is_eagle)
        self._writer = IndexWriter(index, rank, self.tallies)
        self._names: set[int] = set()  # ranks the engine reported for itself, live
        self._beheaded = 0  # consecutive replays that should have begun with batch 0 and did not
        # the last batch applied before the engine may have been replaced unnoticed
        self._doubted_after: int | None = None
        self.is_unproven = False
        # batches that the engine has, but that are of no use to us: too long, or unreadable
        self._unusable: dict[int, None] = {}
        self._breaking: int | None = None  # the last batch too long even for a socket
        self._lost_unusable = 0  # how many of `lost_batches` are of that kind
        # a rebuild that has proven to be right, and is being applied
        self._staged: deque[Staged] = deque()
        self._index = index
        index.attach(rank)

    @property
    def kv_state(self) -> Literal["current", "uncertain"]:
        """Whether the index is known to match what the engine holds."""
        is_known = self._doubted_after is None and not self.is_unproven
        return "current" if self.lost_batches == 0 and is_known else "uncertain"

    @property
    def reports_in_full(self) -> bool:
        """Whether the engine also reports which blocks prompts find in its cache."""
        return self._writer.reports_in_full

    @property
    def is_eagle(self) -> bool:
        """Whether its scope's blocks are made of pairs of tokens."""
        return self._index.is_eagle

    @property
    def block_size(self) -> int:
        """Tokens per block, according to the index."""
        return self._index.block_size

    @property
    def names(self) -> frozenset[int]:
        """Ranks the engine reported for itself in live batches, as far as recorded."""
        return frozenset(self._names)

    @property
    def _is_past_gone(self) -> bool:
        """Whether batch 0 has left the engine's buffer, which makes rebuilding impossible."""
        return self._beheaded >= BEHEADED_BELIEVED

    @property
    def _can_rebuild(self) -> bool:
        """Whether starting over with batch 0 would bring back some of what was lost."""
        return self.lost_batches > self._lost_unusable and not self._is_past_gone

    def lag(self, wall_now: float) -> float | None:
        """Seconds since the engine's last batch, by the engine's clock; None if implausible."""
        if self.last_batch_ts is None:
            return None
        lag = wall_now - self.last_batch_ts
        return max(lag, 0.0) if abs(lag) < PLAUSIBLE_LAG_S else None

    # -- across restarts of this process -----------------------------------------------------------

    @property
    def is_at_rest(self) -> bool:
        """Whether the blocks are those after the last batch, written by this stream alone."""
        return not (
            self._writer.is_busy
            or self._staged
            or self.is_unproven
            or self._doubted_after is not None
            or self._writer.ranks != {self.rank}
            or self.cursor.last is None
            or self.cursor.digest_of(self.cursor.last) is None
        )

    @property
    def ranks_written(self) -> set[WorkerRank]:
        """Ranks whose blocks came, at least in part, from this stream."""
        return self._writer.ranks

    @property
    def clearings(self) -> int:
        """Times all blocks of a rank went at once: cleared, or its engine restarted."""
        return self._writer.clearings

    def memory(self) -> StreamMemory:
        """Return what another process needs to continue from here; the stream must be at rest."""
        assert self.is_at_rest
        assert self.cursor.last is not None
        digests, zero = self.cursor.recent(DIGESTS_KEPT)
        return StreamMemory(
            self.cursor.last,
            digests,
            zero,
            self.lost_batches,
            sorted(self._names),
            dict(self._writer.groups),
            self.last_batch_ts,
            self.unknown_batches,
            dict(self._writer.limiting),
            self._writer.are_of_one_model,
        )

    def _recall(self, memory: StreamMemory) -> None:
        """Restore the position from before a restart; its blocks are in the index, uncredited."""
        assert self.cursor.last is None
        self.cursor.recall(memory.last, memory.digests, memory.zero)
        self.lost_batches = memory.lost_batches
        self.unknown_batches = memory.unknown_batches
        self.last_batch_ts = memory.last_batch_ts
        self._names.update(memory.names)
        self._writer.groups.update(memory.groups)
        self._writer.limiting.update(memory.limiting)
        self._writer.are_of_one_model = memory.are_of_one_model
        self.is_unproven = True

    def _credit(self) -> None:
        """Credit the blocks: the engine is the same, and everything since has been applied."""
        self.is_unproven = False
        self.tallies.recalls["credited"] += 1
        self._index.credit(self.rank)

    def _deny(self, reason: str) -> None:
        """Drop unproven blocks, if any; the caller starts over."""
        if self.is_unproven:
            self.is_unproven = False
            self.tallies.recalls[reason] += 1
            self._writer.forget_blocks()

    def check(self) -> None:
        """Assert the invariants of the position."""
        self.cursor.check()
        assert len(self._names) <= NAMES_REMEMBERED
        assert 0 <= self.unknown_batches <= self.lost_batches

    def _hear_name(self, batch: EventBatch | None) -> None:
        """Record the rank the engine reports for itself."""
        if batch is not None and batch.dp_rank is not None and len(self._names) < NAMES_REMEMBERED:
            self._names.add(batch.dp_rank)

    def _is_garbage(self, payload: bytes) -> bool:
        """Whether a payload cannot be a batch, as far as it was read."""
        return not isinstance(payload, Oversized) and self._decoder.decode(payload) is None

    def _is_foreign(self, batch: EventBatch | None) -> bool:
        """Whether a replayed batch belongs to another rank: one address often serves all."""
        name = None if batch is None else batch.dp_rank
        if name is None:
            return False
        if self._names:
            return name not in self._names
        return name != self.rank.dp_rank and name in self.worker_ranks

    def _accept(self, batch: EventBatch, seq: int, digest: int, *, live: bool) -> None:
        """Begin to apply the expected batch."""
        self.cursor.advance(seq, digest, live=live)
        self.tallies.batches += 1
        self.last_batch_ts = batch.ts
        if live and self.last_event_at is not None:
            self.delivery.note(self.last_event_at, batch.ts)
        self._writer.begin(batch, self.worker_ranks, seq)

    def _work(self, budget: int) -> int:
        """Write some of the current batch; return the remaining budget."""
        left = self._writer.work(budget)
        if self._writer.is_whole:
            # everything was cleared, so losses and blocks of another engine no longer matter
            self.lost_batches = self.unknown_batches = self._lost_unusable = 0
            self._doubted_after = None
            if self.is_unproven:
                self._credit()  # no block from before the restart is left that could be wrong
        return left

    def _give_up_before(self, seq: int) -> None:
        """Count the batches before `seq` as lost for good."""
        if seq > self.cursor.expected:
            self._lose(seq - self.cursor.expected)
            self.cursor.skip_to(seq)

    def _lose(self, batches: int) -> None:
        self.tallies.lost_batches += batches
        self._note_lost(batches)

    def _note_lost(self, batches: int) -> None:
        self._deny("lost")  # when in doubt drop unproven blocks, whatever the policy
        if not self._holds_anything:
            self.unknown_batches += batches
        self.lost_batches += batches
        self._drop_if_told()

    @property
    def _holds_anything(self) -> bool:
        """Whether there are blocks, or will soon be, that a lost batch could make wrong."""
        if self._writer.is_busy or self._staged:
            return True
        return any(
            self._index.slot_of(rank) is not None and any(self._index.blocks_of(rank))
            for rank in self._writer.ranks | {self.rank}
        )

    def _lose_unusable(self, seq: int) -> None:
        """Count a batch as lost that no replay can bring, once for each engine."""
        if seq not in self._unusable:
            self.tallies.lost_batches += 1
            self.tallies.unusable_batches += 1
            self._unusable[seq] = None
            if len(self._unusable) > UNUSABLE_REMEMBERED:
                del self._unusable[next(iter(self._unusable))]
        self._note_lost(1)
        self._lost_unusable += 1

    def _refuse(self, seq: int, payload: bytes, digest: int, *, live: bool) -> None:
        """Take the expected batch, of which only the size and the number can be used."""
        if isinstance(payload, Oversized):
            self.tallies.count_oversized(payload.size)
        else:
            self.tallies.bad_messages["payload"] += 1
        self.cursor.advance(seq, digest, live=live)
        self._lose_unusable(seq)

    def _drop_if_told(self) -> None:
        """The held blocks may be wrong: under `--on-event-loss drop`, drop them."""
        if self._on_event_loss is EventLossPolicy.DROP:
            self._writer.forget_blocks()
            self.unknown_batches = self.lost_batches

    def _begin_anew(self) -> None:
        """Another engine process is speaking: discard everything known about the old one."""
        self._forget_past()
        self._unusable.clear()
        self._breaking = None

    def _forget_past(self) -> None:
        """Start with batch 0, of this engine or another one."""
        self._deny("restarted")
        self._staged.clear()
        self._writer.forget()
        self._names.clear()
        self.delivery.forget()
        self.cursor.reset()
        self.lost_batches = self.unknown_batches = self._lost_unusable = 0
        self._beheaded = 0
        self._doubted_after = None


def fitted(payload: bytes, longest: int) -> bytes:
    """Return a payload, or only its head if it is longer than `longest` bytes."""
    size = size_of(payload)
    if size <= longest or isinstance(payload, Oversized):
        return payload
    return Oversized.of(payload, size)


def read_sequence(frame: bytes) -> int | None:
    """Return the number in a sequence frame, None if the frame is malformed."""
    return int.from_bytes(frame, "big") if len(frame) == SEQUENCE_BYTES else None


# How late a stream's batches come, by the engine's own progress. The clocks of engine and service
# differ by an unknown amount, either may be set at any time, and an engine that has nothing to tell
# is not late. So a batch is compared with the one before: what counts is by how much more time has
# passed here than there.

STEP_S: Final = 1.0
"""A batch that comes this much later than the one before did is taken for a clock that was set, or
for a pause whose end was not seen. Delay grows with every batch while an engine is busy."""

DISORDER_S: Final = 0.01
"""A batch made by this much before the one before it was made by a clock that was set: one engine's
batches are made one after another, though perhaps by threads."""

QUIET_S: Final = 5.0
"""After so long a silence, measuring begins anew: all that was late has come, and the first batch
after it cannot tell a delay from a clock that was set meanwhile."""

BASE_S: Final = 3600.0
"""How long the fastest batch is the baseline for others: clocks drift."""


class Delivery:
    """The delay of one stream's live batches beyond that of the fastest.

    Attributes:
        offset_s: our clock when the last batch came, minus the engine's when it was made; None:
            there was none, or it had no time.
        lag_s: by how much more it was late than the fastest one; 0.0 after a step of either clock.
    """

    __slots__ = ("_at", "_base", "_base_before", "_base_until", "lag_s", "offset_s")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Another engine is speaking, or none."""
        self.offset_s: float | None = None
        self.lag_s = 0.0
        self._at = 0.0
        self._base = 0.0  # the smallest offset of this hour
        self._base_before = 0.0  # and of the hour before
        self._base_until = 0.0

    def note(self, at: float, made_at: float | None) -> None:
        """Take the times of the next live batch: its arrival by our clock, and the engine's."""
        if made_at is None or not isfinite(made_at):
            self.forget()
            return
        offset, before, at_before = at - made_at, self.offset_s, self._at
        is_anew = before is None or at - at_before >= max(QUIET_S, self.lag_s)
        self.offset_s, self._at = offset, at
        if before is None or is_anew:
            self._base = self._base_before = offset
            self._base_until = at + BASE_S
        elif offset - before > STEP_S or made_at < at_before - before - DISORDER_S:
            # A clock was set; what was late before still is. What no step can be told from was the
            # network's: kept at each step, it would add up.
            late = self.lag_s if self.lag_s > STEP_S else 0.0
            self._base = self._base_before = offset - late
        if at >= self._base_until:
            self._base_before, self._base, self._base_until = self._base, offset, at + BASE_S
        elif offset < self._base:
            self._base = offset
        self.lag_s = offset - min(self._base, self._base_before)
