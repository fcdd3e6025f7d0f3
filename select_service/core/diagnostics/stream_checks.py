"""One rank's event stream: do events come, are they usable, and do they belong to the rank?

A `StreamChecks` remembers what a single look cannot show. It is run once per round and names its
suspicions; `causes.py` has how long each must last.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.core.normalize import OTHER_PAIRING
from indexer.types import SOCKET_BYTES_FACTOR
from select_service.core.diagnostics import causes
from select_service.core.diagnostics.growth import CounterGrowth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.stream import EventStream
    from indexer.core.stream_counters import StreamCounters
    from indexer.types import LinkState
    from select_service.core.diagnostics.causes import Cause

SILENCE_S: Final = 30.0
"""How long a worker may take to publish prompts it was given: to queue and to compute them."""

ASKS_MIN: Final = 3
"""Prompts a worker that never published anything must have been given until that is odd."""

SILENCE_AGAIN_S: Final = 120.0
"""The same of one that has published before: a very long prompt may be all it computes."""

ASKS_AGAIN_MIN: Final = 5
"""The same of one that has published before: some of its prompts may have been cached after all."""

ASKS_PAST_MIN: Final = 20
"""The same where what it cached before it was listened to was never published: it may hold all that
comes again."""

EVENTS_MIN: Final = 4
"""Events that could not be used, and nothing else, until that is no accident."""

RESTARTS_MIN: Final = 3
"""Lives of an engine within the window that are too many."""

REPLAYS_MIN: Final = 2
"""Replays in a row without an answer."""

LOSSES_MIN: Final = 2
LOSS_WINDOW_S: Final = 300.0
"""So often within so long a stream may not lose batches; once may happen to anybody."""

SKEW_S: Final = 60.0
"""Events may be that late, or that early."""

UNKNOWN_SHARE: Final = 0.05
"""Of a stream's batches: so few from before this service may be missing."""

SKEWS_MIN: Final = 2
"""Looks in a row at new events that must agree about it."""

RUN_S: Final = 60.0
"""How long what worked before must go wrong until that is reported."""

_STORES: Final = frozenset({"stored", "unreadable"})
_USABLE: Final = frozenset({"applied", "placeholder", "duplicate_hash"})
_NEUTRAL: Final = frozenset({"other_group", "remote", "empty", "no_op"})  # rightly ignored
_UNREADABLE: Final = ("frames", "sequence", "payload")
_ANSWERED: Final = ("complete", "overtaken", "past_gone", "wrong_rank")
_UNANSWERED: Final = ("silent", "deadline", "garbage", "budget", "broken")

Suspect = tuple["Cause", str]


class Look(NamedTuple):
    """What is known of a stream's surroundings at one moment."""

    link: LinkState
    replay_endpoint: str | None
    requests: int  # on the rank
    holds_anything: bool
    is_past_missing: bool  # it may hold blocks it never reported
    now: float
    wall_now: float


class StreamChecks:
    """What one stream did lately."""

    def __init__(self, stream: EventStream, connections: int, requests: int, now: float) -> None:
        self.stream = stream
        self.known_since = now
        self._lives = CounterGrowth(_lives(stream.tallies, connections), now)
        self._asks = 0  # prompts sent since its last message
        # distinct ones: a health check that repeats one prompt all day, and sends it nowhere, is no
        # sign
        self._prompts: set[bytes] = set()
        self._asked_since = 0.0
        self._requests = requests  # earlier ones may be of another life, and fully computed
        self._last_event_at: float | None = None
        self._link_since = now
        self._usable = FailureRun()
        self._readable = FailureRun()
        self._answered = FailureRun()
        self._lost = self._batches = 0
        self._long = 0  # messages that were too long, and when the last one came
        self._long_at: float | None = None
        self._losses: deque[float] = deque(maxlen=LOSSES_MIN)
        self._replayed = self._skewed = self._skews = 0

    def asked(self, at: float, prompt: bytes | None = None) -> None:
        """The rank was given a prompt with blocks it has to compute, and so to publish.

        `prompt` distinguishes it from others; None: it was booked, and no request asks in vain for
        that.
        """
        last_event_at = self.stream.last_event_at
        if at > self._link_since and (last_event_at is None or at > last_event_at):
            if not self._asks:
                self._asked_since = at
            if len(self._prompts) < ASKS_MIN:
                self._prompts.add(b"%d" % self._asks if prompt is None else prompt)
            self._asks += 1

    def look(self, look: Look) -> Iterator[Suspect]:
        """Name what is wrong, as far as it shows."""
        self._follow_silence(look)
        if look.link.is_refused:
            yield causes.EVENTS_REFUSED, "the publisher of its events hangs up on our handshake"
        elif not look.link.is_connected:
            yield causes.EVENTS_UNREACHABLE, "no connection to the publisher of its events"
        elif silent := self._silence(look):
            yield silent
        yield from self._unusable(look)
        yield from self._jumps(look)
        yield from self._replays(look)
        yield from self._past(look)
        yield from self._loss(look)
        yield from self._too_long(look)
        yield from self._skew(look)
        yield from self._offset()

    # -- do they come? -----------------------------------------------------------------------------

    def _follow_silence(self, look: Look) -> None:
        last_event_at = self.stream.last_event_at
        if last_event_at != self._last_event_at or look.link.since != self._link_since:
            self._last_event_at, self._link_since, self._asks = last_event_at, look.link.since, 0
            self._prompts.clear()
        came, self._requests = look.requests - self._requests, look.requests
        if last_event_at is None and not look.holds_anything:  # then every prompt is new to it
            for _ in range(min(came, ASKS_MIN)):
                self.asked(look.now)

    def _silence(self, look: Look) -> Suspect | None:
        enough, long_s = ASKS_MIN, SILENCE_S
        if self._last_event_at is not None:
            enough, long_s = ASKS_AGAIN_MIN, SILENCE_AGAIN_S
            if look.is_past_missing:
                enough = ASKS_PAST_MIN
        if self._asks < enough or len(self._prompts) < ASKS_MIN:
            return None
        if look.now - self._asked_since < long_s:
            return None
        if look.link.load_reports and not self.stream.tallies.messages:
            return causes.WRONG_TOPIC, "only reports of load arrive, no events"
        if self.stream.tallies.messages and self._last_event_at is None:
            return None  # something comes, but no events: see below
        for_s = look.now - self._asked_since
        return causes.NO_EVENTS, f"no event for {for_s:.0f} s although it was given prompts"

    # -- can they be used? -------------------------------------------------------------------------

    def _unusable(self, look: Look) -> Iterator[Suspect]:
        tallies = self.stream.tallies
        unreadable = sum(tallies.bad_messages.get(reason, 0) for reason in _UNREADABLE)
        run = self._readable.go_on(tallies.batches, unreadable, look.now)
        if run >= EVENTS_MIN:
            yield causes.EVENTS_UNREADABLE, f"{run} messages, none of them a batch of events"
        usable, refused = _uses(tallies)
        run = self._usable.go_on(usable, sum(refused.values()), look.now)
        if run < EVENTS_MIN:
            return
        outcome = max(refused, key=refused.__getitem__)
        if outcome == "other_block_size":
            what = f"of {tallies.other_block_size} tokens, its record of {self.stream.block_size}"
            yield causes.BLOCK_SIZE_MISMATCH, f"its events announce blocks {what}"
        elif outcome == OTHER_PAIRING:
            what = "single tokens, its record has" if self.stream.is_eagle else "pairs, it has no"
            yield causes.EAGLE_MISMATCH, f"its events announce {what} is_eagle"
        else:
            what = f"{run} store events, none could be indexed (mostly {outcome})"
            yield causes.EVENTS_NOT_INDEXED, what

    # -- is it always the same engine? -------------------------------------------------------------

    def _jumps(self, look: Look) -> Iterator[Suspect]:
        tallies, connections = self.stream.tallies, look.link.connections
        seen, hidden, connected = self._lives.of(_lives(tallies, connections), look.now)
        lives = seen + hidden
        if lives < RESTARTS_MIN:
            return
        # a new engine may be counted twice, by its number and by its answer; one more may have
        # connected before the first look
        if lives <= 2 * (connected + 1):
            if max(seen, hidden) >= RESTARTS_MIN:
                yield causes.RESTART_STORM, f"the engine began anew {max(seen, hidden)} times"
        elif hidden:
            yield causes.REPLAY_OF_ANOTHER, f"{lives} changes of engine without a new connection"
        else:
            yield causes.SEQUENCE_JUMPS, f"numbers went back {lives} times without a new connection"

    def _offset(self) -> Iterator[Suspect]:
        own, names, ranks = self.stream.rank.dp_rank, self.stream.names, self.stream.worker_ranks
        if not names or own in names:
            return  # one publisher may speak for all ranks
        # an engine that numbers its ranks across a whole cluster is no fault; one registered under
        # a number of its own should have that number
        others = [name for name in names if name in ranks or (ranks.start and len(ranks) == 1)]
        if others:
            yield causes.RANK_OFFSET, f"its endpoint delivers events of dp_rank {min(others)}"

    # -- can what is lost be had again? ------------------------------------------------------------

    def _replays(self, look: Look) -> Iterator[Suspect]:
        ended = self.stream.tallies.replays
        good = sum(ended.get(outcome, 0) for outcome in _ANSWERED)
        bad = sum(ended.get(outcome, 0) for outcome in _UNANSWERED)
        run = self._answered.go_on(good, bad, look.now)
        if not look.link.is_connected:
            self._answered.forgive()  # a disconnected engine answers nothing
            return
        if look.replay_endpoint is None:
            return
        if run >= REPLAYS_MIN:
            how = ", ".join(f"{ended[one]} {one}" for one in _UNANSWERED if ended.get(one))
            what = f"{run} replays in a row without a useful answer (in all: {how})"
            if ended.get("budget"):
                what += (
                    "; --replay-bytes-max, --kv-rebuild-bytes-max or --replay-replies-max is low"
                )
            yield causes.REPLAY_MUTE, what
        if ended.get("wrong_rank") and not self.stream.has_replay:
            yield causes.REPLAY_WRONG_RANK, "its replay endpoint answered for another rank"
        if ended.get("other_engine") and not self.stream.has_replay:
            what = "it repeated another batch under the number of one that was received"
            yield causes.REPLAY_OF_ANOTHER, what

    def _past(self, look: Look) -> Iterator[Suspect]:
        """Name a past that replays bring only a part of; without any, prompts will show it."""
        unknown = self.stream.unknown_batches
        known = unknown + self.stream.tallies.batches
        is_asked = look.replay_endpoint is not None and self.stream.has_replay
        if is_asked and look.is_past_missing and unknown > UNKNOWN_SHARE * known:
            what = f"{unknown} of {known} batches are older than what its replays begin with"
            yield causes.PAST_EVENTS_MISSING, what

    def _loss(self, look: Look) -> Iterator[Suspect]:
        tallies = self.stream.tallies
        lost = tallies.lost_batches - tallies.unusable_batches  # no network lost the others
        # losses before the first batch are of the past
        if lost > self._lost and self._batches:
            self._losses.append(look.now)
        self._lost, self._batches = lost, tallies.batches
        losses = self._losses
        if len(losses) == LOSSES_MIN and look.now - losses[0] <= LOSS_WINDOW_S:
            yield causes.EVENTS_LOST, f"{lost} batches lost for good"

    def _too_long(self, look: Look) -> Iterator[Suspect]:
        tallies, most = self.stream.tallies, self.stream.longest_message
        refused, broke = (tallies.bad_messages.get(one, 0) for one in ("oversized", "breach"))
        if refused + broke > self._long:
            self._long, self._long_at = refused + broke, look.now
        if self._long_at is None or look.now - self._long_at > LOSS_WINDOW_S:
            return
        if refused:
            size = f"{tallies.oversized_bytes} bytes"
        else:
            size = f"more than {SOCKET_BYTES_FACTOR * most} bytes, which broke the connection"
        yield causes.EVENTS_TOO_LONG, f"a batch of {size}; --kv-message-bytes-max is {most}"

    # -- when were they made? ----------------------------------------------------------------------

    def _skew(self, look: Look) -> Iterator[Suspect]:
        stream, tallies = self.stream, self.stream.tallies
        made_at, last_event_at = stream.last_batch_ts, stream.last_event_at
        if tallies.replayed_batches != self._replayed or stream.is_replaying:
            self._replayed, self._skewed = tallies.replayed_batches, tallies.batches
            return  # a replayed batch is not late
        if made_at is None or last_event_at is None:
            return
        skew_s = look.wall_now - (look.now - last_event_at) - made_at
        if tallies.batches != self._skewed:  # there are new batches to judge by
            self._skewed = tallies.batches
            self._skews = self._skews + 1 if abs(skew_s) >= SKEW_S else 0
        if self._skews >= SKEWS_MIN:
            how = "behind" if skew_s > 0 else "ahead of"
            yield causes.CLOCK_SKEW, f"the time of its events is {abs(skew_s):.0f} s {how} ours"


class FailureRun:
    """How often something went wrong since it last went well."""

    __slots__ = ("_bad", "_good", "_length", "_since")

    def __init__(self) -> None:
        self._good = self._bad = self._length = 0
        self._since = 0.0

    def go_on(self, good: int, bad: int, now: float) -> int:
        """Follow two counters that only go up; return how long the run is, 0 while it is young.

        A run on something that has worked before must last a while: good and bad may take turns.
        """
        if good > self._good:
            self._length = 0
        elif bad > self._bad:
            if not self._length:
                self._since = now
            self._length += bad - self._bad
        self._good, self._bad = good, bad
        is_old = not good or now - self._since >= RUN_S
        return self._length if is_old else 0

    def forgive(self) -> None:
        """What went wrong so far does not count."""
        self._length = 0


def _lives(tallies: StreamCounters, connections: int) -> tuple[int, ...]:
    return tallies.restarts + tallies.conflicting_batches, tallies.hidden_restarts, connections


def _uses(tallies: StreamCounters) -> tuple[int, dict[str, int]]:
    """How many store events were of use, and why how many others were not."""
    usable = 0
    refused: dict[str, int] = {}
    for (kind, _, outcome), count in tallies.events.items():
        if kind not in _STORES or outcome in _NEUTRAL:
            continue
        if outcome in _USABLE:
            usable += count
        else:
            refused[outcome] = refused.get(outcome, 0) + count
    return usable, refused
