"""`select-planner plan`, `predict` and `profile inspect`, as typed."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from select_service.planner.cli import main, parser
from select_service.planner.edge.predictors import _MODELS, PredictorSettings
from select_service.planner.edge.run_settings import build_fleet, read_targets
from select_service.planner.errors import SettingsError
from select_service.planner.settings import PREDICTORS, SECTIONS, RunSettings
from select_service.settings.command_line import read_section
from tests.select_service.planner.golden import PROFILE, golden

CASES = golden("replicas_golden")["cases"]
KALMAN = golden("predictors_golden")["results"]["kalman"]["noisy_trend"]


def asked(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, Any, str]:
    code = main([str(one) for one in argv])
    output = capsys.readouterr()
    return code, json.loads(output.out) if output.out.startswith("{") else output.out, output.err


def plan_flags(case: dict[str, Any]) -> list[object]:
    args = case["args"]
    flags = {
        "profile-results-dir": PROFILE,
        "num-req": case["next_num_req"],
        "isl": case["next_isl"],
        "osl": case["next_osl"],
        "p-correction": case["p_correction"],
        "d-correction": case["d_correction"],
        "ttft": args["ttft"],
        "itl": args["itl"],
        "adjustment-interval": args["adjustment_interval"],
        "max-gpu-budget": args["max_gpu_budget"],
        "min-endpoint": args["min_endpoint"],
        "prefill-engine-num-gpu": args["prefill_engine_num_gpu"],
        "decode-engine-num-gpu": args["decode_engine_num_gpu"],
    }
    return [part for name, value in flags.items() for part in (f"--{name}", value)]


def test_what_was_not_measured_makes_nobody_faster(capsys: pytest.CaptureFixture[str]) -> None:
    """Fault 1: a TTFT that is missing came as a factor of 0, and prefill fell to its minimum."""
    facts = ("--profile-results-dir", PROFILE, "--num-req", 5400, "--isl", 3000, "--osl", 300)
    goals = ("--itl", 20, "--max-gpu-budget", 64, "--mode", "slo", "--json")
    _, usual, _ = asked(capsys, "plan", *facts, *goals)
    _, missing, _ = asked(capsys, "plan", *facts, *goals, "--p-correction", 0, "--d-correction", 0)
    assert missing == usual
    assert usual["num_p"] == 4


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--selector", "http://s"], "--selector is of --metrics-source selector and of --drain"),
        (["--trace", "t.jsonl"], "--trace is of --metrics-source trace"),
        (["--targets", "t.yaml"], "--model-name: --targets names them"),
        (["--ray-token-file", "t"], "--ray-token-file is of --connector ray"),
        (["--ray-dashboard", "http://r"], "--ray-dashboard is of --connector ray"),
        (["--namespace", "n"], "--namespace is of --connector kubernetes"),
        (["--drain-timeout", "9"], "--drain-timeout is of --drain"),
        (
            ["--no-load-loop", "--load-interval", "9"],
            "--load-interval is of the loop that --no-load-loop leaves out",
        ),
        (
            ["--metrics-source", "trace", "--proxy-from-environment"],
            "--proxy-from-environment is of --metrics-source prometheus, --connector kubernetes "
            "and --connector ray",
        ),
    ],
)
def test_flags_that_would_be_left_aside_are_refused(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = asked(capsys, "run", "--model-name", "m", "--connector", "virtual", *flags)
    assert (code, errors) == (1, f"select-planner run: {why}\n")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--ttft", "400"), ("--itl", "20"), ("--attainment", "0.99"), ("--min-endpoint", "2")),
        *(("--tenant-id", "t"), ("--prefill-resource", "deployments/p"), ("--start-time", "60")),
        *(("--prefill-engine-num-gpu", "2"), ("--decode-engine-num-gpu", "2")),
    ],
)
def test_flags_of_one_model_are_refused_beside_a_file_of_several(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = asked(capsys, "run", "--targets", "t.yaml", flag, value)
    said = f"select-planner run: {flag}: with --targets, the file says so of each model\n"
    assert (code, errors) == (1, said)


@pytest.mark.parametrize("case", CASES[4:9:2], ids=lambda case: case["args"]["itl"])
def test_plan_answers_as_recorded(case: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy", reason="the extra `planner`")
    code, answer, _ = asked(capsys, "plan", *plan_flags(case), "--mode", "compatible", "--json")
    for name in ("num_p", "num_d", "error", "message"):
        assert answer.get(name) == case.get(name)
    for name, value in case["intermediate"].items():
        expected = value if value == "nan" else pytest.approx(value, rel=1e-12)
        assert answer["intermediate"][name] == expected
    assert code == (1 if "error" in case else 0)


def test_the_default_plan_needs_no_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.interpolate", None)
    ours = asked(capsys, "plan", *plan_flags(CASES[1]), "--mode", "slo", "--json")[:2]
    code, answer, error = asked(capsys, "plan", *plan_flags(CASES[1]), "--json")
    assert (code, answer) == ours
    assert "planned with --mode slo" in error
    assert "pip install 'scipy" in error
    code, _, error = asked(capsys, "plan", *plan_flags(CASES[1]), "--mode", "compatible", "--json")
    assert code == 1
    assert "the extra planner" in error


def test_plan_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    """30 requests of 3000 tokens a second: 9.74 fit one engine, the reference forgets the wait."""
    code, answer, _ = asked(capsys, "plan", *plan_flags(CASES[1]), "--mode", "slo", "--json")
    assert (code, answer["num_p"], answer["infeasible"]) == (0, 4, [])
    assert answer["intermediate"]["prefill_rho"] == pytest.approx(0.898, abs=5e-4)
    case = CASES[1] | {"args": CASES[1]["args"] | {"max_gpu_budget": 1}}
    code, _, error = asked(capsys, "plan", *plan_flags(case), "--mode", "slo", "--json")
    assert code == 1
    assert "the minima need 2 GPUs, 1 are allowed" in error
    code, text, _ = asked(capsys, "plan", *plan_flags(CASES[1]), "--mode", "slo")
    assert "\ngpus: " in text
    assert "  prefill_rho           0.8984   share of the time that so many engines compute" in text
    assert text.startswith("4 prefill and ")
    assert " keep a TTFT of " in text.splitlines()[0]


@pytest.mark.parametrize(
    ("flags", "because"),
    [
        (
            ("--ttft", 1),
            "the TTFT target is 1 ms, and one prompt alone takes 92 ms on an idle engine",
        ),
        (("--max-gpu-budget", 2), "a larger --max-gpu-budget is needed for prefill"),
    ],
)
def test_a_plan_that_keeps_no_target_says_why(
    flags: tuple[str, int], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    demand = ("--num-req", 3000, "--isl", 3000, "--osl", 150, "--profile-results-dir", PROFILE)
    _, text, _ = asked(capsys, "plan", *demand, *flags, "--mode", "slo")
    assert because in text.splitlines()[0]


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--num-req", "nan", "--num-req is not a finite number"),
        ("--num-req", "-5", "--num-req is below 0"),
        ("--isl", "0", "isl is 0"),
        ("--osl", "0", "osl is 0"),
        ("--isl", "-3", "isl is below 0"),
        ("--isl", "1e308", "isl is above 4,294,967,296"),
        ("--osl", "1e308", "osl is above 4,294,967,296"),
        ("--itl", "0", "--itl is 0"),
        ("--itl", "nan", "--itl is not a finite number"),
        ("--ttft", "-1", "--ttft is below 0"),
        ("--p-correction", "nan", "--p-correction is not a finite number"),
    ],
)
def test_what_cannot_be_planned_is_named(
    flag: str, value: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ("plan", *plan_flags(CASES[1]), "--mode", "slo", flag, value)
    code, _, error = asked(capsys, *wrong)
    assert code == 1
    assert why in error


def test_predict_reads_a_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(KALMAN["series"])))
    code, answer, _ = asked(capsys, "predict", "--predictor", "kalman", "--json")
    assert code == 0
    assert answer["pred_after_each"] == pytest.approx(KALMAN["pred_after_each"], rel=1e-12)


@pytest.mark.parametrize(("mode", "last"), [("compatible", -3.0), ("slo", 0.0)])
def test_the_last_value_is_the_last_value(
    mode: str, last: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference has no floor below it; ours forecasts no load of less than nothing."""
    monkeypatch.setattr("sys.stdin", io.StringIO("[0, 5, -3]"))
    code, answer, _ = asked(capsys, "predict", "--predictor", "constant", "--mode", mode)
    assert code == 0
    assert answer["pred_after_each"] == [0.0, 5.0, last]


@pytest.mark.parametrize("name", ["constant", "kalman", "ets", "recurring", "auto"])
@pytest.mark.parametrize("mode", ["compatible", "slo"])
def test_a_missing_measurement_is_no_idle_interval(
    mode: str, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference takes it for one."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([100] * 9 + [None, None])))
    _, answer, _ = asked(capsys, "predict", "--predictor", name, "--mode", mode)
    least = min(answer["pred_after_each"][-2:])
    assert least < 99 if mode == "compatible" else least == pytest.approx(100, rel=0.01)


def test_a_trend_that_never_changes_is_a_filter_like_any(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([10.0] * 40)))
    flags = ("--kalman-q-trend", "0", "--kalman-q-level", "0")
    code, answer, _ = asked(capsys, "predict", "--predictor", "kalman", *flags)
    assert code == 0
    assert answer["pred_after_each"][-1] == pytest.approx(10.0)


@pytest.mark.parametrize("flag", ["--kalman-q-level", "--kalman-q-trend", "--kalman-r"])
def test_variances_too_large_to_count_with_are_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["predict", "--predictor", "kalman", flag, "1e308"])
    assert f"{flag}: '1e308' is not a number" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", '["a"]', "[true]", "[1", "[" * 9000, f"[1{'0' * 400}]"])
def test_predict_refuses_what_is_no_list(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code, _, error = asked(capsys, "predict", "--predictor", "constant")
    assert code == 1
    assert "standard input" in error


def test_a_profile_is_inspected(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "profile.html"
    code, text, _ = asked(capsys, "profile", "inspect", PROFILE, "--out", page)
    assert code == 0
    assert "decode: 30 samples" in text
    assert page.read_text().count("<svg xmlns") == 3
    html = page.read_text()
    assert not re.search(r"<(script|link|img|iframe)|url\((?!#)|@import", html)
    assert set(re.findall(r"https?://[^\"<> ]+", html)) == {"http://www.w3.org/2000/svg"}
    code, _, error = asked(capsys, "profile", "inspect", tmp_path)
    assert code == 1
    assert "no prefill profile" in error


def test_help_says_what_each_flag_is_and_what_it_is_otherwise() -> None:
    def silent(parser: argparse.ArgumentParser) -> Iterator[str]:
        for one in parser._actions:
            if isinstance(one, argparse._SubParsersAction):
                for command in one.choices.values():
                    yield from silent(command)
                continue
            text = re.sub(r"Default: .*", "", one.help or "")
            is_said = one.nargs == 0 or one.required or "Default" in str(one.help)
            is_once = text.count("between ") < 2  # "between plans between two numbers" was said
            if not (text.strip() and is_said and is_once):
                yield f"{parser.prog} {one.option_strings or one.dest}"

    assert list(silent(parser())) == []


def test_every_row_is_whole_and_every_predictor_can_be_made() -> None:
    assert set(PREDICTORS) == set(_MODELS)
    for flags in SECTIONS.values():
        assert len({flag.field for flag in flags}) == len(flags)
        for flag in flags:
            assert flag.help
            assert not flag.help.endswith(".")
            assert (flag.type.parse is None) == (flag.type.metavar == "")
            assert flag.type.parse is not None or flag.default is False


@pytest.mark.parametrize("flag", [["--adjustment-interval", "0"], ["--attainment", "1"]])
def test_wrong_usage_is_reported(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in ("plan", *plan_flags(CASES[0]), *flag)])
    assert ended.value.code == 2
    assert flag[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--prometheus-url", "localhost:9090"], "'localhost:9090' is not http://HOST:PORT"),
        (["--selector", "http://s", "--selector", "http://s:99999"], "is not http://HOST:PORT"),
        (["--selector", "http://a\nb"], "is not http://HOST:PORT"),
        (["--kubernetes-api", "https://"], "is not http://HOST:PORT"),
        (["--ray-dashboard", "http://[bad"], "is not http://HOST:PORT"),
        (["--port", "65536"], "65536 is not in 0..65535"),
        (["--adjustment-interval", "1e-300"], "'1e-300' is not a number at least 0.01"),
        (["--load-interval", "inf"], "'inf' is not a number at least 0.01"),
    ],
)
def test_what_could_never_be_asked_is_refused_at_the_start(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--model-name", "m", *flags])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("other", ["tenant_id: a", "model_name: M"])
def test_traffic_that_would_be_counted_twice_is_refused(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both tenants got all that the model is asked for, and each had engines for it."""
    path = tmp_path / "targets.yaml"
    rest = f"profile_results_dir: {PROFILE}, pools: [{{role: decode}}]"
    both = "".join(f"- {{{one}, {rest}}}\n" for one in ("model_name: m", f"model_name: m, {other}"))
    path.write_text("models:\n" + both.replace("model_name: m, model_name", "model_name"))
    code, _, errors = asked(capsys, "run", "--targets", str(path), "--max-gpu-budget", "0")
    assert code == 1
    assert "not by tenant: each of several would be taken for all" in errors


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([], "m: --profile-results-dir is needed: this source does not report"),
        (["--metrics-source", "trace", "--trace", "x"], "m: --profile-results-dir is needed"),
        (
            ["--prometheus-names", "selector", "--engine-speed", "profile"],
            "m: --profile-results-dir is needed: --engine-speed profile is asked for",
        ),
        (["--engine-speed", "learnt"], "--engine-speed learnt: this source does not report"),
        (
            ["--engine-speed", "profile", "--learnt-speed-max-age", "60"],
            "--learnt-speed-max-age is of an --engine-speed that is learnt",
        ),
        # everything is known how to be known: what is wrong is the next thing
        (["--prometheus-names", "selector", "--max-gpu-budget", "0"], "GPU"),
    ],
)
def test_engines_of_a_speed_that_are_unknown_are_refused_at_the_start(
    flags: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, errors = asked(capsys, "run", "--model-name", "m", *flags)
    assert code == 1
    assert why in errors


def test_targets_without_a_profile_are_refused_by_their_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "targets.yaml"
    path.write_text("models: [{model_name: m, pools: [{role: decode}]}]")
    code, _, errors = asked(capsys, "run", "--targets", str(path))
    assert code == 1
    assert "m: profile_results_dir is needed: this source does not report" in errors


def test_charts_that_can_never_be_written_are_refused_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "no" / "charts.html"
    flags = ["--profile-results-dir", str(tmp_path), "--trace", str(tmp_path / "none")]
    for command in (["replay", *flags], ["profile", "inspect", str(tmp_path)]):
        code, _, errors = asked(capsys, *command, "--out", str(out))
        assert code == 1
        assert f"{out}: No such file or directory" in errors


def test_a_series_from_nowhere_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a service manager starts it, or a shell by <&-."""
    monkeypatch.setattr("sys.stdin", None)
    code, _, errors = asked(capsys, "predict", "--predictor", "constant")
    assert (code, errors.count("\n")) == (1, 1)
    assert "standard input is closed" in errors


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("start_s", value) for value in (".inf", ".nan", "0", "-1")),
        *(("stabilisation_s", value) for value in (".inf", ".nan", "-1")),
        *((step, value) for step in ("step_up", "step_down") for value in ("0", "-5")),
    ],
)
def test_a_pool_that_could_not_be_scaled_is_refused_by_its_field(
    field: str, value: str, tmp_path: Path
) -> None:
    """Each of them failed every turn, or scaled the other way."""
    path = tmp_path / "targets.yaml"
    pool = f"{{role: decode, {field}: {value}}}"
    profile = PROFILE
    path.write_text(f"models: [{{model_name: m, profile_results_dir: {profile}, pools: [{pool}]}}]")
    with pytest.raises(SettingsError, match=f"m decode: {field} must be"):
        build_fleet(read_targets(path), PredictorSettings(name="constant"), 8)


def test_the_manifest_has_flags_we_know_and_no_right_too_many() -> None:
    path = Path(__file__).parents[3] / "deploy" / "planner" / "kubernetes.yaml"
    documents = list(yaml.safe_load_all(path.read_text("utf-8")))
    by_kind = {one["kind"]: one for one in documents}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    settings = read_section(RunSettings, parser().parse_args(container["args"]))
    settings.expect_used()
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]
    assert settings.connector == "kubernetes"
    assert settings.drain_s is None, "or drain.yaml is needed, too"
    for rule in by_kind["Role"]["rules"]:
        (resource, *_) = rule["resources"]
        assert all("*" not in one for one in (*rule["resources"], *rule["verbs"]))
        if resource == "leases":
            assert "delete" not in rule["verbs"]
        else:
            wanted = {"get", "patch"} if resource.endswith("/scale") else {"get"}
            assert set(rule["verbs"]) == wanted


def test_who_drains_may_patch_pods_and_nothing_else() -> None:
    path = Path(__file__).parents[3] / "deploy" / "planner"
    role, binding = yaml.safe_load_all((path / "drain.yaml").read_text("utf-8"))
    (rule,) = role["rules"]
    assert (rule["resources"], set(rule["verbs"])) == (["pods"], {"list", "patch"})
    beside = list(yaml.safe_load_all((path / "kubernetes.yaml").read_text("utf-8")))
    (account,) = [one["metadata"]["name"] for one in beside if one["kind"] == "ServiceAccount"]
    assert [one["name"] for one in binding["subjects"]] == [account]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
