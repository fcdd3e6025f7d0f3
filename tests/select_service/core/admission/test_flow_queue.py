from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.classes import SloClasses
from select_service.core.admission.flow_queue import FlowQueue, ceilings
from tests.select_service.core.admission.golden import SIMULATOR


@pytest.mark.parametrize("case", SIMULATOR["gateway_queue"], ids=lambda case: case["name"])
def test_recorded_logs(case: dict[str, Any]) -> None:
    assert case["dispatch_order"] == "priority"
    classes = SloClasses()
    queue: FlowQueue[str] = FlowQueue(
        max_depth=case["max_depth"],
        per_band_capacity=case["per_band_capacity"],
        shed_victims=case["queue_shedding"],
        fairness=case["fairness"],
        usage_limit=case["usage_limit_threshold"],
    )
    for step in case["log"]:
        if step["op"] == "enqueue":
            priority = classes.priority(step["class"])
            got = queue.enqueue(step["id"], step["tenant"], priority)
            assert (got.outcome, got.victim or "") == (step["outcome"], step["victim"]), step
        else:
            assert step["op"] == "dequeue_gated"
            assert (queue.dequeue(step["saturation"]) or "") == step["id"], step
        queue.check()


def test_victims_are_the_newest_of_the_lowest_sheddable_band() -> None:
    queue: FlowQueue[str] = FlowQueue(max_depth=3, shed_victims=True)
    for name, priority in (("old", -3), ("new", -3), ("batch", -1)):
        assert queue.enqueue(name, "t", priority).outcome == "Enqueued"
    assert queue.enqueue("equal", "t", -3).outcome == "Rejected", "it outranks nobody"
    assert queue.enqueue("critical", "t", 4) == ("ShedVictim", "new")
    assert queue.enqueue("standard", "t", 3) == ("ShedVictim", "old")
    assert queue.enqueue("more", "t", 3) == ("ShedVictim", "batch")
    assert queue.enqueue("most", "t", 4).outcome == "Rejected", "nobody sheddable is left"
    assert [entry.item for entry in queue] == ["critical", "standard", "more"]


def test_ceilings_halt_lower_bands_first() -> None:
    assert ceilings(3, 0.5) == (1.0, 0.75, 0.5)
    assert ceilings(1, 0.5) == (1.0,)
    queue: FlowQueue[str] = FlowQueue(usage_limit=0.5)
    for name, priority in (("a", 4), ("b", 3), ("c", -1)):
        queue.enqueue(name, "t", priority)
    assert queue.dequeue(1.0) is None
    assert queue.dequeue(0.9) == "a"
    assert queue.dequeue(0.9) is None
    assert queue.dequeue(0.7) == "b"
    assert queue.dequeue(0.5) is None
    assert queue.dequeue(0.49) == "c"


def test_round_robin_takes_turns() -> None:
    queue: FlowQueue[str] = FlowQueue(fairness="round-robin")
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.enqueue(name, name[0], 3)
    got = [queue.dequeue(0.0) for _ in range(6)]
    assert got == ["a1", "b1", "c1", "a2", "c2", "a3"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 4), st.booleans()), max_size=60),
    st.integers(0, 6),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["global-strict", "round-robin"]),
)
def test_nothing_is_lost(
    steps: list[tuple[str, int, bool]], depth: int, band: int, shed: bool, fairness: str
) -> None:
    queue: FlowQueue[int] = FlowQueue(
        max_depth=depth,
        per_band_capacity=band,
        shed_victims=shed,
        fairness="round-robin" if fairness == "round-robin" else "global-strict",
    )
    waiting: set[int] = set()
    priorities: dict[int, int] = {}
    for number, (tenant, priority, leaves) in enumerate(steps):
        if leaves:
            got = queue.dequeue(0.5)
            if got is not None:
                assert priorities[got] == max(priorities[one] for one in waiting)
                waiting.remove(got)
        else:
            done = queue.enqueue(number, tenant, priority)
            priorities[number] = priority
            if done.outcome != "Rejected":
                waiting.add(number)
            if done.victim is not None:
                assert priorities[done.victim] < min(priority, 0)
                waiting.remove(done.victim)
        assert {entry.item for entry in queue} == waiting
        assert len(queue) == len(waiting)
        queue.check()
