"""A Prometheus scrapes two replicas under the demo's traffic: every panel has something to show."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from select_service.demo.session import DemoSession, DemoSettings
from select_service.demo.worker import EngineShape
from tests.deploy.everything import RULES, panels, rules
from tests.live.ports import HOST, free_port
from tests.live.server import OURS_EXTRA, Server
from tests.select_service.edge.serving import PROMPT
from tests.wait import PATIENCE_S, block_until

PROMETHEUS = shutil.which("prometheus")
VARIABLES = {"$__rate_interval": "10s", "$job": ".*", "$instance": ".*"}
SCOPES = {"$model": ".*", "$tenant": ".*"}


class Prom:
    """The HTTP API of a Prometheus."""

    def __init__(self) -> None:
        self.port = free_port()

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://{HOST}:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            said = json.load(answer)
        assert said["status"] == "success", said
        return said["data"]

    def shows(self, expression: str) -> bool:
        for name, value in (VARIABLES | SCOPES).items():
            expression = expression.replace(name, value)
        return bool(self.ask("query", query=expression)["result"])


@contextmanager
def prometheus(directory: Path, targets: list[str], every_s: int = 1) -> Iterator[Prom]:
    """One that scrapes these, every second if nothing else is asked for."""
    assert PROMETHEUS is not None
    prom = Prom()
    jobs = [{"job_name": "select-service", "static_configs": [{"targets": targets}]}]
    every = {"scrape_interval": f"{every_s}s", "evaluation_interval": "1s"}
    config = directory / "prometheus.yaml"
    said = {"global": every, "rule_files": [str(RULES)], "scrape_configs": jobs}
    config.write_text(yaml.safe_dump(said), "utf-8")
    command = [
        *(PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={directory / 'tsdb'}"),
        *(f"--web.listen-address={HOST}:{prom.port}", "--log.level=warn"),
    ]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield prom
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def until(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    def does() -> bool:
        try:
            return holds()
        except OSError:  # it may not be up yet
            return False

    block_until(does, what)


@contextmanager
def traffic(port: int) -> Iterator[None]:
    """Simulated engines with chats, until it is left."""
    settings = DemoSettings(
        url=f"http://{HOST}:{port}", rate=30.0, engines=2, engine=EngineShape(blocks=512)
    )
    made: list[tuple[DemoSession, asyncio.AbstractEventLoop]] = []
    ready = threading.Event()

    async def run() -> None:
        made.append((DemoSession(settings), asyncio.get_running_loop()))
        ready.set()
        await made[0][0].run()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield
    finally:
        session, loop = made[0]
        if thread.is_alive():
            loop.call_soon_threadsafe(session.stop)
        thread.join(PATIENCE_S)


@pytest.mark.heavy
@pytest.mark.e2e
@pytest.mark.skipif(
    PROMETHEUS is None, reason="no prometheus: install Debian's package of that name"
)
def test_every_panel_shows_something(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    servers = []
    for number, other in ((0, 1), (1, 0)):
        args = [
            *(*OURS_EXTRA, "--state-dir", str(tmp_path / f"state{number}")),
            *("--replica-sync-port", str(ports[number])),
            *("--replica-sync-peers", f"tcp://{HOST}:{ports[other]}"),
            *("--index-snapshot-interval-s", "2", "--admission-control", "token-capacity"),
            *("--active-prefill-tokens-threshold", "100000", "--admission-policy", "slo-shed"),
            *("--shadow-weights", "overlap_score_credit=0.5", "--shadow-sample", "0.5"),
        ]
        servers.append(Server(tmp_path / f"service{number}.log", args=args))
    with servers[0] as first, servers[1] as second:
        targets = [f"{HOST}:{first.port}", f"{HOST}:{second.port}"]
        with prometheus(tmp_path, targets) as prom, traffic(first.port):
            until(lambda: len(prom.ask("targets")["activeTargets"]) == 2, lambda: "nobody scrapes")
            odd = {**PROMPT, "model_name": "demo", "cache_hit_threshold": 0.01}
            missing = dict(panels())

            def all_shown() -> bool:
                first.request("POST", "/select", odd)
                for where, expression in list(missing.items()):
                    if prom.shows(expression):
                        del missing[where]
                return not missing

            until(all_shown, lambda: f"{missing}\n{first.log_tail()}")
            found = [rule for group in prom.ask("rules")["groups"] for rule in group["rules"]]
            assert len(found) == len(rules())
            assert {rule["health"] for rule in found} == {"ok"}
            firing = {rule["name"] for rule in found if rule.get("state") == "firing"}
            assert firing <= {"SelectServiceRefusals"}, firing
