"""Targets in time: who is good, how much policies differ, and what a fleet carries within them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from select_service.simulator.capacity import (
    Capacities,
    CapacityFound,
    CapacitySearch,
    search,
)
from select_service.simulator.capacity import table_of as capacity_table
from select_service.simulator.capacity import verdict as capacity_verdict
from select_service.simulator.cli import main
from select_service.simulator.comparison import (
    Comparison,
    changes,
    differences,
    legend,
    table,
    verdict,
)
from select_service.simulator.core.measures import Distribution, Measures
from select_service.simulator.core.requests import OK, ClientRequest, RequestOutcome, chain_of
from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.runs import ClosedTraceWorkload, at_load, run, workload
from select_service.simulator.settings import SimulationSettings, Slow, Trace
from tests.select_service.simulator.test_select_sim import trace_file

SINGLE = WorkloadSettings(kind="shared-prompts", rate=8.0, requests=100)
TARGETS = SimulationSettings(
    workloads=[SINGLE], workers=2, block_size=64, policy="kv-cost", slo_ttft_s=0.2, slo_itl_s=0.02
)


def runs_of(settings: SimulationSettings, *policies: str, seeds: int = 1) -> list[Measures]:
    return [
        run(replace(settings, policy=policy, seed=seed))
        for policy in policies
        for seed in range(1, seeds + 1)
    ]


def test_a_request_is_good_within_its_own_target_or_that_of_the_run(tmp_path: Path) -> None:
    strict = replace(SINGLE, slo_ttft_s=1e-6)
    found = run(replace(TARGETS, workloads=[SINGLE, strict]))
    assert [(row.offered, row.met) for row in found.slo] == [(200, round(200 * found.good))]
    assert 0.0 < found.good <= 0.5, "one of two workloads is never in time"
    trace = Trace(path=str(trace_file(tmp_path)))
    asked = workload(replace(TARGETS, workloads=[], trace=trace, block_size=512)).next()
    assert asked is not None
    assert (asked.slo_ttft_s, asked.slo_itl_s) == (0.2, 0.02), "of a trace without targets"
    without = run(replace(TARGETS, slo_ttft_s=None, slo_itl_s=None))
    assert (without.good, without.slo) == (1.0, []), "all are answered"


def test_differences_are_of_the_same_requests() -> None:
    once = runs_of(TARGETS, "kv-cost", "random")
    twice = runs_of(TARGETS, "kv-cost", "random", seeds=2)
    for runs, half in ((once, len(once) // 2), (twice, len(twice) // 2)):
        change = changes(runs[:half], runs[half:])["ttft_mean"]
        means = [sum(one.ttft_s.mean for one in some) / half for some in (runs[:half], runs[half:])]
        assert change.mean == pytest.approx(means[1] - means[0])
        assert change.half is not None
    assert changes(once[:1], once[1:])["ttft_p90"].half is None, "one run has one p90"
    few = runs_of(replace(TARGETS, workloads=[replace(SINGLE, requests=5)]), "kv-cost", "random")
    assert all(part.ttft_mean > 0.0 for one in few for part in one.parts), "nobody is no request"
    none = [replace(one, parts=[]) for one in few]
    assert changes(none[:1], none[1:])["ttft_mean"].half is None
    same = changes(once[:1], once[:1])["good"]
    assert same == (0.0, 0.0)
    head, rows = differences(once)
    assert head[0] == "against kv-cost"
    assert [row[0] for row in rows] == ["random"]
    assert rows[0][1].startswith("+")
    assert [row[0] for row in differences(runs_of(TARGETS, "random", "least-loaded"))[1]] == [
        "random"
    ], "without the default they are compared with the last"


def test_the_verdict_says_who_wins_and_by_how_much() -> None:
    more = replace(TARGETS, slo_ttft_s=0.1, workloads=[replace(SINGLE, requests=200)])
    runs = runs_of(more, "random", "kv-cost", "bound", seeds=3)
    text = verdict(runs)
    assert text.startswith("kv-cost is ahead: ")
    assert " points more than random; bound: " in text
    assert "is not clearly ahead of" in verdict(
        [*runs[3:6], *(replace(one, policy="x") for one in runs[3:6])]
    )
    slow = [replace(one, policy="x", ttft_s=replace(one.ttft_s, p90=9.0)) for one in runs[3:6]]
    text = verdict([*slow, *runs[3:6]])
    assert text.startswith("kv-cost is ahead: "), "as many are in time, and they wait less"
    assert "as many are in time with x, and the TTFT p90 is 9" in text
    plain = runs_of(replace(TARGETS, slo_ttft_s=None, slo_itl_s=None), "random", "kv-cost")
    assert "% below that of random (one run, so no interval)." in verdict(plain)
    assert verdict(plain[:1]).startswith("random: TTFT p90 of ")
    plain[1] = replace(plain[1], e2e_s=replace(plain[0].e2e_s, mean=plain[0].e2e_s.mean * 0.9999))
    without_targets = Comparison(settings=TARGETS, runs=plain)
    head, rows = table(plain)
    at = head.index("in time, %")
    assert [row[at] for row in rows] == ["-", "-"], "nothing says when a request is in time"
    assert legend(without_targets)["in time"].startswith("no target was given")
    assert "sessions" in legend(without_targets)["goodput"]
    batches = replace(TARGETS, workloads=[WorkloadSettings(kind="rl")])
    assert "sessions" not in legend(replace(without_targets, settings=batches))["goodput"], (
        "they have no rate"
    )
    head, rows = differences(plain)
    assert head[-1] == "E2E mean, %"
    assert rows[0][-1].startswith("+0.0"), "nothing is not less than nothing"
    silent = replace(plain[0], ok=0, ttft_s=Distribution(), policy="silent")
    assert verdict([silent, plain[1]]).startswith("kv-cost: "), "no answer is not a fast one"


def test_the_load_that_is_found_is_the_border(tmp_path: Path) -> None:
    task = CapacitySearch(settings=TARGETS, workers=False, share=0.9, tolerance=0.02)
    found = search(task)
    tried = dict(found.trials)
    below = max(load for load, good in tried.items() if good >= 0.9)
    above = min(load for load, good in tried.items() if good < 0.9)
    assert below <= found.found <= above <= below * 1.021
    never = replace(TARGETS, slo_ttft_s=1e-6)
    assert search(replace(task, settings=never)).found == 0.0
    always = replace(
        TARGETS, slo_ttft_s=1e6, slo_itl_s=None, workloads=[replace(SINGLE, requests=20)]
    )
    beyond = search(replace(task, settings=always))
    assert (beyond.found, beyond.beyond) == (64.0, True)


def test_the_fewest_workers_for_a_load() -> None:
    load = replace(SINGLE, rate=60.0)
    task = CapacitySearch(
        settings=replace(TARGETS, workloads=[load], workers=1),
        workers=True,
        share=0.9,
        tolerance=0.01,
    )
    found = search(task)
    tried = dict(found.trials)
    assert tried[found.found] >= 0.9 > tried.get(found.found - 1, 0.0)
    never = search(replace(task, settings=replace(task.settings, slo_ttft_s=1e-6)))
    assert (never.found, never.beyond) == (64.0, True)


def test_fewer_workers_than_slow_ones_are_not_tried() -> None:
    """The search ended with an error as soon as it came to fewer."""
    settings = replace(TARGETS, workers=4, slow=[Slow(count=3, speed=0.9)], slo_ttft_s=5.0)
    task = CapacitySearch(settings=settings, workers=True, share=0.9, tolerance=0.01)
    assert search(task).found == 3.0


def test_there_is_no_half_user() -> None:
    """One user in time and two that are not were reported as one and a half."""
    few = WorkloadSettings(kind="shared-prompts", arrivals="closed", users=1, requests=12)
    settings = replace(TARGETS, workloads=[few], workers=1, slo_ttft_s=None)
    one, two = (
        run(replace(settings, workloads=[replace(few, users=users)])).itl_s.p50 for users in (1, 2)
    )
    assert one < two
    settings = replace(settings, slo_itl_s=(one + two) / 2)
    task = CapacitySearch(settings=settings, workers=False, share=0.5, tolerance=0.01)
    assert search(task).found == 1.0


def capacities(*loads: tuple[str, float]) -> Capacities:
    return Capacities(
        settings=TARGETS,
        find="load",
        share=0.9,
        capacity=10.0,
        searches=[
            CapacityFound(policy=policy, seed=1, found=load, trials=[]) for policy, load in loads
        ],
    )


def found_of(*loads: tuple[str, float]) -> str:
    return capacity_verdict(capacities(*loads))


def test_one_policy_is_compared_with_none() -> None:
    one, two = ("first-token", 0.5), ("kv-cost", 0.4)
    assert capacity_table(capacities(one))[0] == ["policy", "of capacity", "requests/s"]
    head, rows = capacity_table(capacities(one, two))
    assert head[-1] == "against kv-cost, %"
    assert [row[-1] for row in rows] == ["+25.0", "-"]


def test_who_carries_nothing_is_no_equal() -> None:
    assert found_of(("first-token", 0.5), ("kv-cost", 0.0)) == (
        "first-token carries 0.500 of capacity, 5 requests/s, with 90 % of requests in time "
        "(TTFT 200 ms, ITL 20 ms), kv-cost no load."
    )
    assert found_of(("first-token", 0.0), ("kv-cost", 0.0)).startswith("However light the load")
    text = found_of(("first-token", 0.5), ("kv-cost", 0.5))
    assert text.endswith(", the same as for kv-cost.")
    text = found_of(("first-token", 0.5), ("kv-cost", 0.4))
    assert text.endswith("+25.0 % against kv-cost (one seed, so no interval).")


def test_who_is_in_time_at_the_greatest_load_has_a_row_beside_the_others() -> None:
    """One such policy ended the command, and with it the searches of all others."""

    def shown(find: str, *found: tuple[str, float, bool]) -> tuple[str, list[list[str]]]:
        searches = [
            CapacityFound(policy=policy, seed=1, found=amount, trials=[], beyond=beyond)
            for policy, amount, beyond in found
        ]
        result = Capacities(
            settings=TARGETS, find=find, share=0.9, capacity=None, searches=searches
        )
        return capacity_verdict(result), capacity_table(result)[1]

    verdict, rows = shown("load", ("kv-cost", 2.0, False), ("first-token", 64.0, True))
    assert verdict.startswith("first-token carries > 64 times the given load with 90 % of")
    assert verdict.endswith(", kv-cost 2.")
    assert rows == [["kv-cost", "2", "-"], ["first-token", "> 64", "-"]]
    verdict, _ = shown("load", ("kv-cost", 64.0, True), ("first-token", 64.0, True))
    assert verdict.endswith(
        "as does first-token: more requests, or tighter targets, separate them."
    )
    verdict, rows = shown("workers", ("kv-cost", 64.0, True), ("first-token", 3.0, False))
    assert verdict.startswith("first-token needs 3 workers with 90 %")
    assert verdict.endswith(", and for kv-cost 64 are not enough.")
    assert rows == [["kv-cost", "> 64", "-"], ["first-token", "3", "-"]]
    verdict, _ = shown("workers", ("kv-cost", 64.0, True))
    assert verdict.startswith("64 workers are not enough for 90 % of requests in time")
    # one seed of two: the mean of 3 and of more than 64 was reported as more than 33.5
    mixed = (("first-token", 3.0, False), ("first-token", 64.0, True))
    verdict, rows = shown("load", *mixed, ("kv-cost", 2.0, False), ("kv-cost", 2.5, False))
    assert verdict.startswith("first-token carries 3 to > 64 (by seed) times the given")
    assert verdict.endswith(", kv-cost 2.25 ±3.18: not every seed has a number.")
    assert rows == [
        ["first-token", "3 to > 64 (by seed)", "-"],
        ["kv-cost", "2.25 ±3.18", "-"],
    ]
    # what every seed carries decides: two seeds of 4 are ahead of 3 and more than 64
    verdict, _ = shown("load", *mixed, ("kv-cost", 4.0, False), ("kv-cost", 4.0, False))
    assert verdict.startswith("kv-cost carries 4.00 ±0.00 times the given load")
    verdict, _ = shown("workers", *mixed)
    assert verdict.startswith("first-token needs 3 to > 64 (by seed) workers with 90 %")


def test_capacity_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "out.json", tmp_path / "report.html"
    trace = ["--trace", str(trace_file(tmp_path)), "--workers", "2", "--tolerance", "0.1"]
    files = ["--out", str(out), "--report", str(report)]
    argv = ["capacity", *trace, "--slo-ttft", "1", "--policy", "kv-cost,random", "--seeds", "2"]
    assert main([*argv, *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kv-cost carries 0.")
    assert [line.split()[0] for line in lines[1:]] == ["policy", "kv-cost", "random"]
    result = json.loads(out.read_bytes())
    assert [(one["policy"], one["seed"]) for one in result["searches"]] == [
        ("kv-cost", 1),
        ("kv-cost", 2),
        ("random", 1),
        ("random", 2),
    ]
    assert lines[0] in report.read_text().replace("&#x27;", "'")
    users = ["--trace", trace[1], "--users", "40", "--workers", "2", "--tolerance", "0.3"]
    assert main(["capacity", *users, "--slo-ttft", "1", "--policy", "kv-cost"]) == 0
    assert "times the given load" in capsys.readouterr().out
    few = ["--workload", "chat,rate=4,requests=60", "--block-size", "64", "--workers", "1"]
    assert main(["capacity", "--find", "workers", *few, "--slo-ttft", "2"]) == 0
    assert "needs 1 workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--workload", "chat"], "--slo-ttft, --slo-itl or both"),
        (["--trace", "x", "--format", "agents"], "--slo-ttft, --slo-itl or both"),
        (["--trace", "x", "--slo-ttft", "1", "--load", "0.5"], "--load"),
        (["--workload", "chat", "--slo-ttft", "0"], "--slo-ttft"),
        (["--workload", "chat", "--slo-ttft", "1", "--share", "1.5"], "--share"),
        (["--workload", "chat", "--slo-ttft", "1", "--find", "gold"], "--find"),
        (["--trace", "x", "--slo-ttft", "1", "--users", "3", "--speed", "2"], "users of a trace"),
    ],
)
def test_a_search_for_nothing_is_refused(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["capacity", *argv])
    assert refused.value.code == 2
    assert why in capsys.readouterr().err


def test_users_of_a_trace_ask_when_they_have_their_answer(tmp_path: Path) -> None:
    def one(number: int, session: str = "") -> ClientRequest:
        return ClientRequest(
            number=number, arrival=float(number), isl=9, osl=2, blocks=chain_of(), session=session
        )

    requests = [one(1, "a"), one(2), one(3, "a"), one(4), one(5)]
    requests[2].think_s = 0.5
    requests[3].think_s = 9.0
    played = ClosedTraceWorkload(requests, 4, random.Random(1), users=2, limit=4)
    assert played.total == 4
    first, second = played.next(), played.next()
    assert first is not None
    assert second is not None
    assert played.next() is None
    assert [first.number, second.number] == [1, 2]
    assert 0.0 <= first.arrival <= second.arrival <= 1.0
    (third,) = played.after(RequestOutcome(first, OK, 7.0))
    assert (third.number, third.arrival) == (3, 7.5), "the same user's, who thinks"
    (fourth,) = played.after(RequestOutcome(second, OK, 8.0))
    assert (fourth.number, fourth.arrival) == (4, 8.0), "it follows no answer"
    assert played.after(RequestOutcome(fourth, OK, 9.0)) == ()
    trace = Trace(path=str(trace_file(tmp_path)), users=3)
    settings = SimulationSettings(trace=trace, workers=2, policy="kv-cost")
    assert run(settings).ok == 150
    with pytest.raises(ValueError, match="users of a trace set its pace"):
        at_load(settings, 0.5, 1.0)
