"""What follows when a rank finds less than its index says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from indexer.types import WorkerRank
from select_service.core.decisions.trust_monitor import DOUBTFUL_PER_TURN, TrustMonitor
from select_service.core.routing.place import choose
from select_service.types import PotentialLoadsRequest, Selection, SelectRequest, TrustSettings
from tests.indexer.encoding import CLEARED, encode_batch, message
from tests.select_service.core.decisions.doubted import (
    FINDABLE,
    ISL,
    PROMPT,
    Late,
    fleet_of,
    serve,
    trust,
)
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of


def distrusting(**settings: Any) -> Fleet:
    """Worker 1 reports the truth, worker 2 has nothing of what its index says."""
    fleet = fleet_of(**settings)
    for worker_id in (1, 2):
        fleet.hold(worker_id, list(PROMPT))
    serve(fleet, 1, FINDABLE)
    serve(fleet, 2, 0, times=8)
    return fleet


def test_a_liar_is_passed_over_and_what_we_believe_is_booked() -> None:
    fleet = distrusting()
    assert trust(fleet, 2).trust == 0.0
    assert trust(fleet, 2).reasons == ["prediction"]
    assert trust(fleet, 1).trust == 1.0
    assert selection_of(fleet.select(*PROMPT, isl=ISL)).worker_id == 1
    chosen = selection_of(fleet.take("x", *PROMPT, isl=ISL, allowed_worker_ids=[2]))
    assert chosen.overlap.gpu == 128, "facts stay what the index says"
    assert chosen.overlap.dp == {"0": 128}
    assert chosen.effective_prefill_tokens == ISL
    assert fleet.load(2) == (ISL, 8, 1)
    loads = fleet.core.queries.potential_loads(
        PotentialLoadsRequest(
            block_hashes=list(PROMPT), sequence_hashes=list(PROMPT), isl_tokens=ISL
        )
    )
    assert [row.potential_prefill_tokens for row in loads] == [8, 2 * ISL]
    fleet.core.reservations.prefill_complete("x", fleet.now, 0)
    assert trust(fleet, 2).samples == 9, "its predictions are compared all the same"


def test_half_believed() -> None:
    fleet = distrusting()
    serve(fleet, 2, 64, times=200)
    assert trust(fleet, 2).trust == pytest.approx(0.5, abs=0.001)
    everyone = selection_of(fleet.select(*PROMPT, isl=ISL))
    only = selection_of(fleet.select(*PROMPT, isl=ISL, allowed_worker_ids=[2]))
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
    plain = choose(partition, request, prompt, rows, weights, fleet.core.selection._rng, 1.0)
    prices = partition.terms(prompt, rows, weights, 1.0, partition.found(prompt)).cost
    assert (plain.cost, plain.slot) == (float(prices.min()), int(prices.argmin()))
    assert plain.worker.worker_id == 2, "the other one is too busy"
    warm = weights._replace(temperature=1e-9)
    slow = choose(partition, request, prompt, rows, warm, fleet.core.selection._rng, 1.0)
    slow, plain = (replace(one, weights=weights, seen=None) for one in (slow, plain))
    assert slow == plain


def test_a_threshold_for_cached_prompts_believes_as_much() -> None:
    fleet = distrusting()
    chosen = selection_of(fleet.select(*PROMPT, isl=ISL, cache_hit_threshold=0.5))
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
    reread = TrustMonitor._reread

    def counted(self: TrustMonitor, part: Any, slot: int, *rest: Any) -> None:
        read.append(slot)
        reread(self, part, slot, *rest)

    monkeypatch.setattr(TrustMonitor, "_reread", counted)
    fleet.delete(4)  # whoever goes meanwhile is passed over
    fleet.core.trust_monitor.look_at(partition)
    for turn in (1, 2, 3):
        fleet.core.trust_monitor.keep(fleet.now)
        assert len(read) == min(turn * DOUBTFUL_PER_TURN, count - 1)
    assert len(set(read)) == count - 1
    assert not partition.trust.most_are_accurate


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
    fleet.core.reservations.prefill_complete("early", fleet.now, 0)
    assert trust(fleet, 2).samples == before


def test_an_engine_that_drops_its_cache_is_no_liar() -> None:
    fleet = Late()
    fleet.worker(2)
    for worker_id in (1, 2):
        fleet.hold(worker_id, list(PROMPT))
    serve(fleet, 2, FINDABLE)
    for turn in range(3):
        for number in range(30):
            selection_of(fleet.take(f"r{number}", *PROMPT, isl=ISL, allowed_worker_ids=[1]))
        fleet.now += 0.1
        fleet.stream.on_live(message(turn, encode_batch([CLEARED], ts=fleet.now)), fleet.now)
        fleet.hold(1, list(PROMPT))
        for number in range(30):
            fleet.now += 0.1
            fleet.core.reservations.prefill_complete(f"r{number}", fleet.now, 0)
            fleet.free(f"r{number}")
        assert trust(fleet, 1).samples == 0
        assert trust(fleet, 1).trust == 1.0
    serve(fleet, 1, 0, times=8)
    assert trust(fleet, 1).trust == 0.0, "what is said after that counts"
