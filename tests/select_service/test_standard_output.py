"""What commands print to a disk that is full: reported in a line, with their exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from select_service.edge.security import credentials_cli
from tests.wait import PATIENCE_S

FULL = "standard output: No space left on device"
RUN = ("run", "--workload", "chat,rate=2,requests=5", "--policy", "round-robin", "--quiet")


@pytest.mark.parametrize(
    ("module", "arguments", "stdin"),
    [
        ("select_service", ("token", "new", "--name", "a", "--scopes", "read"), ""),
        ("select_service.simulator", RUN, ""),
        (
            "select_service.simulator",
            ("admit", "--policy", "always-admit"),
            '{"t_us": 0, "tokens": 1, "slo_class": "interactive", "tenant": "a"}\n',
        ),
        ("select_service.planner", ("predict", "--predictor", "constant", "--json"), "[1, 2]"),
    ],
)
def test_a_full_disk(module: str, arguments: tuple[str, ...], stdin: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=stdin, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            timeout=PATIENCE_S,
        )  # fmt: skip
    assert "Traceback" not in ended.stderr
    assert FULL in ended.stderr
    assert ended.returncode == 1


def test_half_a_key_pair_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was in the way of the next attempt."""
    path = tmp_path / "keys"
    limited = f"ulimit -f 0; exec {sys.executable} -m select_service keys new {path}"
    ended = subprocess.run(
        ["sh", "-c", f"trap '' XFSZ; {limited}"],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (ended.returncode, path.exists()) == (1, False), ended.stderr
    assert f"cannot write {path}" in ended.stderr
    assert credentials_cli.main(["keys", "new", str(path)]) == 0
    assert capsys.readouterr().out
