"""The closed loop: what planning is worth on traffic that rises, falls and bursts."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.planner.shapes import code_completion
from select_service.planner.cli import main
from select_service.planner.core.demand import intervals_of
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.edge.baselines import Ceiling, Contest, Oracle
from select_service.planner.edge.fixed_fleets import FixedPoint, busiest, engines_of_use
from select_service.planner.edge.predictors import PredictorSettings
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.edge.replay_command import Replayed, ReplayQuestion, replay, verdict
from select_service.planner.edge.trace_replay import (
    DECODE,
    PREFILL,
    ReplaySettings,
    Result,
    TraceReplay,
)
from select_service.planner.errors import InfeasiblePlan, MissingExtra
from select_service.planner.types import PoolKey
from tests.select_service.planner.golden import PROFILE

SETTINGS = ReplaySettings(ttft_ms=600.0, itl_ms=20.0, start=(1, 1))


def traffic(rate: Callable[[float], float], seconds: float, seed: int = 3) -> list[TracedRequest]:
    rng, now = random.Random(seed), 0.0
    found: list[TracedRequest] = []
    while True:
        now += rng.expovariate(rate(now))
        if now >= seconds:
            return found
        isl = min(12_000.0, rng.lognormvariate(7.3, 0.6))
        found.append(TracedRequest(now, isl, max(20.0, rng.lognormvariate(5.0, 0.5))))


def write_trace(path: Path, requests: list[TracedRequest]) -> None:
    lines = [
        {"timestamp": 1e3 * (50 + one.at_s), "input_length": one.isl, "output_length": one.osl}
        for one in requests
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def replayed(
    name: str,
    requests: list[TracedRequest],
    settings: ReplaySettings = SETTINGS,
) -> Result:
    return played(name, Contest(read_profile(PROFILE), requests, settings, 64), settings)


def played(name: str, contest: Contest, settings: ReplaySettings) -> Result:
    tuning = PredictorSettings(
        name="kalman" if name == "compatible" else "auto",
        interval_s=settings.interval_s,
        compatible=name == "compatible",
    )
    return contest.result(name, contest.policy(name, tuning))


def test_two_minutes_of_traffic_are_counted_and_scaled_for() -> None:
    requests = traffic(lambda _: 12.0, 120.0)
    settings = ReplaySettings(
        interval_s=30.0, startup_s=10.0, ttft_ms=600.0, itl_ms=20.0, start=(1, 1)
    )
    ours = replayed("slo", requests, settings)
    assert ours.requests == len(requests)
    assert 0.5 < ours.attainment <= 1.0
    assert ours.replicas["prefill"][-1][1] > 1
    assert ours.gpu_hours > 2 * 120 / 3600
    assert replayed("slo", requests, settings) == ours  # the same once more
    both = Contest(read_profile(PROFILE), requests, settings, 64)
    fixed, oracle = (played(name, both, settings) for name in ("static", "oracle"))
    assert fixed.changes == 0
    assert fixed.attainment >= 0.99 <= oracle.attainment, "they know what will come"
    assert oracle.gpu_hours <= fixed.gpu_hours, "what never changes is a plan, too"


def test_no_fleet_is_tried_in_which_engines_are_never_of_use() -> None:
    """A budget of 100,000 GPUs was simulated, engine by engine."""
    requests, profile = traffic(lambda _: 12.0, 20.0), read_profile(PROFILE)
    vast, usual = (Contest(profile, requests, SETTINGS, gpus).fixed for gpus in (100_000, 64))
    assert vast.best == usual.best
    assert vast.frontier(0.0)[-1].attainment == usual.unlimited.attainment
    assert max(sum(fleet) for fleet in vast._results) < 2 * len(requests)
    alone = TracedRequest(0.0, 12_000.0, 20.0)
    assert engines_of_use(profile, [alone, alone]) == (3, 3), "one more than are ever busy"
    assert engines_of_use(profile, [alone, alone._replace(at_s=60.0)]) == (2, 2)


def test_a_trace_too_long_to_be_searched_is_searched_in_its_busiest_part() -> None:
    """A whole day was simulated some sixty times, for hours."""
    requests, profile = (
        traffic(lambda now: 30.0 if now > 90.0 else 3.0, 120.0),
        read_profile(PROFILE),
    )
    limit = 6 * len(requests)
    whole = Contest(profile, requests, SETTINGS, 64).fixed
    short = dataclasses.replace(SETTINGS, search_requests=limit)
    contest = Contest(profile, requests, short, 64)
    shares: list[float] = []
    static = contest.result("static", None, progress=shares.append)
    assert whole.is_whole
    assert not contest.fixed.is_whole
    assert static.attainment >= 0.99, "it keeps the target, and may be dearer than another"
    assert static.gpu_hours >= whole.result(whole.best).gpu_hours
    assert contest.result("oracle", None).gpu_hours <= static.gpu_hours
    frontier = contest.fixed.frontier(0.0)
    assert max(one.attainment for one in frontier) >= static.attainment
    assert contest.fixed.simulated <= 6, "half of the limit, the most engines and the first plan"
    assert 0.0 < max(shares) <= 1.0


def test_the_busiest_part_is_what_came_in_the_fewest_seconds() -> None:
    requests = [TracedRequest(at, 1.0, 1.0) for at in (0.0, 10.0, 20.0, 21.0, 22.0, 40.0)]
    assert [one.at_s for one in busiest(requests, 3)] == [0.0, 1.0, 2.0]
    assert busiest(requests, 99) == requests


def test_an_oracle_repairs_what_both_pools_together_make_late() -> None:
    """Each alone was within what may be late: it gave up, and a fixed fleet stood for it."""
    ceiling = Ceiling(SETTINGS, 64)
    oracle = Oracle(read_profile(PROFILE), traffic(lambda _: 9.0, 60.0), SETTINGS, ceiling.below)
    assert not oracle.repair({"prefill": [1.0] * 4, "decode": [31.0] * 4}, 10.0)
    assert oracle.repair({"prefill": [1.0] * 6, "decode": [31.0] * 6}, 10.0)


def test_what_came_in_an_interval_is_drawn_from_its_beginning() -> None:
    """Whether replicas came before the load or after it is what people look for."""
    requests = traffic(lambda now: 1.0 if now < 60.0 else 6.0, 120.0)
    result = replayed("reactive", requests, SETTINGS)
    every = SETTINGS.interval_s
    assert [at for at, _ in result.load[:3]] == [0.0, every, 2 * every]
    assert min(at for at, rate in result.load if rate > 4.0) == 60.0
    assert [at for at, _ in result.attained] == [0.0, every]


def test_engines_that_drain_are_paid_until_they_are_empty() -> None:
    """One of two prefill and of two decode engines goes while requests are on it."""

    class Down:
        name = "down"

        def slow(self, window: object, states: object, now: float) -> dict[PoolKey, int]:
            return {}

        def fast(self, load: object, states: object, now: float) -> dict[PoolKey, int]:
            return {PREFILL: 1, DECODE: 1} if now >= 30.0 else {}

    requests = [TracedRequest(0.01 * step, 200.0, 8000.0) for step in range(40)]
    requests.append(TracedRequest(100.0, 200.0, 10.0))
    settings = dataclasses.replace(SETTINGS, start=(2, 2), interval_s=60.0)
    result = TraceReplay(read_profile(PROFILE), requests, settings).run(Down())
    longest = 8000 * 0.005  # seconds of decoding, at the very least
    there = sum(count * 5.0 for points in result.replicas.values() for _, count in points) / 3600
    assert result.gpu_hours >= there + (longest - 35.0) / 3600


def test_ages_of_nothing_are_not_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One time that was 0 among epoch times: it never ended."""
    trace = tmp_path / "trace.jsonl"
    lengths = '"input_length": 10, "output_length": 10'
    trace.write_text("".join(f'{{"timestamp": {at}, {lengths}}}\n' for at in (0, 1.7e12)))
    flags = ("--trace", str(trace), "--profile-results-dir", str(PROFILE), "--policy", "reactive")
    assert main(["replay", *flags]) == 1
    assert "span 1.97e+04 days, 366 are replayed at most" in capsys.readouterr().err


def test_replay_writes_charts_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, traffic(lambda _: 3.0, 60.0))
    page = tmp_path / "replay.html"
    code = main(
        [
            *("replay", "--trace", str(trace), "--profile-results-dir", str(PROFILE)),
            *("--policy", "slo", "--policy", "reactive", "--policy", "static"),
            *("--adjustment-interval", "20"),
            *("--load-predictor", "constant", "--load-predictor", "kalman"),
            *("--itl", "20", "--out", str(page), "--json"),
        ]
    )
    output = capsys.readouterr()
    assert code == 0
    answer = json.loads(output.out)
    results = answer["results"]
    names = ["slo (constant)", "slo (kalman)", "reactive", "static (1 + 1)"]
    assert [one["policy"] for one in results] == names
    assert all(one["attainment"] > 0.9 for one in results)
    assert answer["frontier"][0]["prefill"] == 1
    assert results[0]["fixed_gpu_hours"] <= results[0]["gpu_hours"]
    assert answer["verdict"] in output.err
    assert "as good as no planning" in page.read_text()
    assert page.read_text().count("<svg xmlns") == 5
    (tmp_path / "empty.jsonl").write_text("")
    wrong = str(tmp_path / "empty.jsonl")
    assert main(["replay", "--trace", wrong, "--profile-results-dir", str(PROFILE)]) == 1
    assert "no requests in it" in capsys.readouterr().err


def test_what_is_not_installed_is_reported_before_anything_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was reported after minutes of the policies before, whose results were lost."""
    monkeypatch.setitem(sys.modules, "scipy.interpolate", None)  # an import of it fails
    write_trace(tmp_path / "trace.jsonl", traffic(lambda _: 12.0, 20.0))
    question = ReplayQuestion(
        *(tmp_path / "trace.jsonl", PROFILE, ("oracle", "compatible")),
        *((PredictorSettings(name="constant"),), SETTINGS, 64),
    )
    lines: list[str] = []
    with pytest.raises(MissingExtra, match="the extra planner"):
        replay(question, lines.append)
    assert not lines
    names = [one.name for one in replay(question._replace(skips=True), lines.append).results]
    assert names == ["oracle"], "who names no policy gets those that are there"
    assert lines[0].startswith("left out: compatible needs")


def test_of_policies_that_are_alike_none_is_the_best() -> None:
    alike = [Result(name, requests=100, in_time=99, gpu_hours=5.0) for name in ("slo", "reactive")]
    assert verdict(Replayed(alike, [], 0.99)).startswith("No policy is ahead of another: 99.00 %")
    alike[1].gpu_hours = 6.0
    assert verdict(Replayed(alike, [], 0.99)).startswith("slo does best")


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (4.0, "slo beats fixed fleets"),
        (5.0, "slo is as good as no planning: a fixed fleet of 4 prefill"),
        (5.02, "slo is as good as no planning"),
        (5.5, "slo is beaten by no planning at all"),
    ],
)
def test_a_planner_that_costs_what_a_fixed_fleet_costs_is_not_beaten(
    hours: float, text: str
) -> None:
    ours = Result("slo", requests=100, in_time=99, gpu_hours=hours)
    whole = Replayed([ours], [FixedPoint(4, 1, 5.0, 0.99)], 0.99)
    assert text in verdict(whole)
    assert "--search-requests" not in verdict(whole)
    assert verdict(whole._replace(is_whole=False)).endswith("too (--search-requests).")


@pytest.mark.parametrize("runs", [9, 10])
def test_what_policies_play_is_part_of_what_may_be_simulated(
    runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They came on top: eleven runs of the trace."""
    requests = traffic(lambda _: 40.0, 15.0)
    simulated: list[int] = []
    run = TraceReplay.run

    def counted(self: TraceReplay, *arguments: Any) -> Result:
        simulated.append(self.requests)
        return run(self, *arguments)

    monkeypatch.setattr(TraceReplay, "run", counted)
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests)
    settings = dataclasses.replace(
        SETTINGS, search_requests=runs * len(requests), interval_s=10.0, startup_s=5.0
    )
    names = ("kalman", "ets", "constant", "auto")
    tunings = tuple(PredictorSettings(name=name, interval_s=10.0) for name in names)
    policies = ("slo", "reactive", "static", "oracle")
    replay(ReplayQuestion(path, PROFILE, policies, tunings, settings, 24), lambda _: None)
    assert simulated.count(len(requests)) >= 8, "each policy, two fixed fleets and the oracle"
    assert sum(simulated) <= runs * len(requests)


def test_nobody_is_replayed_with_more_gpus_than_there_are() -> None:
    """The reactive scaler and the oracle had as many as they liked: no baselines to compare."""
    requests = traffic(lambda _: 30.0, 60.0)
    settings = dataclasses.replace(SETTINGS, interval_s=10.0, startup_s=10.0, decode_gpus=2)
    profile = read_profile(PROFILE)
    contest = Contest(profile, requests, settings, 6)
    for name in ("slo", "reactive", "static", "oracle"):
        replicas = played(name, contest, settings).replicas
        pairs = zip(replicas["prefill"], replicas["decode"], strict=True)
        assert max(prefill + 2 * decode for (_, prefill), (_, decode) in pairs) <= 6, name
    with pytest.raises(InfeasiblePlan):
        Contest(profile, requests, settings, 2)


def test_clumps_that_nobody_can_follow_are_served_as_well_as_by_a_fixed_fleet() -> None:
    """It followed them: 92 % of an hour like this in time, where four and one have 99.9 %."""
    requests, settings = code_completion(1, 1200.0), ReplaySettings(start=(4, 1))
    contest = Contest(read_profile(PROFILE), requests, settings, 64)
    fixed = contest.fixed.result((4, 1))
    ours = contest.result("slo", contest.policy("slo", PredictorSettings(interval_s=60.0)))
    assert ours.attainment >= max(0.99, fixed.attainment - 0.005)
    assert ours.gpu_hours <= 1.05 * fixed.gpu_hours


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rate", "hours"),
    [
        (lambda now: 22 - 16 * math.cos(2 * math.pi * now / 3600), 4.34),
        (lambda now: 4 + 36 * min(1.0, now / 3600), 4.40),
    ],
    ids=["diurnal", "ramp"],
)
def test_an_hour_in_time_at_hardly_more_than_an_oracle_s_price(
    rate: Callable[[float], float], hours: float
) -> None:
    """`hours` is what an oracle costs that plans 99 % for every half minute, without a replay."""
    requests = traffic(rate, 3600.0)
    contest = Contest(read_profile(PROFILE), requests, SETTINGS, 64)
    fixed, oracle = contest.result("static", None), contest.result("oracle", None)
    ours, theirs = replayed("slo", requests), replayed("compatible", requests)
    assert ours.attainment >= 0.99
    assert ours.attainment > theirs.attainment
    assert ours.gpu_hours <= 1.10 * hours
    assert ours.gpu_hours <= 1.15 * oracle.gpu_hours, "which keeps 99 % and not a request more"
    assert ours.gpu_hours < 0.8 * fixed.gpu_hours
    assert ours.turns <= 3
    assert oracle.attainment >= 0.99
    assert oracle.gpu_hours < hours, "it is no fixed fleet that stands for it"


def recurring(now: float) -> float:
    return 36.0 if now % 900.0 >= 750.0 else 10.0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_bursts_that_recur_are_foreseen_once_they_were_learnt() -> None:
    """Engines start in a minute: nobody who only reacts is in time for them."""
    before = traffic(recurring, 7200.0, seed=4)
    past = tuple(intervals_of([*before, TracedRequest(7201.0, 1.0, 1.0)], 60.0))
    requests = traffic(recurring, 1900.0)
    learnt = replayed("slo", requests, dataclasses.replace(SETTINGS, warmup=past))
    assert learnt.attainment >= 0.99
    assert learnt.gpu_hours <= 1.10 * replayed("oracle", requests).gpu_hours


def bursts(now: float) -> float:
    return 36.0 if (now // 100.0) % 7 == 5 else 10.0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_headroom_for_bursts_nobody_foresees_is_the_user_s_choice() -> None:
    """The more of all requests are to be in time, the more is kept ready, and the more are."""
    before = traffic(lambda now: bursts(now + 13.0 * (now // 700.0)), 5400.0, seed=4)
    past = tuple(intervals_of(before, 60.0))
    requests = traffic(bursts, 1800.0)
    results = [
        replayed("slo", requests, dataclasses.replace(SETTINGS, warmup=past, attainment=goal))
        for goal in (0.5, 0.99)
    ]
    assert results[1].attainment > results[0].attainment + 0.02
    assert results[1].gpu_hours > results[0].gpu_hours


def test_without_a_profile_the_fleet_is_nearly_as_large() -> None:
    """Engines are as the profile says, which only one of two planners knows."""
    requests = traffic(lambda now: 9.0 - 5.0 * math.cos(now / 300.0), 900.0)
    start = (2, 3)
    with_profile, without = (
        replayed("slo", requests, dataclasses.replace(SETTINGS, start=start, engine_speed=source))
        for source in ("profile", "learnt")
    )
    for pool, counts in with_profile.replicas.items():
        means = [
            sum(count for _, count in one) / len(one) for one in (counts, without.replicas[pool])
        ]
        assert abs(means[0] - means[1]) < 1.0, (pool, means)
    assert without.gpu_hours < 1.25 * with_profile.gpu_hours
    assert without.attainment > with_profile.attainment - 0.01
