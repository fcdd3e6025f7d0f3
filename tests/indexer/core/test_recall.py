"""A stream that comes back with the blocks of an earlier life: what proves, what denies them."""

from __future__ import annotations

import pytest

from indexer.core.hashing import block_hashes
from indexer.core.index import KvIndex
from indexer.types import EventLossPolicy, StreamLimits, Tier, WorkerRank
from tests.indexer.core.streams import batch, stream_of, tokens
from tests.indexer.encoding import (
    CLEARED,
    encode_batch,
    end_marker,
    message,
    removed,
    reply,
    stored,
)

RANK = WorkerRank(1, 0)
LIMITS = StreamLimits(backlog_batches_max=50, recall_wait_s=100.0)


class Life:
    """A stream over a real index; `Life(of)` has frozen what `of` had and thawed it."""

    def __init__(
        self,
        of: Life | None = None,
        *,
        has_replay: bool = True,
        policy: EventLossPolicy = EventLossPolicy.KEEP,
    ) -> None:
        self.index = KvIndex(16)
        self.stream = stream_of(
            self.index,
            worker_ranks=range(2),
            has_replay=has_replay,
            on_event_loss=policy,
            limits=LIMITS,
        )
        self.now = 0.0
        if of is not None:
            assert of.stream.is_at_rest
            thaw = self.index.thaw(RANK, of.index.holder(RANK).home)
            for run in of.index.freeze(RANK):
                thaw.add(run)
            self.stream.recall(of.stream.memory(), self.now)
            self.check()

    def live(self, *numbers: int, engine: str = "old") -> None:
        for number in numbers:
            self.say(number, batch(number, engine=engine))

    def say(self, number: int, payload: bytes) -> None:
        self.stream.on_live(message(number, payload), self.now)
        self.check()

    def reply(self, *numbers: int, engine: str = "old") -> None:
        for number in numbers:
            self.stream.on_replay(reply(number, batch(number, engine=engine)), self.now)
            self.check()

    def end(self) -> None:
        self.stream.on_replay(end_marker(4), self.now)
        self.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.stream.on_timer(self.now)
        self.check()

    def check(self) -> None:
        self.stream.check()
        self.index.check()
        if self.stream.is_unproven:
            assert self.shown() == set()
            assert not list(filter(None, self.index.dump()))

    def shown(self, engine: str = "old") -> set[int]:
        shift = 0 if engine == "old" else 5_000
        return {
            n
            for n in range(60)
            if self.index.find_matches(block_hashes(tokens(n + shift), 16)).rows()
        }

    @property
    def recalls(self) -> dict[str, int]:
        return self.stream.tallies.recalls

    @property
    def asked(self) -> int | None:
        return None if self.stream.request is None else self.stream.request.start


def first_life(count: int = 5, *, has_replay: bool = True) -> Life:
    life = Life(has_replay=has_replay)
    life.live(*range(count))
    return life


def test_a_connection_that_breaks_is_no_proof_of_another_engine() -> None:
    """Something else may listen there until the engine has started; silence is what counts."""
    life = Life(first_life())
    assert not life.stream.on_broken_replay(life.now)
    assert life.stream.is_unproven
    life.wait(2.0)
    assert life.asked == 4, "asked again"
    life.reply(4)
    life.end()
    assert life.recalls == {"credited": 1}
    assert not life.stream.on_broken_replay(life.now), "nothing was asked"


def test_the_same_engine_is_credited_when_all_is_applied() -> None:
    life = Life(first_life())
    assert life.asked == 4, "from the last batch, to compare it"
    life.reply(4, 5)
    assert life.shown() == set(), "more may come"
    life.say(6, encode_batch([removed([1])]))
    assert life.shown() == {1, 2, 3, 4, 5}
    assert life.recalls == {"credited": 1}
    assert life.stream.kv_state == "current"


def test_the_end_of_the_replay_is_proof_when_nothing_new_has_come() -> None:
    life = Life(first_life())
    assert life.stream.kv_state == "uncertain"
    life.reply(4)
    life.end()
    assert life.shown() == {0, 1, 2, 3, 4}
    assert life.asked is None
    life.live(5)
    assert 5 in life.shown()


def test_a_silent_engine_is_asked_again_while_nothing_waits() -> None:
    life = Life(first_life())
    first = life.stream.request
    life.wait(1.5)
    assert life.stream.request is not first
    life.wait(5.0)
    life.reply(4)
    life.end()
    assert life.recalls == {"credited": 1}


def restarted(life: Life) -> None:
    life.reply(4, engine="new")


def gone(life: Life) -> None:
    life.reply(9, engine="new")


def shorter(life: Life) -> None:
    life.end()


def mute(life: Life) -> None:
    for _ in range(8):
        life.wait(5.0)


def mute_while_live_batches_wait(life: Life) -> None:
    life.live(5)
    for _ in range(3):
        life.wait(1.1)


def verified_then_broken_off(life: Life) -> None:
    life.reply(4, 5)
    life.live(9)
    for _ in range(6):
        life.wait(1.1)


def other_rank(life: Life) -> None:
    payload = batch(4, rank=1)
    life.stream.on_replay(reply(4, payload), 0.0)


def live_restart(life: Life) -> None:
    life.live(5)
    life.live(0, engine="new")


def closed(life: Life) -> None:
    life.stream.close()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (restarted, "restarted"),
        (gone, "gone"),
        (shorter, "restarted"),
        (mute, "deadline"),
        (mute_while_live_batches_wait, "silent"),
        (verified_then_broken_off, "silent"),
        (other_rank, "wrong_rank"),
        (live_restart, "superseded"),
        (closed, "closed"),
    ],
)
@pytest.mark.parametrize("policy", EventLossPolicy)
def test_on_doubt_nothing_is_credited(
    happens: object, reason: str, policy: EventLossPolicy
) -> None:
    life = Life(first_life(), policy=policy)
    assert callable(happens)
    happens(life)
    life.check()
    assert life.recalls == {reason: 1}
    assert not life.shown() & {0, 1, 2, 3, 4}
    assert not life.stream.is_unproven


def test_without_a_replay_endpoint_the_very_next_number_is_the_proof() -> None:
    life = Life(first_life(has_replay=False), has_replay=False)
    assert life.asked is None
    life.live(5)
    assert life.shown() == set(range(6))
    assert life.recalls == {"credited": 1}


OWN, KNOWN, UNKNOWN = [9], [3], [77]


@pytest.mark.parametrize(
    ("events", "is_same"),
    [
        ([stored(OWN, tokens(8), KNOWN[0])], True),
        ([removed(KNOWN)], True),
        ([stored(OWN, tokens(8)), removed(OWN)], True),
        ([stored(OWN, tokens(8)), stored([10], tokens(9), OWN[0])], True),
        ([CLEARED, removed(UNKNOWN)], True),
        ([removed(UNKNOWN, group_idx=1)], True),
        ([removed(UNKNOWN, medium="MARS")], True),
        ([stored(OWN, tokens(8), UNKNOWN[0], kv_cache_spec_kind="mamba")], True),
        ([stored(OWN, tokens(8), UNKNOWN[0])], False),
        ([removed([*KNOWN, *UNKNOWN])], False),
        ([removed(UNKNOWN), CLEARED], False),
    ],
)
def test_an_engine_that_builds_on_what_it_should_not_have_is_another(
    events: list[dict[str, object]], is_same: bool
) -> None:
    life = Life(first_life(has_replay=False), has_replay=False)
    life.say(5, encode_batch(events))
    assert life.recalls == ({"credited": 1} if is_same else {"strange": 1})
    assert is_same or not life.shown() & {0, 1, 2, 3, 4}


@pytest.mark.parametrize("number", [0, 3, 6, 70])
def test_without_a_replay_endpoint_any_other_number_is_none(number: int) -> None:
    life = Life(first_life(has_replay=False), has_replay=False)
    life.live(number, engine="new")
    assert life.shown() == set()
    assert sum(life.recalls.values()) == 1
    assert "credited" not in life.recalls


def test_without_a_replay_endpoint_the_wait_is_bounded() -> None:
    life = Life(first_life(has_replay=False), has_replay=False)
    life.wait(99.0)
    assert life.stream.is_unproven
    life.wait(2.0)
    assert life.recalls == {"unheard": 1}
    life.live(5)
    assert life.shown() == {5}
    assert life.stream.lost_batches == 5


def test_what_was_uncertain_stays_uncertain() -> None:
    before = first_life(has_replay=False)
    before.live(9)
    life = Life(before)
    life.reply(9)
    life.end()
    assert life.shown() == {0, 1, 2, 3, 4, 9}
    assert life.stream.kv_state == "uncertain"
    assert life.stream.lost_batches == 4


def test_blocks_below_the_device_are_unseen_as_well() -> None:
    before = first_life()
    content = block_hashes(tokens(50), 16)
    before.index.store(RANK, Tier.DISK, None, [777], content)
    life = Life(before)
    assert not life.index.find_matches(content).rows()
    life.reply(4)
    life.index.store(RANK, Tier.DISK, None, [778], block_hashes(tokens(51), 16))
    assert not life.index.find_matches(block_hashes(tokens(51), 16)).rows()
    life.end()
    assert life.index.find_matches(content).rows() == {0: (0, 0, 1)}


def test_a_stream_that_is_not_at_rest_has_nothing_to_keep() -> None:
    assert not Life().stream.is_at_rest, "nothing was heard"
    assert not Life(first_life()).stream.is_at_rest, "unproven"
    other = first_life()
    other.say(5, encode_batch([], rank=1))
    assert not other.stream.is_at_rest, "it wrote for two ranks"
