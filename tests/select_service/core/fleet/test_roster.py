"""What a source says against what the catalog has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from select_service.core.fleet.catalog import Catalog
from select_service.core.fleet.roster import API, Roster, RosterPlan, Unready
from select_service.types import CoreLimits, WorkerSpec


def catalog(**sources: list[int]) -> Catalog:
    made = Catalog(CoreLimits(data_parallel_size_max=8))
    for source, ids in sources.items():
        for worker_id in ids:
            made.put(made.admit(WorkerSpec(worker_id=worker_id, endpoint="e"), source))
    return made


def specs(*ids: int, endpoint: str = "e") -> dict[int, WorkerSpec]:
    return {i: WorkerSpec(worker_id=i, endpoint=endpoint) for i in ids}


def test_only_what_differs_is_changed() -> None:
    plan = Roster("file", grace_s=0.0).plan(
        specs(1, 2) | specs(3, endpoint="new"), catalog(file=[2, 3, 4]), 0.0
    )
    assert [spec.worker_id for spec in plan.put] == [1, 3]
    assert (plan.removed, plan.conflicts) == ([4], [])


def test_records_of_others_are_reported_and_never_touched() -> None:
    plan = Roster("file", grace_s=0.0).plan(
        specs(1, 2, 3), catalog(api=[1, 9], kubernetes=[2, 8]), 0.0
    )
    assert [spec.worker_id for spec in plan.put] == [3]
    assert plan.removed == []
    assert plan.conflicts == [(1, API), (2, "kubernetes")]


def test_a_flap_costs_nothing_and_a_departure_comes_late() -> None:
    roster, known = Roster("k", grace_s=10.0), catalog(k=[1, 2])
    assert roster.plan(specs(2), known, 0.0).removed == []
    assert roster.missed == 1
    assert roster.plan(specs(1, 2), known, 9.0).removed == []
    assert roster.missed == 0
    assert roster.plan(specs(2), known, 10.0).removed == []
    assert roster.plan(specs(2), known, 19.9).removed == []
    assert roster.plan(specs(2), known, 20.0).removed == [1]
    assert roster.missed == 0


@given(
    named=st.sets(st.integers(0, 9)),
    mine=st.sets(st.integers(0, 9)),
    theirs=st.sets(st.integers(0, 9)),
)
def test_after_the_plan_both_agree(named: set[int], mine: set[int], theirs: set[int]) -> None:
    known = catalog(file=sorted(mine - theirs), api=sorted(theirs))
    plan = Roster("file", grace_s=0.0).plan(specs(*named, endpoint="x"), known, 0.0)
    for worker_id in plan.removed:
        known.remove(worker_id)
    for spec in plan.put:
        known.put(known.admit(spec, "file"))
    assert {w.worker_id for w in known if w.source == "file"} == named - theirs
    assert {w.worker_id for w in known if w.source == API} == theirs
    assert Roster("file", grace_s=0.0).plan(specs(*named, endpoint="x"), known, 0.0)[:2] == ([], [])


def held(plan: RosterPlan) -> dict[int, str | None]:
    return dict(plan.held_back)


def apply(plan: RosterPlan, known: Catalog, source: str) -> None:
    for worker_id in plan.removed:
        known.remove(worker_id)
    for worker_id, why in plan.held_back:
        worker = known.get(worker_id)
        worker.hold_back(worker.operator_drain, why)
    for spec in plan.put:
        known.put(known.admit(spec, source))


def test_who_is_not_ready_is_held_back_for_as_long_as_it_is_listed() -> None:
    roster, known = Roster("k", grace_s=0.0), catalog(k=[1, 2])
    unready = {1: Unready("not ready"), 9: Unready("not ready")}
    plan = roster.plan(specs(2), known, 0.0, unready)
    assert (held(plan), plan.removed, plan.put) == ({1: "not ready"}, [], [])
    apply(plan, known, "k")
    assert roster.plan(specs(2), known, 1e6, unready) == ([], [], [], [])
    assert (roster.missed, roster.is_waiting) == (1, False)
    plan = roster.plan(specs(1, 2), known, 1e6)
    assert (held(plan), roster.missed) == ({1: None}, 0)


def test_who_has_ended_or_is_not_listed_is_held_back_and_then_removed() -> None:
    roster, known = Roster("k", grace_s=10.0), catalog(k=[1, 2])
    unready = {1: Unready("phase Failed", has_ended=True)}
    plan = roster.plan({}, known, 0.0, unready)
    assert held(plan) == {1: "phase Failed", 2: "no longer named"}
    apply(plan, known, "k")
    assert roster.plan({}, known, 9.9, unready) == ([], [], [], [])
    assert roster.plan({}, known, 10.0, unready).removed == [1, 2]


def test_an_unbroken_connection_or_a_request_speaks_for_a_worker() -> None:
    connections: dict[int, object] = {1: (1,), 2: (1,), 3: None}
    busy = {4}
    roster = Roster(
        "k",
        grace_s=0.0,
        engine_grace_s=300.0,
        connection=connections.get,
        has_requests=busy.__contains__,
    )
    known = catalog(k=[1, 2, 3, 4])
    plan = roster.plan({}, known, 0.0)
    assert (plan.removed, set(held(plan))) == ([3], {1, 2, 4})
    apply(plan, known, "k")
    connections[2] = (2,)  # it came again: who says that it is the same?
    busy.clear()
    apply(plan := roster.plan({}, known, 1.0), known, "k")
    assert plan.removed == [2, 4]
    assert roster.plan({}, known, 299.9).removed == []
    assert roster.plan({}, known, 300.0).removed == [1]


def test_one_that_another_source_no_longer_names_is_taken_over() -> None:
    known = catalog(file=[1])
    apply(Roster("file", grace_s=10.0).plan({}, known, 0.0), known, "file")
    plan = Roster("k", grace_s=10.0).plan(specs(1), known, 0.0)
    assert ([spec.worker_id for spec in plan.put], plan.conflicts) == ([1], [])
