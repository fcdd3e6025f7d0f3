"""A stream against a whole engine: loss, lag, restarts and bad replays, then the truth compared.

The engine below keeps its own cache and its replay buffer; the network between loses and delays.
Whatever happened, once the engine speaks again and the stream is quiet, the index equals the
engine's cache, or the stream says that it is uncertain.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from indexer.core.cursor import StreamMemory
from indexer.core.progress import BEHEADED_BELIEVED
from indexer.core.replay import ReplayRequest
from indexer.types import EventLossPolicy, StreamLimits, Tier, WorkerRank
from tests.effort import examples
from tests.indexer.core.streams import stream_of
from tests.indexer.encoding import (
    CLEARED,
    FORMS,
    encode_batch,
    end_marker,
    message,
    removed,
    reply,
    stored,
)
from tests.indexer.naive_index import NaiveIndex

RANK = WorkerRank(1, 0)
LIMITS = StreamLimits(backlog_batches_max=12, replay_useless_max=8, blocks_per_turn=20)
MEDIA = {"GPU": Tier.DEVICE, "CPU": Tier.HOST_PINNED}


class Engine:
    """One process of an engine: a cache, a sequence, a replay buffer."""

    def __init__(self, number: int, buffer_steps: int, form: str) -> None:
        self.number = number
        self.form = form
        self.truth = NaiveIndex(16)
        self.truth.attach(RANK)
        self.sequence = 0
        self.names = 100 * number
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)

    def store(self, pick: int, blocks: int, medium: str) -> dict[str, Any]:
        """Store new blocks behind some known block, or at the root."""
        known: list[int | None] = [None, *self.truth.chains[RANK]]
        parent = known[pick % len(known)]
        names = [self.names + at + 1 for at in range(blocks)]
        self.names += blocks
        tokens = [pick % 7 + at for at in range(16 * blocks)]
        return stored(names, tokens, parent, medium=medium)

    def remove(self, pick: int, medium: str) -> dict[str, Any]:
        names = list(self.truth.chains[RANK]) or [1]
        return removed([names[pick % len(names)]], medium=medium)

    def publish(self, events: list[dict[str, Any]]) -> tuple[int, bytes]:
        payload = encode_batch(events, self.form, ts=self.number * 1e6 + self.sequence)
        # the engine's own cache, through the same reading of events
        twin = stream_of(self.truth)
        twin.on_live(message(0, payload), 0.0)
        while twin.is_busy:
            twin.resume(0.0)
        one = (self.sequence, payload)
        self.sequence += 1
        self.buffer.append(one)
        return one


class StreamMachine(RuleBasedStateMachine):
    """Rules: publish, lose, deliver, restart, answer replays well or badly, wait."""

    policy = EventLossPolicy.KEEP

    @initialize(
        steps=st.sampled_from([3, 1_000]), has_replay=st.booleans(), form=st.sampled_from(FORMS)
    )
    def begin(self, steps: int, has_replay: bool, form: str) -> None:
        self.steps, self.form = steps, form
        self.engine = Engine(1, steps, form)
        self.has_replay = has_replay
        self._come_alive()
        self.snapshot: tuple[int, StreamMemory, NaiveIndex] | None = None
        self.wire: deque[tuple[int, int, bytes]] = deque()
        self.applied_of = 1  # whose batches the cursor counts
        self.dead_request: ReplayRequest | None = None
        self.now = 0.0

    def _come_alive(self) -> None:
        self.beheaded = 0  # answers from number 0 on that lost their beginning on the way
        self.index = NaiveIndex(16)
        self.stream = stream_of(
            self.index, has_replay=self.has_replay, on_event_loss=self.policy, limits=LIMITS
        )

    # -- ourselves --------------------------------------------------------------------------------

    @precondition(lambda self: self.stream.is_at_rest)
    @rule()
    def write_snapshot(self) -> None:
        copy = NaiveIndex(16)
        copy.recall(RANK, self.index)
        memory = self.stream.memory()
        assert memory.last_batch_ts is not None
        self.snapshot = (int(memory.last_batch_ts // 1e6), memory, copy)

    @precondition(lambda self: self.snapshot is not None)
    @rule(is_mute=st.booleans())
    def crash(self, is_mute: bool) -> None:
        """Come back with the snapshot; what was on its way to us is lost."""
        assert self.snapshot is not None
        self.wire.clear()
        self.dead_request = None
        self._come_alive()
        self.applied_of, memory, copy = self.snapshot
        self.recalled_of = self.applied_of
        self.index.recall(RANK, copy)
        self.stream.recall(memory, self.now)
        self.stream.check()
        assert not any(self.index.held(RANK, tier) for tier in Tier), "nothing before the proof"
        if is_mute:
            self.dead_request = self.stream.request

    @invariant()
    def only_the_same_engine_is_credited(self) -> None:
        if not hasattr(self, "stream"):
            return
        if self.stream.is_unproven:
            assert not any(self.index.held(RANK, tier) for tier in Tier)
        elif self.stream.tallies.recalls.pop("credited", 0) and self.has_replay:
            assert self.recalled_of == self.engine.number

    # -- the engine -----------------------------------------------------------------------------

    @rule(
        kinds=st.lists(st.sampled_from(["store", "store", "remove", "clear"]), max_size=3),
        pick=st.integers(0, 50),
        blocks=st.integers(1, 30),
        medium=st.sampled_from(sorted(MEDIA)),
        is_lost=st.booleans(),
    )
    def publish(self, kinds: list[str], pick: int, blocks: int, medium: str, is_lost: bool) -> None:
        for kind in kinds or ["store"]:
            event = {
                "store": lambda: self.engine.store(pick, blocks, medium),
                "remove": lambda: self.engine.remove(pick, medium),
                "clear": lambda: CLEARED,
            }[kind]()
            seq, payload = self.engine.publish([event])
            if not is_lost:
                self.wire.append((self.engine.number, seq, payload))

    @rule(loses_flight=st.booleans())
    def restart(self, loses_flight: bool) -> None:
        self.engine = Engine(self.engine.number + 1, self.steps, self.form)
        self.dead_request = self.stream.request  # nobody will answer it any more
        if loses_flight:
            self.wire.clear()

    # -- the network ----------------------------------------------------------------------------

    @rule()
    def reconnect(self) -> None:
        """The connection breaks for a moment, and the same engine, or the next one, is there."""
        self.stream.on_reconnect(self.now)
        self.stream.check()

    @rule(count=st.integers(1, 20))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            if not self.wire:
                return
            number, seq, payload = self.wire.popleft()
            self._settle()
            if number != self.applied_of:
                self.stream.on_reconnect(self.now)
                self.stream.check()
            if number != self.applied_of and self._is_lucky(seq):
                continue  # the one restart nobody can see: the numbers fit without a seam
            if number != self.applied_of:
                self.applied_of = number
            self.stream.on_live(message(seq, payload), self.now)
            self.stream.check()

    def _is_lucky(self, seq: int) -> bool:
        return not self.stream.has_replay and seq >= self.stream.cursor.expected > 0

    def _settle(self) -> None:
        while self.stream.is_busy:
            self.stream.resume(self.now)
            self.stream.check()

    # -- the replay endpoint ----------------------------------------------------------------------

    @precondition(lambda self: self.stream.request is not None)
    @rule(hole=st.none() | st.integers(0, 8), ends=st.booleans(), frames=st.sampled_from([3, 4]))
    def answer(self, hole: int | None, ends: bool, frames: int) -> None:
        request = self.stream.request
        if request is self.dead_request:
            return
        assert request is not None
        replies = [one for one in self.engine.buffer if one[0] >= request.start]
        if request.start == 0:
            self.beheaded += hole == 0
        if hole is not None:
            del replies[hole : hole + 2]
        for seq, payload in replies:
            if self.stream.request is not request:
                return
            self.stream.on_replay(reply(seq, payload, frames), self.now)
            self.stream.check()
            self._settle()
        if ends and self.stream.request is request:
            self.stream.on_replay(end_marker(frames), self.now)
            self.stream.check()
            self._settle()

    @precondition(lambda self: self.stream.request is not None)
    @rule(junk=st.lists(st.binary(max_size=9), max_size=4))
    def answer_junk(self, junk: list[bytes]) -> None:
        self.stream.on_replay(junk, self.now)
        self.stream.check()

    @rule(seconds=st.sampled_from([0.1, 1.1, 6.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        was_busy = self.stream.is_busy  # a look goes on with what is pending, too
        due, before = self.stream.due(self.now), self._what_a_look_may_change()
        self.stream.on_timer(self.now)
        self.stream.check()
        if due > self.now and not was_busy:
            assert self._what_a_look_may_change() == before, "nobody looks before it is due"
        self._settle()
        # what was due has been done, or it would be due for ever; who is busy is looked at again
        assert was_busy or self.stream.request or self.stream.due(self.now) > self.now

    def _what_a_look_may_change(self) -> object:
        stream = self.stream
        held = [self.index.held(RANK, tier) for tier in Tier]
        return (stream.request, stream.kv_state, stream.lost_batches, stream.is_unproven, held)

    # -- the truth ------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        self.publish(["store"], 1, 1, "GPU", is_lost=False)
        self.deliver(1_000)
        for _ in range(40):
            if self.stream.request is not None:
                self.answer(None, True, 4)
            self.wait(6.0)
            self.deliver(1_000)
        assert self.stream.request is None or self.stream.has_replay
        self._compare()

    def _compare(self) -> None:
        if self.engine.number != self.applied_of and not self.stream.has_replay:
            return  # without a replay nothing has told the stream of this engine yet
        truth = self.engine.truth
        for tier in Tier:
            held, real = self.index.held(RANK, tier), truth.held(RANK, tier)
            if self.stream.kv_state == "current":
                assert held == real
            elif self.policy is EventLossPolicy.DROP:
                assert held <= real
        if self.stream.has_replay and self.steps > 100 and self.beheaded < BEHEADED_BELIEVED:
            assert self.stream.kv_state == "current", "all of the past was there to be asked for"


class StrictStreamMachine(StreamMachine):
    """The same under `--on-event-loss drop`: never a block that the engine has not."""

    policy = EventLossPolicy.DROP


StreamMachine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None
)
StrictStreamMachine.TestCase.settings = StreamMachine.TestCase.settings
TestStream = StreamMachine.TestCase
TestStrictStream = StrictStreamMachine.TestCase
