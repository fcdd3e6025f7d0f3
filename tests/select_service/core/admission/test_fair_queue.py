from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.fair_queue import FairQueue, Waiting
from select_service.core.admission.policy_api import AdmissionRequest


def ask_of(tenant: str, work: int) -> AdmissionRequest:
    return AdmissionRequest(work, tenant_id=tenant)


def wait(
    queue: FairQueue[str], item: str, work: int = 10, band: int = 0, deadline: float = 9.0
) -> Waiting[str]:
    one = Waiting(item, ask_of(item[0], work), band, work, deadline)
    queue.push(one)
    return one


def serve_all(queue: FairQueue[str], band: int = 0) -> list[str]:
    served = []
    while (one := queue.head(band)) is not None:
        queue.serve(one)
        served.append(one.item)
        queue.check()
    return served


def test_inside_a_flow_the_earliest_deadline_is_next() -> None:
    queue: FairQueue[str] = FairQueue([99])
    for name, deadline in (("a1", 3.0), ("a2", 1.0), ("a3", 2.0), ("a4", 1.0)):
        wait(queue, name, deadline=deadline)
    assert serve_all(queue) == ["a2", "a4", "a3", "a1"]


def test_a_correction_moves_a_tenant_among_those_that_wait() -> None:
    queue: FairQueue[str] = FairQueue([99])
    for name in ("a1", "a2", "b1", "b2", "c1"):
        wait(queue, name)
    queue.correct(0, "a", 25)
    queue.correct(0, "c", -1)
    queue.correct(0, "unknown", 7)
    queue.check()
    assert queue.counter(0, "unknown") == 0
    assert serve_all(queue) == ["c1", "b1", "b2", "a1", "a2"]


def test_a_tenant_that_returns_is_lifted() -> None:
    queue: FairQueue[str] = FairQueue([99])
    for number in range(10):
        wait(queue, f"a{number}", work=100)
    for _ in range(8):
        head = queue.head(0)
        assert head is not None
        queue.serve(head)
    wait(queue, "b1", work=100)
    wait(queue, "b2", work=100)
    assert queue.counter(0, "b") == 800, "absence earns no credit"
    assert serve_all(queue) == ["a8", "b1", "a9", "b2"]


def test_who_arrives_at_an_empty_queue_is_lifted_to_who_left_last() -> None:
    queue: FairQueue[str] = FairQueue([99])
    queue.serve_directly(0, "a", 500)
    queue.serve_directly(0, "a", 500)
    wait(queue, "b1")
    assert queue.counter(0, "b") == 500
    assert queue.counter(0, "a") == 1000


def test_who_waits_too_long_is_taken_out_uncharged() -> None:
    queue: FairQueue[str] = FairQueue([9, 9])
    wait(queue, "a1", deadline=5.0)
    wait(queue, "b1", deadline=3.0, band=1)
    wait(queue, "c1", deadline=4.0)
    assert queue.next_expiry() == 3.0
    assert [one.item for one in queue.expired(4.0, 10)] == ["b1", "c1"]
    assert queue.counter(1, "b") == 0
    assert [one.item for one in queue] == ["a1"]
    assert queue.expired(9.0, 0) == []
    queue.check()
    assert serve_all(queue) == ["a1"]
    assert queue.next_expiry() == math.inf


def test_bands_do_not_share_room() -> None:
    queue: FairQueue[str] = FairQueue([1, 2])
    assert queue.first_band() == 2
    wait(queue, "a1", band=1)
    wait(queue, "a2", band=1)
    assert queue.has_room(0)
    assert not queue.has_room(1)
    assert queue.first_band() == 1
    assert (queue.work_ahead(0), queue.work_ahead(1)) == (0, 20)


def test_the_more_a_tenant_has_waiting_the_sooner_room_is_left_to_others() -> None:
    queue: FairQueue[str] = FairQueue([11])
    for number in range(9):
        assert queue.has_share(0, "m"), "nobody else waits"
        wait(queue, f"m{number}")
    wait(queue, "c")
    assert queue.has_share(0, "c")
    assert queue.has_share(0, "d")
    assert not queue.has_share(0, "m")
    serve_all(queue)
    assert queue.has_share(0, "m")


def test_memory_of_tenants_is_bounded_and_who_waits_is_kept() -> None:
    queue: FairQueue[str] = FairQueue([10_000], tenants_max=3)
    one = Waiting("x", ask_of("patient", 5), 0, 5, 1.0)
    queue.push(one)
    for number in range(50):
        queue.serve_directly(0, f"t{number}", 1)
        queue.check()
    assert queue.head(0) is one
    assert queue.counter(0, "t0") == 0
    assert queue.counter(0, "t49") > 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 3), st.booleans()),
        max_size=80,
    )
)
def test_structure_follows_every_step(steps: list[tuple[str, int, int, bool]]) -> None:
    queue: FairQueue[str] = FairQueue([99, 99], tenants_max=2)
    waiting: list[Waiting[str]] = []
    for tenant, number, what, low in steps:
        band = int(low)
        if what == 0:
            waiting.append(wait(queue, tenant, number, band, float(number)))
        elif what == 1 and (head := queue.head(band)) is not None:
            queue.serve(head)
            waiting.remove(head)
        elif what == 2:
            for one in queue.expired(float(number), 2):
                waiting.remove(one)
        elif waiting:
            one = waiting.pop(number % len(waiting))
            assert queue.remove(one)
            assert not queue.remove(one)
        queue.check()
        assert len(queue) == len(waiting)


@given(
    st.lists(st.integers(1, 100), min_size=5, max_size=60),
    st.lists(st.integers(1, 100), min_size=5, max_size=60),
    st.integers(0, 10_000),
)
def test_backlogged_tenants_get_the_same(a: list[int], b: list[int], head_start: int) -> None:
    """Virtual token counters, theorem 4.4: the service of two who both wait differs by 2 U."""
    queue: FairQueue[str] = FairQueue([999])
    queue.serve_directly(0, "a", head_start)
    for work in a:
        wait(queue, "a", work)
    for work in b:
        wait(queue, "b", work)
    got = {"a": 0, "b": 0}
    most = max(*a, *b)
    left = {"a": len(a), "b": len(b)}
    lead = queue.counter(0, "a") - queue.counter(0, "b")
    while left["a"] and left["b"]:
        one = queue.head(0)
        assert one is not None
        queue.serve(one)
        got[one.item] += one.cost
        left[one.item] -= 1
        if left["a"] and left["b"]:
            assert abs(got["a"] - got["b"] + lead) <= most
            assert head_start > most or abs(got["a"] - got["b"]) <= 2 * most
