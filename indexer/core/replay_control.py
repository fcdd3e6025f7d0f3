"""Replays of one stream: when one is asked for, how long it may take, and how it ends.

The layer under `repair`, which reads the replies. `replay` keeps the budgets. Whatever the endpoint
does, live batches wait for a bounded time only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from math import inf
from typing import TYPE_CHECKING

from typing_extensions import override

from indexer.core.progress import StreamProgress
from indexer.core.replay import Mode, ReplayRequest, StreamReplay
from indexer.types import EventLossPolicy, StreamLimits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.cursor import StreamMemory
    from indexer.core.index import KvIndex
    from indexer.types import WorkerRank


class ReplayControl(StreamProgress):
    """A position that can ask for what is missing before it.

    Attributes:
        request: The replay that should be running now, or None. Compare by identity: a new object
            is a new request, on a fresh socket. It stays open for one more reply where that reply
            has to confirm what the replay brought.
        backlog: Live messages that wait for the replay, or for the batch before them.
    """

    def __init__(
        self,
        rank: WorkerRank,
        index: KvIndex,
        *,
        worker_ranks: range,
        has_replay: bool,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        limits: StreamLimits | None = None,
    ) -> None:
        super().__init__(rank, index, worker_ranks=worker_ranks, on_event_loss=on_event_loss)
        self.has_replay = has_replay
        self.request: ReplayRequest | None = None
        self._limits = limits or StreamLimits()
        self.backlog = MessageBacklog(
            self._limits.backlog_batches_max, self._limits.backlog_bytes_max
        )
        self._replay: StreamReplay | None = None
        # (number, digest, deadline) of a live batch that the next reply must repeat
        self._first_live: tuple[int, int, float] | None = None
        # a long message still being read, and the request it answers, if any
        self._unread: tuple[Sequence[bytes], ReplayRequest | None] | None = None
        # since when the engine may have been replaced: a new connection, or numbers that began anew
        self._changed_at: float | None = None
        # a live message whose number had come with another content, until that is explained
        self._conflict: tuple[int, bytes] | None = None
        self._conflict_after = -1  # the last batch that waited when it came, if any did
        self._is_to_verify = False  # the connection is new, since a rebuild is being applied
        self._is_disowned = False  # the replay endpoint contradicted what was heard live
        # live batches since the one that the next reply must repeat; None: too many
        self._heard: list[tuple[int, bytes]] | None = None
        self._ask_after = float("-inf")
        self._backoff_s = 0.0
        self._quiet_since: float | None = None
        self._proof_until = 0.0  # deadline for the proof of an engine without a replay endpoint

    @property
    def is_replaying(self) -> bool:
        """Whether live messages wait for a replay, or for what it has brought."""
        return self._replay is not None or bool(self._staged)

    @property
    def _running(self) -> StreamReplay:
        """The replay, where there is one for certain."""
        assert self._replay is not None
        return self._replay

    def check(self) -> None:
        """Assert every invariant of the state machine."""
        super().check()
        if not self._staged:
            self.backlog.check()
        replay = self._replay
        assert replay is None or not replay.staged or replay.mode is Mode.REBUILD
        assert replay is None or self._first_live is None
        assert (self.request is None) == (replay is None and self._first_live is None)
        if replay is not None and self.backlog and not self._must_wait and not self._staged:
            assert self.backlog.first > self.cursor.expected, "live batches wait without need"

    # -- blocks from before a restart --------------------------------------------------------------

    def recall(self, memory: StreamMemory, now: float) -> None:
        """Continue where the previous process stopped, once the engine proves to be the same.

        The rank's blocks of that moment are in the index, uncredited. An engine with a replay
        endpoint is asked for the last batch again; an equal digest proves that it is the same
        engine, and once everything after that batch is applied the blocks are credited. An engine
        without one must continue with the very next number, and only build on blocks it should
        have. On any doubt the blocks are dropped as if there had been none: a wrong credit costs
        more than a cold start.
        """
        self._recall(memory)
        self._changed_at = now
        if self.has_replay:
            self._ask(Mode.VERIFY, now)
        else:
            self._proof_until = now + self._limits.recall_wait_s

    def _judge_recall(self, replay: StreamReplay, outcome: str) -> None:
        """Handle the end of the replay that was to prove blocks from before a restart."""
        if replay.is_verified and outcome in {"complete", "overtaken"}:
            self._credit()
        else:
            self._deny("unproven" if outcome in {"complete", "overtaken"} else outcome)
            self._begin_anew()

    # -- asking ----------------------------------------------------------------------------------

    def _may_ask(self, now: float) -> bool:
        return self.has_replay and now >= self._ask_after

    def _ask(self, mode: Mode, now: float, *, suspects: int = 0) -> None:
        self._first_live = self._heard = None
        self._replay = StreamReplay(mode, self._limits, now)
        self._replay.suspects = suspects
        self._send_request()

    def _send_request(self) -> None:
        """Ask from the last applied batch on: its copy shows whether the engine is the same."""
        replay = self._running
        last = self.cursor.last
        if replay.mode is Mode.REBUILD:
            last = len(replay.staged) - 1 if replay.staged else None
        if replay.mode is Mode.PROBE and replay.target is not None:
            last = replay.target[0]
        start = 0 if last is None else last
        is_broken = replay.staged[-1].payload is None if replay.staged else last == self._breaking
        if last is not None and is_broken:
            start += 1  # a copy of it would break the connection
        if replay.behind is not None:
            start = replay.behind
        self.request = ReplayRequest(start)
        replay.waiting_before = len(self.backlog)
        self.tallies.replays_asked += 1

    def _ask_again(self, now: float) -> None:
        self._running.begin_attempt(now)
        self._send_request()

    def _ask_behind(self, replay: StreamReplay, now: float) -> bool:
        """Ask for what follows the batch that broke the connection twice; False: too early."""
        is_again = replay.behind is not None and not replay.replies_now
        if not is_again and replay.may_ask_again(now):
            return False  # it may have been an accident
        is_rebuild = replay.mode is Mode.REBUILD
        if not replay.may_skip(now) or (is_rebuild and not replay.staged):
            return False
        replay.skipped += 1
        expected = len(replay.staged) if is_rebuild else self.cursor.expected
        replay.behind = 1 + (expected if replay.behind is None else replay.behind)
        self._ask_again(now)
        return True

    def _ask_again_or_abandon(self, outcome: str, now: float) -> None:
        assert self._replay is not None
        if self._replay.may_ask_again(now):
            self._ask_again(now)
        else:
            self._abandon(outcome, now)

    def _verify_engine(self, now: float) -> None:
        """Have the engine prove that it is the one we know."""
        self._forget_first_live()  # it may be another engine that answers by now
        if self.cursor.last is None and self._replay is None:
            return  # nothing is known that could be wrong
        self._changed_at = now
        if self._replay is not None:
            # the previous request went to an engine that may be gone
            if self._replay.mode is not Mode.REBUILD and self.cursor.last is not None:
                self._replay.mode = Mode.VERIFY
            self._replay.unstage()
            # and waiting batches may come from an engine that was only there for a moment
            self._replay.suspects = len(self.backlog)
            self._ask_again(now)
        elif self._may_ask(now):
            self._ask(Mode.VERIFY, now, suspects=len(self.backlog))
        elif self.has_replay:
            self._doubt()  # `on_timer` asks once it may

    def due(self, now: float) -> float:
        """When silence becomes meaningful if nothing is heard before; `inf`: never. O(1).

        A message may postpone this time but never advances it, except through a new `request`; a
        new connection may advance it.
        """
        if self._replay is not None:
            return now
        due = self._proof_until if self.is_unproven else inf
        if self._first_live is not None:
            due = min(due, self._first_live[2])
        if not self.has_replay:
            return due
        if self._settling_mode is not None:
            due = min(due, self._ask_after)
        if self._limits.poll_after_s:
            quiet_since = now if self._quiet_since is None else self._quiet_since
            due = min(due, max(quiet_since + self._limits.poll_after_s, self._ask_after))
        return due

    def _watch_silence(self, now: float, *, may_poll: bool) -> None:
        """Give up a late replay, or look for lost last batches."""
        limits = self._limits
        if self._replay is not None:
            self._watch_replay(self._replay, now)
            return
        if self._first_live is not None and now >= self._first_live[2]:
            self._forget_first_live()
        if self.is_unproven and now >= self._proof_until:
            self._deny("unheard")
            self._begin_anew()
        mode = self._settling_mode
        if mode is not None and may_poll and self._may_ask(now):
            self._ask(mode, now)
            return
        if self._quiet_since is None:
            self._quiet_since = now
        # exactly the sum that `due` returns, or rounding could leave nothing to do when it is due
        is_quiet = limits.poll_after_s and now >= self._quiet_since + limits.poll_after_s
        if is_quiet and may_poll and not self.backlog and self._may_ask(now):
            self._ask(Mode.REBUILD if self._can_rebuild else Mode.POLL, now)

    def _watch_replay(self, replay: StreamReplay, now: float) -> None:
        if self._staged:
            replay.hear(now)  # nothing more is read before that is applied
        elif now >= replay.deadline:
            self._abandon("deadline", now)
        elif self._writer.is_busy or self._unread is not None:
            replay.hear(now)  # its last reply is still being processed, so the next has to wait
        elif now >= replay.quiet_until and self.is_unproven and not self.backlog:
            self._ask_again(now)  # no reply at all yet: it may be starting, and nothing waits
        elif now >= replay.quiet_until:
            self._ask_again_or_abandon("silent", now)

    # -- ends ------------------------------------------------------------------------------------

    @property
    def _must_wait(self) -> bool:
        """Whether live batches wait although they would continue what is known."""
        replay = self._running
        if replay.suspects or replay.mode in {Mode.REBUILD, Mode.PROBE}:
            return True
        return self._is_proof_due

    @property
    def _is_proof_due(self) -> bool:
        replay = self._replay
        return replay is not None and replay.mode is Mode.VERIFY and not replay.is_verified

    def _doubt(self) -> None:
        """The requested proof will not come: this may be another engine whose numbers fit."""
        if self._doubted_after is None and self.cursor.last is not None:
            self._doubted_after = self.cursor.last
            self._drop_if_told()

    @property
    def _is_to_bring_back(self) -> bool:
        """Whether blocks were dropped in doubt, and a rebuild may bring them back."""
        is_dropped = self._on_event_loss is EventLossPolicy.DROP
        return is_dropped and self.has_replay and not self._is_past_gone

    @property
    def _settling_mode(self) -> Mode | None:
        """Which replay settles the doubt; None: there is no doubt, or none can settle it."""
        if self._doubted_after is None:
            return None
        if self._doubted_after == self.cursor.last and not self._is_to_bring_back:
            return Mode.VERIFY  # a later batch would only vouch for the engine that sent it
        return None if self._is_past_gone else Mode.REBUILD

    def _settle_doubt(self) -> None:
        """It is the same engine; blocks that were dropped in doubt are missing all the same."""
        doubted = self._doubted_after
        if doubted is None or self._is_to_bring_back:
            return
        self._doubted_after = None
        if self._on_event_loss is EventLossPolicy.DROP:
            self._note_lost(max(doubted + 1 - self.lost_batches, 0))

    def _forget_first_live(self) -> None:
        if self._first_live is not None:
            self._first_live = self.request = self._heard = None

    @property
    def _may_be_another(self) -> bool:
        """Whether something else than batches suggests that another engine is speaking.

        Without a replay endpoint that is not proven either way; after some time it no longer
        counts.
        """
        return self._changed_at is not None

    @override
    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._changed_at = self._conflict = None

    def _disown(self, now: float) -> None:
        """The endpoint contradicts the engine that we hear: its replies change nothing.

        It is not asked again before the connection is renewed. Until the next live number it is
        open whether the engine has been replaced unnoticed.
        """
        self._distrust_endpoint()
        self._doubt()
        self._abandon("other_engine", now)

    def _distrust_endpoint(self) -> None:
        self._is_disowned = True
        self.has_replay = False

    def _drop_suspects(self, replay: StreamReplay) -> None:
        """The engine has sent everything, without these batches: another engine sent them."""
        for _ in range(min(replay.suspects, len(self.backlog))):
            self.backlog.pop()
            self.tallies.stale_batches += 1
        replay.waiting_before = max(replay.waiting_before - replay.suspects, 0)
        replay.suspects = 0

    def _count_useless(self, now: float) -> None:
        assert self._replay is not None
        if not self._replay.waste():
            self._abandon("garbage", now)

    def _reject_endpoint(self, now: float) -> None:
        """The endpoint replays another rank: never ask it again."""
        self.has_replay = False
        self._abandon("wrong_rank", now)

    def _abandon(self, outcome: str, now: float) -> None:
        """Continue without the missing batches; back off from the endpoint for a while."""
        limits = self._limits
        replay = self._replay
        if self._is_proof_due or (replay is not None and replay.target is not None):
            self._doubt()
        if (
            replay is not None
            and not replay.is_verified
            and self._on_event_loss is EventLossPolicy.DROP
        ):
            self._drop_suspects(replay)  # of a proven engine they are ordinary live batches
        # A gap that live batches could not wait for is given up. A rebuild stays wanted, but asking
        # again at once would hold back a busy stream for ever.
        is_asked_again = replay is not None and replay.mode is Mode.REBUILD
        if outcome != "backlog_full" or is_asked_again:
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
        self.tallies.replays[outcome] += 1
        replay = self._replay
        self._stop_replay()
        if self.is_unproven and replay is not None:
            self._judge_recall(replay, outcome)
        self._backoff_s = 0.0
        self._quiet_since = now

    def _stop_replay(self) -> None:
        self._replay = self._first_live = self._heard = None
        self.request = None


# Live messages that wait until the missing batches before them have arrived. A bounded queue that
# knows its first and last sequence number. `stream` fills it during a replay and decides what to do
# when it is full.


class MessageBacklog:
    """Messages in order of arrival, counted in batches and bytes."""

    __slots__ = ("_batches_max", "_bytes_max", "_queue", "bytes")

    def __init__(self, batches_max: int, bytes_max: int) -> None:
        self._queue: deque[tuple[int, bytes]] = deque()
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first(self) -> int:
        """Sequence of the oldest message."""
        return self._queue[0][0]

    @property
    def first_payload(self) -> bytes:
        """Payload of the oldest message."""
        return self._queue[0][1]

    @property
    def last(self) -> int:
        """Sequence of the newest message."""
        return self._queue[-1][0]

    @property
    def is_full(self) -> bool:
        """Whether more messages or bytes are queued than may wait."""
        return len(self._queue) > self._batches_max or self.bytes > self._bytes_max

    @property
    def last_payload(self) -> bytes:
        """Payload of the newest message."""
        return self._queue[-1][1]

    def holds(self, seq: int, payload: bytes) -> bool:
        """Whether this very message waits; O(log n) positions, if the numbers ascend."""
        at = bisect_left(self._queue, seq, key=lambda one: one[0])
        return at < len(self._queue) and self._queue[at] == (seq, payload)

    def append(self, seq: int, payload: bytes) -> None:
        """Add the newest message."""
        self._queue.append((seq, payload))
        self.bytes += len(payload)

    def put_back(self, seq: int, payload: bytes) -> None:
        """Return a message to the front of the queue."""
        self._queue.appendleft((seq, payload))
        self.bytes += len(payload)

    def pop(self) -> tuple[int, bytes]:
        """Take the oldest message."""
        seq, payload = self._queue.popleft()
        self.bytes -= len(payload)
        return seq, payload

    def clear(self) -> None:
        """Drop everything."""
        self._queue.clear()
        self.bytes = 0

    def check(self) -> None:
        """Assert that the byte count is right and that no limit stays exceeded."""
        assert self.bytes == sum(len(payload) for _, payload in self._queue)
        assert not self.is_full
