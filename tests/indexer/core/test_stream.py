"""One stream: garbage, gaps, replays of every kind, restarts, loss."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.core.stream import EventStream
from indexer.types import EventLossPolicy, Namespace, Scope, StreamLimits, WorkerRank
from tests.indexer.encoding import (
    CLEARED,
    encode_batch,
    end_marker,
    message,
    removed,
    reply,
    stored,
)
from tests.indexer.golden import golden
from tests.indexer.naive_index import NaiveIndex

RANK = WorkerRank(1, 0)
LIMITS = StreamLimits(backlog_batches_max=50, replay_useless_max=20, replay_replies_max=500)


def tokens(number: int) -> list[int]:
    return [number * 16 + at for at in range(16)]


ENGINES = ("old", "new", "third")  # processes one after the other behind the same endpoint


def batch(number: int, *, engine: str = "old", rank: int | None = None) -> bytes:
    """Batch `number` stores block `number`; another engine writes other bytes."""
    ts = number + 0.1 * ENGINES.index(engine)
    shift = 5_000 * ENGINES.index(engine)
    return encode_batch([stored([number + 1], tokens(number + shift))], ts=ts, rank=rank)


class Bench:
    """A stream over the naive index, and short words for what tests do to it."""

    def __init__(self, *, has_replay: bool = True, **options: Any) -> None:
        self.index = NaiveIndex(16, is_eagle=options.pop("is_eagle", False))
        options.setdefault("limits", LIMITS)
        options.setdefault("worker_ranks", range(2))
        self.stream = EventStream(
            Scope("m", "t"),
            RANK,
            self.index,  # type: ignore[arg-type]
            has_replay=has_replay,
            **options,
        )
        self.now = 0.0

    def live(self, seq: int, payload: bytes | None = None, **kwargs: Any) -> None:
        self.stream.on_live(message(seq, payload or batch(seq, **kwargs)), self.now)
        self.stream.check()

    def reply(self, seq: int, payload: bytes | None = None, **kwargs: Any) -> None:
        self.stream.on_replay(reply(seq, payload or batch(seq, **kwargs)), self.now)
        self.stream.check()

    def end(self, frames: int = 4) -> None:
        self.stream.on_replay(end_marker(frames), self.now)
        self.stream.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.stream.on_timer(self.now)
        self.stream.check()

    def busy(self) -> bool:
        return self.stream.is_busy

    def state(self) -> str:
        return self.stream.kv_state

    def asked(self) -> int | None:
        return None if self.stream.request is None else self.stream.request.start

    def blocks(self, count: int = 60, *, engine: str = "old", rank: WorkerRank = RANK) -> set[int]:
        """Numbers of the batches whose block is held."""
        shift = 5_000 * ENGINES.index(engine)
        return {
            n for n in range(count) if self.index.row(rank, block_hashes(tokens(n + shift), 16))[0]
        }

    @property
    def outcomes(self) -> dict[str, int]:
        return self.stream.tallies.replays


# -- messages ------------------------------------------------------------------------------------


MALFORMED = golden("events/malformed.json")


@pytest.mark.parametrize("case", MALFORMED["cases"], ids=lambda case: case["name"])
def test_malformed(case: dict[str, Any]) -> None:
    bench = Bench(has_replay=False)
    bench.live(0)
    frames = [bytes.fromhex(frame) for frame in case["frames"]]
    bench.stream.on_live(frames, 0.0)
    while bench.busy():
        bench.stream.resume(0.0)

    def held(name: str) -> bool:
        return bench.index.row(RANK, block_hashes(MALFORMED[name], 16))[0] == 1

    applied = bench.stream.cursor.last == 1
    if case["expect"] == "drop_message":
        assert not applied
        assert sum(bench.stream.tallies.bad_messages.values()) == 1
    elif case["expect"] in ("accept", "skip_event"):
        assert applied
    if applied and case["has_good_marker"]:
        assert held("good_marker_tokens")
    flag = case["bad_block_should_be_indexed"]
    if case["expect"] != "implementation_defined" and flag is not None:
        assert held("bad_block_tokens") == flag
    bench.live(2)
    bench.live(3)
    assert {2, 3} <= bench.blocks()
    assert bench.stream.lost_batches == (0 if applied else 1)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"", b"", b""], [b"", b"123", b"x"]])
def test_wrong_frames_are_counted(frames: list[bytes]) -> None:
    bench = Bench()
    bench.stream.on_live(frames, 0.0)
    assert sum(bench.stream.tallies.bad_messages.values()) == 1
    bench.stream.on_replay(frames, 0.0)  # nobody asked


def test_the_end_marker_is_no_live_sequence() -> None:
    bench = Bench()
    bench.stream.on_live([b"", b"\xff" * 8, batch(0)], 0.0)
    bench.live(0)
    assert bench.asked() is None
    assert bench.blocks() == {0}


# -- ranks ---------------------------------------------------------------------------------------


def test_the_batch_knows_its_rank_better_if_the_worker_has_it() -> None:
    bench = Bench()
    bench.live(0, rank=1)
    bench.live(1, rank=7)
    bench.live(2, rank=0)
    assert bench.blocks(rank=WorkerRank(1, 1)) == {0}
    assert bench.blocks() == {1, 2}
    assert bench.stream.tallies.foreign_ranks == 1
    bench.live(0, engine="new")  # a restart forgets what the stream brought, wherever it went
    assert bench.blocks(rank=WorkerRank(1, 1)) == set()
    assert bench.blocks(engine="new") == {0}


# -- gaps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [3, 4])
def test_a_gap_is_mended_before_the_live_batch(frames: int) -> None:
    bench = Bench()
    bench.live(0)
    bench.live(3)
    assert (bench.asked(), bench.blocks()) == (0, {0})
    for seq in range(3):
        bench.stream.on_replay(reply(seq, batch(seq), frames), 0.0)
    assert (bench.asked(), bench.blocks()) == (None, {0, 1, 2, 3})
    assert bench.outcomes == {"complete": 1}
    assert bench.state() == "current"


def test_the_past_is_fetched_when_the_first_batch_is_not_number_0() -> None:
    bench = Bench()
    bench.live(2)
    assert bench.asked() == 0
    bench.reply(0)
    bench.live(3)
    bench.reply(1)
    assert bench.blocks() == {0, 1, 2, 3}
    assert bench.state() == "current"


def test_nothing_is_applied_twice() -> None:
    bench = Bench()
    for seq in (0, 3, 4, 4):
        bench.live(seq)
    for seq in range(6):  # the replay runs into live traffic
        bench.reply(seq)
    bench.live(5)
    bench.live(5)
    counts = bench.index.counts[RANK].values()
    assert list(counts) == [1] * 6
    assert bench.stream.tallies.stale_batches == 2


def test_the_buffer_begins_later() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(8)
    bench.reply(5)
    bench.reply(6)
    bench.reply(7)
    assert bench.blocks() == {0, 5, 6, 7, 8}
    assert (bench.state(), bench.stream.lost_batches) == ("uncertain", 4)


def test_a_replay_with_a_hole_is_asked_for_again() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(6)
    for seq in (0, 1, 2, 5):
        bench.reply(seq)
    assert bench.asked() == 2
    for seq in (2, 3, 4, 5):
        bench.reply(seq)
    assert bench.blocks() == {0, 1, 2, 3, 4, 5, 6}
    assert bench.state() == "current"


def test_a_hole_that_stays_is_given_up() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(6)
    for _ in range(2):
        request = bench.stream.request
        for seq in (0, 4, 5):
            if bench.stream.request is request:
                bench.reply(seq)
    assert bench.asked() is None
    assert bench.blocks() == {0, 4, 5, 6}
    assert bench.stream.lost_batches == 3


def test_a_replay_without_its_end_is_asked_for_again() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(4)
    bench.reply(0)
    bench.reply(1)
    bench.wait(1.1)
    assert bench.asked() == 1
    for seq in (1, 2, 3):
        bench.reply(seq)
    assert bench.blocks() == {0, 1, 2, 3, 4}


def test_an_end_that_comes_early_is_not_believed() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(4)
    bench.reply(0)
    bench.reply(1)
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
    bench.live(0)
    bench.live(2)
    bench.live(3)
    bench.wait(1.1)
    bench.wait(1.1)
    assert bench.blocks() == {0, 2, 3}
    assert bench.outcomes == {"silent": 1}
    bench.live(5)  # and it is left alone for a while
    assert bench.asked() is None
    assert 5 in bench.blocks()
    bench.wait(5.1)
    bench.live(7)
    assert bench.asked() == 5
    bench.wait(1.1)
    bench.wait(1.1)
    bench.wait(5.1)
    bench.live(9)
    assert bench.asked() is None, "each failure doubles the pause"


def test_an_endless_replay_is_given_up() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(3)
    for _ in range(30):
        bench.reply(0)
    assert bench.asked() is None
    assert bench.outcomes == {"garbage": 1}
    assert bench.blocks() == {0, 3}


def test_a_replay_of_garbage_is_given_up() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(3)
    for frames in [[], [b""], [b"", b"12", b"x"], [b"", b"\xff" * 8, b"x"]] * 6:
        bench.stream.on_replay(frames, 0.0)
    assert bench.blocks() == {0, 3}
    assert bench.stream.tallies.bad_messages == {"replay": 21}


def test_too_many_replies_or_bytes_end_a_replay() -> None:
    for limits in (StreamLimits(replay_replies_max=3), StreamLimits(replay_bytes_max=600)):
        bench = Bench(limits=limits)
        bench.live(0)
        bench.live(9)
        for seq in range(9):
            bench.reply(seq)
        assert bench.outcomes == {"budget": 1}
        assert 9 in bench.blocks()


def test_a_slow_drip_ends_at_the_deadline() -> None:
    bench = Bench(limits=StreamLimits(replay_deadline_s=3.0))
    bench.live(0)
    bench.live(20)
    for seq in range(5):
        bench.wait(0.7)
        bench.reply(seq)
    assert bench.outcomes == {"deadline": 1}
    assert {0, 20} <= bench.blocks()


def test_sequences_far_above_the_live_one_do_not_carry_the_cursor_away() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(3)
    bench.reply(10**9)
    assert bench.blocks() == {0, 3}
    bench.live(4)
    assert bench.blocks() == {0, 3, 4}
    assert bench.stream.cursor.last == 4


def test_a_poll_that_lies_is_found_out_by_the_next_live_batch() -> None:
    bench = Bench()
    bench.wait(0)
    bench.wait(10.1)
    assert bench.asked() == 0
    bench.reply(10**9)
    bench.end()
    bench.live(0)
    bench.live(1)
    assert bench.asked() == 0, "and is it the engine's voice that we hear?"
    bench.reply(0)
    assert bench.blocks() == {0, 1}


@pytest.mark.parametrize("seq", [0, 2, 5, 2**63])
@pytest.mark.parametrize("lost", [False, True])
def test_garbage_is_no_evidence_whatever_number_it_bears(seq: int, lost: bool) -> None:
    bench = Bench()
    for number in (0, 1, 2 + lost):
        bench.live(number)
    bench.wait(1.1)
    bench.wait(1.1)
    bench.wait(10.1)
    assert bench.asked() == (0 if lost else 2)
    before = bench.blocks()
    bench.reply(seq, b"\xc1garbage")
    bench.wait(1.1)
    bench.wait(1.1)
    assert bench.blocks() == before
    assert bench.stream.lost_batches == int(lost)
    bench.live(4 if lost else 3)
    assert bench.stream.tallies.restarts == bench.stream.tallies.hidden_restarts == 0


@pytest.mark.parametrize("seq", [0, 10**9])
def test_live_garbage_during_a_replay_costs_itself(seq: int) -> None:
    bench = Bench()
    bench.live(0)
    bench.live(2)
    bench.live(seq, b"\xc1garbage")
    bench.live(3)
    bench.reply(0)
    bench.reply(1)
    assert bench.blocks() == {0, 1, 2, 3}
    assert bench.stream.tallies.restarts == bench.stream.lost_batches == 0
    assert bench.stream.tallies.bad_messages == {"payload": 1}


def test_wrong_order_loses_no_live_batch() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(6)
    for seq in (5, 4, 3, 2, 1):
        bench.reply(seq)
    bench.live(7)
    assert {0, 6, 7} <= bench.blocks()


def test_the_backlog_is_bounded() -> None:
    for limits in (LIMITS, StreamLimits(backlog_bytes_max=5_000)):
        bench = Bench(limits=limits)
        bench.live(0)
        for seq in range(2, 60):
            bench.live(seq)
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
    bench.wait(1.1)
    bench.wait(1.1)
    bench.wait(10.1)
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


# -- restarts ------------------------------------------------------------------------------------


def test_a_restart_drops_the_state() -> None:
    bench = Bench()
    for seq in range(5):
        bench.live(seq)
    bench.live(0, engine="new")
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {0}
    assert bench.stream.tallies.restarts == 1


def test_a_restart_seen_late_fetches_what_was_missed() -> None:
    bench = Bench()
    for seq in range(5):
        bench.live(seq)
    bench.live(2, engine="new")
    assert bench.asked() == 0
    for seq in range(2):
        bench.reply(seq, engine="new")
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {0, 1, 2}


def test_a_repeat_is_no_restart() -> None:
    bench = Bench()
    for seq in (0, 1, 2, 0, 1, 2):
        bench.live(seq)
    assert bench.blocks() == {0, 1, 2}
    assert bench.stream.tallies.stale_batches == 3


def test_a_restart_hidden_by_the_number_is_seen_by_the_bytes() -> None:
    bench = Bench()
    for seq in range(3):
        bench.live(seq)
    bench.live(5, engine="new")
    assert bench.asked() == 2
    bench.reply(2, engine="new")
    assert bench.asked() == 0
    assert bench.blocks() == set()
    for seq in range(6):
        bench.reply(seq, engine="new")
    bench.end()
    assert bench.blocks(engine="new") == {0, 1, 2, 3, 4, 5}
    assert bench.stream.tallies.hidden_restarts == 1
    assert bench.state() == "current"


def test_a_reconnect_asks_whose_voice_it_is() -> None:
    bench = Bench()
    bench.stream.on_reconnect(0.0)
    assert bench.asked() is None, "nothing is known that could be wrong"
    for seq in range(3):
        bench.live(seq)
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


def test_a_restart_without_a_seam() -> None:
    bench = Bench()
    for seq in range(3):
        bench.live(seq)
    bench.stream.on_reconnect(0.0)
    bench.live(3, engine="new")
    bench.reply(2, engine="new")
    for seq in range(4):
        bench.reply(seq, engine="new")
    bench.end()
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {0, 1, 2, 3}


def test_a_proof_that_does_not_come_is_not_waited_for_long() -> None:
    for policy in EventLossPolicy:
        bench = Bench(on_event_loss=policy)
        bench.live(0)
        bench.stream.on_reconnect(0.0)
        bench.live(1)
        bench.wait(1.1)
        bench.wait(1.1)
        kept = {0} if policy is EventLossPolicy.KEEP else set()
        assert bench.blocks() == kept | {1}
        assert bench.state() == "uncertain", "the numbers fit, but whose are they?"
        bench.stream.on_reconnect(bench.now)
        assert bench.asked() is None, "not at once again"
        bench.wait(LIMITS.replay_backoff_s + 0.1)
        assert bench.asked() == 0, "batch 1 came after the doubt and vouches for nothing before it"
        bench.reply(0)
        bench.reply(1)
        bench.end()
        assert bench.blocks() == {0, 1}
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
    assert bench.asked() == 0, "from the beginning, the engine being another one"
    bench.reply(0, engine="new")
    bench.end()
    assert bench.blocks(engine="new") == {0}
    assert bench.blocks() == set()


def test_last_words_of_an_engine_that_is_gone_are_no_restart() -> None:
    bench = Bench()
    bench.live(0)
    bench.stream.on_reconnect(0.0)
    bench.live(0, engine="new")
    bench.live(1, engine="new")
    bench.stream.on_reconnect(0.0)
    bench.live(3, engine="third")
    for seq in (1, 2, 3):
        bench.reply(seq, engine="third")
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


def test_an_engine_that_does_not_know_our_last_batch_is_another_one() -> None:
    bench = Bench()
    for seq in range(3):
        bench.live(seq)
    bench.wait(0)
    bench.wait(10.1)
    assert bench.asked() == 2
    bench.end()
    assert bench.asked() == 0
    bench.reply(0, engine="new")
    bench.end()
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {0}


def test_a_restart_during_a_replay() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(4)
    bench.reply(0)
    bench.reply(1)
    bench.live(0, engine="new")
    assert bench.asked() is None
    assert bench.blocks() == set()
    assert bench.blocks(engine="new") == {0}
    assert bench.outcomes == {"superseded": 1}


@pytest.mark.parametrize("policy", EventLossPolicy)
def test_a_restart_forgets_losses_under_both_policies(policy: EventLossPolicy) -> None:
    bench = Bench(has_replay=False, on_event_loss=policy)
    bench.live(0)
    bench.live(5)
    assert bench.state() == "uncertain"
    bench.live(0, engine="new")
    assert bench.state() == "current"
    assert bench.blocks(engine="new") == {0}


# -- loss ----------------------------------------------------------------------------------------


def test_keep_keeps_and_says_so_until_a_clear() -> None:
    bench = Bench(has_replay=False)
    bench.live(0)
    bench.live(3)
    assert bench.blocks() == {0, 3}
    assert (bench.state(), bench.stream.lost_batches) == ("uncertain", 2)
    bench.live(4, encode_batch([CLEARED]))
    assert (bench.state(), bench.stream.lost_batches) == ("current", 0)
    assert bench.stream.tallies.lost_batches == 2


def test_a_clear_of_one_rank_of_two_proves_nothing() -> None:
    bench = Bench(has_replay=False)
    bench.live(0, rank=1)
    bench.live(3)
    bench.live(4, encode_batch([CLEARED]))
    assert bench.state() == "uncertain"


def test_a_clear_is_for_the_rank_that_the_batch_names() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(1, rank=1)
    bench.live(2, encode_batch([CLEARED], rank=1))
    assert bench.blocks() == {0}
    assert bench.blocks(rank=WorkerRank(1, 1)) == set()


def test_drop_lets_go_of_what_may_be_wrong() -> None:
    bench = Bench(has_replay=False, on_event_loss=EventLossPolicy.DROP)
    bench.live(0)
    bench.live(3)
    assert bench.blocks() == {3}


def test_joining_late_without_replay() -> None:
    bench = Bench(has_replay=False)
    bench.live(7)
    bench.live(8)
    assert bench.blocks() == {7, 8}
    assert bench.stream.lost_batches == 7


def test_a_rank_becomes_whole_again_when_the_whole_past_is_replayed() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(2)
    bench.wait(1.1)
    bench.wait(1.1)
    assert bench.state() == "uncertain"
    bench.wait(10.1)
    assert bench.asked() == 0
    for seq in range(3):
        bench.reply(seq)
    bench.end()
    assert bench.blocks() == {0, 1, 2}
    assert bench.state() == "current"


def test_an_answer_that_lost_its_beginning_is_not_a_past_that_is_gone() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(2)
    bench.wait(1.1)
    bench.wait(1.1)
    bench.wait(10.1)
    bench.reply(2)  # 0 and 1 were dropped on the way
    bench.wait(10.1)
    assert bench.asked() == 0
    for seq in range(3):
        bench.reply(seq)
    bench.end()
    assert bench.blocks() == {0, 1, 2}
    assert bench.state() == "current"


def test_a_past_that_is_gone_is_asked_for_twice() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(4)
    bench.reply(3)
    assert bench.state() == "uncertain"
    for told in (1, 2):
        bench.wait(10.1)
        assert bench.asked() == 0
        bench.reply(3)
        assert bench.asked() is None
        assert bench.outcomes["past_gone"] == told
    assert bench.blocks() == {0, 3, 4}
    bench.wait(10.1)
    assert bench.asked() == 4
    bench.reply(4)
    bench.end()
    bench.wait(10.1)
    bench.end()  # a buffer that has nothing at all: another engine
    assert bench.asked() == 0
    bench.end()
    assert bench.blocks() == set()


# -- silence -------------------------------------------------------------------------------------


def test_lost_last_batches_are_found_by_asking() -> None:
    bench = Bench()
    bench.live(0)
    bench.wait(9.9)
    assert bench.asked() is None
    bench.wait(0.2)
    assert bench.asked() == 0
    for seq in range(3):
        bench.reply(seq)
    bench.end()
    assert bench.blocks() == {0, 1, 2}
    bench.live(2)  # the live copy of what the replay brought
    bench.live(3)
    assert bench.blocks() == {0, 1, 2, 3}
    assert bench.stream.tallies.restarts == 0


def test_polling_can_be_off_and_waits_its_turn() -> None:
    bench = Bench(limits=StreamLimits(poll_after_s=0))
    bench.live(0)
    bench.wait(1_000)
    assert bench.asked() is None
    bench = Bench()
    bench.live(0)
    bench.now = 50.0
    bench.stream.on_timer(bench.now, may_poll=False)
    assert bench.asked() is None
    bench = Bench(has_replay=False)
    bench.live(0)
    bench.wait(1_000)
    assert bench.asked() is None


def test_a_live_batch_overtakes_a_poll() -> None:
    bench = Bench()
    bench.live(0)
    bench.wait(10.1)
    bench.live(1)
    assert bench.asked() is None
    assert bench.outcomes == {"overtaken": 1}
    bench.wait(10.1)
    bench.live(3)  # turns the poll into the mending of a gap
    assert bench.blocks() == {0, 1}
    bench.reply(1)
    bench.reply(2)
    assert bench.blocks() == {0, 1, 2, 3}


def test_a_rebuild_goes_on_after_silence() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(2)
    bench.wait(1.1)
    bench.wait(1.1)
    bench.wait(10.1)
    bench.reply(0)
    bench.live(3)
    bench.wait(1.1)
    assert bench.asked() == 0
    for seq in range(3):
        bench.reply(seq)
    assert bench.blocks() == {0, 1, 2, 3}
    assert bench.state() == "current"


def test_an_engine_is_not_silent_while_its_last_words_are_written() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(3)
    request = bench.stream.request
    bench.reply(0)
    many = list(range(100, 4_100))
    bench.reply(1, encode_batch([stored(many, [t % 977 for t in range(16 * 4_000)])], ts=1.0))
    for _ in range(3):
        bench.wait(1.1)
        assert bench.busy()
        assert bench.stream.request is request
    bench.reply(2)
    assert bench.outcomes == {"complete": 1}


def test_a_rebuild_from_an_empty_buffer_changes_nothing() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(2)
    bench.wait(1.1)
    bench.wait(1.1)
    bench.wait(10.1)
    bench.end()
    assert bench.blocks() == {0, 2}


# -- a doubtful index is read again -----------------------------------------------------------


def test_it_is_read_again_while_the_engine_goes_on() -> None:
    bench = Bench()
    for seq in range(3):
        bench.live(seq)
    assert bench.stream.reread(bench.now) == "asked"
    assert bench.stream.reread(bench.now) == "later"
    assert bench.asked() == 0
    bench.live(3)
    bench.live(4)
    assert bench.blocks() == {0, 1, 2}, "what is held goes when there is something in its place"
    true = encode_batch([stored([9], tokens(9))], ts=0.0)
    bench.reply(0, true)
    assert bench.blocks() == {9}
    for seq in range(1, 5):
        bench.reply(seq)
    bench.end()
    assert bench.blocks() == {9, 1, 2, 3, 4}
    assert bench.state() == "current"
    assert bench.outcomes == {"complete": 1}
    bench.live(5)
    assert bench.blocks() == {9, 1, 2, 3, 4, 5}


def test_a_busy_stream_that_cannot_be_read_again_is_not_held_back_for_ever() -> None:
    bench = Bench()
    bench.live(0)
    assert bench.stream.reread(bench.now) == "asked"  # of a mute endpoint
    for seq in range(1, 60):
        bench.live(seq)
    assert bench.outcomes == {"backlog_full": 1}
    assert bench.blocks() == set(range(60)), "nothing is lost"
    assert bench.stream.reread(bench.now) == "later", "not the next moment again"
    assert not bench.stream.is_replaying


def test_whoever_cannot_be_read_again_keeps_what_it_has_and_goes_on() -> None:
    mute = Bench()
    mute.live(0)
    assert mute.stream.reread(mute.now) == "asked"
    mute.live(1)
    for _ in range(4):
        mute.wait(1.1)
    assert mute.blocks() == {0, 1}
    assert mute.state() == "current"
    assert mute.stream.reread(mute.now) == "later", "the endpoint is left alone for a while"
    gone = Bench()
    gone.live(0)
    for seq in (4, 5):  # the engine's buffer begins behind batch 0
        gone.now += 100.0
        assert gone.stream.reread(gone.now) == "asked"
        gone.live(seq - 3)
        gone.reply(seq)
        assert gone.blocks() == set(range(seq - 2))
    gone.now += 100.0
    assert gone.stream.reread(gone.now) == "past_gone"
    gone.stream.forget_blocks()
    assert gone.blocks() == set()
    gone.live(3)
    assert gone.blocks() == {3}
    assert Bench(has_replay=False).stream.reread(0.0) == "no_replay"


def test_what_brought_a_neighbours_blocks_is_not_read_again() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(1, batch(1, rank=1))
    assert bench.stream.reread(bench.now) == "shared"
    assert bench.stream.request is None


def offset(bench: Bench) -> float | None:
    return bench.stream.delivery_offset_s


def test_how_late_batches_come_is_known_of_live_ones_only() -> None:
    bench = Bench()
    assert offset(bench) is None
    bench.now = 50.0
    bench.live(0, encode_batch([stored([1], tokens(0))], ts=40.0))
    assert offset(bench) == 10.0
    bench.now = 60.0
    bench.live(1, encode_batch([stored([2], tokens(1))], ts=45.0))
    assert offset(bench) == 15.0
    bench.wait(0.1)
    bench.wait(10.1)
    bench.reply(1, encode_batch([stored([2], tokens(1))], ts=45.0))
    bench.reply(2, encode_batch([stored([3], tokens(2))], ts=70.0))
    assert offset(bench) is None


# -- slices --------------------------------------------------------------------------------------


def test_a_long_batch_is_applied_in_slices_and_in_order() -> None:
    bench = Bench()
    many = list(range(1, 2_001))
    flat = [t % 1000 for t in range(16 * 2_000)]
    bench.live(0, encode_batch([stored(many, flat), removed([2_000]), stored([1], tokens(1))]))
    assert bench.busy()
    bench.live(1, encode_batch([removed(many[:-1])]))
    turns = 0
    while bench.busy():
        bench.stream.resume(0.0)
        turns += 1
    assert 2 <= turns <= 9
    assert {c for c in bench.index.counts[RANK].values() if c} == {1}, "only the second copy of 1"
    bench.stream.check()


def test_a_rank_that_leaves_while_its_batch_is_written() -> None:
    index = KvIndex(16)
    stream = EventStream(
        Scope("m", "t"),
        RANK,
        index,
        worker_ranks=range(2),
        has_replay=False,
        limits=StreamLimits(blocks_per_turn=64),
    )
    long = stored(list(range(1, 2_001)), [at % 977 for at in range(32_000)])
    stream.on_live(message(0, encode_batch([long], rank=1)), 0.0)
    busy = [stream.is_busy]
    index.detach(WorkerRank(1, 1))
    stream.worker_ranks = range(1)
    stream.resume(0.0)
    assert [*busy, stream.is_busy] == [True, False]
    assert index.slot_of(WorkerRank(1, 1)) is None
    stream.on_live(message(1, batch(1)), 0.0)
    assert index.stats.holdings[0] == 1
    while index.sweep(100):
        pass
    index.check()


def test_a_listener_that_never_resumes_cannot_fill_the_memory() -> None:
    bench = Bench()
    flat = [t % 1000 for t in range(16 * 1_000)]
    for seq in range(80):
        base = seq * 1_000
        bench.live(seq, encode_batch([stored(list(range(base + 1, base + 1_001)), flat)]))
        bench.live(seq)  # a copy or not: it must queue behind
    assert len(bench.stream.backlog) <= LIMITS.backlog_batches_max


@pytest.mark.parametrize("repeated", [900, 5_000])
def test_a_name_twice_in_a_long_event(repeated: int) -> None:
    bench = Bench()
    flat = [t % 1000 for t in range(16 * 1_000)]
    names = [*range(999), repeated if repeated < 999 else 5]
    bench.live(0, encode_batch([stored(names, flat, 5_000)]))
    assert bench.stream.tallies.events == {("stored", "map", "duplicate_hash"): 1}


def test_a_closed_stream_is_deaf_and_leaves_nothing() -> None:
    bench = Bench()
    bench.live(0)
    bench.live(2)
    bench.stream.close()
    bench.stream.close()
    assert bench.asked() is None
    bench.stream.on_live(message(1, batch(1)), 0.0)
    bench.stream.on_replay(reply(0, batch(0)), 0.0)
    bench.stream.on_timer(99.0)
    assert bench.blocks() == set()


# -- what events mean ----------------------------------------------------------------------------


def outcome(event: dict[str, Any], **options: Any) -> str:
    bench = Bench(**options)
    bench.live(0, encode_batch([event]))
    ((_, _, found),) = bench.stream.tallies.events
    return found


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (stored([1], tokens(0)), "applied"),
        (stored([1], tokens(0), locality="REMOTE"), "remote"),
        (removed([1], locality="remote"), "remote"),
        (stored([1], tokens(0), medium="TAPE"), "unknown_medium"),
        (removed([1], medium="TAPE"), "unknown_medium"),
        (stored([1], tokens(0), kv_cache_spec_kind="mamba"), "other_group"),
        (stored([1], tokens(0), kv_cache_spec_kind="mla_attention"), "applied"),
        (stored([1], tokens(0), kv_cache_spec_kind="sink_full_attention"), "applied"),
        (stored([1], tokens(0), group_idx=1), "other_group"),
        (removed([1], group_idx=1), "other_group"),
        (stored([], []), "empty"),
        (stored([1], []) | {"block_size": 0}, "placeholder"),
        (stored([1], tokens(0), lora_id=1), "nameless_adapter"),
        (stored([1], tokens(0) * 2) | {"block_size": 32}, "other_block_size"),
        (stored([1, 2], tokens(0)), "token_count"),
        (stored([1, 1], tokens(0) * 2), "duplicate_hash"),
        (stored([1], tokens(0), 1), "duplicate_hash"),
        (stored([1], [*tokens(0)[1:], 1 << 32]), "malformed"),
        ({"type": "Ignored"}, "no_op"),
        ({"type": "Else"}, "unknown_tag"),
        (CLEARED, "applied"),
    ],
)
def test_outcomes(event: dict[str, Any], expected: str) -> None:
    assert outcome(event) == expected


def test_groups_are_remembered_until_a_restart() -> None:
    bench = Bench()
    kinds = [stored([1], tokens(0), group_idx=1, kv_cache_spec_kind="full_attention")]
    kinds += [stored([2], tokens(1), group_idx=1), removed([1], group_idx=1)]
    kinds += [stored([9], tokens(3), group_idx=0, kv_cache_spec_kind="mamba"), removed([9])]
    bench.live(0, encode_batch(kinds))
    assert bench.blocks() == {1}
    events = bench.stream.tallies.events
    assert events["stored", "map", "applied"] == 2
    assert events["removed", "map", "applied"] == 1
    assert events["removed", "map", "other_group"] == 1
    bench.live(0, encode_batch([stored([1], tokens(0), group_idx=1)], ts=2.0))
    assert bench.blocks() == set()


def test_only_so_many_groups_are_remembered() -> None:
    bench = Bench()
    events = [
        stored([1], tokens(0), group_idx=group, kv_cache_spec_kind="full_attention")
        for group in range(100)
    ]
    bench.live(0, encode_batch([*events, removed([1], group_idx=99), removed([1], group_idx=1)]))
    while bench.busy():
        bench.stream.resume(0.0)
    assert bench.stream.tallies.events["removed", "map", "other_group"] == 1


def test_a_child_inherits_what_it_does_not_say() -> None:
    bench = Bench()
    root = stored([1], tokens(0), lora_name="a", extra_keys=[["a", "s"]])
    child = stored([2], tokens(1), 1, lora_name="a", extra_keys=[["a"]])
    bench.live(0, encode_batch([root, child, stored([3], tokens(2), 2)]))
    bench.live(1, encode_batch([stored([4], tokens(0), cache_salt="t")]))
    flat = tokens(0) + tokens(1) + tokens(2)
    full = block_hashes(flat, 16, namespace=Namespace("a", "s"))
    assert bench.index.row(RANK, full)[0] == 3
    assert bench.index.row(RANK, block_hashes(flat, 16))[0] == 0
    assert bench.index.row(RANK, block_hashes(flat, 16, namespace=Namespace("", "t")))[0] == 1


def test_pages_of_pairs_hash_like_windows() -> None:
    bench = Bench(is_eagle=True)
    flat = list(range(33))
    pairs = [[flat[at], flat[at + 1]] for at in range(32)]
    bench.live(0, encode_batch([stored([1, 2], pairs)]))
    assert bench.index.row(RANK, block_hashes(flat, 16, is_eagle=True))[0] == 2


def test_embeddings_match_nothing_but_carry_on_the_chain() -> None:
    bench = Bench()
    event = stored([1, 2], tokens(0) + tokens(1), extra_keys=[None, [b"digest"]])
    bench.live(0, encode_batch([event, stored([3], tokens(2), 2)]))
    flat = tokens(0) + tokens(1) + tokens(2)
    assert bench.index.row(RANK, block_hashes(flat, 16))[0] == 1
    assert len(bench.index.chains[RANK][3]) == 3


def test_lag_is_told_where_it_is_plausible() -> None:
    bench = Bench()
    assert bench.stream.lag(1_000.0) is None
    bench.live(0, encode_batch([], ts=1_000.0))
    assert bench.stream.lag(1_002.5) == 2.5
    assert bench.stream.lag(999.0) == 0.0
    assert bench.stream.lag(1e9) is None


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
