"""One worker rank's event stream: live batches in order, holes mended by replay, restarts noticed.

A pure state machine. It is fed messages and the time; when it wants a replay it says so in
`request`, and whoever owns the sockets opens or closes one to match. `cursor` judges the sequence
numbers, `replay` keeps the budget of a replay, `writer` puts the events into the index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from xxhash import xxh3_64_intdigest

from indexer.core.backlog import Backlog
from indexer.core.cursor import Cursor, Verdict
from indexer.core.replay import Mode, Replay, ReplayRequest
from indexer.core.tallies import Tallies
from indexer.core.wire import BatchDecoder
from indexer.core.writer import IndexWriter
from indexer.types import EventLossPolicy, StreamLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.events import EventBatch
    from indexer.core.index import KvIndex
    from indexer.types import Scope, WorkerRank

SEQUENCE_BYTES: Final = 8
END_MARKER: Final = (1 << 64) - 1
"""Sequence of the message that ends a replay; on the live stream it is nothing (R37)."""

LIVE_FRAMES: Final = 3  # topic, sequence, payload
REPLY_FRAMES: Final = (3, 4)  # delimiter, topic (vLLM 0.26 and later), sequence, payload

NAMES_REMEMBERED: Final = 64
"""Ranks an engine may have called itself on one stream before we stop keeping them."""

PLAUSIBLE_LAG_S: Final = 86_400.0
"""An engine whose clock is off by more than a day has no lag."""


class EventStream:
    """The events of one (worker, rank), from one endpoint, into one index.

    Attributes:
        request: The replay that should be running now; None for none. Compare by identity: a
            new object is a new request, on a fresh socket.
        lost_batches: Batches that will never come; above 0 the rank's blocks are uncertain.
        worker_ranks: Ranks the worker has; the owner may replace it when the worker changes.
    """

    def __init__(  # noqa: PLR0913 - settings, keyword only
        self,
        scope: Scope,
        rank: WorkerRank,
        index: KvIndex,
        *,
        worker_ranks: range,
        has_replay: bool,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        limits: StreamLimits | None = None,
    ) -> None:
        self.scope = scope
        self.rank = rank
        self.worker_ranks = worker_ranks
        self.has_replay = has_replay
        self.closed = False
        self.request: ReplayRequest | None = None
        self.lost_batches = 0
        self.last_event_at: float | None = None
        self.last_batch_ts: float | None = None  # the engine's wall clock
        self.tallies = Tallies()
        self.cursor = Cursor()
        self._index = index
        self._on_event_loss = on_event_loss
        self._limits = limits or StreamLimits()
        self._decoder = BatchDecoder(is_eagle=index.is_eagle)
        self._writer = IndexWriter(index, rank, self.tallies)
        self._names: set[int] = set()  # what the engine has called its rank, live
        # live messages that wait for a replay, or for the batch before them
        self.backlog = Backlog(self._limits.backlog_batches_max, self._limits.backlog_bytes_max)
        self._replay: Replay | None = None
        self._ask_after = float("-inf")
        self._backoff_s = 0.0
        self._quiet_since: float | None = None
        self._is_past_gone = False  # batch 0 has left the engine's buffer: no rebuilding
        index.attach(rank)

    # -- what others may know ----------------------------------------------------------------

    @property
    def kv_state(self) -> Literal["current", "uncertain"]:
        """Whether the index is known to hold what the engine holds (R35)."""
        return "uncertain" if self.lost_batches else "current"

    @property
    def is_busy(self) -> bool:
        """Whether `resume` has work; no message should be fed until it has none."""
        return self._writer.is_busy or (self._replay is None and bool(self.backlog))

    @property
    def is_replaying(self) -> bool:
        """Whether live messages wait for a replay."""
        return self._replay is not None

    def lag(self, wall_now: float) -> float | None:
        """Seconds since the engine made its last batch, by its own clock; None if implausible."""
        if self.last_batch_ts is None:
            return None
        lag = wall_now - self.last_batch_ts
        return max(lag, 0.0) if abs(lag) < PLAUSIBLE_LAG_S else None

    def close(self) -> None:
        """Stop for good and forget what the stream has brought; late messages are ignored."""
        if not self.closed:
            self.closed = True
            self._stop_replay()
            self.backlog.clear()
            self._writer.forget()

    def check(self) -> None:
        """Assert every promise of the machine."""
        self.cursor.check()
        assert (self.request is None) == (self._replay is None)
        self.backlog.check()
        assert len(self._names) <= NAMES_REMEMBERED
        if self._replay is not None and self.backlog and not self._is_proof_due:
            assert self.backlog.first > self.cursor.expected, "live batches wait without need"

    # -- what happens ------------------------------------------------------------------------

    def on_live(self, frames: Sequence[bytes], now: float) -> None:
        """Take one message from the publisher, whatever it is."""
        if self.closed:
            return
        self.tallies.messages += 1
        if len(frames) != LIVE_FRAMES:
            self.tallies.count_bad_message("frames")
            return
        seq = _sequence(frames[1])
        if seq is None or seq == END_MARKER:
            self.tallies.count_bad_message("sequence")
            return
        self.last_event_at = self._quiet_since = now
        if self._replay is None and not self.is_busy:
            self._take(seq, frames[2], now)
        else:
            self._hold(seq, frames[2], now)
        self.resume(now)

    def on_replay(self, frames: Sequence[bytes], now: float) -> None:
        """Take one reply of the replay that `request` asked for."""
        replay = self._replay
        if replay is None:
            return
        self._writer.finish()  # the reply comes after it
        if not replay.count(sum(map(len, frames))):
            self._abandon("budget", now)
        else:
            seq = _sequence(frames[-2]) if len(frames) in REPLY_FRAMES else None
            if seq is None or (seq == END_MARKER and frames[-1]):
                self.tallies.count_bad_message("replay")
                self._waste(now)
            elif not frames[-1]:
                self._on_marker(now)
            else:
                self._on_reply(seq, frames[-1], now)
        self.resume(now)

    def on_timer(self, now: float, *, may_poll: bool = True) -> None:
        """Notice silence; call this a few times a second."""
        if self.closed:
            return
        replay = self._replay
        if replay is not None:
            if now >= replay.deadline:
                self._abandon("deadline", now)
            elif now >= replay.quiet_until:
                self._ask_again_or_abandon("silent", now)
            self.resume(now)
        elif may_poll and self._is_poll_due(now):
            rebuild = self.lost_batches and not self._is_past_gone
            self._ask(Mode.REBUILD if rebuild else Mode.POLL, now)

    def on_reconnect(self, now: float) -> None:
        """Look whose voice it is after the publisher was out of reach.

        A restarted engine whose numbers happen to go on where the old one stopped is seen in no
        other way; a mere reconnect costs one small replay and no state.
        """
        if self.closed or self.cursor.last is None:
            return
        if self._replay is not None:
            # what was asked before went to the engine that may be gone
            if self._replay.mode is not Mode.REBUILD:
                self._replay.mode = Mode.VERIFY
            self._ask_again(now)
        elif self.has_replay and now >= self._ask_after:
            self._ask(Mode.VERIFY, now)

    def resume(self, now: float) -> None:
        """Work off what is pending, for about a quarter of a millisecond."""
        budget = self._limits.blocks_per_turn
        while budget > 0:
            if self._writer.is_busy:
                budget = self._writer.work(budget)
                if self._writer.is_whole:
                    self.lost_batches = 0  # all was cleared: whatever was lost is gone anyway
            elif self._replay is None and self.backlog:
                self._take(*self.backlog.pop(), now)
            else:
                return

    # -- live batches --------------------------------------------------------------------------

    def _take(self, seq: int, payload: bytes, now: float) -> None:
        """Judge the next live message; nothing is pending and no replay runs."""
        batch = self._decoder.decode(payload)
        if batch is None:  # leaves the cursor: it may have been no batch at all
            self.tallies.count_bad_message("payload")
            return
        digest = xxh3_64_intdigest(payload)
        verdict = self.cursor.judge(seq, digest)
        if verdict is Verdict.STALE:
            self.tallies.stale_batches += 1
            self.cursor.saw_live(seq)
            return
        if verdict is Verdict.RESTARTED:
            self.tallies.restarts += 1
            self._begin_anew()
        if batch.dp_rank is not None and len(self._names) < NAMES_REMEMBERED:
            self._names.add(batch.dp_rank)
        if seq != self.cursor.expected:
            self.tallies.gaps += 1
            if self.has_replay and now >= self._ask_after:
                self.backlog.put_back(seq, payload)
                self._ask(Mode.GAP, now)
                return
            self._give_up_before(seq)
        self._accept(batch, seq, digest, live=True)
        if verdict is Verdict.RESTARTED:
            self.on_reconnect(now)  # a late word of an engine that is gone would look the same

    def _hold(self, seq: int, payload: bytes, now: float) -> None:
        """Keep a live message until the replay, or the batch before it, is done."""
        if self.backlog and seq <= self.backlog.last:
            if self.backlog.ends_with(seq, payload):
                self.tallies.stale_batches += 1
                return
            if self._replay is not None:
                # the engine began anew: what waits, and what the replay mends, is history
                self._end_replay("superseded", now)
                self.backlog.clear()
                self.tallies.restarts += 1
                self._begin_anew()
        self.backlog.append(seq, payload)
        if not self.backlog.is_full:
            self._meet_live(now)
            return
        if self._replay is not None:
            self._abandon("backlog_full", now)
        while self.is_busy and self.backlog.is_full:
            self.resume(now)

    def _accept(self, batch: EventBatch, seq: int, digest: int, *, live: bool) -> None:
        """Begin to apply a batch; it is the expected one."""
        self.cursor.advance(seq, digest, live=live)
        self.tallies.batches += 1
        self.last_batch_ts = batch.ts
        self._writer.begin(batch, self.worker_ranks)

    # -- loss and restarts -----------------------------------------------------------------------

    def _give_up_before(self, seq: int) -> None:
        """The batches before `seq` will never come."""
        if seq > self.cursor.expected:
            self._lose(seq - self.cursor.expected)
            self.cursor.skip_to(seq)

    def _lose(self, batches: int) -> None:
        self.lost_batches += batches
        self.tallies.lost_batches += batches
        if self._on_event_loss is EventLossPolicy.DROP:
            self._writer.forget_blocks()

    def _begin_anew(self) -> None:
        """Another engine process speaks: nothing that was known of the old one holds."""
        self._writer.forget()
        self._names.clear()
        self.cursor.reset()
        self.lost_batches = 0
        self._is_past_gone = False

    # -- replay ----------------------------------------------------------------------------------

    def _is_poll_due(self, now: float) -> bool:
        limits = self._limits
        if not self.has_replay or not limits.poll_after_s or self.is_busy:
            return False
        if self._quiet_since is None:
            self._quiet_since = now
        return now >= self._ask_after and now - self._quiet_since >= limits.poll_after_s

    def _ask(self, mode: Mode, now: float) -> None:
        self._replay = Replay(mode, self._limits, now)
        self._send_request()

    def _send_request(self) -> None:
        """Ask from the last batch applied: its copy shows whether this is still the same engine."""
        replay = self._replay
        assert replay is not None
        last = None if replay.mode is Mode.REBUILD else self.cursor.last
        self.request = ReplayRequest(0 if last is None else last)
        self.tallies.replays_asked += 1

    def _ask_again(self, now: float) -> None:
        assert self._replay is not None
        self._replay.begin_attempt(now)
        self._send_request()

    def _ask_again_or_abandon(self, outcome: str, now: float) -> None:
        assert self._replay is not None
        if self._replay.may_ask_again(now):
            self._ask_again(now)
        else:
            self._abandon(outcome, now)

    def _on_reply(self, seq: int, payload: bytes, now: float) -> None:
        replay = self._replay
        assert replay is not None
        digest = xxh3_64_intdigest(payload)
        if not replay.is_verified and not self._verify(replay, seq, payload, digest, now):
            return
        expected = self.cursor.expected
        if seq < expected:
            self._waste(now)
        elif seq == expected:
            self._accept_reply(replay, seq, payload, digest, now)
        elif replay.replies_now > 1 and replay.may_ask_again(now):
            self._ask_again(now)  # a hole: replies were dropped on the way
        else:
            # the engine's buffer begins later, or the hole will not close; never beyond what is
            # known from the live stream, so that a wrong endpoint cannot carry the cursor away
            self._give_up_before(min(seq, self.backlog.first) if self.backlog else seq)
            if seq == self.cursor.expected:
                self._accept_reply(replay, seq, payload, digest, now)
            else:
                self._meet_live(now)

    def _verify(self, replay: Replay, seq: int, payload: bytes, digest: int, now: float) -> bool:
        """Look at the first reply: whose is it? True if it has still to be applied."""
        if replay.mode is Mode.REBUILD:
            if seq != 0:
                self._is_past_gone = True
                self._end_replay("past_gone", now)
                return False
            self._begin_anew()
            replay.mode = Mode.GAP if self.backlog else Mode.POLL
        last = self.cursor.last
        if last is None or seq > last:
            replay.is_verified = True  # nothing to compare with
            return True
        if seq < last:
            self._waste(now)
            return False
        replay.is_verified = True
        replay.hear(now)
        if self.cursor.digest_of(last) not in (None, digest):
            self._on_other_engine(payload, now)
        else:
            self._meet_live(now)
        return False

    def _on_other_engine(self, payload: bytes, now: float) -> None:
        batch = self._decoder.decode(payload)
        if batch is not None and self._is_foreign(batch):
            self._shun(now)
        else:
            self._start_over(now)

    def _start_over(self, now: float) -> None:
        """The endpoint speaks for another engine than the one we know: learn that one.

        What waits may be of either engine; the replay has it all, up to this moment.
        """
        replay = self._replay
        assert replay is not None
        self.tallies.hidden_restarts += 1
        self._begin_anew()
        self.backlog.clear()
        replay.mode = Mode.POLL
        self._ask_again(now)

    def _accept_reply(
        self, replay: Replay, seq: int, payload: bytes, digest: int, now: float
    ) -> None:
        batch = self._decoder.decode(payload)
        if batch is None:
            self.tallies.count_bad_message("payload")
            self.cursor.advance(seq, digest, live=False)
            self._lose(1)
        elif self._is_foreign(batch):
            self._shun(now)
            return
        else:
            self.tallies.replayed_batches += 1
            self._accept(batch, seq, digest, live=False)
        replay.advance(now)
        self._meet_live(now)

    def _on_marker(self, now: float) -> None:
        """The engine says that was all."""
        replay = self._replay
        assert replay is not None
        last = self.cursor.last
        if not replay.is_verified and replay.mode is Mode.REBUILD:
            self._is_past_gone = True
            self._end_replay("past_gone", now)
        elif (
            not replay.is_verified and last is not None and self.cursor.digest_of(last) is not None
        ):
            # what we applied must be in its buffer, being the newest or nearly so; it is not
            self._start_over(now)
        elif not self.backlog:
            self._end_replay("complete", now)
        elif replay.progressed and replay.may_ask_again(now):
            self._ask_again(now)  # the end arrived, but not everything before it
        else:
            self._abandon("incomplete", now)

    def _meet_live(self, now: float) -> None:
        """End the replay as soon as the live batches that wait can go on by themselves."""
        if self._replay is None or not self.backlog or self._is_proof_due:
            return
        if self.backlog.first <= self.cursor.expected:
            self._end_replay("complete" if self._replay.progressed else "overtaken", now)
        elif self._replay.mode is not Mode.REBUILD:
            self._replay.mode = Mode.GAP

    @property
    def _is_proof_due(self) -> bool:
        replay = self._replay
        return replay is not None and replay.mode is Mode.VERIFY and not replay.is_verified

    def _waste(self, now: float) -> None:
        assert self._replay is not None
        if not self._replay.waste():
            self._abandon("garbage", now)

    def _is_foreign(self, batch: EventBatch) -> bool:
        """Whether a replayed batch is another rank's: one replay address often serves them all."""
        name = batch.dp_rank
        if name is None:
            return False
        if self._names:
            return name not in self._names
        return name != self.rank.dp_rank and name in self.worker_ranks

    def _shun(self, now: float) -> None:
        """The endpoint replays another rank: never ask it again."""
        self.has_replay = False
        self._abandon("wrong_rank", now)

    def _abandon(self, outcome: str, now: float) -> None:
        """Go on without what should have come; leave the endpoint alone for a while."""
        limits = self._limits
        if outcome != "backlog_full":
            doubled = min(2 * self._backoff_s, limits.replay_backoff_max_s)
            backoff_s = doubled or limits.replay_backoff_s
            self._ask_after = now + backoff_s
        else:
            backoff_s = self._backoff_s
        self._end_replay(outcome, now)
        self._backoff_s = backoff_s
        if self.backlog:
            self._give_up_before(self.backlog.first)

    def _end_replay(self, outcome: str, now: float) -> None:
        self.tallies.count_replay(outcome)
        self._stop_replay()
        self._backoff_s = 0.0
        self._quiet_since = now

    def _stop_replay(self) -> None:
        self._replay = None
        self.request = None


def _sequence(frame: bytes) -> int | None:
    return int.from_bytes(frame, "big") if len(frame) == SEQUENCE_BYTES else None
