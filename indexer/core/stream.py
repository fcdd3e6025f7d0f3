"""One worker rank's event stream: live batches in order, gaps replayed, restarts noticed.

A pure state machine, fed with messages and the time. `live_verdicts` judges live messages, `repair`
fills gaps, `progress` knows what was applied and lost. When it wants a replay it sets `request`,
and the owner of the sockets (`edge/listener`) opens or closes one to match.

What came live is believed; a replay fills in what did not.

What a reply means that contradicts what is known (`_judge_stranger`, `_compare_first_live`):

* another copy of the last batch, or the end without one, with unproven blocks, or after a new
  connection by which nothing has come yet: the engine behind the endpoint has taken over, and the
  stream starts over with it;
* the same while live batches wait or one conflicts: the endpoint is asked for the newest of these.
  Any other content: the endpoint is disowned. The same: a restart; its past replaces what is held
  once it has led from number 0 to that batch, or if it does not begin there;
* the same while nothing waits: disowned, and in doubt until the next live number;
* another copy of an older batch: it is counted, nothing else;
* another copy of the first live batch, after a past that was not received: that past goes, the
  endpoint is disowned, and what came live is applied once more.

A rebuild from number 0 (`_stage`) replaces nothing before it has reached the last batch that is
known, with the copies of what was heard. Only where predictions fail (`reread`) is what was heard
itself in doubt, and just the last copy has to be equal. Beyond its batches, bytes or time it is
given up, and all is as it was before.

A disowned endpoint is not asked again before the publisher's connection is renewed.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from indexer.compiled import usable
from indexer.core.events import Oversized
from indexer.core.live_verdicts import LiveVerdicts
from indexer.core.normalize import form_of
from indexer.core.progress import END_MARKER, fitted, read_sequence
from indexer.core.repair import REPLY_FRAMES
from indexer.core.replay import Mode
from indexer.types import EventLossPolicy, StreamLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.events import EventBatch
    from indexer.core.index import KvIndex
    from indexer.types import Scope, WorkerRank

if usable("indexer._ingest", 9):
    from indexer._ingest import Feeder
else:
    Feeder = None  # type: ignore[assignment,misc]

LIVE_FRAMES: Final = 3  # topic, sequence, payload


class EventStream(LiveVerdicts):
    """The events of one (worker, rank), from one endpoint, into one index.

    Attributes:
        lost_batches: Batches lost for good; above 0 the rank's blocks are uncertain.
        worker_ranks: Ranks the worker has; the owner may replace it when the worker changes.
        unreachable_since: When the connection to the publisher was lost; None: there is one, or
            there never was. Set by the owner of the socket.
    """

    def __init__(
        self,
        scope: Scope,
        rank: WorkerRank,
        index: KvIndex,
        *,
        worker_ranks: range,
        has_replay: bool,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        limits: StreamLimits | None = None,
        reports_in_full: bool = False,
    ) -> None:
        super().__init__(
            rank,
            index,
            worker_ranks=worker_ranks,
            has_replay=has_replay,
            on_event_loss=on_event_loss,
            limits=limits,
        )
        self._writer.reports_in_full = reports_in_full
        self.scope = scope
        self.closed = False
        self.unreachable_since: float | None = None
        # the compiled path counts every store of a block
        is_fed = Feeder is not None and not reports_in_full and Feeder.suits(self)
        self._feeder = Feeder(self) if is_fed else None

    @property
    def is_busy(self) -> bool:
        """Whether `resume` has work; do not feed messages until it has none."""
        return (
            self._writer.is_busy
            or self._unread is not None
            or bool(self._staged)
            or (self._replay is None and bool(self.backlog))
        )

    @property
    def longest_message(self) -> int:
        """Bytes of the longest batch that is read."""
        return self._limits.message_bytes_max

    def on_live(self, frames: list[bytes], now: float) -> None:
        """Take one message from the publisher, whatever it contains."""
        self.take(deque((frames,)), now)
        self.resume(now)

    def take(self, inbox: deque[list[bytes]], now: float) -> None:
        """Take messages from the left of `inbox`, at least one, for about the time of a turn.

        `resume` completes the work they begin.
        """
        if self._feeder is not None and self._is_undisputed:
            self._feeder.take(inbox, now)  # plain messages, and the first other one through `hear`
        else:
            self.hear(inbox.popleft(), now)

    @property
    def _is_undisputed(self) -> bool:
        """Whether nothing hangs on the very next messages."""
        return not (self._first_live or self._conflict or self._staged or self._is_to_settle)

    def hear(self, frames: Sequence[bytes], now: float) -> None:
        """Take one message of any kind on the slow path; a long one is only begun."""
        if self.closed:
            return
        self._read_to_end(now)
        self.tallies.messages += 1
        if len(frames) != LIVE_FRAMES:
            self.tallies.bad_messages["frames"] += 1
            return
        seq = read_sequence(frames[1])
        if seq is None or seq == END_MARKER:
            self.tallies.bad_messages["sequence"] += 1
            return
        self.last_event_at = self._quiet_since = now
        payload = fitted(frames[2], self._limits.message_bytes_max)
        if isinstance(payload, Oversized):
            self._hear_oversized(seq, payload, now)
        elif self._decoder.read_ahead(payload):
            self._take_or_hold(seq, payload, now)
        else:
            self._unread = frames, None

    def _hear_oversized(self, seq: int, payload: Oversized, now: float) -> None:
        """Take a live batch that is too long: it costs itself, if it is the next one.

        Otherwise its number cannot be trusted, because the rest was not read: whatever it would
        tell of a gap or a restart, the next message tells as well.
        """
        due = self.backlog.last + 1 if self.backlog else self.cursor.expected
        if seq == due and form_of(payload) is not None:
            self._take_or_hold(seq, payload, now)
        else:
            self.tallies.count_oversized(payload.size)

    def _take_or_hold(self, seq: int, payload: bytes, now: float) -> None:
        """Take a live message that can be decoded at once."""
        if not (self.is_replaying or self._writer.is_busy or self.backlog):
            self._take_now(seq, payload, now)
        else:
            self._hold(seq, payload, now)

    def on_replay(self, frames: Sequence[bytes], now: float) -> None:
        """Take one reply of the replay that `request` asked for."""
        self._read_to_end(now)
        if frames:
            frames = [*frames[:-1], fitted(frames[-1], self._limits.message_bytes_max)]
        if self._replay is None:
            self._compare_first_live(frames)
            self.resume(now)
            return
        if len(frames) not in REPLY_FRAMES or self._decoder.read_ahead(frames[-1]):
            self._read_reply(self._replay, frames, now)
        else:
            self._unread = frames, self.request
        self.resume(now)

    def on_broken_replay(self, now: float) -> bool:
        """Handle a socket that will bring no more replies; False: no consequence yet.

        It is not ZMQ, or the next batch is longer than the socket takes. For blocks from before a
        restart only silence counts: the engine may be about to start where something else still
        listens.
        """
        if self._replay is None or self.is_busy or self.is_unproven:
            return False
        if not self._ask_behind(self._replay, now):
            self._ask_again_or_abandon("broken", now)
        self.resume(now)
        return True

    def on_breach(self) -> None:
        """Count a live connection that libzmq gave up: by a message longer than it may be."""
        self.tallies.bad_messages["breach"] += 1

    def on_timer(self, now: float, *, may_poll: bool = True) -> None:
        """Check for silence; call this a few times a second."""
        if not self.closed:
            self._watch_silence(now, may_poll=may_poll and not self.is_busy)
            self.resume(now)

    def on_absence(self, seconds: float) -> None:
        """Do not count these seconds as silence, because `on_timer` was called late."""
        if self._replay is not None:
            self._replay.excuse(seconds)

    def on_arriving(self, now: float) -> None:
        """Note that a reply is here that is too long to be copied in one go."""
        if self._replay is not None:
            self._replay.hear(now)

    def reread(self, now: float) -> Literal["asked", "later", "shared", "no_replay", "past_gone"]:
        """Rebuild the rank's blocks from batch 0, because what is held is in doubt.

        Held blocks go once all batches up to the last known one are here to replace them, not
        before. Copies may differ from what was heard, except that of the last batch: it shows that
        the same engine answers. `shared`: other ranks' blocks came from this stream, too, and would
        be missing for a while.
        """
        if self.closed or self.is_replaying or self.is_busy or self.is_unproven:
            return "later"
        if self._writer.ranks != {self.rank}:
            return "shared"
        if not self.has_replay:
            return "no_replay"
        if self._is_past_gone:
            return "past_gone"
        if not self._may_ask(now):
            return "later"
        self._ask(Mode.REBUILD, now)
        assert self._replay is not None
        self._replay.is_reread = True
        return "asked"

    def forget_blocks(self) -> None:
        """Forget all blocks received so far; later ones count. Not for a `shared` stream."""
        assert self._writer.ranks == {self.rank}
        self._writer.forget_blocks()
        self.unknown_batches = self.lost_batches

    @property
    def awaits_past(self) -> bool:
        """Whether the engine is still to say, for the first time, what it told before we heard it.

        Never where it cannot be asked, or is not to be asked by itself.
        """
        if self.closed or not self.has_replay or not self._limits.poll_after_s:
            return False
        return self.is_replaying or not (
            self.tallies.replays_asked or self.last_event_at is not None
        )

    def on_connect(self) -> None:
        """Ask at the next `on_timer` what the engine told before; an idle one would stay silent."""
        if self.awaits_past and not self.is_replaying:
            self._quiet_since = float("-inf")

    def on_reconnect(self, now: float) -> None:
        """Verify the engine's identity after the publisher was out of reach.

        A restarted engine whose numbers happen to continue those of the old one cannot be noticed
        otherwise; a mere reconnect costs one small replay and no state.
        """
        if not self.closed:
            self._read_to_end(now)  # it was sent before
            if self._is_disowned:  # the engine may be the one behind the endpoint by now
                self._is_disowned, self.has_replay = False, True
                self._ask_after = now
            # the pauses grew while no engine was there: they begin anew
            self._ask_after = min(self._ask_after, now + self._limits.replay_backoff_s)
            self._backoff_s = 0.0
            if self._staged:
                self._is_to_verify = True  # once that is applied
            else:
                self._verify_engine(now)

    def resume(self, now: float) -> None:
        """Process pending work, for about a quarter of a millisecond."""
        budget = self._limits.blocks_per_turn
        while budget > 0:
            if self._unread is not None:
                if not self._read_on(now):
                    return
            elif self._writer.is_busy:
                budget = self._work(budget)
            elif self._staged:
                if not self._apply_staged(now):
                    return
            elif self._replay is None and self.backlog:
                if not self._decoder.read_ahead(self.backlog.first_payload):
                    return
                self._take_now(*self.backlog.pop(), now)
                self._decoder.let_go()
            else:
                return

    def _read_on(self, now: float) -> bool:
        """Read a piece of a long message; True if that completed the message."""
        assert self._unread is not None
        frames, request = self._unread
        if not self._decoder.read_ahead(frames[-1]):
            return False
        self._unread = None
        if request is None:
            self._take_or_hold(int.from_bytes(frames[1], "big"), frames[-1], now)
        elif self._replay is not None and self.request is request:
            self._read_reply(self._replay, frames, now)
        self._decoder.let_go()
        return True

    def _read_to_end(self, now: float) -> None:
        """Finish the message being read before something that cannot wait."""
        while self._unread is not None:
            self._read_on(now)

    def on_fault(self) -> None:
        """Drop a batch whose writing raised: it would raise again, for ever."""
        feeder = self._feeder
        is_torn = feeder is not None and feeder.is_torn
        if feeder is not None:
            feeder.is_torn = False
        if self._unread is not None:  # not taken yet: it will be missing, as if it had been lost
            self._unread = None
            self._decoder.let_go()
        if self._writer.is_busy or is_torn:
            self._writer.drop_batch()
            self._lose(1)

    def close(self) -> None:
        """Stop for good and forget the blocks the stream has brought; late messages are ignored."""
        if not self.closed:
            self.closed = True
            self._unread = None
            self._decoder.let_go()
            self._deny("closed")
            self._stop_replay()
            self._staged.clear()
            self.backlog.clear()
            self._writer.forget()
            self._feeder = None  # it refers to us: the cycle would keep the index alive

    def _begin(self, batch: EventBatch) -> None:
        """Begin to write the rest of a batch that the compiled path has started."""
        self._writer.begin(batch, self.worker_ranks, self.cursor.last)

    def _write(self, batch: EventBatch) -> None:
        """Write events that the compiled path leaves to us, at once."""
        self._begin(batch)
        while self._writer.is_busy:
            self._work(self._limits.blocks_per_turn)

    def _passes_copy(self, seq: int, payload: bytes) -> bool:
        """Count a live message that waits or was applied already; False: it is another."""
        known = self.cursor.digest_of(seq)
        if known is not None and known == self._decoder.digest(payload):
            self.cursor.saw_live(seq)
        elif not self.backlog.holds(seq, payload):
            return False
        self.tallies.stale_batches += 1
        return True

    def _hold(self, seq: int, payload: bytes, now: float) -> None:
        """Keep a live message until the replay, or the batch before it, is done."""
        if self._is_garbage(payload):  # or its number would be trusted
            self.tallies.bad_messages["payload"] += 1
            return
        if self._passes_copy(seq, payload):
            return
        if self.backlog and seq <= self.backlog.last:
            is_restart = seq == 0 < self.backlog.last or self._may_be_another_at(now)
            if self._replay is not None and not is_restart:
                self.tallies.conflicting_batches += 1
                self._conflict, self._conflict_after = (seq, payload), self.backlog.last
                return
            if self._replay is not None:
                # the engine restarted: waiting batches and the running replay are obsolete
                self._end_replay("superseded", now)
                self.backlog.clear()
                self.tallies.restarts += 1
                self._begin_anew()
        self.backlog.append(seq, payload)
        if self._staged:
            return
        if not self.backlog.is_full:
            self._meet_live(now)
            return
        while self.backlog.is_full:  # processing one may request another replay
            if self._replay is not None:
                self._abandon("backlog_full", now)
            self.resume(now)
