"""Engines out of figures: measured ones, and published ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from select_service.core.recording.items import ReservationStep
from select_service.simulator.calibrate import fit, points_of_lives
from select_service.simulator.cli import main
from select_service.simulator.core.latency import AnalyticLatency
from select_service.simulator.core.requests import RequestOutcome
from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.engine_presets import DEVICES, MODELS, preset_of
from select_service.simulator.measured_points import Point, read_points
from select_service.simulator.profiles import read_profile, write_profile
from select_service.simulator.runs import cluster
from select_service.simulator.settings import EngineSpec, SimulationSettings
from tests.models.recorded_fleet import RecordedFleet

TRUTH = EngineSpec(
    base_s=9e-3, prefill_token_s=60e-6, prefill_pair_s=2e-9, sequence_s=0.2e-3, kv_token_s=90e-9
)


def outcomes_of(engine: EngineSpec, users: int, isl: int, requests: int) -> list[RequestOutcome]:
    one = WorkloadSettings(
        kind="chat",
        arrivals="closed",
        users=users,
        requests=max(requests, 4 * users),
        turns=1.0,
        prompts=1,
        prompt_tokens=0,
        turn_tokens=isl,
        output_tokens=150,
        think_s=0.0,
    )
    settings = SimulationSettings(
        workloads=[one], workers=1, engine=engine, policy="round-robin", block_size=64
    )
    built = cluster(settings)
    built.finish()
    return [one for one in built.outcomes if one.request.osl > 1]


def measured(engine: EngineSpec, users: int, isl: int, requests: int = 120) -> Point:
    """What a load generator would say of a simulated engine."""
    ends = outcomes_of(engine, users, isl, requests)
    number = len(ends)
    seconds = max(one.finished for one in ends)
    isl_mean = sum(one.request.isl for one in ends) / number
    return Point(
        isl=isl_mean,
        osl=sum(one.request.osl for one in ends) / number,
        concurrency=sum(one.e2e_s for one in ends) / seconds,
        ttft_s=sum(one.ttft_s for one in ends) / number,
        itl_s=sum(one.finished - one.first_token for one in ends)
        / sum(one.request.osl - 1 for one in ends),
    )


POINTS = [measured(TRUTH, users, isl) for users, isl in ((1, 300), (1, 4000), (8, 1000), (32, 600))]


def of_vllm(one: Point) -> dict[str, Any]:
    e2e_s = one.ttft_s + one.itl_s * (one.osl - 1)
    return {
        "completed": 100,
        "duration": 100 * e2e_s / one.concurrency,
        "total_input_tokens": 100 * one.isl,
        "total_output_tokens": 100 * one.osl,
        "mean_ttft_ms": 1e3 * one.ttft_s,
        "mean_tpot_ms": 1e3 * one.itl_s,
    }


def of_guidellm(*some: Point) -> dict[str, Any]:
    def run(one: Point) -> dict[str, Any]:
        values = {
            "prompt_token_count": one.isl,
            "output_token_count": one.osl,
            "request_concurrency": one.concurrency,
            "time_to_first_token_ms": 1e3 * one.ttft_s,
            "inter_token_latency_ms": 1e3 * one.itl_s,
        }
        return {
            "metrics": {name: {"successful": {"mean": value}} for name, value in values.items()}
        }

    return {"benchmarks": [run(one) for one in some]}


def of_aiperf(one: Point) -> dict[str, Any]:
    return {
        "input_sequence_length": {"avg": one.isl, "unit": "tokens"},
        "output_sequence_length": {"avg": one.osl, "unit": "tokens"},
        "request_throughput": {"avg": one.concurrency / 2.0, "unit": "requests/sec"},
        "request_latency": {"avg": 2_000.0, "unit": "ms"},
        "time_to_first_token": {"avg": 1e3 * one.ttft_s, "unit": "ms"},
        "inter_token_latency": {"avg": 1e3 * one.itl_s, "unit": "ms"},
    }


VLLM = json.dumps(of_vllm(POINTS[0]))


def test_each_generator_says_the_same_of_a_run(tmp_path: Path) -> None:
    one = Point(isl=1000.0, osl=200.0, concurrency=8.0, ttft_s=0.25, itl_s=0.0125)
    for report in (of_vllm(one), of_guidellm(one), of_aiperf(one), {"records": of_aiperf(one)}):
        path = tmp_path / "result.json"
        path.write_text(json.dumps(report), encoding="utf-8-sig")
        (read,) = read_points(str(path))
        assert read == pytest.approx(one)


@pytest.mark.parametrize("users", [4, 16])
def test_a_calibrated_engine_is_as_fast_as_the_measured_one(tmp_path: Path, users: int) -> None:
    path, profile = tmp_path / "all.json", tmp_path / "profile"
    path.write_text(json.dumps(of_guidellm(*POINTS)))
    argv = ["calibrate", str(path), "--kv-tokens", "400000", "--out", str(profile)]
    assert main(argv) == 0
    truth = measured(TRUTH, users, 800)
    fitted = measured(EngineSpec(profile=str(profile)), users, 800)
    assert fitted.itl_s == pytest.approx(truth.itl_s, rel=0.1)
    assert fitted.ttft_s == pytest.approx(truth.ttft_s, rel=0.1)
    assert read_profile(profile).max_kv_tokens == 400_000, "for the planner, too"


def lives_of(users: int, isl: int, name: str) -> list[tuple[int, ReservationStep]]:
    """What a recording has of a simulated engine's requests, in blocks of a token."""
    steps = []
    for one in outcomes_of(TRUTH, users, isl, 150):
        id_ = f"{name}{one.request.number}"
        new, osl = one.request.isl - one.cached_tokens, one.request.osl
        begin = ReservationStep(one.placed, "booked", id_, 0, 7, 0, new, one.request.isl)
        steps += [begin, ReservationStep(one.first_token, "prefill_complete", id_)]
        steps.append(ReservationStep(one.finished, "freed", id_, amount=osl))
    steps.sort(key=lambda step: step.at)
    return [(1, step) for step in steps]


def test_a_recording_shows_its_engines_as_a_load_generator_does() -> None:
    points = [
        point
        for number, (users, isl) in enumerate(((1, 300), (1, 4000), (8, 1000), (32, 600)))
        for point in points_of_lives(lives_of(users, isl, str(number)))
    ]
    assert len(points) > 8, "by length and load"
    recorded, truth = fit(points).latency, TRUTH.build().latency
    for tokens in (300, 3000):
        assert recorded.prefill_s(tokens, 0) == pytest.approx(truth.prefill_s(tokens, 0), rel=0.2)
    for sequences in (1, 30):
        batch = sequences, 700 * sequences, 1
        assert recorded.stretch_s(*batch) == pytest.approx(truth.stretch_s(*batch), rel=0.1)


def test_lives_that_were_cut_short_show_nothing() -> None:
    def points(end: str, *, first: bool = True, amount: int = 9) -> list[Point]:
        steps = []
        for number in range(6):
            id_, at = str(number), 10.0 * number
            steps.append(ReservationStep(at, "booked", id_, 0, 1, 0, 50, 80))
            steps += [ReservationStep(at + 1.0, "prefill_complete", id_)] * first
            steps.append(ReservationStep(at + 3.0, end, id_, amount=amount))
        return points_of_lives([(4, step) for step in steps])

    (one,) = points("freed")
    assert one == pytest.approx((80.0, 36.0, 1.0, 1.0, 2.0 / 35, 30.0))
    assert points("expired") == points("freed", first=False) == points("freed", amount=0) == []


def test_a_recording_of_the_service_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = RecordedFleet(1)
    fleet.play(30)
    path = fleet.recorded_file.into(tmp_path / "recording")
    with pytest.raises(SystemExit):
        main(["calibrate", str(path), "--kv-tokens", "1000", "--out", str(tmp_path / "out")])
    assert "reservations that are alike" in capsys.readouterr().err


def test_a_fit_finds_the_formula_again() -> None:
    """Without queues and noise: points made by the formula itself."""
    latency = AnalyticLatency(8e-3, 50e-6, 3e-9, 0.3e-3, 80e-9)
    rng = random.Random(1)
    points = []
    for _ in range(12):
        isl, osl = rng.uniform(100, 8000), rng.uniform(50, 400)
        ttft_s = latency.base_s + latency.prefill_s(int(isl), 0)
        context = isl + osl / 2
        itl_s = latency.base_s + latency.sequence_s + latency.kv_token_s * context
        points.append(Point(isl, osl, 1.0, ttft_s, itl_s))
    found = fit(points)
    for (ttft_s, itl_s), one in zip(found.fitted, points, strict=True):
        assert ttft_s == pytest.approx(one.ttft_s, rel=0.02)
        assert itl_s == pytest.approx(one.itl_s, rel=0.02)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{}", "neither of vLLM's bench"),
        ("[1]", "Expected `object`"),
        ('{"a": 1', "result.json is not JSON: "),
        ("# Results\n", "result.json begins with '# Results\\n': neither JSON of vLLM's bench, "),
        ("select-service recorded", "nor a recording (select-service --record FILE)"),
        ('{"mean_ttft_ms": 3}', "result.json: Object missing required field `completed`"),
        (VLLM.replace("100", "0", 1), "Expected `float` > 0.0 - at `$.completed`"),
        (VLLM.replace("100", "9" * 400, 1), "`$.completed`"),
        (VLLM.replace("100", '"100"', 1), "Expected `float`, got `str` - at `$.completed`"),
        ('{"benchmarks": [{"metrics": []}]}', "`$.benchmarks[0].metrics`"),
        ('{"records": []}', "`$.records`"),
        (
            json.dumps(of_aiperf(POINTS[0]) | {"request_latency": {"avg": 1, "unit": "min"}}),
            "`$.request_latency.unit`",
        ),
        ('{"benchmarks": []}', "neither of vLLM's bench"),
        (json.dumps(of_vllm(POINTS[0]._replace(itl_s=0.0))), "itl_s is 0"),
        (json.dumps(of_vllm(POINTS[0]._replace(osl=1.0))), "a single token"),
    ],
)
def test_what_cannot_be_read_is_no_wrong_usage(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with 2, where a damaged recording ends with 1."""
    path = tmp_path / "result.json"
    path.write_text(text)
    argv = ["calibrate", str(path), "--kv-tokens", "1000", "--out", str(tmp_path / "out")]
    assert main(argv) == 1
    assert why in capsys.readouterr().err
    path.write_text(json.dumps(of_vllm(POINTS[0])))
    with pytest.raises(SystemExit) as refused:
        main(argv)
    assert refused.value.code == 2
    assert "one run is not enough" in capsys.readouterr().err


def test_a_cache_too_small_for_a_prompt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The planner's half had no point, which whoever reads it had to find out."""
    path = tmp_path / "result.json"
    path.write_text(json.dumps(of_guidellm(*POINTS)))
    with pytest.raises(SystemExit):
        main(["calibrate", str(path), "--kv-tokens", "63", "--out", str(tmp_path / "out")])
    assert "a KV cache of 63 tokens" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [{"base_s": -1}, {"foo": 1}, {"kv_tokens": 0.5}])
def test_a_formula_that_no_engine_has_is_named_by_its_file(
    tmp_path: Path, wrong: dict[str, float]
) -> None:
    write_profile(tmp_path, AnalyticLatency(), 400_000, 1000)
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    with pytest.raises(ValueError, match=f"engine.json: .*{next(iter(wrong))}"):
        EngineSpec(profile=str(tmp_path)).build()


def test_a_preset_is_a_model_on_a_device() -> None:
    small = EngineSpec(preset="llama-3.1-8b@h100").build()
    usual = EngineSpec().build()
    assert small.kv_tokens == pytest.approx(usual.kv_tokens, rel=0.05), (
        "which the defaults are near"
    )
    assert small.latency.prefill_s(2000, 0) == pytest.approx(
        usual.latency.prefill_s(2000, 0), rel=0.05
    )
    assert EngineSpec(preset="llama-3.1-8b@h100", kv_tokens=5000).build().kv_tokens == 5000
    for model in MODELS:
        for device in DEVICES:
            EngineSpec(preset=f"{model}@{device}x8").build()
    one, two = (preset_of(f"qwen3-32b@h200{number}") for number in ("", "x2"))
    assert two["base_s"] == one["base_s"] / 2
    assert two["kv_tokens"] > 2 * one["kv_tokens"], "the weights are there once"
    eight, sixteen = (preset_of(f"llama-3.1-8b@h100x{number}") for number in (8, 16))
    assert sixteen["kv_tokens"] < 1.1 * eight["kv_tokens"], "each device has a whole KV head"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (EngineSpec(preset="gpt@h100"), "preset gpt@h100 should be MODEL@DEVICE"),
        (EngineSpec(preset="llama-3.1-8b@h100x0"), "should be MODEL@DEVICE"),
        (EngineSpec(preset="llama-3.1-70b@h100"), "do not fit"),
        (EngineSpec(preset="llama-3.1-70b@l40sx2"), "as llama-3.1-70b@l40sx4$"),
        (EngineSpec(preset="llama-3.1-8b@h100", base_s=0.01), "has its own times"),
        (replace(EngineSpec(), preset="llama-3.1-8b@h100", profile="x"), "has its own times"),
    ],
)
def test_a_preset_that_cannot_be_is_refused(spec: EngineSpec, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        spec.build()
