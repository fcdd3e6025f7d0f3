"""What of a stream has been applied, and what was lost on the way.

The floor the other two rooms of a stream stand on: `repair` mends holes by replay, `stream` takes
live messages. Here is the cursor, the writer, and what becomes of the blocks when batches are lost
or the engine begins anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from indexer.core.cursor import Cursor
from indexer.core.memory import StreamMemory
from indexer.core.tallies import Tallies
from indexer.core.wire import BatchDecoder
from indexer.core.writer import IndexWriter
from indexer.types import EventLossPolicy

if TYPE_CHECKING:
    from indexer.core.events import EventBatch
    from indexer.core.index import KvIndex
    from indexer.types import WorkerRank

SEQUENCE_BYTES: Final = 8
END_MARKER: Final = (1 << 64) - 1
"""Sequence of the message that ends a replay; on the live stream it is nothing."""

NAMES_REMEMBERED: Final = 64
"""Ranks an engine may have called itself on one stream before we stop keeping them."""

DIGESTS_KEPT: Final = 64
"""Of the last batches, for another life; the last one is the proof, the others know copies."""

BEHEADED_BELIEVED: Final = 2
"""Answers without their beginning: one may have lost it on the way, all of them do not."""

PLAUSIBLE_LAG_S: Final = 86_400.0
"""An engine whose clock is off by more than a day has no lag."""


class Progress:
    """Batches applied in order, batches lost, engines gone.

    Attributes:
        is_unproven: Whether the blocks are of an earlier life and the engine has still to show
            that it is the one they came from; until then no answer names them.
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
        self.last_event_at: float | None = None  # by our clock, the last live message
        self.last_batch_ts: float | None = None  # the engine's wall clock
        self.tallies = Tallies()
        self.cursor = Cursor()
        self._on_event_loss = on_event_loss
        self._decoder = BatchDecoder(is_eagle=index.is_eagle)
        self._writer = IndexWriter(index, rank, self.tallies)
        self._names: set[int] = set()  # what the engine has called its rank, live
        self._beheaded = 0  # answers in a row that were to begin with batch 0 and did not
        # the last batch applied before the engine may have become another one without a word
        self._doubted_after: int | None = None
        self.is_unproven = False
        self._index = index
        index.attach(rank)

    @property
    def kv_state(self) -> Literal["current", "uncertain"]:
        """Whether the index is known to hold what the engine holds."""
        is_known = self._doubted_after is None and not self.is_unproven
        return "current" if self.lost_batches == 0 and is_known else "uncertain"

    @property
    def block_size(self) -> int:
        """Tokens in a block, as the index has them."""
        return self._index.block_size

    @property
    def names(self) -> frozenset[int]:
        """What the engine has called its rank in live batches, as far as that is remembered."""
        return frozenset(self._names)

    @property
    def _is_past_gone(self) -> bool:
        """Whether batch 0 has left the engine's buffer: there is no rebuilding then."""
        return self._beheaded >= BEHEADED_BELIEVED

    def lag(self, wall_now: float) -> float | None:
        """Seconds since the engine made its last batch, by its own clock; None if implausible."""
        if self.last_batch_ts is None:
            return None
        lag = wall_now - self.last_batch_ts
        return max(lag, 0.0) if abs(lag) < PLAUSIBLE_LAG_S else None

    @property
    def delivery_offset_s(self) -> float | None:
        """Our clock when the last batch came, less the engine's when it made it.

        Clocks differ; that this grows shows that events come later. None unless it came live.
        """
        if self.last_event_at is None or self.last_batch_ts is None or not self.cursor.is_live:
            return None
        return self.last_event_at - self.last_batch_ts

    # -- from one life to the next -----------------------------------------------------------------

    @property
    def is_at_rest(self) -> bool:
        """Whether the blocks are those after the last batch, and nobody else wrote any of them."""
        return not (
            self._writer.is_busy
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
        """Times all blocks of a rank went at once: cleared, or the engine's as it was before."""
        return self._writer.clearings

    def memory(self) -> StreamMemory:
        """What another process needs to go on from here; the stream is at rest."""
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
        )

    def _recall(self, memory: StreamMemory) -> None:
        """Stand where an earlier life stood; its blocks are in the index, uncredited."""
        assert self.cursor.last is None
        self.cursor.recall(memory.last, memory.digests, memory.zero)
        self.lost_batches = memory.lost_batches
        self.last_batch_ts = memory.last_batch_ts
        self._names.update(memory.names)
        self._writer.groups.update(memory.groups)
        self.is_unproven = True

    def _credit(self) -> None:
        """The engine is the one we knew, and everything since has been applied."""
        self.is_unproven = False
        self.tallies.count_recall("credited")
        self._index.credit(self.rank)

    def _deny(self, reason: str) -> None:
        """What an earlier life has left is void, if there is any; the caller begins anew."""
        if self.is_unproven:
            self.is_unproven = False
            self.tallies.count_recall(reason)
            self._writer.forget_blocks()

    def check(self) -> None:
        """Assert what can be asserted about a position."""
        self.cursor.check()
        assert len(self._names) <= NAMES_REMEMBERED
        assert self.lost_batches >= 0

    def _hear_name(self, batch: EventBatch) -> None:
        """Remember what the engine calls its rank."""
        if batch.dp_rank is not None and len(self._names) < NAMES_REMEMBERED:
            self._names.add(batch.dp_rank)

    def _is_foreign(self, batch: EventBatch) -> bool:
        """Whether a replayed batch is another rank's: one replay address often serves them all."""
        name = batch.dp_rank
        if name is None:
            return False
        if self._names:
            return name not in self._names
        return name != self.rank.dp_rank and name in self.worker_ranks

    def _accept(self, batch: EventBatch, seq: int, digest: int, *, live: bool) -> None:
        """Begin to apply a batch; it is the expected one."""
        self.cursor.advance(seq, digest, live=live)
        self.tallies.batches += 1
        self.last_batch_ts = batch.ts
        self._writer.begin(batch, self.worker_ranks)

    def _work(self, budget: int) -> int:
        """Write some of the batch being applied; return what is left of the budget."""
        left = self._writer.work(budget)
        if self._writer.is_whole:
            # all was cleared: whatever was lost, or another engine's, is gone anyway
            self.lost_batches = 0
            self._doubted_after = None
            if self.is_unproven:
                self._credit()  # nothing of an earlier life is left that could be wrong
        return left

    def _give_up_before(self, seq: int) -> None:
        """The batches before `seq` will never come."""
        if seq > self.cursor.expected:
            self._lose(seq - self.cursor.expected)
            self.cursor.skip_to(seq)

    def _lose(self, batches: int) -> None:
        self._deny("lost")  # on doubt hold nothing rather, whatever the policy
        self.lost_batches += batches
        self.tallies.lost_batches += batches
        self._drop_if_told()

    def _drop_if_told(self) -> None:
        """What is held may be wrong: under `--on-event-loss drop` hold nothing rather."""
        if self._on_event_loss is EventLossPolicy.DROP:
            self._writer.forget_blocks()

    def _begin_anew(self) -> None:
        """Another engine process speaks: nothing that was known of the old one holds."""
        self._deny("restarted")
        self._writer.forget()
        self._names.clear()
        self.cursor.reset()
        self.lost_batches = 0
        self._beheaded = 0
        self._doubted_after = None


def read_sequence(frame: bytes) -> int | None:
    """The number in a sequence frame, None if it is none."""
    return int.from_bytes(frame, "big") if len(frame) == SEQUENCE_BYTES else None
