"""Another engine behind the same endpoint: seen, proven, and told from a repeat."""

from __future__ import annotations

import pytest

from indexer.types import EventLossPolicy
from tests.indexer.core.streams import LIMITS, Bench


def test_a_reconnect_asks_whose_voice_it_is() -> None:
    bench = Bench()
    bench.stream.on_reconnect(0.0)
    assert bench.asked() is None, "nothing is known that could be wrong"
    bench.live(*range(3))
    bench.stream.on_reconnect(0.0)
    request = bench.stream.request
    assert bench.asked() == 2
    bench.stream.on_reconnect(0.0)
    assert bench.stream.request is not request, "the first one went to nobody"
    bench.live(3)
    assert bench.blocks() == {0, 1, 2}, "contiguous, but perhaps by chance"
    bench.reply(2)
    assert bench.blocks() == {0, 1, 2, 3}
    assert bench.stream.tallies.hidden_restarts == 0


def test_a_proof_that_does_not_come_is_not_waited_for_long() -> None:
    for policy in EventLossPolicy:
        bench = Bench(on_event_loss=policy)
        bench.live(0)
        bench.stream.on_reconnect(0.0)
        bench.live(1)
        bench.wait(1.1, 1.1)
        kept = {0} if policy is EventLossPolicy.KEEP else set()
        assert bench.blocks() == kept | {1}
        assert bench.state() == "uncertain", "the numbers fit, but whose are they?"
        bench.stream.on_reconnect(bench.now)
        assert bench.asked() is None, "not at once again"
        bench.wait(LIMITS.replay_backoff_s + 0.1)
        assert bench.asked() == 0, "batch 1 came after the doubt and vouches for nothing before it"
        bench.reply(0, 1)
        bench.end()
        assert bench.blocks() == {0, 1}
        assert bench.state() == "current"


def test_a_proof_that_may_not_be_asked_for_yet_is_missing() -> None:
    """The endpoint was silent a moment ago; then comes a new connection, and the numbers fit."""
    bench = Bench()
    for seq in range(2):
        bench.live(seq)
    bench.wait(0)
    for seconds in (10.1, 1.1, 1.1):  # a poll, twice, and nobody answers
        bench.wait(seconds)
    assert (bench.outcomes, bench.state()) == ({"silent": 1}, "current"), "nothing contradicts us"
    bench.stream.on_reconnect(bench.now)
    bench.live(2, engine="new")
    assert (bench.asked(), bench.state()) == (None, "uncertain"), "whose is it?"
    assert bench.stream.due(bench.now) <= bench.now + LIMITS.replay_backoff_s
    bench.wait(LIMITS.replay_backoff_s)
    assert bench.asked() == 0
    for seq in range(3):
        bench.reply(seq, engine="new")
    assert (bench.blocks(), bench.blocks(engine="new")) == (set(), {0, 1, 2})
    assert bench.state() == "current"


def test_a_new_connection_ends_a_long_backoff() -> None:
    """An engine was away for long; then one comes whose numbers continue those of the old one."""
    bench = Bench()
    for seq in range(2):
        bench.live(seq)
    bench.wait(0)
    for _ in range(4):  # nobody answers: the pauses get longer
        bench.wait(LIMITS.poll_after_s + LIMITS.replay_backoff_max_s)
        bench.wait(1.1)
        bench.wait(1.1)
    assert bench.outcomes == {"silent": 4}
    bench.stream.on_reconnect(bench.now)
    bench.live(2, engine="new")
    assert (bench.asked(), bench.state()) == (None, "uncertain")
    bench.wait(LIMITS.replay_backoff_s)
    assert bench.asked() == 0
    for seq in range(3):
        bench.reply(seq, engine="new")
    assert (bench.blocks(), bench.blocks(engine="new")) == (set(), {0, 1, 2})
    assert bench.state() == "current"


@pytest.mark.parametrize("is_past_gone", [False, True])
def test_what_was_dropped_in_doubt_is_fetched_once_the_engine_has_proven_itself(
    is_past_gone: bool,
) -> None:
    bench = Bench(on_event_loss=EventLossPolicy.DROP)
    for seq in range(2):
        bench.live(seq)
    bench.stream.on_reconnect(bench.now)
    bench.wait(1.1)
    bench.wait(1.1)
    assert (bench.blocks(), bench.state()) == (set(), "uncertain")
    bench.stream.on_reconnect(bench.now)
    bench.wait(LIMITS.replay_backoff_s)
    first = 1 if is_past_gone else 0
    while bench.asked() is not None:
        assert bench.state() == "uncertain", "the blocks are not there"
        for seq in range(first, 2):
            bench.reply(seq)
        bench.end()
        bench.wait(0.1)
    assert bench.blocks() == (set() if is_past_gone else {0, 1})
    assert bench.state() == ("uncertain" if is_past_gone else "current")
    assert bench.stream.lost_batches == (2 if is_past_gone else 0)
    assert bench.stream.is_at_rest, "the next process may go on from here"


def test_last_words_behind_which_another_engine_goes_on_are_in_doubt() -> None:
    """Two restarts while the endpoint is mute: what the engine in between said is not believed."""
    bench = Bench()
    bench.live(0)
    bench.stream.on_reconnect(bench.now)
    bench.live(0, engine="new")
    bench.stream.on_reconnect(bench.now)
    bench.live(1, engine="third")
    bench.reply(0, engine="third")
    assert bench.asked() == 1, "does the endpoint at least repeat what has come since?"
    bench.wait(1.1)
    bench.wait(1.1)
    assert (bench.blocks(engine="new"), bench.blocks(engine="third")) == ({0}, {1})
    assert bench.state() == "uncertain"
    bench.wait(LIMITS.replay_backoff_s)
    assert bench.asked() == 0
    for seq in range(2):
        bench.reply(seq, engine="third")
    assert (bench.blocks(engine="new"), bench.blocks(engine="third")) == (set(), {0, 1})
    assert bench.state() == "current"


def test_a_buffer_that_has_moved_on_proves_nothing() -> None:
    for policy, kept in ((EventLossPolicy.KEEP, {0}), (EventLossPolicy.DROP, set())):
        bench = Bench(on_event_loss=policy)
        bench.live(0)
        bench.stream.on_reconnect(0.0)
        bench.reply(1, engine="new")
        bench.end()
        assert bench.blocks() == kept
        assert bench.blocks(engine="new") == {1}
        assert bench.state() == "uncertain"


def test_garbage_with_a_number_ends_no_wait_for_a_proof() -> None:
    bench = Bench()
    bench.live(0)
    bench.stream.on_reconnect(0.0)
    bench.live(0, engine="new")
    bench.reply(2, b"\x00")
    assert bench.asked() == 0
    bench.reply(0, engine="new")
    assert bench.asked() is None, "it repeats what waits, and nothing came before that"
    assert bench.blocks(engine="new") == {0}
    assert bench.blocks() == set()


def test_last_words_of_an_engine_that_is_gone_are_no_restart() -> None:
    bench = Bench()
    bench.live(0)
    bench.stream.on_reconnect(0.0)
    bench.live(0, 1, engine="new")
    bench.stream.on_reconnect(0.0)
    bench.live(3, engine="third")
    bench.reply(1, 2, 3, engine="third")
    bench.end()
    assert bench.asked() is None
    assert bench.blocks(engine="new") == set()
    assert bench.blocks(engine="third") == {1, 2, 3}
    assert bench.state() == "uncertain"


def test_what_waited_is_not_dropped_when_a_proven_engine_falls_silent() -> None:
    """Its replay breaks off behind a batch that is too long for us: no word on what comes after."""
    bench = Bench()
    bench.live(0)
    bench.live(2)  # heard before the news that the connection is back
    bench.stream.on_reconnect(0.0)
    bench.reply(0)
    bench.wait(1.1)
    bench.reply(0)
    bench.wait(1.1)
    assert not bench.stream.is_replaying
    assert bench.blocks() == {0, 2}
    assert bench.stream.lost_batches == 1
    assert bench.state() == "uncertain"


@pytest.mark.parametrize("policy", EventLossPolicy)
def test_a_restart_forgets_losses_under_both_policies(policy: EventLossPolicy) -> None:
    bench = Bench(has_replay=False, on_event_loss=policy)
    bench.live(0, 5)
    assert bench.state() == "uncertain"
    bench.live(0, engine="new")
    assert bench.state() == "current"
    assert bench.blocks(engine="new") == {0}


def test_a_restart_without_a_seam() -> None:
    bench = Bench()
    for seq in range(3):
        bench.live(seq)
    bench.stream.on_reconnect(0.0)
    bench.live(3, engine="new")
    bench.reply(2, engine="new")
    assert bench.asked() == 3, "does the endpoint at least repeat what has come since?"
    bench.reply(3, engine="new")
    assert bench.asked() == 0
    for seq in range(4):
        bench.reply(seq, engine="new")
    bench.end()
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {0, 1, 2, 3}
