"""`select-sim admit`, as a program sees it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest

from select_service.core.admission.policies import KEYS, KEYS_OF_ALL
from select_service.core.admission.policies import MEANINGS as ADMISSION
from select_service.simulator.cli import main
from select_service.simulator.settings import MEANINGS as PLACEMENT
from tests.select_service.core.admission.golden import SIMULATOR, TRACE


class _Standard:
    def __init__(self, data: bytes = b"") -> None:
        self.buffer = io.BytesIO(data)

    def flush(self) -> None:
        """Nothing is held here."""


def admit(
    monkeypatch: pytest.MonkeyPatch, policy: str, config: object, arrivals: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    lines = b"".join(json.dumps(one).encode() + b"\n" for one in arrivals)
    code, out = run(monkeypatch, ["--policy", policy, "--config", json.dumps(config)], lines)
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def run(monkeypatch: pytest.MonkeyPatch, argv: list[str], data: bytes) -> tuple[int, bytes]:
    out = _Standard()
    monkeypatch.setattr(sys, "stdin", _Standard(data))
    monkeypatch.setattr(sys, "stdout", out)
    code = main(["admit", "--json", *argv])
    return code, out.buffer.getvalue()


@pytest.mark.parametrize("case", SIMULATOR["token_bucket"], ids=lambda case: case["name"])
def test_recorded_token_bucket(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"capacity": case["capacity"], "refill_rate": case["refill_rate_per_s"]}
    arrivals = [
        {"t_us": one["t_us"], "tokens": one["input_tokens"], "slo_class": "", "tenant": "a"}
        for one in case["decisions"]
    ]
    got = admit(monkeypatch, "token-bucket", config, arrivals)
    assert got == [{"admitted": d["admitted"], "reason": d["reason"]} for d in case["decisions"]]


def test_recorded_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals = [
        {"t_us": t_us, "tokens": tokens, "slo_class": TRACE["classes"][number], "tenant": "a"}
        for t_us, tokens, number in TRACE["arrivals"]
    ]
    config = {"capacity": 100000, "refill_rate": 110000}
    got = admit(monkeypatch, "token-bucket", config, arrivals)
    decisions = "".join(str(int(one["admitted"])) for one in got)
    assert decisions == TRACE["decisions"][: len(arrivals)]


@pytest.mark.parametrize("state", SIMULATOR["slo_aware"], ids=lambda state: state["state"])
@pytest.mark.parametrize(
    ("policy", "config", "column"),
    [
        ("gaie-legacy", {}, "gaie_legacy_qd5_kv0.8"),
        ("tier-shed", {"threshold": 20}, "tier_shed_thr20_min3"),
        ("tier-shed", {"tier_shed_min_priority": 0}, "tier_shed_thr0_min0"),
    ],
)
def test_recorded_shedding(
    state: dict[str, Any],
    policy: str,
    config: dict[str, Any],
    column: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrivals: list[dict[str, Any]] = [
        {"t_us": 0, "tokens": 1, "slo_class": row["class"]} for row in state["rows"]
    ]
    arrivals[0]["snapshots"] = state["snapshots"]  # the rest goes by what was reported last
    got = admit(monkeypatch, policy, config, arrivals)
    assert got == [row[column] for row in state["rows"]]


def test_budgets_go_by_what_arrivals_report(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"tenant_budgets": {"a": 0.5}, "seats_per_instance": 2}
    counts = {"snapshots": [{"in_flight": 2}], "tenant_in_flight": 2}
    arrivals = [
        {"t_us": 0, "tokens": 1, "slo_class": "batch", "tenant": "a"} | counts,
        {"t_us": 1, "tokens": 1, "slo_class": "critical", "tenant": "a"},
        {"t_us": 2, "tokens": 1, "slo_class": "batch", "tenant": "a", "tenant_in_flight": 1},
    ]
    got = admit(monkeypatch, "always-admit", config, arrivals)
    assert [one["reason"] for one in got] == ["tenant-budget-shed", "", ""]


def test_slo_shed_before_a_pool_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "quotas": {"batch": 1, "standard": 2},
        "pool": {"ranks": 1, "prefill_tokens_per_s": 1000, "target_ttft_s": 1.0},
    }
    arrivals: list[dict[str, Any]] = [
        {"t_us": 0, "tokens": 900, "slo_class": "critical"},
        {"t_us": 1, "tokens": 100, "slo_class": "batch"},  # waits, is served at 0.9 s
        {"t_us": 2, "tokens": 100, "slo_class": "batch"},
        {"t_us": 3, "tokens": 50, "slo_class": "standard", "slo_ttft_ms": 500},
        {"t_us": 4, "tokens": 500, "slo_class": "standard"},  # waits until 0.9 s, within its 5 s
    ]
    got = admit(monkeypatch, "slo-shed", config, arrivals)
    assert [one["reason"] for one in got] == ["", "", "band-full", "infeasible-deadline", ""]
    assert [one["admitted"] for one in got] == [True, True, False, False, True]


def test_who_waits_in_vain_is_refused_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"pool": None, "feasibility_slack": 0}
    arrivals: list[dict[str, Any]] = [
        {"t_us": 0, "tokens": 1, "slo_class": "batch", "snapshots": [{"kv_utilization": 0.7}]},
        {"t_us": 1, "tokens": 1, "slo_class": "critical"},
        {"t_us": 30_000_000, "tokens": 1, "slo_class": "batch"},
        {"t_us": 30_000_001, "tokens": 1, "slo_class": "critical", "snapshots": [{}]},
    ]
    got = admit(monkeypatch, "slo-shed", config, arrivals)
    assert [one["reason"] for one in got] == ["expired-waiting", "", "", ""]


def test_a_bad_line_is_named_and_what_came_before_is_answered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good = b'{"t_us":0,"tokens":1}\n'
    code, out = run(monkeypatch, ["--policy", "always-admit"], good + b"\n" + b"foo\n" + good)
    assert code == 1
    assert out == b'{"admitted":true,"reason":""}\n'
    assert "select-sim admit: line 3 is not JSON: it ends within a value" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"tokens": 1}, "t_us"),
        ({"t_us": 0}, "tokens"),
        ({"t_us": 0, "tokens": -1}, "tokens must be a whole number in 0.."),
        ({"t_us": 0, "tokens": 1.5}, "tokens"),
        ({"t_us": True, "tokens": 1}, "t_us"),
        ({"t_us": 1 << 60, "tokens": 1}, "t_us must be a whole number in"),
        ({"t_us": 0.5, "tokens": 1}, "t_us must be a whole number in"),
        ({"t_us": 0, "tokens": 1, "slo_ttft_ms": 0}, "slo_ttft_ms must be above 0"),
        ({"t_us": 0, "tokens": 1, "snapshots": [{"queue_depth": "1"}]}, "queue_depth"),
        ({"t_us": 0, "tokens": 1, "slo_class": 3}, "slo_class"),
        ([], "line 1"),
    ],
)
def test_bad_arrivals(
    line: object, why: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(monkeypatch, ["--policy", "always-admit"], json.dumps(line).encode())
    assert code == 1
    error = capfd.readouterr().err
    assert "line 1: " in error
    assert why in error


@pytest.mark.parametrize(
    "argv",
    [
        ["--policy", "nobody"],
        [],
        ["--policy", "token-bucket", "--config", "nonsense"],
        ["--policy", "token-bucket", "--config", "[]"],
        ["--policy", "token-bucket", "--config", '{"capacity": 0}'],
        ["--policy", "token-bucket", "--config", '{"capacity": "1"}'],
        ["--policy", "token-bucket", "--config", '{"refill": 1}'],
        ["--policy", "slo-shed", "--config", '{"pool": {"ranks": 0}}'],
        ["--policy", "slo-shed", "--config", '{"pool": {"rank": 1}}'],
        ["--policy", "slo-shed", "--config", '{"pool": {"ranks": "1"}}'],
        ["--policy", "slo-shed", "--config", '{"pool": 1}'],
    ],
)
def test_wrong_usage_ends_with_2(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, argv, b"")
    assert ended.value.code == 2


def test_what_nobody_knows_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"t_us": 5.0, "tokens": 1, "slo_class": None, "tenant": None, "request_id": "r-1"}
    assert admit(monkeypatch, "always-admit", {}, [line]) == [{"admitted": True, "reason": ""}]


def test_it_answers_while_it_reads() -> None:
    """A program may wait for each answer before it sends the next arrival."""
    code = "from select_service.simulator.cli import main; raise SystemExit(main())"
    argv = [sys.executable, "-c", code, "admit", "--policy", "reject-all", "--json"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for t_us in range(3):
            process.stdin.write(b'{"t_us":%d,"tokens":1}\n' % t_us)
            process.stdin.flush()
            assert process.stdout.readline() == b'{"admitted":false,"reason":"reject-all"}\n'
        process.stdin.close()
        assert process.wait() == 0


def test_a_reader_that_leaves_is_no_crash() -> None:
    code = "from select_service.simulator.cli import main; raise SystemExit(main())"
    argv = [sys.executable, "-c", code, "admit", "--policy", "reject-all"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(b'{"t_us":0,"tokens":1}\n')
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.parametrize(
    ("command", "meanings"),
    [(["admit", "--help"], ADMISSION), (["run", "--help-all"], PLACEMENT)],
    ids=["admission", "placement"],
)
def test_the_help_says_what_each_policy_does(
    command: list[str], meanings: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(command)
    output = " ".join(capsys.readouterr().out.partition("\npolicies:")[2].split())
    for name, meaning in meanings.items():
        assert meaning
        assert f" {name} {meaning}" in f" {output}"
    if command[0] == "admit":
        assert all(key in output for key in KEYS_OF_ALL.union(*KEYS.values()))
