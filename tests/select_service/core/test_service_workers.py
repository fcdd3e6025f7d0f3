"""The verbs of the core for workers, one promise a test; contract numbers in brackets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from indexer.types import WorkerRank
from select_service.errors import InvalidRequest
from select_service.types import CoreLimits, OverlapScoresRequest
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.types import WorkerRecord

_SEVERAL: dict[str, Any] = {
    "data_parallel_size": 3,
    "kv_events_endpoints": {str(rank): f"tcp://w2:{rank}" for rank in (2, 0, 1)},
}


def test_a_listing_tells_which_ranks_are_in_doubt_as_a_record_does() -> None:
    fleet = Fleet()
    fleet.worker(3)
    fleet.worker(2, **_SEVERAL)
    fleet.worker(1)
    streams = {stream.rank: stream for stream in fleet.core.registry.streams()}
    for rank in ((2, 2), (2, 0), (1, 0)):
        streams[WorkerRank(*rank)].is_unproven = True
    listed = fleet.core.workers.workers()
    in_doubt = [
        [] if one.kv_ranks is msgspec.UNSET else [rank.dp_rank for rank in one.kv_ranks]
        for one in listed
    ]
    assert in_doubt == [[0], [0, 2], []]
    assert [one.kv_state for one in listed] == ["uncertain", "uncertain", msgspec.UNSET]
    assert listed == [fleet.worker(1), fleet.worker(2, **_SEVERAL), fleet.worker(3)]


@pytest.mark.parametrize("say", [Fleet.worker, Fleet.patch])
@pytest.mark.parametrize("field", ["max_num_seqs", "max_inflight"])
def test_who_embeds_is_refused_what_the_wire_refuses(
    say: Callable[..., WorkerRecord], field: str
) -> None:
    fleet = Fleet()
    known = fleet.worker(1)
    with pytest.raises(ValueError, match=f"^{field} must be at least 1$"):
        say(fleet, 1, **{field: 0})
    assert fleet.core.workers.workers() == [known]
    fleet.core.check()


def test_the_first_schedulable_worker_pins_block_size_and_eagle(fleet: Fleet) -> None:
    other = fleet.worker(3, block_size=32)
    assert other.not_schedulable_reasons == [
        "reconciliation failed: block_size mismatch for model=default tenant=default: "
        "existing=16 requested=32"
    ]
    eagle = fleet.worker(4, is_eagle=True)
    assert eagle.not_schedulable_reasons == [
        "reconciliation failed: is_eagle mismatch for model=default tenant=default: "
        "existing=false requested=true"
    ]
    fleet.delete(1)
    assert fleet.core.workers.worker(3).lifecycle == "incomplete"
    assert fleet.patch(3, block_size=16).lifecycle == "schedulable"


def test_workers_that_were_refused_pin_a_scope_once_its_last_worker_has_gone(fleet: Fleet) -> None:
    """A fleet that changes its block size pod by pod needs nobody's help."""
    for worker_id in (3, 4):
        assert fleet.worker(worker_id, block_size=32).lifecycle == "incomplete"
    assert fleet.worker(5, is_eagle=True).lifecycle == "incomplete"
    fleet.delete(1)
    fleet.delete(2)
    assert (
        fleet.core.workers.worker(3).lifecycle
        == fleet.core.workers.worker(4).lifecycle
        == "schedulable"
    )
    assert [one.stream.rank.worker_id for one in fleet.effects.listen] == [3, 4]
    assert "existing=32 requested=16" in str(fleet.core.workers.worker(5).not_schedulable_reasons)
    fleet.core.check()


def test_the_only_worker_of_a_scope_is_registered_anew_with_another_block_size() -> None:
    fleet = Fleet()
    fleet.worker(1)
    assert fleet.worker(1, block_size=32).lifecycle == "schedulable"
    assert fleet.worker(1, block_size=32, is_eagle=True).lifecycle == "schedulable"
    patched = fleet.patch(1, block_size=16)  # the contract (1.3) has it so
    assert "existing=32 requested=16" in str(patched.not_schedulable_reasons)
    fleet.core.tick(fleet.now)
    assert fleet.core.workers.worker(1).lifecycle == "incomplete"
    assert fleet.worker(1, is_eagle=True).lifecycle == "schedulable"
    fleet.core.check()


def test_what_a_worker_left_behind_is_swept_before_a_scope_has_another_block_size() -> None:
    fleet = Fleet(limits=CoreLimits(dropped_per_turn_max=2))
    fleet.worker(1)
    for number in range(6):
        fleet.book(f"r{number}", 1, 1, 2)
    assert fleet.worker(1, block_size=32).lifecycle == "incomplete"
    for _ in range(5):
        fleet.core.tick(fleet.now)
    assert fleet.core.workers.worker(1).lifecycle == "schedulable"
    fleet.core.check()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kv_events_endpoint": "x"}, "invalid kv_events endpoint for worker 8 dp_rank 0: "),
        ({"replay_endpoint": "http://h:1"}, "invalid replay endpoint for worker 8 dp_rank 0: "),
        (
            {"replay_endpoints": {"0": "http://h:1"}},
            "invalid replay endpoint for worker 8 dp_rank 0: ",
        ),
        (
            _SEVERAL | {"replay_endpoint": "tcp://h:65534"},
            "invalid replay endpoint for worker 8 dp_rank 2: invalid ZMQ endpoint "
            "`tcp://h:65536`: invalid TCP port",
        ),
    ],
)
def test_a_bad_event_source_keeps_a_worker_out(change: dict[str, Any], why: str) -> None:
    record = Fleet().worker(8, **change)
    assert isinstance(record.not_schedulable_reasons, list)
    assert record.not_schedulable_reasons[0].startswith(f"reconciliation failed: {why}")


@pytest.mark.parametrize("key", ["x", "-1", "4294967296", "9" * 5000])
@pytest.mark.parametrize("field", ["kv_events_endpoints", "replay_endpoints"])
def test_a_key_that_is_no_rank_is_refused(field: str, key: str) -> None:
    with pytest.raises(InvalidRequest, match="is not a dp_rank") as caught:
        Fleet().worker(8, **{field: {key: "tcp://h:1"}})
    assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="twice"):
        Fleet().worker(8, **{field: {"1": "tcp://h:1", "01": "tcp://h:2"}})


def test_the_replay_of_each_rank_is_a_source_of_its_own() -> None:
    fleet = Fleet()
    record = fleet.worker(2, **_SEVERAL, replay_endpoint="tcp://w2:700")
    assert record.replay_endpoints is msgspec.UNSET
    asked = {one.stream.rank.dp_rank: one.replay_endpoint for one in fleet.effects.listen}
    assert asked == {rank: f"tcp://w2:{700 + rank}" for rank in range(3)}
    record = fleet.patch(2, replay_endpoints={"1": "tcp://w2:9", "7": "tcp://w2:9"})
    assert record.replay_endpoints == {"1": "tcp://w2:9", "7": "tcp://w2:9"}
    assert [one.rank.dp_rank for one in fleet.effects.unlisten] == [1]
    (listen,) = fleet.effects.listen
    assert listen.replay_endpoint == "tcp://w2:9"
    fleet.patch(2, replay_endpoints={})
    (listen,) = fleet.effects.listen
    assert listen.replay_endpoint == "tcp://w2:701"
    fleet.patch(2, taints=["t"])
    assert not fleet.effects.unlisten
    fleet.core.check()


def test_a_rank_that_goes_and_comes_is_listened_to_anew() -> None:
    fleet = Fleet()
    endpoints = {str(rank): f"tcp://127.0.0.1:{6000 + rank}" for rank in range(2)}
    fleet.worker(1, data_parallel_size=2, kv_events_endpoints=endpoints)
    stays, goes = (listen.stream for listen in fleet.effects.listen)
    store = [0.0, [["BlockStored", [7], None, list(range(16)), 16]]]
    frames = [b"", bytes(8), msgspec.msgpack.encode(store)]
    goes.on_live(frames, fleet.now)
    tokens: dict[str, Any] = {"token_ids": list(range(16))}

    def blocks() -> list[int]:
        request = OverlapScoresRequest(**tokens)
        return [row.device_blocks for row in fleet.core.queries.overlap_scores(request).workers]

    assert blocks() == [0, 1]
    fleet.patch(1, data_parallel_size=1)  # its endpoint is still named, so it is still listened to
    assert fleet.effects.unlisten == [goes]
    assert goes.closed
    (listen,) = fleet.effects.listen
    assert (listen.stream.rank.dp_rank, listen.endpoint) == (1, endpoints["1"])
    listen.stream.on_live(frames, fleet.now)  # sent again, by a replay or by a busy engine
    fleet.patch(1, data_parallel_size=2)
    assert not fleet.effects.listen
    assert not stays.closed
    assert blocks() == [0, 1]


def test_removed_workers_leave_no_memory_behind(fleet: Fleet) -> None:
    index = fleet.core.partitions[DEFAULT].index
    fleet.hold(1, list(range(500)))
    fleet.hold(2, list(range(100, 300)))
    fleet.delete(1)
    fleet.delete(2)
    fleet.tick(1.0)
    assert index.stats.nodes == 0
    assert fleet.core.partitions[DEFAULT].ledger.live == 0


def test_every_reason_is_named_in_order() -> None:
    fleet = Fleet()
    record = fleet.worker(1, endpoint="", block_size=0, kv_events_endpoint=None)
    assert record.not_schedulable_reasons == [
        "endpoint is required",
        "block_size must be greater than 0",
        "kv_events endpoint is required for dp_rank 0",
    ]


def test_too_many_ranks_are_refused_before_anything_is_built() -> None:
    with pytest.raises(InvalidRequest, match="at most 1024") as caught:
        Fleet().worker(1, data_parallel_size=4_000_000_000)
    assert caught.value.field == "data_parallel_size"
