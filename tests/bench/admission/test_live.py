"""The harness before a real process for a moment: so that it does not rot. No speed is asserted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from bench.admission.live import play_live
from bench.admission.play import Script
from bench.admission.workload import read_workload
from bench.compare.servers import Contender, RunningServer

if TYPE_CHECKING:
    from bench.admission.live import Traffic
    from bench.admission.measures import Result

SCRIPT = Script(
    read_workload("four-class"), rate=120.0, seconds=1.0, warm_up_s=0.2, tail_s=0.8, workers=2
)
COMMAND = (sys.executable, "-m", "select_service", "--host", "127.0.0.1")


def played(monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[Result, Traffic]:
    monkeypatch.setenv("DYN_USE_KV_EVENTS", "false")
    with RunningServer(Contender("ours", (*COMMAND, *flags))) as server:
        return play_live(server.address, SCRIPT)


@pytest.mark.parametrize(
    "flags",
    [
        ("--admission-policy", "slo-shed", "--admission-config", '{"quotas": {"background": 0}}'),
        pytest.param(
            ("--admission-policy", "token-bucket", "--admission-config", '{"capacity": 9000}'),
            marks=pytest.mark.heavy,
        ),
        pytest.param(("--admission-policy", "reject-all"), marks=pytest.mark.heavy),
    ],
    ids=lambda flags: flags[1],
)
def test_a_live_run_before_a_gate_accounts_for_everybody(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    result, traffic = played(monkeypatch, *flags)
    assert sum(result.outcomes.values()) == result.offered > 50
    assert result.outcomes.get("failed", 0) == 0
    assert traffic.refused_operations == 0
    assert traffic.has_reports
    assert traffic.counted["offered"] > 0
    assert traffic.is_conserved
    if flags[1] != "slo-shed":
        assert sum(result.reasons.values()) > 0


@pytest.mark.heavy
def test_a_live_run_accounts_for_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    result, traffic = played(monkeypatch)
    assert sum(result.outcomes.values()) == result.offered > 50
    assert result.outcomes.get("failed", 0) == 0
    assert result.reasons == {}, "always-admit refuses nobody"
    assert traffic.refused_operations == 0
    assert traffic.attempts >= result.offered
