"""Load reports reach every replica, whichever of them received them."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.replication.checksum import with_checksum
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    encode_message,
)
from select_service.core.replication.messages import (
    LOADS_TOPIC,
    OWN_TOPIC,
    RANK_LOADS_MAX,
    Heartbeat,
    RankLoad,
    RankLoads,
)
from select_service.errors import AdmissionRefused
from select_service.types import Selection
from select_service.types.admission import AdmissionSettings, RankMetrics, WorkerMetrics
from tests.select_service.core.replication.replica import Replica
from tests.select_service.core.whole_fleet import Fleet, ticket_of

BUSY: dict[str, Any] = {"mode": "token-capacity", "active_decode_blocks_threshold": 0.8}


def replica(router_id: int, **settings: Any) -> Replica:
    made = Replica.__new__(Replica)
    Fleet.__init__(made, router_id=router_id, admission=AdmissionSettings(**settings))
    made.worker(1, total_kv_blocks=1000)
    return made


def pair(**settings: Any) -> tuple[Replica, Replica]:
    here, there = replica(1, **settings), replica(2, **settings)
    exchange(here, there)
    exchange(here, there)
    return here, there


def exchange(here: Replica, there: Replica, seconds: float = 0.1) -> list[RankLoads]:
    """One turn of both; the messages of load reports."""
    loads = []
    for sender, receiver in ((here, there), (there, here)):
        for message in sender.turn(seconds):
            topic, payload = encode_message(message)
            read = decode_message(topic, with_checksum(payload))
            loads += [read] if isinstance(read, RankLoads) else []
            receiver.hears(read, peer=f"tcp://of:{sender.core.replicas._claims.router_id}")
        here.now = there.now = max(here.now, there.now)
    return loads


def report(some: Replica, *, is_relayed: bool = True, **reported: Any) -> None:
    metrics = WorkerMetrics(ranks=[RankMetrics(**reported)])
    _, effects = some.core.admission.report(1, metrics, some.now, is_relayed=is_relayed)
    some._did(effects)


def refusal(some: Replica, **wishes: Any) -> str:
    with pytest.raises(AdmissionRefused) as caught:
        some.take(None, 1, **wishes)
    return caught.value.code


def test_a_replica_refuses_what_the_other_does() -> None:
    here, there = pair(**BUSY)
    report(here, kv_used_blocks=900.0)
    exchange(here, there)
    assert refusal(here) == refusal(there) == "all-workers-busy"
    report(there, kv_used_blocks=100.0)
    exchange(here, there)
    for some in (here, there):
        assert isinstance(some.take(None, 1), Selection)
        some.core.check()


def test_reports_that_move_to_another_replica_are_no_silence() -> None:
    here, there = pair(policy="slo-shed", load_report_stale_s=3.0)
    report(here, kv_used_blocks=10.0)
    for _ in range(20):
        report(there, kv_used_blocks=10.0)
        exchange(here, there, 0.5)
        here.tick(0.0)
        there.tick(0.0)
    assert not list(here.core.admission_controller.reports.stale())
    assert isinstance(here.take("c", 1, slo_class="critical"), Selection)
    assert here.core.admission_controller.reports.from_replicas > 0


def test_where_nobody_hears_of_a_worker_any_more_everybody_knows() -> None:
    here, there = pair(policy="slo-shed", load_report_stale_s=3.0)
    report(here, kv_used_blocks=10.0)
    for _ in range(8):
        exchange(here, there, 0.5)
        here.tick(0.0)
        there.tick(0.0)
    assert [
        len(list(some.core.admission_controller.reports.stale())) for some in (here, there)
    ] == [1, 1]


def test_what_lets_a_request_in_is_heard_through_a_replica() -> None:
    here, there = pair(policy="slo-shed")
    report(here, num_requests_waiting=1000)
    exchange(here, there)
    waits = ticket_of(there.take("w", 1, slo_class="critical"))
    report(here, num_requests_waiting=0)
    exchange(here, there)
    assert isinstance(waits.answer, Selection)


def test_a_newcomer_is_told_what_was_reported_before_it_came() -> None:
    here = replica(1, **BUSY)
    here.turn()
    report(here, kv_used_blocks=900.0)
    here.turn()
    there = replica(2, **BUSY)
    there.now = here.now
    for _ in range(3):
        exchange(here, there, 0.5)
    assert refusal(there) == "all-workers-busy"


def test_a_replica_that_restarts_under_its_name_is_told_again() -> None:
    here, there = pair(**BUSY)
    report(here, kv_used_blocks=900.0)
    exchange(here, there)
    again = Replica.__new__(Replica)
    Fleet.__init__(again, router_id=2, epoch=2, admission=AdmissionSettings(**BUSY))
    again.worker(1, total_kv_blocks=1000)
    again.now = here.now
    for _ in range(3):
        exchange(here, again, 0.5)
    assert refusal(again) == "all-workers-busy"


def test_what_has_gone_is_not_told() -> None:
    """Worker ids come and go for ever, also where there is no replica."""
    here = replica(1)
    for worker_id in (2, 3):
        here.worker(worker_id, data_parallel_size=2)
        metrics = WorkerMetrics(ranks=[RankMetrics(dp_rank=n) for n in range(2)])
        here.core.admission.report(worker_id, metrics, here.now)
    here.worker(2, data_parallel_size=1)
    here.core.workers.delete_worker(3, here.now)
    reports = here.core.admission_controller.reports
    assert list(reports._unsent) == [(2, 0)]
    assert [(one.worker_id, one.dp_rank) for one in reports.take_unsent(here.now, 9)] == [(2, 0)]


def test_a_message_that_lost_its_checksum_is_not_believed() -> None:
    here, there = pair(**BUSY)
    beat = next(one for one in here.turn(1.0) if isinstance(one, Heartbeat))
    there.core.replica_operations.receive("tcp://of:1", beat, there.now, checked=True)
    there.hears(RankLoads(1, beat.epoch, 99, [RankLoad(1, 0, 0.0, 999.0)]), peer="tcp://of:1")
    assert there.core.replicas.counters.garbled == 1
    assert isinstance(there.take(None, 1), Selection)


def test_what_every_replica_hears_from_the_worker_is_not_told_again() -> None:
    here, there = pair(**BUSY)
    report(here, is_relayed=False, kv_used_blocks=900.0)
    assert exchange(here, there) == []


def test_a_report_heard_of_is_not_told_on() -> None:
    here, there = pair(**BUSY)
    report(here, kv_used_blocks=900.0)
    assert [one.router_id for one in exchange(here, there)] == [1]
    assert exchange(here, there) == []


def test_an_old_message_changes_nothing() -> None:
    here, there = pair(**BUSY)
    report(here, kv_used_blocks=900.0)
    (first,) = exchange(here, there)
    report(here, kv_used_blocks=100.0)
    exchange(here, there)
    there.hears(first, peer="tcp://of:1")
    assert isinstance(there.take(None, 1), Selection)
    report(there, kv_used_blocks=900.0)
    late = RankLoads(1, first.epoch, 9, [RankLoad(1, 0, 60.0, 0.0)])
    there.hears(late, peer="tcp://of:1")
    assert refusal(there) == "all-workers-busy", "the later report counts, not the later message"


@pytest.mark.parametrize(
    ("peer", "router_id"), [("tcp://other:1", 1), ("tcp://of:1", 77)], ids=["peer", "publisher"]
)
def test_only_a_replica_that_is_alive_is_believed(peer: str, router_id: int) -> None:
    here, there = pair(**BUSY)
    message = RankLoads(router_id, 1, 99, [RankLoad(1, 0, 0.0, 999.0)])
    there.hears(message, peer=peer)
    assert isinstance(there.take(None, 1), Selection)
    assert there.core.replicas.counters.ignored == 1
    for load in (RankLoad(2, 0, 0.0, 999.0), RankLoad(1, 7, 0.0, 999.0)):
        there.hears(RankLoads(1, 1, 100 + load.dp_rank, [load]), peer="tcp://of:1")
    there.core.check()
    assert here.core.admission_controller.reports.from_replicas == 0


def test_many_ranks_are_told_in_bounded_messages() -> None:
    here = replica(1)
    ranks = RANK_LOADS_MAX + 10
    here.worker(2, data_parallel_size=ranks)
    here.turn()
    metrics = WorkerMetrics(ranks=[RankMetrics(dp_rank=n) for n in range(ranks)])
    here.core.admission.report(2, metrics, here.now)
    sizes = [len(one.ranks) for one in here.turn() if isinstance(one, RankLoads)]
    assert sizes == [RANK_LOADS_MAX, 10]


def test_older_versions_are_sent_nothing_that_they_cannot_read() -> None:
    message = RankLoads(1, 1, 1, [RankLoad(1, 0, 0.0, 5.0)])
    topic, payload = encode_message(message)
    assert topic == LOADS_TOPIC
    assert not topic.startswith(OWN_TOPIC), "what they subscribe to"
    with pytest.raises(MalformedReplicaMessage):
        decode_message(OWN_TOPIC, payload)
    for wrong in ([RankLoad(1, 0, -1.0)], [RankLoad(1, 0, float("nan"))]):
        with pytest.raises(MalformedReplicaMessage):
            decode_message(*encode_message(RankLoads(1, 1, 1, wrong)))
