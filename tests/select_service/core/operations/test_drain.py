"""A worker is emptied: nothing new, everything old, and who waited for nobody else is answered."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.core.admission.queue import Ticket
from select_service.core.fleet.unschedulable import REASONS_MAX
from select_service.errors import (
    NoEligibleWorker,
    NoSchedulableWorker,
    NoWorkerForRole,
    WorkerConflict,
    WorkerDraining,
    WorkerNotFound,
)
from select_service.types import (
    CoreLimits,
    OverlapScoresRequest,
    PinnedWorker,
    PotentialLoadsRequest,
    RouterConfig,
    Selection,
    WorkerPatch,
    WorkerSpec,
)
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.replication.replica import DYNAMO, Replica, add
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of, ticket_of


@pytest.fixture
def fleet() -> Fleet:
    return busy_fleet()


def busy_fleet(workers: int = 2, **settings: Any) -> Fleet:
    """Workers that are busy above 16 prefill tokens: then requests wait."""
    made = Fleet(RouterConfig(queue_threshold=1.0), **settings)
    for worker_id in range(1, workers + 1):
        made.worker(worker_id, max_num_batched_tokens=16)
    return made


def test_who_asks_for_it_by_name_is_told(fleet: Fleet) -> None:
    fleet.drain(2)
    for wish in ({"pinned_worker": PinnedWorker(2, 0)}, {"allowed_worker_ids": [2]}):
        with pytest.raises(WorkerDraining, match="worker 2 is draining") as refused:
            fleet.select(1, **wish)
        assert refused.value.details == {"worker_ids": [2]}
    with pytest.raises(WorkerDraining, match="worker 2 is draining"):
        fleet.book("x", 2, 1)
    with pytest.raises(NoEligibleWorker, match="no endpoints"):  # there is no such rank
        fleet.select(1, pinned_worker=PinnedWorker(2, 7))
    assert fleet.core.counters.selections_failed == {"worker_draining": 2, "no_eligible_worker": 1}


def test_when_all_drain_there_is_no_schedulable_worker() -> None:
    fleet = busy_fleet(12)
    for worker_id in range(1, 12):
        fleet.drain(worker_id)
    with pytest.raises(WorkerDraining, match=r"draining: 1, 2, 3, 4, 5, 6, 7, 8 and 3 more"):
        fleet.select(1, allowed_worker_ids=[*range(1, 12)])
    assert selection_of(fleet.take("a", 1)).worker_id == 12
    fleet.drain(12)
    with pytest.raises(NoSchedulableWorker, match="no schedulable workers are available"):
        fleet.select(1)
    with pytest.raises(WorkerDraining):
        fleet.book("b", 12, 1)
    assert not fleet.core.workers.ready().ready
    assert fleet.core.reader.strayed == 0


def reasons_of(fleet: Fleet, **wish: Any) -> dict[str, object]:
    with pytest.raises(NoSchedulableWorker) as refused:
        fleet.select(1, **wish)
    assert refused.value.details is not None
    return refused.value.details


def test_a_refusal_of_a_model_without_workers_names_the_tenant_s_other_models() -> None:
    fleet = busy_fleet(1)
    none = "no worker is registered for model=m tenant=default"
    one = "tenant=default has workers of model=default"
    assert reasons_of(fleet, model_name="m")["reasons"] == [none, one]
    fleet.worker(30, model_name="theirs", tenant_id="other")
    assert reasons_of(fleet, model_name="m")["reasons"] == [none, one]
    for worker_id in range(20, 30):
        fleet.worker(worker_id, model_name=f"m{worker_id}")
    named = ", ".join(f"model={one}" for one in ("default", *(f"m{at}" for at in range(20, 27))))
    more = f"tenant=default has workers of {named} and 3 more"
    assert reasons_of(fleet, model_name="m")["reasons"] == [none, more]
    for worker_id in range(20, 30):
        fleet.delete(worker_id)
    assert reasons_of(fleet, model_name="m")["reasons"] == [none, one]


def test_a_refusal_names_the_first_reasons() -> None:
    fleet = busy_fleet(1)
    nobody = {"reasons": ["no worker is registered for model=m tenant=t"], "is_known": False}
    assert reasons_of(fleet, model_name="m", tenant_id="t") == nobody, "of others nothing is shown"
    for worker_id in (11, 12, 13):
        fleet.worker(worker_id, block_size=None)
    fleet.worker(14, endpoint="")
    fleet.drain(1, "upgrade")
    lacks = "worker{} incomplete: block_size must be greater than 0"
    rest = ["1 worker is incomplete: endpoint is required", "1 worker is draining: upgrade"]
    expected = {"reasons": [lacks.format("s are").join(("3 ", "")), *rest], "is_known": True}
    assert reasons_of(fleet) == reasons_of(fleet) == expected
    for worker_id in (11, 12):
        fleet.delete(worker_id)
    assert reasons_of(fleet)["reasons"] == [
        "1 worker is incomplete: block_size must be greater than 0",
        *rest,
    ]
    for worker_id in (1, 13, 14):
        fleet.delete(worker_id)
    assert reasons_of(fleet)["is_known"], "it has had one"
    empty = reasons_of(fleet, model_name="m", tenant_id="t")
    assert empty == {**nobody, "is_known": None}, "others may not have come yet"


def test_no_more_than_the_first_reasons() -> None:
    fleet = Fleet()
    for number in range(REASONS_MAX + 3):
        fleet.worker(number, block_size=None)
        fleet.drain(number, f"why {number}")
        fleet.worker(number)
    reasons = reasons_of(fleet)["reasons"]
    assert isinstance(reasons, list)
    assert len(reasons) == REASONS_MAX + 1
    assert reasons[-1] == "3 more, for other reasons"


def test_a_repeat_gets_its_first_answer_whoever_drains(fleet: Fleet) -> None:
    first = fleet.take("a", 1)
    fleet.book("b", 2, 2)
    for worker_id in (1, 2):
        fleet.drain(worker_id)
        assert fleet.take("a", 1) == first
        fleet.book("b", 2, 2)
    assert sum(len(scope.loads) for scope in fleet.core.queries.loads()) == 2
    assert fleet.core.counters.reservations_booked == 2
    with pytest.raises(NoSchedulableWorker):
        fleet.take("c", 1)


def test_who_chooses_for_himself_is_not_offered_it(fleet: Fleet) -> None:
    fleet.drain(1)
    prompt: dict[str, Any] = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 16}
    loads = fleet.core.queries.potential_loads(PotentialLoadsRequest(**prompt))
    assert [row.worker_id for row in loads] == [2]
    assert fleet.load(1) == (0, 0, 0), "what it carries is still shown"


def test_what_a_draining_worker_holds_is_told_as_what_it_carries_is(fleet: Fleet) -> None:
    prompt: dict[str, Any] = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 16}
    request = OverlapScoresRequest(**prompt)
    fleet.hold(1, [1])
    before = fleet.core.queries.overlap_scores(request)
    assert [(row.worker_id, row.device_blocks) for row in before.workers] == [(1, 1), (2, 0)]
    for worker_id in (1, 2):  # then all drain
        fleet.drain(worker_id)
        assert fleet.core.queries.overlap_scores(request) == before
        (scope,) = fleet.core.queries.loads()
        assert [row.worker_id for row in scope.loads] == [1, 2]
    with pytest.raises(NoSchedulableWorker):
        fleet.core.queries.potential_loads(PotentialLoadsRequest(**prompt))
    for worker_id in (1, 2):
        fleet.delete(worker_id)
    with pytest.raises(NoSchedulableWorker):
        fleet.core.queries.overlap_scores(request)


def test_it_ends_when_undone_or_with_the_record_and_not_before() -> None:
    fleet = Fleet()
    fleet.core.workers.sources.add("file")
    spec = WorkerSpec(
        worker_id=1, endpoint="http://x", block_size=16, kv_events_endpoint="tcp://127.0.0.1:1"
    )
    fleet.core.workers.upsert_worker(spec, 1.0, "file")
    with pytest.raises(WorkerConflict):
        fleet.patch(1, max_queued=3)
    assert fleet.drain(1).drains, "whoever registered it"
    fleet.core.workers.upsert_worker(spec, 2.0, "file")
    assert fleet.core.workers.worker(1).lifecycle == "draining", "a source says again what it knows"
    fleet.core.workers.delete_worker(1, 3.0, "file")
    with pytest.raises(WorkerNotFound):
        fleet.core.drains.status(1)
    assert fleet.worker(1).lifecycle == "schedulable"
    fleet.drain(1)
    assert fleet.patch(1, endpoint="").lifecycle == "incomplete"
    status = fleet.core.drains.status(1)
    assert (status.lifecycle, status.safe_to_terminate) == ("incomplete", True)
    assert fleet.patch(1, endpoint="http://x").lifecycle == "draining"
    for verb in (fleet.drain, fleet.undrain, fleet.core.drains.status):
        with pytest.raises(WorkerNotFound):
            verb(9)


@pytest.mark.parametrize("gated", [False, True])
def test_who_waits_for_it_alone_is_told_and_others_go_on(*, gated: bool) -> None:
    admission = AdmissionSettings(max_inflight=9) if gated else None
    fleet = busy_fleet(3, admission=admission)
    for worker_id in (1, 2, 3):
        fleet.book(f"load{worker_id}", worker_id, *range(2))
    anybody = ticket_of(fleet.take("a", 9))
    pinned = ticket_of(fleet.take("b", 9, pinned_worker=PinnedWorker(1, 0)))
    either = ticket_of(fleet.take("c", 9, allowed_worker_ids=[1, 2]))
    fleet.drain(1)
    assert isinstance(pinned.answer, WorkerDraining), "behind somebody who waits on"
    assert fleet.effects.answered == [pinned]
    with pytest.raises(WorkerDraining):
        fleet.take("d", 9, pinned_worker=PinnedWorker(1, 0))
    fleet.drain(2)
    assert fleet.effects.answered == [either]
    fleet.free("load1")  # room where nobody may go
    assert fleet.effects.answered == []
    fleet.undrain(1)
    assert fleet.effects.answered == [anybody]
    assert isinstance(anybody.answer, Selection)
    assert anybody.answer.worker_id == 1
    assert fleet.core.queries.loads()[0].pending_count == 0


def test_who_waits_at_the_gate_for_it_alone_is_told() -> None:
    fleet = busy_fleet(2, admission=AdmissionSettings(max_inflight=1))
    for worker_id in (1, 2):
        fleet.book(f"load{worker_id}", worker_id, 1)
    pinned = ticket_of(fleet.take("a", 9, pinned_worker=PinnedWorker(1, 0)))
    anybody = ticket_of(fleet.take("b", 9))
    keeper = fleet.core.partitions[DEFAULT].admission
    assert keeper is not None
    assert keeper.waiting_count == 2
    fleet.drain(1)
    assert isinstance(pinned.answer, WorkerDraining)
    assert fleet.effects.answered == [pinned]
    fleet.free("load1")
    assert fleet.effects.answered == []
    fleet.free("load2")
    assert fleet.effects.answered == [anybody]
    assert isinstance(anybody.answer, Selection)
    assert anybody.answer.worker_id == 2


def test_a_crowd_is_told_in_slices() -> None:
    fleet = busy_fleet(1, limits=CoreLimits(judged_per_turn_max=4, let_in_per_turn_max=4))
    fleet.worker(2, max_num_batched_tokens=16, taints=["spare"])
    for worker_id in (1, 2):
        fleet.book(f"load{worker_id}", worker_id, *range(2))
    crowd = [ticket_of(fleet.take(f"r{n}", n, allowed_worker_ids=[1])) for n in range(30)]
    gone = crowd[7]
    assert fleet.core.waiting_requests.withdraw(gone)
    fleet.drain(1)
    assert fleet.effects.more
    assert 0 < sum(one.answer is not None for one in crowd) <= 8
    fleet.tick(0.0)
    assert {type(one.answer) for one in crowd if one is not gone} == {WorkerDraining}
    assert gone.answer is None
    assert fleet.core.counters.selections_failed == {"worker_draining": 29}


def test_the_last_of_a_role_leaves_those_who_need_it_refused() -> None:
    fleet = Fleet()
    fleet.worker(1, role="prefill")
    fleet.worker(2, role="decode")
    fleet.drain(2)
    with pytest.raises(NoWorkerForRole):
        fleet.pair("p", 1)
    with pytest.raises(WorkerDraining):
        fleet.pair("p", 1, allowed_worker_ids=[2])
    fleet.undrain(2)
    pair = fleet.pair("p", 1)
    assert not isinstance(pair, Ticket)


def test_a_pool_is_measured_by_those_who_stay() -> None:
    fleet = busy_fleet(2, admission=AdmissionSettings(policy="slo-shed", max_inflight=1))
    keeper = fleet.core.partitions[DEFAULT].admission
    assert keeper is not None
    fleet.book("a", 1, *range(64))
    fleet.core.partitions[DEFAULT].ledger.check()
    loaded = keeper.pool.saturation
    fleet.drain(1)
    assert (keeper.pool.instances, keeper.pool.saturation) == (1, 0.0)
    assert (keeper.pool.prefill_backlog, keeper.pool.heaviest) == (0, 0)
    keeper.pool.check()
    fleet.book("b", 2, *range(64))
    assert keeper.pool.saturation == 2 * loaded
    keeper.pool.check()
    fleet.undrain(1)
    assert (keeper.pool.instances, keeper.pool.saturation) == (2, 2 * loaded)
    assert keeper.is_full(fleet.core.workers.worker(1).worker_id - 1), "as many as it may have"
    fleet.drain(2)
    fleet.delete(2)
    assert keeper.pool.instances == 1
    keeper.pool.check()


def test_a_gate_that_opens_later_sees_only_those_who_stay() -> None:
    fleet = busy_fleet(3)
    fleet.book("a", 3, *range(64))
    fleet.drain(3)
    fleet.core.workers.patch_worker(1, WorkerPatch(max_inflight=5), fleet.now)
    keeper = fleet.core.partitions[DEFAULT].admission
    assert keeper is not None
    assert (keeper.pool.instances, keeper.pool.saturation) == (2, 0.0)
    fleet.core.check()


def test_what_replicas_have_on_it_counts() -> None:
    here = Replica()
    here.dynamo(add(1, 2))
    status = here.drain(1)
    assert (status.reservations, status.prefill_tokens, status.decode_blocks) == (1, 40, 2)
    here.dynamo(add(3), request_id="late")
    status = here.core.drains.status(1)
    assert (status.reservations, status.safe_to_terminate) == (2, False), "it was learnt later"
    here.dynamo("Free")
    here.dynamo("Free", request_id="late", router_id=DYNAMO)
    assert here.core.drains.status(1).safe_to_terminate
