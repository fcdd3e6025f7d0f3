"""A rebuild from batch 0 replaces nothing before it has proven to be right."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from tests.indexer.core.streams import LIMITS, Bench


def uncertain(**options: Any) -> Bench:
    """A stream that has lost batch 1, and whose endpoint is asked for everything from batch 0."""
    bench = Bench(**options)
    bench.live(0, 2)
    bench.wait(1.1, 1.1, 10.1)
    assert (bench.asked(), bench.state()) == (0, "uncertain")
    return bench


def test_a_rebuild_that_repeats_the_true_beginning_for_ever_takes_nothing() -> None:
    bench = uncertain()
    for number in range(60):
        if bench.asked() is None:
            break
        bench.reply(0)
        if number == 5:
            bench.live(3)
        assert {0, 2} <= bench.blocks()
    assert bench.outcomes == {"silent": 1, "garbage": 1}
    assert (bench.blocks(), bench.stream.lost_batches) == ({0, 2, 3}, 1)
    assert bench.stream.cursor.last == 3


def test_a_rebuild_that_goes_on_with_another_engine_is_refused_at_what_was_heard() -> None:
    bench = uncertain()
    bench.reply(0)
    bench.reply(*range(1, 50), engine="new")
    assert bench.blocks() == {0, 2}
    assert bench.blocks(engine="new") == set()
    assert bench.outcomes["other_engine"] == 1


def test_a_rebuild_that_never_reaches_what_is_known_is_given_up() -> None:
    bench = Bench(limits=structs.replace(LIMITS, replay_replies_max=10))
    bench.live(*range(30))
    assert bench.stream.reread(bench.now) == "asked"
    bench.reply(*range(30))
    assert bench.outcomes == {"budget": 1}
    assert (bench.blocks(), bench.state()) == (set(range(30)), "current")


def test_where_predictions_fail_the_copies_replace_what_was_heard() -> None:
    bench = Bench()
    bench.live(*range(5))
    assert bench.stream.reread(bench.now) == "asked"
    for seq in range(4):
        bench.reply(seq, engine="new")
        assert bench.blocks() == set(range(5))
    bench.reply(4)
    assert (bench.blocks(), bench.blocks(engine="new")) == ({4}, set(range(4)))
    assert bench.state() == "current"


def test_where_predictions_fail_the_same_engine_has_to_answer() -> None:
    bench = Bench()
    bench.live(*range(5))
    assert bench.stream.reread(bench.now) == "asked"
    bench.reply(*range(5), engine="new")
    assert (bench.blocks(), bench.blocks(engine="new")) == (set(range(5)), set())


def test_a_rebuild_keeps_no_more_than_its_bytes() -> None:
    bench = Bench(limits=structs.replace(LIMITS, rebuild_bytes_max=1_000))
    bench.live(*range(30))
    assert bench.stream.reread(bench.now) == "asked"
    for seq in range(30):
        bench.reply(seq)
        replay = bench.stream._replay
        assert replay is None or replay.staged_bytes <= 1_000
    assert bench.outcomes == {"budget": 1}
    assert (bench.blocks(), bench.state()) == (set(range(30)), "current")


def test_a_rebuild_has_its_time() -> None:
    bench = uncertain()
    for _ in range(60):
        if bench.asked() is None:
            break
        bench.reply(0)
        bench.wait(0.9)
        bench.reply(1)
    assert bench.blocks() == {0, 2}
    assert bench.asked() is None


def test_what_came_live_during_a_rebuild_is_applied_once_it_is_given_up() -> None:
    bench = uncertain()
    bench.reply(0)
    bench.live(*range(3, 60))
    assert bench.outcomes == {"silent": 1, "backlog_full": 1}
    assert bench.blocks() == {0, *range(2, 60)}


def test_a_rebuild_is_applied_in_turns() -> None:
    bench = Bench(limits=structs.replace(LIMITS, blocks_per_turn=16))
    bench.live(*range(40))
    assert bench.stream.reread(bench.now) == "asked"
    bench.reply(*range(40))
    turns = 0
    while bench.busy():
        before = len(bench.blocks())
        bench.stream.resume(bench.now)
        bench.stream.check()
        assert len(bench.blocks()) - before <= 3
        turns += 1
    assert turns > 10
    bench.end()
    assert (bench.blocks(), bench.state()) == (set(range(40)), "current")
    assert bench.stream.cursor.heard == 39, "all of it came live as well"


def test_a_new_connection_while_a_rebuild_is_applied() -> None:
    bench = Bench(limits=structs.replace(LIMITS, blocks_per_turn=16))
    bench.live(*range(40))
    assert bench.stream.reread(bench.now) == "asked"
    bench.reply(*range(40))
    assert bench.busy()
    bench.stream.on_reconnect(bench.now)
    while bench.busy():
        bench.stream.resume(bench.now)
        bench.stream.check()
    assert bench.asked() == 39, "whose voice is it?"
    bench.reply(39)
    bench.end()
    assert (bench.blocks(), bench.state()) == (set(range(40)), "current")


# -- the past of an engine that took the place of another ------------------------------------------


def replaced() -> Bench:
    """A stream whose endpoint contradicts what is held, and repeats what was just heard live."""
    bench = Bench()
    bench.live(*range(3))
    bench.live(5, engine="new")
    bench.reply(2, 5, engine="new")
    assert (bench.asked(), bench.state()) == (0, "uncertain")
    return bench


def test_an_endpoint_with_two_faces_takes_nothing() -> None:
    bench = replaced()
    bench.reply(*range(6), engine="third")
    assert bench.blocks() == {0, 1, 2}
    assert bench.blocks(engine="third") == set()
    assert bench.blocks(engine="new") == {5}
    assert bench.outcomes == {"other_engine": 1}


def test_a_past_that_ends_before_it_takes_nothing() -> None:
    bench = replaced()
    bench.reply(0, engine="new")
    bench.end()
    assert bench.asked() == 0, "replies may have been lost"
    bench.reply(0, engine="new")
    bench.end()
    assert bench.asked() is None
    assert (bench.blocks(), bench.blocks(engine="new")) == ({0, 1, 2}, {5})


def test_a_past_that_begins_later_is_taken_from_there() -> None:
    bench = replaced()
    bench.reply(3, engine="new")
    assert (bench.asked(), bench.blocks()) == (0, set())
    bench.reply(*range(3, 6), engine="new")
    bench.end()
    assert bench.blocks(engine="new") == {3, 4, 5}
    assert bench.stream.lost_batches == 3
