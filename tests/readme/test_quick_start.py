"""The quick start for bare metal, as far as it goes without a GPU."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from select_service.cli import parse
from tests.live.server import Server
from tests.readme.document import DOCS

CHAPTER = re.findall(
    r"^## On bare metal\n(.*?)^## ",
    (DOCS / "quick-starts.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)[0]


def commands(name: str) -> list[list[str]]:
    """The arguments behind each use of a command."""
    shells = "".join(re.findall(r"```sh\n(.*?)```", CHAPTER, re.DOTALL))
    found = re.findall(rf"^{name} ((?:[^'\n]|'[^']*')*)", shells, re.MULTILINE)
    return [shlex.split(one, comments=True) for one in found]


def test_the_engine_publishes_where_the_worker_says() -> None:
    ((*_, config),) = commands("vllm")
    ((*_, body),) = commands("curl")
    published, worker = json.loads(config), json.loads(body)
    for name, field in (("endpoint", "kv_events_endpoint"), ("replay_endpoint", "replay_endpoint")):
        assert published[name].split(":")[-1] == worker[field].split(":")[-1]


@pytest.mark.e2e
def test_the_worker_gets_requests(tmp_path: Path) -> None:
    serve, doctor = commands("select-service")
    assert parse(serve, {}).state_dir == "/var/lib/select-service"
    assert doctor == ["doctor", "--probe"]
    ((*_, body),) = commands("curl")
    with Server(tmp_path / "log", args=("--state-dir", str(tmp_path / "state"))) as server:
        record: Any = server.request("POST", "/workers", json.loads(body)).json
        assert record["lifecycle"] == "schedulable"
