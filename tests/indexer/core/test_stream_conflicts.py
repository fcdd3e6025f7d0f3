"""Two batches under one number: what came live stays, and the doubt is settled, not the state."""

from __future__ import annotations

from typing import Any, Final, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from indexer.types import EventLossPolicy
from tests.effort import examples
from tests.indexer.core.streams import Bench, tokens
from tests.indexer.encoding import encode_batch, stored

# -- a replay endpoint that contradicts what came live ---------------------------------------------


def lies(bench: Bench, count: int = 600) -> None:
    """Answer without end, with batches of another engine, from wherever it was asked."""
    for _ in range(20):
        request = bench.stream.request
        if request is None:
            return
        for seq in range(request.start, request.start + count):
            bench.reply(seq, engine="new")
            if bench.stream.request is not request:
                break


def test_an_endless_replay_is_not_believed_over_the_live_stream() -> None:
    bench = Bench()
    bench.live(*range(3), 4)
    lies(bench)
    assert bench.asked() is None
    assert bench.blocks() == {0, 1, 2, 4}, "with the batch that showed the gap"
    assert bench.blocks(engine="new") == set()
    assert bench.stream.tallies.conflicting_replies == 2
    assert bench.outcomes == {"other_engine": 1}
    assert (bench.stream.lost_batches, bench.state()) == (1, "uncertain")
    bench.live(6)
    assert bench.asked() is None, "it is not asked again"
    assert bench.blocks() == {0, 1, 2, 4, 6}


def test_what_follows_the_last_live_batch_is_believed_until_it_comes_live() -> None:
    bench = Bench()
    bench.live(*range(3))
    bench.wait(10.1)
    assert bench.asked() == 2
    bench.reply(2)
    bench.reply(*range(3, 700), engine="new")
    assert bench.outcomes == {"budget": 1}
    bench.live(3, 4)
    assert bench.blocks() == {0, 1, 2, 3, 4}
    assert bench.stream.cursor.last == 4
    assert bench.stream.tallies.conflicting_batches == 1
    assert bench.stream.tallies.restarts == 0
    assert (bench.state(), bench.stream.has_replay) == ("uncertain", False)


def test_under_drop_what_a_wrong_replay_brought_goes() -> None:
    bench = Bench(on_event_loss=EventLossPolicy.DROP)
    bench.live(0)
    bench.wait(10.1)
    bench.reply(0)
    bench.reply(1, engine="new")
    bench.live(1, 2)
    assert bench.blocks(engine="new") == set()
    assert {1, 2} <= bench.blocks()


@pytest.mark.parametrize("heard_more", [False, True])
def test_another_past_goes_and_what_came_live_stays(heard_more: bool) -> None:
    bench = Bench()
    bench.live(3)
    bench.reply(*range(3), engine="new")
    if heard_more:
        bench.live(*range(4, 8))
    bench.reply(3, engine="new")
    assert bench.blocks(engine="new") == set()
    assert bench.blocks() == ({3, 4, 5, 6, 7} if heard_more else {3})
    assert bench.stream.lost_batches == 3
    counts = bench.index.counts[bench.stream.rank].values()
    assert set(counts) == {1}, "once"


def test_silence_and_a_wrong_copy_change_nothing() -> None:
    """The connection never broke, so that no other engine can have taken the place of this one."""
    bench = Bench()
    bench.live(*range(3))
    bench.wait(10.1)
    bench.reply(2, engine="new")
    assert bench.blocks() == {0, 1, 2}
    assert bench.state() == "uncertain", "until the next number"
    assert bench.outcomes == {"other_engine": 1}
    bench.live(3)
    assert (bench.blocks(), bench.state()) == ({0, 1, 2, 3}, "current")


def test_a_new_connection_makes_the_endpoint_worth_asking_again() -> None:
    bench = Bench()
    bench.live(*range(3))
    bench.wait(10.1)
    bench.reply(2, engine="new")
    bench.stream.on_reconnect(bench.now)
    assert bench.asked() == 2
    bench.reply(2, engine="new")
    assert bench.asked() == 0, "now it is believed: the engine was replaced"
    bench.reply(0, engine="new")
    bench.end()
    assert (bench.blocks(), bench.blocks(engine="new")) == (set(), {0})


# -- straight after a new connection ---------------------------------------------------------------


@pytest.mark.parametrize("how", ["other copies", "the end"])
def test_a_lying_endpoint_is_not_believed_over_what_came_by_the_new_connection(how: str) -> None:
    bench = Bench()
    bench.live(*range(3))
    bench.stream.on_reconnect(bench.now)
    bench.live(3, 4)
    if how == "the end":
        bench.end()
    lies(bench)
    assert bench.asked() is None
    assert bench.blocks() == {0, 1, 2, 3, 4}
    assert bench.blocks(engine="new") == set()
    assert bench.outcomes == {"other_engine": 1}


def test_a_stray_message_after_a_past_that_nobody_had_heard() -> None:
    bench = Bench()
    bench.wait(0.1, 10.1)
    bench.reply(*range(5), engine="new")
    bench.live(3)
    bench.live(3, engine="third")
    bench.live(4)
    assert bench.blocks() == {3, 4}
    assert bench.blocks(engine="new") == set()
    assert bench.stream.tallies.restarts == 0


@pytest.mark.parametrize("how", ["nothing", "lies", "the end"])
def test_what_waited_before_a_new_connection_stays(how: str) -> None:
    bench = Bench()
    bench.live(0, 2)
    bench.stream.on_reconnect(bench.now)
    bench.live(3)
    if how == "the end":
        bench.end()
    if how != "nothing":
        lies(bench)
    for _ in range(8):
        bench.wait(1.1)
    assert bench.blocks() == {0, 2, 3}
    assert bench.state() == "uncertain"


# -- a number twice, live --------------------------------------------------------------------------

SETTLED: dict[str, tuple[set[int], set[int]]] = {
    "by the replay": ({0, 1, 2}, set()),
    "by the next number": ({0, 1, 2, 3}, set()),
    "by neither, yet": ({0, 1, 2}, set()),
}


@pytest.mark.parametrize("has_replay", [True, False])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("settled", SETTLED)
def test_a_number_heard_twice_forgets_nothing(settled: str, number: int, has_replay: bool) -> None:
    bench = Bench(has_replay=has_replay)
    bench.live(*range(3))
    bench.live(number, engine="new")
    assert bench.blocks() == {0, 1, 2}
    assert bench.stream.tallies.conflicting_batches == 1
    if settled == "by the replay":
        if not has_replay:
            return
        assert bench.asked() == 2
        bench.reply(2)
        bench.end()
    elif settled == "by the next number":
        bench.live(3)
        bench.wait(1.1, 1.1)
    assert (bench.blocks(), bench.blocks(engine="new")) == SETTLED[settled]
    assert bench.stream.tallies.restarts == 0


def test_the_very_first_number_twice() -> None:
    bench = Bench(has_replay=False)
    bench.live(0)
    bench.live(0, engine="new")
    assert bench.blocks() == {0}
    bench.live(1)
    assert (bench.blocks(), bench.state()) == ({0, 1}, "current")


@pytest.mark.parametrize("has_replay", [True, False])
def test_numbers_that_go_on_from_the_second_one_are_a_restart(has_replay: bool) -> None:
    bench = Bench(has_replay=has_replay)
    bench.live(*range(5))
    bench.live(1, engine="new")
    bench.wait(1.1)
    bench.wait(1.1)  # of a mute endpoint
    bench.live(2, engine="new")
    bench.wait(1.1, 1.1)
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {1, 2}
    assert bench.stream.tallies.restarts == 1
    bench.live(3, engine="new")
    assert bench.blocks(engine="new") == {1, 2, 3}


def test_a_batch_that_builds_on_unknown_blocks_is_the_new_engines() -> None:
    bench = Bench(has_replay=False)
    bench.live(*range(3))
    bench.live(2, engine="new")
    child = encode_batch([stored([77], tokens(9), parent=5_555)], ts=3.3)
    bench.live(3, child)
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {2}


@pytest.mark.parametrize("number", [0, 2, 4])
@pytest.mark.parametrize("has_replay", [True, False])
def test_after_a_new_connection_a_lower_number_is_a_restart_at_once(
    number: int, has_replay: bool
) -> None:
    bench = Bench(has_replay=has_replay)
    bench.live(*range(5))
    bench.stream.on_reconnect(bench.now)
    bench.live(number, engine="new")
    if has_replay:
        bench.wait(1.1, 1.1)
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {number}


def test_copies_are_no_proof_of_another_engine() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(1)
    bench.live(1, engine="third")
    bench.live(0)  # late, while the endpoint is asked
    bench.reply(1, engine="new")
    bench.reply(0)
    bench.live(2)
    for _ in range(4):
        bench.wait(1.1)
    assert bench.blocks() == {0, 1, 2}


def test_another_copy_of_what_was_heard_is_counted_and_changes_nothing() -> None:
    bench = Bench()
    bench.live(*range(3), 4)
    assert bench.asked() == 2
    bench.reply(2)
    bench.reply(1, engine="new")
    assert bench.stream.tallies.conflicting_replies == 1
    bench.reply(3)
    assert bench.blocks() == {0, 1, 2, 3, 4}


# -- all of it, in any order ---------------------------------------------------------------------

Answer = Literal["lies", "lies later", "repeats", "truth", "end", "nothing"]


class DisputeMachine(RuleBasedStateMachine):
    """One engine, whose connection never breaks; copies, strays, and an endpoint of any kind.

    The rule of the naive model: what the engine has said live, it holds. It never removes a block.
    """

    @initialize(has_replay=st.booleans())
    def begin(self, has_replay: bool) -> None:
        self.bench = Bench(has_replay=has_replay)
        self.next = 0
        self.live: set[int] = set()
        self.is_stray_last = self.has_lied = False

    def _say(self) -> None:
        self.live.add(self.next)
        self.bench.live(self.next)
        self.next += 1
        self.is_stray_last = False

    @rule(count=st.integers(1, 3), lost=st.integers(0, 2))
    def publish(self, count: int, lost: int) -> None:
        if not self.is_stray_last:
            self.next += lost
        for _ in range(count):
            self._say()

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def repeat(self, pick: int) -> None:
        self.bench.live(sorted(self.live)[pick % len(self.live)])

    @precondition(lambda self: len(self.live) > 1 and not self.is_stray_last)
    @precondition(lambda self: not self.bench.stream._may_be_another)  # then it is a restart
    @rule(pick=st.integers(0, 99))
    def stray(self, pick: int) -> None:
        heard = [seq for seq in self.live if seq]
        self.bench.live(sorted(heard)[pick % len(heard)], engine="third")
        self.is_stray_last = True

    @precondition(lambda self: self.bench.asked() is not None)
    @rule(how=st.sampled_from(["lies", "lies later", "repeats", "truth", "end", "nothing"]))
    def answer(self, how: Answer) -> None:
        request = self.bench.stream.request
        assert request is not None
        for seq in range(request.start, request.start + 30):
            if self.bench.stream.request is not request:
                return
            if how == "nothing" or (how == "truth" and seq >= self.next) or how == "end":
                break
            is_true = how == "truth" or (how == "lies later" and seq == request.start)
            number = request.start if how == "repeats" else seq
            is_true |= how == "repeats" and number < self.next
            self.has_lied |= not is_true
            self.bench.reply(number, engine="old" if is_true else "new")
        if how in ("truth", "end") and self.bench.stream.request is request:
            self.bench.end()

    @rule(seconds=st.sampled_from([0.1, 1.1, 10.1, 31.0]))
    def wait(self, seconds: float) -> None:
        self.bench.wait(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self._say()
        for _ in range(8):
            if self.bench.asked() is not None:
                self.bench.wait(1.1)
        assert self.bench.asked() is None
        held = self.bench.blocks(self.next)
        assert self.live <= held, "what came live stays"
        assert not self.bench.blocks(self.next, engine="third"), "a stray message is no batch"
        if self.bench.state() == "current" and not self.has_lied:
            assert held == set(range(self.next))


DisputeMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=25, deadline=None
)
TestDispute = DisputeMachine.TestCase


FOUND_ONCE: Final[dict[str, list[tuple[str, dict[str, Any]]]]] = {
    "the first live batch contradicts a past that only the endpoint has told": [
        ("wait", {"seconds": 0.1}),
        ("wait", {"seconds": 10.1}),
        ("answer", {"how": "lies"}),
        ("answer", {"how": "lies"}),
        ("wait", {"seconds": 0.1}),
        ("publish", {"count": 1, "lost": 0}),
        ("wait", {"seconds": 0.1}),
        ("wait", {"seconds": 0.1}),
        ("wait", {"seconds": 10.1}),
        ("answer", {"how": "lies"}),
    ],
    "a stray batch between what was heard and what the endpoint made up": [
        ("wait", {"seconds": 0.1}),
        ("wait", {"seconds": 0.1}),
        ("publish", {"count": 2, "lost": 0}),
        ("wait", {"seconds": 10.1}),
        ("answer", {"how": "lies later"}),
        ("stray", {"pick": 0}),
    ],
    "two strays wait, and the later one has the lower number": [
        ("publish", {"count": 1, "lost": 1}),
        ("wait", {"seconds": 1.1}),
        ("wait", {"seconds": 1.1}),
        ("publish", {"count": 1, "lost": 0}),
        ("publish", {"count": 1, "lost": 0}),
        ("publish", {"count": 3, "lost": 0}),
        ("wait", {"seconds": 10.1}),
        ("stray", {"pick": 82}),
        ("publish", {"count": 1, "lost": 0}),
        ("stray", {"pick": 3}),
    ],
}


@pytest.mark.parametrize("steps", FOUND_ONCE.values(), ids=FOUND_ONCE)
def test_disputes_that_were_lost_once(steps: list[tuple[str, dict[str, Any]]]) -> None:
    machine = DisputeMachine()
    machine.begin(has_replay=True)
    for name, values in steps:
        getattr(machine, name)(**values)
    machine.teardown()
