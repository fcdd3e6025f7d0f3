"""The quick start for bare metal, as far as it goes without a GPU; the five lines of README.md."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from select_service.cli import parse
from select_service.client import AsyncClient
from tests.live.server import Server
from tests.readme.document import DOCS, README, blocks

CHAPTER = re.findall(
    r"^## On bare metal\n(.*?)^## ",
    (DOCS / "quick-starts.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)[0]


def commands(name: str) -> list[list[str]]:
    """The words behind each use of a command."""
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
def test_a_request(tmp_path: Path) -> None:
    serve, doctor = commands("select-service")
    assert parse(serve, {}).state_dir == "/var/lib/select-service"
    assert doctor == ["doctor", "--probe"]
    ((*_, body),) = commands("curl")
    (source,) = (text for language, text in blocks(README) if language == "py")
    with Server(tmp_path / "log", args=("--state-dir", str(tmp_path / "state"))) as server:
        worker = json.loads(body) | {"model_name": "demo"}  # as README's five minutes have it
        record: Any = server.request("POST", "/workers", worker).json
        assert record["lifecycle"] == "schedulable"
        source = source.replace("http://localhost:8092", f"http://127.0.0.1:{server.port}")
        asked: list[str] = []

        async def send(endpoint: str, tokens: list[int]) -> AsyncIterator[int]:
            asked.append(endpoint)
            for token in tokens:
                yield token

        names: dict[str, Any] = {"AsyncClient": AsyncClient, "send": send, "tokens": [1, 2, 3]}
        exec("async def main():\n" + textwrap.indent(source, "    "), names)
        asyncio.run(names["main"]())
        assert asked == [record["endpoint"]]
        loads: Any = server.request("GET", "/loads").json
        assert loads[0]["loads"][0]["active_requests"] == 0
