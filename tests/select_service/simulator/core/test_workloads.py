"""Synthetic requests: rates, shapes, contexts that grow, the same for the same seed."""

from __future__ import annotations

import itertools
import random
from statistics import mean, pstdev

import pytest

from select_service.simulator.core import workloads
from select_service.simulator.core.requests import OK, ClientRequest, RequestOutcome, Workload
from select_service.simulator.core.workloads import WorkloadSettings, workload_of

COUNT = 20_000


def drain(workload: Workload, takes_s: float = 1.0) -> list[ClientRequest]:
    """Every request, each answered after a fixed time, in order of arrival."""
    waiting: list[ClientRequest] = []
    ahead = workload.next()
    found = []
    while ahead is not None or waiting:
        waiting.sort(key=lambda one: (one.arrival, one.number))
        if ahead is not None and (not waiting or ahead.arrival <= waiting[0].arrival):
            one, ahead = ahead, workload.next()
        else:
            one = waiting.pop(0)
        found.append(one)
        waiting += workload.after(RequestOutcome(one, OK, one.arrival + takes_s))
    return found


def of(*settings: WorkloadSettings, seed: int = 1) -> Workload:
    return workload_of(settings, 64, [random.Random(f"{seed}/{at}") for at in range(len(settings))])


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_spread_asked_for(cv: float) -> None:
    times = list(itertools.islice(workloads.gamma(random.Random(1), 5.0, cv), COUNT))
    found = gaps(times)
    assert mean(found) == pytest.approx(0.2, rel=0.1)
    assert pstdev(found) / mean(found) == pytest.approx(cv, rel=0.1)


def test_bursts_come_together_at_the_rate_asked_for() -> None:
    times = list(itertools.islice(workloads.bursts(random.Random(1), 5.0, 10), COUNT))
    assert len(set(times)) == COUNT // 10
    assert times[-1] == pytest.approx(COUNT / 5.0, rel=0.1)


def test_a_day_has_its_valley() -> None:
    rng = random.Random(1)
    times = workloads.diurnal(rng, workloads.poisson(rng, 20.0), 100.0, 0.8)
    day = [now % 100.0 for now in itertools.takewhile(lambda now: now < 2_000.0, times)]
    peak = sum(now < 10.0 or now >= 90.0 for now in day)
    valley = sum(40.0 <= now < 60.0 for now in day)
    assert valley / peak == pytest.approx(0.2, abs=0.06)


@pytest.mark.parametrize("kind", ["chat", "agents", "shared-prompts", "rl"])
@pytest.mark.parametrize("how", ["poisson", "closed"])
def test_as_many_as_were_asked_for_in_order_with_names_of_their_own(kind: str, how: str) -> None:
    settings = WorkloadSettings(kind=kind, arrivals=how, requests=500, users=10)  # type: ignore[arg-type]
    found = drain(of(settings))
    assert len(found) == 500
    assert len({one.number for one in found}) == 500
    assert all(one.isl > 0 and one.osl > 0 for one in found)
    assert all(len(one.blocks) <= (one.isl + one.osl) // 64 for one in found)
    again = drain(of(settings))
    assert [(one.arrival, one.isl, one.blocks) for one in again] == [
        (one.arrival, one.isl, one.blocks) for one in found
    ]


@pytest.mark.parametrize("kind", ["chat", "agents"])
def test_users_of_a_closed_loop_come_in_order_of_what_they_ask_first(kind: str) -> None:
    settings = WorkloadSettings(kind=kind, arrivals="closed", users=50)  # type: ignore[arg-type]
    alone, beside = of(settings), of(settings, WorkloadSettings(rate=5.0, requests=200))
    for workload in (alone, beside):
        times = [one.arrival for one in iter(workload.next, None)]
        assert len(times) >= 50
        assert times == sorted(times)


def test_a_next_turn_begins_with_the_one_before_and_its_answer() -> None:
    found = drain(of(WorkloadSettings(kind="chat", requests=400, rate=0.5)))
    sessions: dict[str, list[ClientRequest]] = {}
    for one in found:
        sessions.setdefault(one.session, []).append(one)
    assert max(len(turns) for turns in sessions.values()) > 3
    for turns in sessions.values():
        for before, after in itertools.pairwise(turns):
            assert after.isl > before.isl + before.osl
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert after.arrival > before.arrival + 1.0


def test_what_is_said_does_not_depend_on_how_fast_it_is_answered() -> None:
    settings = WorkloadSettings(kind="chat", requests=300)
    said = []
    for takes_s in (0.1, 30.0):
        found = drain(of(settings), takes_s)
        said.append(sorted((one.session, one.isl, one.osl) for one in found))
    assert said[0] == said[1]


def test_samples_of_a_group_share_their_prompt_and_batches_wait_for_each_other() -> None:
    settings = WorkloadSettings(kind="rl", prompts=4, samples=8, requests=64, think_s=5.0)
    found = drain(of(settings), takes_s=2.0)
    batches = sorted({one.arrival for one in found})
    assert batches == [0.0, 7.0]
    first = [one for one in found if one.arrival == 0.0]
    assert len({tuple(one.blocks[: one.isl // 64]) for one in first}) == 4


def test_tenants_and_classes_come_side_by_side() -> None:
    found = drain(
        of(
            WorkloadSettings(tenant="a", slo_class="high", requests=100, slo_ttft_s=0.5),
            WorkloadSettings(tenant="b", kind="agents", requests=50, tells_output=True),
        )
    )
    by_tenant = {name: [one for one in found if one.tenant == name] for name in "ab"}
    assert [len(by_tenant[name]) for name in "ab"] == [100, 50]
    assert {one.slo_class for one in by_tenant["a"]} == {"high"}
    assert all(one.expected_osl == one.osl for one in by_tenant["b"])
    shared = {b for one in by_tenant["a"] for b in one.blocks}
    assert shared.isdisjoint(b for one in by_tenant["b"] for b in one.blocks)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.0},
        {"cv": -1.0},
        {"turns": 0.5},
        {"prompt_tokens": 0, "turn_tokens": 0},
        {"diurnal_depth": 2.0},
        {"think_s": float("nan")},
    ],
)
def test_what_cannot_be_drawn_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        WorkloadSettings(**wrong).check()  # type: ignore[arg-type]
