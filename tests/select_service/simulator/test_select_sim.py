"""`select-sim run` and `sweep`, as people and programs see them."""

from __future__ import annotations

import errno
import html
import json
import os
import random
import re
import xml.etree.ElementTree as ET  # of our own writing
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from select_service.simulator.cli import main
from select_service.simulator.core.latency import ProfileLatency
from select_service.simulator.core.measures import ceiling_of
from select_service.simulator.core.requests import ClientRequest, chain_of
from select_service.simulator.core.worker import EngineWorker
from select_service.simulator.core.workloads import WorkloadSettings
from select_service.simulator.results import NotWritten, write_whole
from select_service.simulator.runs import at_load, capacity_of, router, run
from select_service.simulator.settings import (
    POLICIES,
    EngineSpec,
    FleetChange,
    SimulationSettings,
    Slow,
    Trace,
    peer_of,
)
from select_service.simulator.statistics import estimate
from select_service.simulator.sweep import pareto
from select_service.types import RouterConfig

CHAT = "chat,rate=4,requests=150,slo_class=high,slo_ttft_s=0.5"


def trace_file(folder: Path, count: int = 150) -> Path:
    rng = random.Random(3)
    lines = []
    for number in range(count):
        shared = rng.randrange(5)
        ids = [shared, *range(1000 + 20 * number, 1000 + 20 * number + rng.randrange(1, 12))]
        facts = {
            "timestamp": number * 250,
            "input_length": 512 * len(ids) - 100,
            "output_length": rng.randrange(1, 300),
            "hash_ids": ids,
        }
        lines.append(json.dumps(facts))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_all_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = tmp_path / "out.json", tmp_path / "report.html"
    options = ["--workload", CHAT, "--workers", "3", "--block-size", "64", "--seeds", "2"]
    files = ["--out", str(out), "--report", str(report)]
    assert main(["run", "--policy", "all", *options, *files]) == 0
    verdict, rest = capsys.readouterr().out.split("\n", 1)
    table, differences, legend = (part.splitlines() for part in rest.split("\n\n"))
    assert [line.split()[0] for line in table[1:]] == list(POLICIES)
    assert [line.split()[0] for line in differences[1:]] == [
        policy for policy in POLICIES if policy != "kv-cost"
    ]
    assert legend[0] == "columns:"
    assert "rate=4 counts sessions" in " ".join(" ".join(legend).split())
    assert verdict.endswith(".")
    page = html.unescape(report.read_text())
    assert verdict in page, "it begins with the same sentence"
    assert "load CoV: standard deviation over mean" in page, "columns mean the same there"
    result = json.loads(out.read_bytes())
    assert [(one["policy"], one["seed"]) for one in result["runs"]] == [
        (policy, seed) for policy in POLICIES for seed in (1, 2)
    ]
    assert all(one["ok"] == one["requests"] == 150 for one in result["runs"])
    first_token, kv_cost = result["runs"][0], result["runs"][2]
    assert {**first_token, "policy": ""} != {**kv_cost, "policy": ""}
    check_page(report.read_text())


def test_weights_are_of_the_policy_that_they_name() -> None:
    load = WorkloadSettings(kind="chat", rate=4.0, requests=60)
    base = SimulationSettings(workloads=[load], workers=3, block_size=64)
    odd = replace(base, weights=RouterConfig(prefill_load_scale=9.0, temperature=2.0))
    found = {
        (one is odd, policy): run(replace(one, policy=policy))
        for one in (base, odd)
        for policy in ("first-token", "kv-cost")
    }
    assert found[True, "first-token"] == found[False, "first-token"], (
        "kv-cost is the default of them"
    )
    assert found[True, "kv-cost"] != found[False, "kv-cost"]
    assert run(peer_of(odd)) == found[False, "kv-cost"]


def check_page(page: str) -> None:
    """It needs no network, and every plot is well-formed."""
    assert not re.search(r"<(script|link|img|iframe)|url\((?!#)|@import", page)
    assert set(re.findall(r"https?://[^\"<> ]+", page)) == {"http://www.w3.org/2000/svg"}
    plots = re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL)
    titles = [ET.fromstring(plot).findtext(".//{http://www.w3.org/2000/svg}text") for plot in plots]
    assert {"Time to first token", "Between two tokens", "From arrival to last token"} < set(titles)
    assert {"Hit rate and ceiling", "Spread of load over workers"} < set(titles)
    assert "SLO attainment, class high" in titles
    assert "longest prefix" in page
    decisions = plots[titles.index("Decisions by reason")]
    shares: dict[str, float] = {}
    for policy, share in re.findall(r"<title>([^,<]+), [^:<]+: ([\d.]+)", decisions):
        shares[policy] = shares.get(policy, 0.0) + float(share)
    of_core = ("first-token", "kv-cost", "dynamo-agentic")
    assert shares == pytest.approx(dict.fromkeys(of_core, 100.0), abs=0.2)


@pytest.mark.parametrize("policy", ["least-loaded", "power-of-two"])
def test_replicas_of_a_simple_policy_learn_late_of_each_other_too(policy: str) -> None:
    load = WorkloadSettings(kind="shared-prompts", rate=60.0, requests=1_500)
    base = SimulationSettings(policy=policy, workloads=[load], block_size=64)
    alone, late = (
        run(replace(base, replicas=replicas, sync_delay_s=1.0)).load_cov for replicas in (1, 4)
    )
    assert late > 1.5 * alone


def test_round_robin_of_several_replicas_begins_anywhere() -> None:
    load = WorkloadSettings(kind="shared-prompts", rate=1.0, requests=4)
    base = SimulationSettings(policy="round-robin", workloads=[load], block_size=64, replicas=4)
    routers = [router(replace(base, seed=seed)) for seed in range(5)]
    firsts = set()
    for one in routers:
        for worker_id in range(8):
            one.add(EngineWorker(worker_id, EngineSpec().build(), 64), 0.0)
        asked = ClientRequest(number=0, arrival=0.0, isl=64, osl=1, blocks=chain_of())
        firsts.add(one.route("0", asked, 0.0))
    assert len(firsts) > 1


def test_a_trace_at_a_share_of_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trace", str(trace_file(tmp_path)), "--jitter", "1", "--workers", "2"]
    assert main(["run", "--policy", "kv-cost,random", "--load", "0.5", *options]) == 0
    assert capsys.readouterr().out.startswith("capacity ")
    base = SimulationSettings(
        trace=Trace(path=str(trace_file(tmp_path))), workers=2, policy="kv-cost"
    )
    capacity = capacity_of(base)
    low, high = (run(at_load(base, load, capacity)) for load in (0.3, 1.5))
    assert low.requests_per_s == pytest.approx(0.3 * capacity, rel=0.2)
    assert high.requests_per_s < 1.2 * capacity
    assert high.ttft_s.p90 > 2 * low.ttft_s.p90


def test_a_trace_of_three_has_no_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--trace", str(trace_file(tmp_path, 3)), "--load", "1"])
    assert "too short" in capsys.readouterr().err


def test_results_come_back_replace(tmp_path: Path) -> None:
    first, again = tmp_path / "1.json", tmp_path / "2.json"
    options = ["--workload", CHAT, "--change", "5:fail:1:3", "--change", "8:add:2"]
    options += ["--slow", "2:0.5", "--slow", "1:0.1"]
    assert (
        main(["run", *options, "--weights", "overlap_score_credit=0.5", "--out", str(first)]) == 0
    )
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(json.loads(first.read_bytes())["settings"]))
    assert main(["run", "--settings", str(settings), "--out", str(again)]) == 0
    assert first.read_bytes() == again.read_bytes(), "to the last bit"


def test_a_sweep_shows_the_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep.json"
    vary = ["--vary", "overlap_score_credit=0,1", "--vary", "prefill_load_scale=0.5:1.5:0.5"]
    options = ["--workload", CHAT, "--workers", "3", "--seeds", "2", "--jobs", "2"]
    assert main(["sweep", *vary, "--draw", "3", *options, "--out", str(out)]) == 0
    found = json.loads(out.read_bytes())["candidates"]
    assert len(found) == 4, "three drawn, and the peer's"
    assert found[-1]["policy"] == "kv-cost"
    assert any(one["is_on_front"] for one in found)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_a_draw_takes_points_of_a_grid_that_nobody_could_write_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("temperature", "overlap_score_credit", "prefill_load_scale", "delay_scale")
    vary = [text for name in names for text in ("--vary", f"{name}=0:1:0.002")]
    options = ["--workload", "chat,rate=4,requests=5", "--workers", "2", "--seeds", "1"]
    argv = ["sweep", *vary, "--draw", "3", *options, "--jobs", "1"]
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 5
    assert main(argv) == 0
    assert capsys.readouterr().out == table


def test_a_sweep_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "sweep.html"
    options = ["--workload", CHAT, "--workers", "3", "--seeds", "1", "--jobs", "1"]
    vary = ["--vary", "overlap_score_credit=0,1"]
    assert main(["sweep", *vary, *options, "--report", str(report)]) == 0
    page = report.read_text("utf-8")
    lines = capsys.readouterr().out.splitlines()
    assert page.count("<tr>") == len(lines) == 4, "a head, two settings, the peer's"
    assert page.count("<svg xmlns") == 2, "of three aims, each beside the first"
    assert "overlap_score_credit=0" in page
    plot = re.findall(r"<svg xmlns.*?</svg>", page, re.DOTALL)[0]
    assert plot.count('class="d"') == 3, "each setting once"
    weights = re.findall(r"<title>(.*?) \((?:on the front|beaten)\): ", plot)
    assert sorted(weights) == ["kv-cost", "overlap_score_credit=0", "overlap_score_credit=1"]
    with pytest.raises(SystemExit):
        main(["sweep", *vary, *options, "--report", str(tmp_path / "no" / "where.html")])


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["run"], "a trace or workloads"),
        (["run", "--workload", "chat", "--policy", "first-token,best"], "policy 'best' is none of"),
        (["run", "--workload", "chat", "--policy", "first-tokn"], "(is first-token meant?)"),
        (
            ["run", "--workload", "chats"],
            "kind: 'chats' is none of chat, agents, shared-prompts, rl (is chat meant?)",
        ),
        (["run", "--workload", "chat,rat=2"], "there is no rat (is rate meant?)"),
        (["run", "--workload", "chat,rate=x"], "rate: Expected"),
        (["run", "--workload", "chat,rate"], "NAME=VALUE"),
        (["run", "--workload", "chat", "--load", "0.5"], "needs a trace"),
        (["run", "--workload", "chat", "--workers", "0"], "--workers: 0 is not in 1..10000"),
        (["run", "--workload", "chat", "--seeds", "0"], "--seeds: 0 is not in 1.."),
        (["run", "--workload", "chat", "--jobs", "0"], "--jobs: 0 is not in 1.."),
        (["run", "--workload", "chat", "--policy", "first-token,first-token"], "named twice"),
        (["run", "--workload", "chat", "--speed", "2"], "--speed is of a --trace"),
        (["run", "--workload", "chat", "--out", "/nowhere/x.json"], "/nowhere/x.json"),
        (["run", "--workload", "chat", "--report", "/"], "Is a directory"),
        (["run", "--workload", "chat", "--change", "soon"], "AT:DO"),
        (["run", "--workload", "chat", "--engine", "kv_tokens=0"], "kv_tokens"),
        (["run", "--workload", "chat", "--slow", "4"], "COUNT:SPEED"),
        (["run", "--workload", "chat", "--slow", "4:half"], "--slow: 4:half: speed: Expected"),
        (["run", "--workload", "chat", "--slow", "0:0.5"], "0:0.5: count: 0 is not in 1.."),
        (
            ["run", "--workload", "chat", "--slow", "4:0"],
            "4:0: speed: '0.0' is not a number",
        ),
        (["run", "--workload", "chat", "--slow", "4:1", "--slow", "5:1"], "more slow workers"),
        (["run", "--trace", "/nowhere"], "/nowhere"),
        (["run", "--workload", "chat", "--engine", "profile=/nowhere"], "/nowhere"),
        (["sweep", "--workload", "chat", "--vary", "luck=1"], "there is no luck"),
        (["sweep", "--workload", "chat", *("--vary", "temperature=0") * 2], "named twice"),
        (["sweep", "--workload", "chat", "--vary", "temperature=2:1:1"], "should go up"),
        (["sweep", "--workload", "chat", "--vary", "temperature=0", "--aims", "fame"], "no fame"),
        (["sweep", "--workload", "chat", "--vary", "temperature=0,nan"], "temperature must be"),
        (["sweep", "--workload", "chat", "--vary", "temperature=0:1e9:1e-9"], "points"),
        (["sweep", "--workload", "chat", "--vary", "temperature=0:inf:1"], "should go up"),
        (["run", "--workload", "chat", "--weights", "temperature=-1"], "temperature must be"),
        (["run", "--workload", "chat", "--weights", "delay_scale=inf"], "delay_scale must be"),
        (["run", "--workload", "chat", *("--out", "x"), *("--report", "./x")], "the same file"),
        (["run", "--workload", "rl,rate=2"], "rl takes no rate"),
        (["run", "--workload", "chat,samples=2"], "chat takes no samples"),
        (["run", "--workload", "chat,arrivals=closed,rate=2"], "closed arrivals take no rate"),
        (
            ["run", "--workload", "chat,arrivals=closed,diurnal_period_s=60"],
            "closed arrivals take no diurnal_period_s",
        ),
        (["run", "--workload", "chat,users=9"], "poisson arrivals take no users"),
        (["run", "--workload", "chat,arrivals=gamma,burst_size=2"], "take no burst_size"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(argv)
    assert refused.value.code == 2
    assert why in capsys.readouterr().err


def test_prompts_may_be_computed_apart(tmp_path: Path) -> None:
    for policy in ("first-token", "least-loaded"):
        settings = SimulationSettings(
            policy=policy,
            workloads=[WorkloadSettings(requests=80, rate=2.0)],
            prefill_workers=2,
            workers=3,
            slow=[Slow(count=1, speed=0.5)],
            block_size=64,
            changes=[FleetChange(at=10.0, do="add", pool="decode", startup_s=1.0)],
        )
        measured = run(settings)
        assert (measured.ok, measured.workers) == (80, 6)


@pytest.mark.parametrize("policy", ["first-token", "kv-cost", "least-loaded"])
def test_slow_workers_are_those_of_a_slower_engine(policy: str) -> None:
    usual = EngineSpec()
    times = ("base_s", "prefill_token_s", "prefill_pair_s", "sequence_s", "kv_token_s")
    half = {name: 2 * getattr(usual, name) for name in times}
    base = SimulationSettings(
        policy=policy, workloads=[WorkloadSettings(requests=60, rate=2.0)], workers=2, block_size=64
    )
    slowed = run(replace(base, slow=[Slow(count=2, speed=0.5)]))
    assert slowed == run(replace(base, engine=EngineSpec(**half))), "halves are exact"
    some = run(replace(base, slow=[Slow(count=1, speed=0.5)]))
    assert run(base).e2e_s.mean < some.e2e_s.mean < slowed.e2e_s.mean


def test_the_ceiling_is_what_one_endless_cache_would_find() -> None:
    def one(number: int, isl: int, *blocks: int) -> ClientRequest:
        return ClientRequest(number=number, arrival=number, isl=isl, osl=1, blocks=chain_of(blocks))

    requests = [one(0, 25, 1, 2), one(1, 35, 1, 2, 3), one(2, 20, 1, 2), one(3, 20, 9, 2)]
    # nothing; two blocks; one, as the last token is computed; a block behind another is another
    assert ceiling_of(requests, 10) == pytest.approx((0 + 20 + 10 + 0) / 100)


def test_a_trace_begins_anywhere_and_in_any_order(tmp_path: Path) -> None:
    ordered = trace_file(tmp_path)
    lines = [json.loads(line) for line in ordered.read_text().splitlines()]
    for line in lines:
        line["timestamp"] += 1_763_800_000_000
    random.Random(1).shuffle(lines)
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(map(json.dumps, lines)))
    one, same = (
        run(SimulationSettings(policy="kv-cost", trace=Trace(path=str(path))))
        for path in (ordered, other)
    )
    assert same == one


def test_who_was_not_answered_is_in_no_ceiling(tmp_path: Path) -> None:
    path = trace_file(tmp_path)
    huge = {"timestamp": 0, "input_length": 10**12, "output_length": 1, "hash_ids": [1]}
    path.write_text(f"{json.dumps(huge)}\n{path.read_text()}")
    found = run(SimulationSettings(policy="round-robin", trace=Trace(path=str(path))))
    assert found.ends == {"ok": 150, "too_large": 1}
    assert 0.2 < found.hit_share <= 1.0


def test_a_run_that_answers_nobody_has_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, report = trace_file(tmp_path, 3), tmp_path / "report.html"
    argv = ["run", "--trace", str(trace), "--engine", "kv_tokens=1", "--report", str(report)]
    assert main(argv) == 0
    verdict, _, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert verdict == "No request was answered."
    assert len(rows) == 2
    assert all(line.endswith(" 100.00") for line in rows)
    assert "<svg" in report.read_text()
    assert "nan" not in report.read_text()


def test_a_result_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_whole(path, b"old")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(NotWritten, match=r"out\.json: No space left"):
            write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


def test_a_device_is_written_to() -> None:
    write_whole("/dev/null", b"x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(NotWritten, match="/dev/full"):
        write_whole("/dev/full", b"x")


def test_ctrl_c_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out.json"
    out.write_text("old")
    monkeypatch.setattr("select_service.simulator.run_command.perform", interrupted)
    assert main(["run", "--workload", CHAT, "--out", str(out)]) == 130
    assert (out.read_text(), len(list(tmp_path.iterdir()))) == ("old", 1)
    assert "stopped by Ctrl-C" in capsys.readouterr().err


@pytest.mark.parametrize("column", ["prefill_isl", "prefill_ttft", "x_kv_usage", "z_itl"])
def test_a_profile_with_what_is_no_number_is_refused(column: str) -> None:
    prefill = {"prefill_isl": [1.0, 9.0], "prefill_ttft": [1.0, 2.0]}
    decode = {
        "x_kv_usage": [0.0, 1.0],
        "y_context_length": [9.0, 9.0],
        "z_itl": [1.0, 2.0],
        "max_kv_tokens": [100.0],
    }
    ProfileLatency(prefill, decode)
    (prefill if column in prefill else decode)[column] = [1.0, float("nan")]
    with pytest.raises(ValueError, match=column):
        ProfileLatency(prefill, decode)


def test_an_interval_is_student_s() -> None:
    assert estimate([3.0]).half is None
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.303 / 3**0.5)
    assert estimate([5.0] * 50).half == 0.0


def test_the_front_has_those_whom_nobody_beats() -> None:
    assert pareto([[1, 4], [2, 2], [3, 3], [4, 1], [2, 2]]) == {0, 1, 3, 4}


@pytest.mark.parametrize(("runs", "quantile"), [(31, 2.0423), (32, 2.0395), (61, 2.0003)])
def test_an_interval_of_many_runs_is_student_s_too(runs: int, quantile: float) -> None:
    values = [float(at % 2) for at in range(runs)]
    deviation = float(np.std(values, ddof=1))
    assert estimate(values).half == pytest.approx(quantile * deviation / runs**0.5, rel=2e-4)


def test_what_workers_have_evicted_counts_when_they_are_gone() -> None:
    base = SimulationSettings(
        policy="round-robin",
        workloads=[WorkloadSettings(requests=150, rate=4.0)],
        workers=2,
        block_size=64,
        engine=EngineSpec(kv_tokens=10_000),
    )
    end = run(base).duration_s
    evicted = run(replace(base, changes=[FleetChange(at=end * 0.9, do="add", count=1)])).evictions
    for do in ("remove", "fail"):
        changes = [FleetChange(at=end * 0.9, do="add"), FleetChange(at=end * 0.95, do=do, count=2)]
        assert run(replace(base, changes=changes)).evictions >= evicted * 0.8


def test_whoever_waits_for_a_run_sees_how_far_it_is(tmp_path: Path) -> None:
    trace = Trace(path=str(trace_file(tmp_path)))
    of_a_trace = SimulationSettings(policy="round-robin", trace=trace)
    drawn = SimulationSettings(
        policy="round-robin", workloads=[WorkloadSettings(requests=150, rate=4.0)]
    )
    for settings in (of_a_trace, drawn):
        shares: list[float] = []
        run(settings, shares.append)
        assert shares == sorted(shares)
        assert len(set(shares)) > 3
        assert shares[-1] == 1.0
