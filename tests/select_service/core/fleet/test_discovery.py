"""What a source says against what the catalog has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from select_service.core.fleet.catalog import Catalog
from select_service.core.fleet.discovery import API, Roster
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
