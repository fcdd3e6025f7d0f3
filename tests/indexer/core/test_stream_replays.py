"""Gaps, and replays of every kind: mute, endless, of garbage, of others; and recorded ones."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.core import cursor as cursor_module
from indexer.core.cursor import Cursor, SequenceVerdict
from indexer.types import StreamLimits, WorkerRank
from tests.indexer.core.streams import LIMITS, Bench, batch, tokens
from tests.indexer.encoding import encode_batch, reply, stored
from tests.indexer.golden import golden

# -- gaps ----------------------------------------------------------------------------------------


def test_the_past_is_that_of_who_repeats_what_we_have_heard() -> None:
    """The endpoint of another engine, and no rank is named: nothing else can tell."""
    bench = Bench()
    bench.live(2)
    bench.reply(*range(2), engine="new")
    bench.live(3)
    assert bench.blocks() == {2, 3}, "nobody waits for that"
    bench.reply(2, engine="new")
    assert bench.blocks(engine="new") == set()
    assert bench.blocks() == {2, 3}, "what came live stays"
    assert (bench.asked(), bench.stream.has_replay) == (None, False)
    assert (bench.state(), bench.stream.lost_batches) == ("uncertain", 2)
    assert bench.outcomes == {"complete": 1, "other_engine": 1}
    bench.live(4)
    assert bench.blocks() == {2, 3, 4}


@pytest.mark.parametrize(
    "witness", ["same", "later", "end", "garbage", "frames", "none", "reconnect"]
)
def test_a_past_that_nobody_contradicts_is_believed(witness: str) -> None:
    bench = Bench()
    bench.live(2)
    bench.reply(*range(2))
    assert bench.asked() == 0
    if witness == "reconnect":
        bench.stream.on_reconnect(bench.now)
        assert bench.asked() == 2
        bench.reply(2)
        bench.end()
    elif witness == "end":
        bench.end()
    elif witness == "garbage":
        bench.reply(2, b"\xc1garbage")
    elif witness == "frames":
        bench.stream.on_replay([b""], bench.now)
    elif witness == "none":
        assert bench.stream.due(bench.now) == 1.0
        bench.wait(1.1)
    else:
        bench.reply(2 if witness == "same" else 3)
    assert bench.asked() is None
    bench.reply(2, engine="new")
    assert bench.blocks() == {0, 1, 2}
    assert (bench.state(), bench.stream.has_replay) == ("current", True)


def test_the_buffer_begins_later() -> None:
    bench = Bench()
    bench.live(0, 8)
    bench.reply(5, 6, 7)
    assert bench.blocks() == {0, 5, 6, 7, 8}
    assert (bench.state(), bench.stream.lost_batches) == ("uncertain", 4)


def test_a_hole_that_stays_is_given_up() -> None:
    bench = Bench()
    bench.live(0, 6)
    for _ in range(2):
        request = bench.stream.request
        for seq in (0, 4, 5):
            if bench.stream.request is request:
                bench.reply(seq)
    assert bench.asked() is None
    assert bench.blocks() == {0, 4, 5, 6}
    assert bench.stream.lost_batches == 3


def test_an_end_that_comes_early_is_not_believed() -> None:
    bench = Bench()
    bench.live(0, 4)
    bench.reply(0, 1)
    bench.end()
    assert bench.asked() == 1
    bench.reply(1)
    bench.end()
    bench.reply(1)
    bench.end()
    assert bench.asked() is None
    assert bench.blocks() == {0, 1, 4}
    assert bench.stream.lost_batches == 2


def test_a_batch_nobody_can_read_is_lost_but_not_asked_for_forever() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(1, b"garbage")
    bench.live(2)
    assert bench.asked() == 0
    bench.reply(0)
    bench.reply(1, b"garbage")
    assert bench.asked() is None
    assert bench.blocks() == {0, 2}
    assert bench.stream.lost_batches == 1


# -- replay endpoints that waste our time --------------------------------------------------------


def test_a_mute_endpoint_does_not_stop_live_batches() -> None:
    bench = Bench()
    bench.live(0, 2, 3)
    bench.wait(1.1, 1.1)
    assert bench.blocks() == {0, 2, 3}
    assert bench.outcomes == {"silent": 1}
    bench.live(5)  # and it is left alone for a while
    assert bench.asked() is None
    assert 5 in bench.blocks()
    bench.wait(5.1)
    bench.live(7)
    assert bench.asked() == 5
    bench.wait(1.1, 1.1, 5.1)
    bench.live(9)
    assert bench.asked() is None, "each failure doubles the pause"


def test_a_replay_of_garbage_is_given_up() -> None:
    bench = Bench()
    bench.live(0, 3)
    for frames in [[], [b""], [b"", b"12", b"x"], [b"", b"\xff" * 8, b"x"]] * 6:
        bench.stream.on_replay(frames, 0.0)
    assert bench.blocks() == {0, 3}
    assert bench.stream.tallies.bad_messages == {"replay": 21}


def test_too_many_replies_or_bytes_end_a_replay() -> None:
    for limits in (StreamLimits(replay_replies_max=3), StreamLimits(replay_bytes_max=600)):
        bench = Bench(limits=limits)
        bench.live(0, 9)
        bench.reply(*range(9))
        assert bench.outcomes == {"budget": 1}
        assert 9 in bench.blocks()


def test_a_slow_drip_ends_at_the_deadline() -> None:
    bench = Bench(limits=StreamLimits(replay_deadline_s=3.0))
    bench.live(0, 20)
    for seq in range(5):
        bench.wait(0.7)
        bench.reply(seq)
    assert bench.outcomes == {"deadline": 1}
    assert {0, 20} <= bench.blocks()


def test_sequences_far_above_the_live_one_do_not_carry_the_cursor_away() -> None:
    bench = Bench()
    bench.live(0, 3)
    bench.reply(10**9)
    assert bench.blocks() == {0, 3}
    bench.live(4)
    assert bench.blocks() == {0, 3, 4}
    assert bench.stream.cursor.last == 4


def test_a_poll_that_lies_is_found_out_by_the_next_live_batch() -> None:
    bench = Bench()
    bench.wait(0, 10.1)
    assert bench.asked() == 0
    bench.reply(10**9)
    bench.end()
    bench.live(0, 1)
    assert bench.asked() == 0, "and is it the engine's voice that we hear?"
    bench.reply(0)
    assert bench.blocks() == {0, 1}


def test_what_only_replays_bring_is_remembered_within_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that says nothing more while its replays go on, for days: it is hostile, or cut."""
    most = 5 * cursor_module.REMEMBERED
    monkeypatch.setattr(cursor_module, "UNCONFIRMED_MAX", most)
    cursor = Cursor()
    cursor.advance(0, 7, live=True)
    last = 3 * most
    for seq in range(1, last + 1):
        cursor.advance(seq, seq, live=False)
        assert len(cursor._digests) <= most + cursor_module.REMEMBERED
    assert cursor.judge(0, 7) is SequenceVerdict.STALE
    copies = range(last - most + 1, last + 1)
    assert {cursor.judge(seq, seq) for seq in copies} == {SequenceVerdict.STALE}, (
        "may be on their way"
    )


@pytest.mark.parametrize("seq", [0, 2, 5, 2**63])
@pytest.mark.parametrize("lost", [False, True])
def test_garbage_is_no_evidence_whatever_number_it_bears(seq: int, lost: bool) -> None:
    bench = Bench()
    bench.live(0, 1, 2 + lost)
    bench.wait(1.1, 1.1, 10.1)
    assert bench.asked() == (0 if lost else 2)
    before = bench.blocks()
    bench.reply(seq, b"\xc1garbage")
    bench.wait(1.1, 1.1)
    assert bench.blocks() == before
    assert bench.stream.lost_batches == int(lost)
    bench.live(4 if lost else 3)
    assert bench.stream.tallies.restarts == bench.stream.tallies.hidden_restarts == 0


@pytest.mark.parametrize("seq", [0, 10**9])
def test_live_garbage_during_a_replay_costs_itself(seq: int) -> None:
    bench = Bench()
    bench.live(0, 2)
    bench.live(seq, b"\xc1garbage")
    bench.live(3)
    bench.reply(0, 1)
    assert bench.blocks() == {0, 1, 2, 3}
    assert bench.stream.tallies.restarts == bench.stream.lost_batches == 0
    assert bench.stream.tallies.bad_messages == {"payload": 1}


def test_wrong_order_loses_no_live_batch() -> None:
    bench = Bench()
    bench.live(0, 6)
    bench.reply(5, 4, 3, 2, 1)
    bench.live(7)
    assert {0, 6, 7} <= bench.blocks()


def test_the_backlog_is_bounded() -> None:
    for limits in (LIMITS, StreamLimits(backlog_bytes_max=5_000)):
        bench = Bench(limits=limits)
        bench.live(0, *range(2, 60))
        assert bench.outcomes == {"backlog_full": 1}
        assert bench.blocks() == {0, *range(2, 60)}
        assert bench.stream.lost_batches == 1
        bench.live(61)  # no fault of the endpoint: it is asked again
        assert bench.asked() == 59


def test_a_full_backlog_with_holes_stays_bounded() -> None:
    bench = Bench(limits=StreamLimits(backlog_bytes_max=400))
    bench.live(0)
    for seq in range(2, 60, 2):  # a hole before each
        bench.live(seq, encode_batch([stored([seq + 1], tokens(seq))] * (1 + seq % 4)))
    assert bench.stream.backlog.bytes <= 400


def test_another_ranks_replay_is_refused() -> None:
    bench = Bench()
    bench.live(0, rank=0)
    bench.live(2, rank=0)
    bench.reply(0, batch(0, engine="new", rank=1))
    assert bench.outcomes == {"wrong_rank": 1}
    assert bench.blocks() == {0, 2}, "the state is not the endpoint's to drop"
    assert not bench.stream.has_replay
    bench = Bench()
    bench.live(1)
    bench.reply(0, rank=1)
    assert bench.blocks() == {1}
    assert bench.blocks(rank=WorkerRank(1, 1)) == set()


def test_another_ranks_past_does_not_take_the_place_of_ours() -> None:
    bench = Bench()
    bench.live(0, rank=0)
    bench.live(2, rank=0)
    bench.wait(1.1, 1.1, 10.1)
    assert bench.asked() == 0
    bench.reply(0, batch(0, engine="new", rank=1))
    assert bench.outcomes == {"silent": 1, "wrong_rank": 1}
    assert bench.blocks() == {0, 2}


def test_an_empty_reply_is_no_evidence_of_another_engine() -> None:
    bench = Bench()
    bench.live(0)
    bench.wait(10.1)
    assert bench.asked() == 0
    bench.stream.on_replay(reply(7, b""), bench.now)
    assert bench.blocks() == {0}
    assert bench.asked() is None


def test_a_rank_the_engine_uses_live_may_be_replayed() -> None:
    bench = Bench()
    bench.live(0, rank=9)
    bench.live(2, rank=9)
    bench.reply(0, rank=9)
    bench.reply(1, rank=9)
    assert bench.blocks() == {0, 1, 2}


# -- what engines really replied -----------------------------------------------------------------


REPLAYS = [r for r in golden("events/replay_frames.json") if r["client"] == "dealer"]


@pytest.mark.parametrize(
    "record", REPLAYS, ids=lambda r: f"{r['engine']}-{r['version']}{r['args']}"
)
def test_recorded_replays(record: dict[str, Any]) -> None:
    live = [[bytes.fromhex(frame) for frame in frames] for frames in record["live_frames"]]
    replies = [[bytes.fromhex(frame) for frame in frames] for frames in record["replay_from_0"]]
    whole = Bench()
    for frames in live:
        whole.stream.on_live(frames, 0.0)
    bench = Bench()
    bench.stream.on_live(live[-1], 0.0)  # everything before was missed
    assert bench.asked() == 0
    for frames in replies:
        bench.stream.on_replay(frames, 0.0)
        bench.stream.check()
    assert bench.asked() is None
    if record["args"]:  # a buffer of three batches
        assert bench.stream.lost_batches == 3
    else:
        assert bench.state() == "current"
        assert bench.index.counts == whole.index.counts
