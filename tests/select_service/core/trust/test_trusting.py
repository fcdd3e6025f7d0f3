"""What engines found, told with a completed prefill; late and lost events; what follows of them."""

from __future__ import annotations

import contextlib
import math
import random
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from indexer.core.hashing import pack_u64
from indexer.types import Tier, WorkerRank
from select_service.core.pricing.scoring import costs
from select_service.core.replicas.wire import decode_message, encode_message
from select_service.core.trust.trusting import BASE_S, DOUBTFUL_PER_TURN, LOOK_S, Trusting
from select_service.errors import InvalidField, ReservationNotFound, ServiceError
from select_service.types import (
    BatchPrefillComplete,
    CoreLimits,
    PairSelection,
    PotentialLoadsRequest,
    RankTrustRow,
    RouterConfigOverride,
    Selection,
    SelectRequest,
    TrustSettings,
)
from tests.indexer.encoding import CLEARED, encode_batch, message, stored
from tests.select_service.core.replicas.replica import Replica
from tests.select_service.core.test_state import Disk, restored
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

PROMPT = tuple(range(1, 9))  # 8 blocks of 16 tokens
ISL = 136  # and half a block more
FINDABLE = 128


def fleet_of(workers: int = 2, **settings: Any) -> Fleet:
    fleet = Fleet(trust=TrustSettings(**settings))
    for worker_id in range(1, workers + 1):
        fleet.worker(worker_id)
    return fleet


def placed(answer: object) -> Selection:
    assert isinstance(answer, Selection)
    return answer


def trust(fleet: Fleet, worker_id: int) -> RankTrustRow:
    return next(row for row in fleet.core.trust().ranks if row.worker_id == worker_id)


def serve(fleet: Fleet, worker_id: int, found: int | None, times: int = 1) -> None:
    """Let a worker have a prompt, and say what it found of it."""
    for _ in range(times):
        placed(fleet.take("r", *PROMPT, isl=ISL, allowed_worker_ids=[worker_id]))
        fleet._did(fleet.core.prefill_complete("r", fleet.now, found))
        fleet.free("r")


def outcomes(fleet: Fleet) -> dict[str, int]:
    return fleet.core.counters.cached_tokens_told


def distrusting(**settings: Any) -> Fleet:
    """Worker 1 tells the truth, worker 2 has nothing of what its index says."""
    fleet = fleet_of(**settings)
    for worker_id in (1, 2):
        fleet.hold(worker_id, list(PROMPT))
    serve(fleet, 1, FINDABLE)
    serve(fleet, 2, 0, times=8)
    return fleet


# -- what is told --------------------------------------------------------------------------------


def test_what_was_predicted_is_compared_with_what_was_found() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    serve(fleet, 1, 96)
    row = trust(fleet, 1)
    assert row.prediction_error == 32.0
    assert row.missing_share == 0.25
    assert (row.samples, row.trust, row.reasons) == (1, 1.0, [])
    serve(fleet, 2, 0)
    assert trust(fleet, 2).prediction_error == 0.0
    assert trust(fleet, 2).samples == 0, "nothing was predicted"
    assert outcomes(fleet) == {"compared": 2}


def test_nothing_told_nothing_compared() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    serve(fleet, 1, None)
    assert outcomes(fleet) == {}
    assert trust(fleet, 1).prediction_error is None


def test_the_last_token_is_never_found() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, allowed_worker_ids=[1])  # 128 tokens, of which 112 can be cached
    fleet.core.prefill_complete("r", fleet.now, 112)
    assert trust(fleet, 1).missing_share == 0.0


def test_more_than_the_prompt_is_refused_and_changes_nothing() -> None:
    fleet = fleet_of()
    fleet.take("r", *PROMPT, isl=ISL, allowed_worker_ids=[1])
    with pytest.raises(InvalidField, match=r"cached_tokens \(137\) must not exceed") as refused:
        fleet.core.prefill_complete("r", fleet.now, ISL + 1)
    assert refused.value.field == "cached_tokens"
    assert fleet.load(1) == (ISL, 8, 1)
    result, _ = fleet.core.operate(
        BatchPrefillComplete(reservation_id="r", cached_tokens=ISL + 1), fleet.now
    )
    assert (result.status, result.field) == (422, "cached_tokens")
    fleet.core.prefill_complete("r", fleet.now, ISL)
    assert fleet.load(1) == (0, 8, 1)
    assert outcomes(fleet) == {"compared": 1}


def test_only_the_first_completion_counts() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, isl=ISL)
    for found in (128, 0, 0):
        fleet.core.prefill_complete("r", fleet.now, found)
    assert trust(fleet, 1).samples == 1
    assert outcomes(fleet) == {"compared": 1, "repeated": 2}


def test_who_was_booked_without_a_selection_has_no_prediction() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    fleet.book("r", 1, *PROMPT, isl=ISL, effective_prefill_tokens=8)
    fleet.core.prefill_complete("r", fleet.now, 0)
    assert outcomes(fleet) == {"unpredicted": 1}
    with pytest.raises(ReservationNotFound):
        fleet.core.prefill_complete("nobody", fleet.now, 0)


def test_by_selection_id_and_without_tracking() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT))
    override = RouterConfigOverride(track_prefill_tokens=False)
    fleet.take("r", *PROMPT, isl=ISL, selection_id="s", router_config_override=override)
    fleet.core.prefill_complete("s", fleet.now, 64)
    assert trust(fleet, 1).missing_share == 0.5


def test_what_is_held_below_the_device_may_be_found_or_not() -> None:
    fleet = fleet_of()
    fleet.hold(1, list(PROMPT[:4]))
    index = fleet.core.partitions[DEFAULT].index
    index.store(
        WorkerRank(1, 0),
        Tier.HOST_PINNED,
        1004,
        [1000 + one for one in PROMPT[4:]],
        pack_u64(list(PROMPT[4:])),
    )
    serve(fleet, 1, FINDABLE)
    assert trust(fleet, 1).missing_share == 0.0
    assert trust(fleet, 1).prediction_error == 112 - 128
    serve(fleet, 1, 64)
    assert trust(fleet, 1).missing_share == pytest.approx(48 / 112 / (1 + 15 / 16), abs=0.01)


def test_of_a_pair_the_leg_that_computes_is_asked() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill")
    fleet.worker(2, role="decode")
    fleet.hold(1, list(PROMPT))
    answer = fleet.pair("p", *PROMPT, isl=ISL)
    assert isinstance(answer, PairSelection)
    fleet.core.prefill_complete("p", fleet.now, 0)
    fleet.core.prefill_complete("p", fleet.now, 0)
    assert trust(fleet, 1).samples == 1
    assert trust(fleet, 2).samples == 0
    assert outcomes(fleet) == {"compared": 1, "elsewhere": 1}
    fleet.pair("q", *PROMPT, isl=ISL)
    fleet.core.prefill_complete("q:decode", fleet.now, 0)
    assert outcomes(fleet)["unpredicted"] == 1
    fleet.core.prefill_complete("q:prefill", fleet.now, 128)
    assert trust(fleet, 1).samples == 2


def test_one_worker_that_does_better_than_a_pair() -> None:
    fleet = Fleet()
    fleet.worker(1)
    fleet.hold(1, list(PROMPT))
    fleet.pair("p", *PROMPT, isl=ISL)
    fleet.core.prefill_complete("p", fleet.now, 64)
    assert trust(fleet, 1).missing_share == 0.5


def test_a_prediction_outlives_the_process() -> None:
    fleet = fleet_of()
    disk = Disk(fleet.core.keep_changes())
    fleet.worker(1)
    fleet.hold(1, list(PROMPT))
    fleet.take("r", *PROMPT, isl=ISL, allowed_worker_ids=[1])
    disk.write(fleet)
    again = restored(disk, now=5.0)
    again.core.prefill_complete("r", again.now, 64)
    assert trust(again, 1).missing_share == 0.5


def test_of_another_replicas_reservation_nothing_is_concluded() -> None:
    ours, theirs = Replica(), Replica(router_id=2000)
    theirs.hold(1, list(PROMPT))
    theirs.take("r", *PROMPT, isl=ISL, allowed_worker_ids=[1])
    for said in theirs.effects.published:
        topic, payload = encode_message(said)
        ours.hears(decode_message(topic, payload))
    assert ours.load(1) is not None
    assert ours.load(1)[2] == 1  # type: ignore[index]
    ours.core.prefill_complete("r", ours.now, 0)
    assert outcomes(ours) == {"unpredicted": 1}
    assert trust(ours, 1).samples == 0
    with pytest.raises(InvalidField):
        ours.core.prefill_complete("r", ours.now, ISL + 1)


# -- what follows --------------------------------------------------------------------------------


def test_a_liar_is_passed_over_and_what_we_believe_is_booked() -> None:
    fleet = distrusting()
    assert trust(fleet, 2).trust == 0.0
    assert trust(fleet, 2).reasons == ["prediction"]
    assert trust(fleet, 1).trust == 1.0
    assert placed(fleet.select(*PROMPT, isl=ISL)).worker_id == 1
    chosen = placed(fleet.take("x", *PROMPT, isl=ISL, allowed_worker_ids=[2]))
    assert chosen.overlap.gpu == 128, "facts stay what the index says"
    assert chosen.overlap.dp == {"0": 128}
    assert chosen.effective_prefill_tokens == ISL
    assert fleet.load(2) == (ISL, 8, 1)
    loads = fleet.core.potential_loads(
        PotentialLoadsRequest(
            block_hashes=list(PROMPT), sequence_hashes=list(PROMPT), isl_tokens=ISL
        )
    )
    assert [row.potential_prefill_tokens for row in loads] == [8, 2 * ISL]
    fleet.core.prefill_complete("x", fleet.now, 0)
    assert trust(fleet, 2).samples == 9, "its predictions are compared all the same"


def test_half_believed() -> None:
    fleet = distrusting()
    serve(fleet, 2, 64, times=200)
    assert trust(fleet, 2).trust == pytest.approx(0.5, abs=0.001)
    everyone = placed(fleet.select(*PROMPT, isl=ISL))
    only = placed(fleet.select(*PROMPT, isl=ISL, allowed_worker_ids=[2]))
    assert everyone.worker_id == 1
    assert only.effective_prefill_tokens == ISL - int(128 * trust(fleet, 2).trust)


def test_every_way_of_pricing_agrees() -> None:
    fleet = distrusting()
    serve(fleet, 2, 90, times=50)
    partition = fleet.core.partitions[DEFAULT]
    fleet.book("load", 1, 70, 71, 72, isl=60)
    read = fleet.core.reader
    request = SelectRequest(block_hashes=list(PROMPT), sequence_hashes=list(PROMPT), isl_tokens=ISL)
    _, prompt, weights = read.selection(request)
    rows = partition.candidates(request)
    plain = partition.place(request, prompt, rows, weights, fleet.core.selecting._rng, 1.0)
    prices = costs(partition.project(prompt, rows, weights), weights)
    assert (plain.cost, plain.slot) == (float(prices.min()), int(prices.argmin()))
    assert plain.worker.worker_id == 2, "the other one is too busy"
    warm = weights._replace(temperature=1e-9)
    slow = partition.place(request, prompt, rows, warm, fleet.core.selecting._rng, 1.0)
    slow, plain = (replace(one, weights=weights, seen=None) for one in (slow, plain))
    assert slow == plain


def test_a_threshold_for_cached_prompts_believes_as_much() -> None:
    fleet = distrusting()
    chosen = placed(fleet.select(*PROMPT, isl=ISL, cache_hit_threshold=0.5))
    assert chosen.worker_id == 1
    refused = fleet.select(*PROMPT, isl=ISL, cache_hit_threshold=0.5, allowed_worker_ids=[2])
    assert not isinstance(refused, Selection)


def test_a_new_worker_is_believed() -> None:
    fleet = distrusting()
    fleet.delete(2)
    fleet.worker(2)
    assert trust(fleet, 2).trust == 1.0
    assert fleet.core.partitions[DEFAULT].trust.column is None
    fleet.tick(1.0)
    assert not fleet.effects.trusted


def test_another_source_of_events_is_believed() -> None:
    fleet = distrusting()
    assert trust(fleet, 2).trust == 0.0
    fleet.worker(2, endpoint="http://renamed")
    assert trust(fleet, 2).trust == 0.0, "the events come from where they came from"
    fleet.worker(2, kv_events_endpoint="tcp://127.0.0.1:7002")
    assert (trust(fleet, 2).trust, trust(fleet, 2).samples) == (1.0, 0)


def test_it_is_told_once_and_without_a_replay_endpoint_kept_in_mind() -> None:
    fleet = distrusting()
    fleet.now += 1.0
    _, effects = fleet.core.tick(fleet.now)
    assert [(one.rank, one.reasons) for one in effects.trusted] == [
        (WorkerRank(2, 0), ("prediction",))
    ]
    fleet.now += 1.0
    _, effects = fleet.core.tick(fleet.now)
    assert not effects.trusted
    assert fleet.core.counters.rereads == {"no_replay": 1}, "half of those compared are liars"
    assert trust(fleet, 2).rereads == 0


def test_a_second_reading_waits_for_evidence_and_for_longer_each_time() -> None:
    fleet = distrusting(reread_s=30.0, reread_max_s=50.0)
    for _ in range(200):
        fleet.tick(1.0)
    assert fleet.core.counters.rereads == {"no_replay": 1}, "nobody has asked it since"
    asked = []
    for second in range(200):
        serve(fleet, 2, 0)
        fleet.tick(1.0)
        asked.append((second, sum(fleet.core.counters.rereads.values())))
    times = [second for second, count in asked if asked[second - 1][1] < count]
    gaps = [after - before for before, after in pairwise(times)]
    assert set(gaps) == {50}


def test_not_all_indexes_are_read_again_at_once() -> None:
    fleet = fleet_of(0)
    for worker_id in range(1, 8):
        fleet.worker(worker_id, replay_endpoint="tcp://127.0.0.1:6001")
        fleet.hold(worker_id, list(PROMPT))
    serve(fleet, 7, FINDABLE)
    for worker_id in range(1, 7):
        serve(fleet, worker_id, 0, times=8)
    fleet.tick(1.0)
    streams = fleet.core.membership.streams()
    assert sum(stream.is_replaying for stream in streams) == TrustSettings().rereads_max
    asking = [stream for stream in streams if stream.request is not None]
    assert fleet.effects.reread == asking, "listeners do not look at a stream that rests"
    for stream in streams:
        if stream.is_replaying:
            stream.on_replay([b"", b"kv", b"\xff" * 8, b""], fleet.now)
    fleet.tick(1.0)
    assert fleet.core.counters.rereads == {"asked": 6}


def test_a_whole_fleet_that_is_doubted_is_looked_at_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = fleet_of(0)
    count = 2 * DOUBTFUL_PER_TURN + 3
    for worker_id in range(count):
        fleet.worker(worker_id, kv_events_endpoint=f"tcp://127.0.0.1:{5000 + worker_id}")
    partition = fleet.core.partitions[DEFAULT]
    for slot in range(count):
        for found in (128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0):
            partition.trust.compare(slot, 128, found, fleet.now)
    read: list[int] = []
    reread = Trusting._reread

    def counted(self: Trusting, part: Any, slot: int, *rest: Any) -> None:
        read.append(slot)
        reread(self, part, slot, *rest)

    monkeypatch.setattr(Trusting, "_reread", counted)
    fleet.delete(4)  # whoever goes meanwhile is passed over
    for turn in (1, 2, 3):
        fleet.core.trusting.keep(fleet.now)
        assert len(read) == min(turn * DOUBTFUL_PER_TURN, count - 1)
    assert len(set(read)) == count - 1
    assert not partition.trust.most_tell_the_truth


def test_what_was_predicted_before_its_index_was_read_again_does_not_count() -> None:
    fleet = fleet_of(3)
    for worker_id in (1, 2, 3):
        fleet.hold(worker_id, list(PROMPT))
    serve(fleet, 1, FINDABLE)
    serve(fleet, 3, FINDABLE)
    fleet.take("early", *PROMPT, isl=ISL, allowed_worker_ids=[2])
    serve(fleet, 2, 0, times=8)
    fleet.tick(1.0)
    assert fleet.core.counters.rereads == {"forgotten": 1}
    before = trust(fleet, 2).samples
    fleet.core.prefill_complete("early", fleet.now, 0)
    assert trust(fleet, 2).samples == before


def test_an_engine_that_drops_its_cache_is_no_liar() -> None:
    fleet = Late()
    fleet.worker(2)
    for worker_id in (1, 2):
        fleet.hold(worker_id, list(PROMPT))
    serve(fleet, 2, FINDABLE)
    for turn in range(3):
        for number in range(30):
            placed(fleet.take(f"r{number}", *PROMPT, isl=ISL, allowed_worker_ids=[1]))
        fleet.now += 0.1
        fleet.stream.on_live(message(turn, encode_batch([CLEARED], ts=fleet.now)), fleet.now)
        fleet.hold(1, list(PROMPT))
        for number in range(30):
            fleet.now += 0.1
            fleet.core.prefill_complete(f"r{number}", fleet.now, 0)
            fleet.free(f"r{number}")
        assert trust(fleet, 1).samples == 0
        assert trust(fleet, 1).trust == 1.0
    serve(fleet, 1, 0, times=8)
    assert trust(fleet, 1).trust == 0.0, "what is said after that counts"


# -- how fresh -----------------------------------------------------------------------------------


class Late(Fleet):
    """One worker whose batches come as late as the test wants."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(trust=TrustSettings(**settings))
        self.worker(1, replay_endpoint="tcp://127.0.0.1:6001")
        self.core.trusting.wall_ahead = 0.0
        self.seq = 0
        self.late_s = math.inf  # of the last batch
        stream = self.core.membership.stream_at(WorkerRank(1, 0))
        assert stream is not None
        self.stream = stream

    def event(self, late_s: float, seq: int | None = None, *, is_set: bool = False) -> None:
        """One more batch; what is later than the one before was made after it all the same.

        Args:
            late_s: by so much.
            seq: its number, if not the next.
            is_set: it is not later: the engine's clock was set back.
        """
        if not is_set:
            self.now += max(0.0, late_s - self.late_s)
        self.late_s = late_s
        number = self.seq if seq is None else seq
        payload = encode_batch(
            [stored([number + 1], [number * 16 + at for at in range(16)])], ts=self.now - late_s
        )
        self.stream.on_live(message(number, payload), self.now)
        self.seq = number + 1
        self.tick(1.0)

    @property
    def row(self) -> RankTrustRow:
        return trust(self, 1)


def test_events_that_come_in_time_or_not_at_all_cost_nothing() -> None:
    fleet = Late()
    fleet.tick(1000.0)
    assert (fleet.row.trust, fleet.row.index.state, fleet.row.index.lag_s) == (1.0, "silent", None)
    for late in (0.01, 0.5, 2.0, 4.9):
        fleet.event(late)
        assert fleet.row.trust == 1.0
    assert fleet.row.index.lag_s == pytest.approx(4.89)
    fleet.event(0.01)
    for _ in range(100):
        fleet.tick(100.0)
        assert fleet.row.trust == 1.0, "an idle engine says nothing"
    fleet.event(20.0)
    assert fleet.row.trust < 1.0
    fleet.tick(20.0)
    assert fleet.row.trust == 1.0, "whatever was as late has come by now"
    assert fleet.core.partitions[DEFAULT].trust.column is None


def test_late_events_cost_half_the_credit_every_so_often() -> None:
    fleet = Late(lag_grace_s=2.0, lag_half_s=4.0)
    fleet.event(0.0)
    fleet.event(6.0)
    assert fleet.row.trust == pytest.approx(0.5)
    assert fleet.row.reasons == ["lag"]
    fleet.event(10.0)
    assert fleet.row.trust == pytest.approx(0.25)
    fleet.event(0.0)
    assert (fleet.row.trust, fleet.row.reasons) == (1.0, [])


def test_clocks_that_differ_are_no_lag() -> None:
    for ahead in (-300.0, 300.0):
        fleet = Late()
        for _ in range(5):
            fleet.event(ahead)
            assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, 0.0)
        fleet.event(ahead + 20.0)
        assert fleet.row.trust < 1.0


def test_a_clock_that_was_set_is_forgiven_after_a_while() -> None:
    fleet = Late()
    fleet.event(0.0)
    fleet.event(60.0)
    assert fleet.row.trust < 0.1
    for _ in range(2):
        fleet.now += BASE_S
        fleet.event(60.0)
    assert fleet.row.trust == 1.0


@pytest.mark.parametrize("back_s", [60.0, 7200.0])
def test_an_engine_whose_clock_is_set_back_is_not_late(back_s: float) -> None:
    """One engine's batches are made one after another: a time that goes back was set."""
    fleet = Late()
    for _ in range(3):
        fleet.event(0.0)
    for _ in range(5):
        fleet.event(back_s, is_set=True)
        assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, 0.0)
    fleet.event(back_s + 20.0)  # and from then on, this late is late
    assert fleet.row.index.lag_s == pytest.approx(20.0)
    assert fleet.row.trust < 1.0


def test_an_engine_without_a_clock_has_no_lag() -> None:
    fleet = Late()
    for _ in range(3):
        fleet.now += 100.0
        fleet.event(fleet.now + 1e9)
        assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, None)
    fleet.core.trusting.wall_ahead = None
    fleet.event(50.0)
    assert fleet.row.index.lag_s is None


def test_an_open_gap_costs_and_a_closed_one_does_not() -> None:
    fleet = Late(lag_grace_s=2.0, lag_half_s=2.0)
    fleet.event(0.0)
    fleet.event(0.0, seq=3)
    assert fleet.row.index.open_gaps == 1
    assert fleet.row.index.state == "replaying"
    assert fleet.row.trust == 1.0
    for _ in range(4):
        fleet.tick(1.0)
    assert fleet.row.reasons == ["gaps"]
    assert fleet.row.trust == pytest.approx(0.5**1.0, abs=0.2)
    for seq in range(3):
        payload = encode_batch([stored([seq + 1], [seq * 16 + at for at in range(16)])], ts=99.0)
        if seq == 0:
            payload = encode_batch([stored([1], list(range(16)))], ts=100.0)
        fleet.stream.on_replay([b"", b"kv", seq.to_bytes(8, "big"), payload], fleet.now)
    fleet.tick(1.0)
    assert fleet.row.index.open_gaps == 0
    assert fleet.row.trust == 1.0


def test_many_lost_batches_cost_their_share_few_cost_nothing() -> None:
    fleet = Late()
    fleet.stream.has_replay = False
    for _ in range(40):
        fleet.event(0.0)
    fleet.event(0.0, seq=42)
    assert fleet.row.index.lost_batches == 2
    assert fleet.row.trust == 1.0
    fleet.event(0.0, seq=60)
    assert fleet.row.index.state == "uncertain"
    assert fleet.row.reasons == ["gaps"]
    assert fleet.row.trust == pytest.approx(42 / 61)


def test_it_can_be_switched_off() -> None:
    fleet = Late(weigh_freshness=False)
    fleet.event(0.0)
    fleet.event(100.0)
    assert (fleet.row.trust, fleet.row.index.lag_s) == (1.0, None)


def test_streams_are_looked_at_some_a_turn() -> None:
    fleet = Fleet()
    for worker_id in range(CoreLimits().streams_watched_per_turn_max + 1):
        spec: dict[str, Any] = {"kv_events_endpoint": f"tcp://127.0.0.1:{5000 + worker_id}"}
        fleet.worker(worker_id, **spec)
    trusting = fleet.core.trusting
    assert trusting.keep(1000.0)
    assert not trusting.keep(1000.0)
    assert not trusting.keep(1000.5), "not before a second is over"
    assert trusting.keep(1001.0)
    fleet.delete(5)
    assert not trusting.keep(1001.0)


def test_a_fleet_that_is_late_as_one_is_told_so_in_turns() -> None:
    limits = CoreLimits(streams_watched_per_turn_max=2)
    fleet = Fleet(limits=limits, trust=TrustSettings())
    for worker_id in range(1, 6):
        fleet.worker(worker_id, kv_events_endpoint=f"tcp://127.0.0.1:{5000 + worker_id}")
    for stream in fleet.core.membership.streams():
        stream.lost_batches = 9
    told = []
    more = True
    while more:
        before = sum(row.trust < 1.0 for row in fleet.core.trust().ranks)
        more = fleet.core.trusting.keep(fleet.now)
        told.append(sum(row.trust < 1.0 for row in fleet.core.trust().ranks) - before)
    assert sum(told) == 5
    assert max(told) == 2
    for stream in fleet.core.membership.streams():
        stream.lost_batches = 0
    fleet.now += LOOK_S
    while fleet.core.trusting.keep(fleet.now):
        pass
    assert all(row.trust == 1.0 for row in fleet.core.trust().ranks)


def test_a_scope_is_shown_alone() -> None:
    fleet = fleet_of()
    fleet.worker(9, tenant_id="other")
    assert [row.worker_id for row in fleet.core.trust().ranks] == [1, 2, 9]
    assert [row.worker_id for row in fleet.core.trust(tenant_id="other").ranks] == [9]
    assert fleet.core.trust(model_name="none").ranks == []


# -- whatever happens ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_promise_holds(seed: int) -> None:
    rng = random.Random(seed)
    fleet = fleet_of(4, samples=rng.choice([2, 16]), reread_s=rng.choice([0.5, 5.0]))
    live = [""]
    for number in range(120):
        fleet.now += rng.random()
        worker_id = rng.randrange(1, 5)
        with contextlib.suppress(ServiceError):
            match rng.randrange(7):
                case 0 | 1:
                    blocks = PROMPT[: rng.randrange(1, 9)]
                    wishes: list[dict[str, Any]] = [{}, {"cache_hit_threshold": 0.5}]
                    wish = rng.choice([*wishes, {"allowed_worker_ids": [worker_id]}])
                    fleet.take(f"r{number}", *blocks, isl=16 * len(blocks) + 3, **wish)
                    live.append(f"r{number}")
                case 2 | 3:
                    found = rng.choice([None, 0, 16, 64, 10**6])
                    fleet._did(fleet.core.prefill_complete(rng.choice(live), fleet.now, found))
                case 4:
                    fleet.hold(worker_id, list(PROMPT[: rng.randrange(1, 9)]))
                case 5:
                    fleet.free(rng.choice(live))
                case _:
                    fleet.tick(rng.random() * 3)
                    if rng.random() < 0.3:
                        fleet.delete(worker_id)
                        fleet.worker(worker_id)
        fleet.core.check()
        assert all(0.0 <= one.trust <= 1.0 for one in fleet.core.trust().ranks)
