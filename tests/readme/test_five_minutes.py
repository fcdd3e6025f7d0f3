"""The five minutes of README.md: what is typed there works, beside simulated engines."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.live.server import Server
from tests.readme.document import PORT_IN_TEXT, README, blocks, run_program
from tests.wait import PATIENCE_S

SECTION: Final = re.findall(
    r"^## Five minutes\n(.*?)^## ", README.read_text("utf-8"), re.DOTALL | re.MULTILINE
)[0]
COMMAND: Final = ".venv/bin/select-service "
BRIEF: Final = ("--plain", "--requests", "60", "--rate", "60")


def typed() -> list[str]:
    """Every line of the section's shell blocks, without its comment."""
    shells = "".join(re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL))
    return [re.sub(r" +#.*", "", line) for line in shells.splitlines()]


def run(server: Server, *arguments: str) -> str:
    command = [sys.executable, "-m", "select_service", *arguments]
    done = subprocess.run(
        [*command, *(() if "--url" in arguments else ("--url", f"http://127.0.0.1:{server.port}"))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.e2e
def test_what_is_typed(tmp_path: Path) -> None:
    demo, *commands = typed()
    (arguments,) = re.findall(r'^make demo ARGS="(.*)"$', demo)
    with Server(tmp_path / "log") as server:
        arguments = arguments.replace(PORT_IN_TEXT, f"127.0.0.1:{server.port}")
        shown = run(server, "demo", *shlex.split(arguments), *BRIEF)
        assert re.search(r"hit=[1-9]", shown), "some prompts were warm"
        decisions: Any = server.request("GET", "/decisions").json
        last = decisions["decisions"][0]["decision_id"]
        assert len(commands) > 3
        for command in commands:
            assert command.startswith(COMMAND)
            arguments = shlex.split(command.removeprefix(COMMAND))
            assert run(server, *(last if word == "ID" else word for word in arguments))


@pytest.mark.e2e
def test_the_program(tmp_path: Path) -> None:
    """It is whole: it runs as it is printed, where a worker serves the demo's model."""
    (source,) = (text for language, text in blocks() if language == "py")
    worker = {"worker_id": 1, "model_name": "demo", "endpoint": "http://w", "block_size": 16}
    with Server(tmp_path / "log") as server:
        record = server.request("POST", "/workers", worker | {"kv_events": "none"})
        assert b'"lifecycle":"schedulable"' in record.raw, record.raw
        assert run_program(source, tmp_path, server.port) == (0, "worker 1 at http://w\n", "")
        loads: Any = server.request("GET", "/loads").json
        assert [row["active_requests"] for row in loads[0]["loads"]] == [0]
