"""A fleet at zero is woken by its first request: real selectors, a real planner, no engine."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_planner_drains import api_server
from tests.live.ports import HOST, free_port
from tests.live.replicas import Replica, ours
from tests.live.server import Server
from tests.select_service.planner.edge.fakes import FakeKube
from tests.select_service.planner.golden import PROFILE
from tests.wait import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

POOLS = {
    role: f"/apis/apps/v1/namespaces/inference/deployments/{role}" for role in ("prefill", "decode")
}
PROMPT = {"model_name": "m", "token_ids": [*range(64)]}


def planner(folder: Path, api: str, urls: list[str]) -> Server:
    """One that looks ten times a second; a fleet that is not asked for may have no engine."""
    pools = [{"role": role, "resource": f"deployments/{role}", "replicas_min": 0} for role in POOLS]
    model = {"model_name": "m", "profile_results_dir": str(PROFILE), "pools": pools}
    targets = folder / "targets.json"  # which is YAML, too
    targets.write_text(json.dumps({"models": [model]}))
    args = ["--targets", targets, "--connector", "kubernetes", "--kubernetes-api", api]
    args += ["--namespace", "inference", "--metrics-source", "selector"]
    args += ["--load-interval", "0.1", "--adjustment-interval", "1", "--lease", "machine"]
    args += [part for url in urls for part in ("--selector", url)]
    return Server(
        folder / "planner.log",
        (sys.executable, "-m", "select_service.planner", "run"),
        [str(one) for one in args],
        {"XDG_RUNTIME_DIR": str(folder)},
    )


class Engines:
    """What starts when a deployment is scaled: it registers itself at every selector."""

    def __init__(self, fake: FakeKube, selectors: list[Replica]) -> None:
        self._fake, self._selectors = fake, selectors
        self.wanted = threading.Event()
        for role in POOLS:
            fake.deployment(role, 0, 0)
        fake.patched = lambda _: self.wanted.set()

    @property
    def replicas(self) -> list[int]:
        return [self._fake.objects[path]["spec"]["replicas"] for path in POOLS.values()]

    def start(self) -> None:
        eventually(lambda: self.replicas, [1, 1])
        for role, path in POOLS.items():
            self._fake.objects[path]["status"] = {"replicas": 1, "readyReplicas": 1}
            record = {
                "worker_id": 1 + [*POOLS].index(role),
                "model_name": "m",
                "role": role,
                "endpoint": f"http://{HOST}:8000",
                "block_size": 16,
                "kv_events_endpoint": f"tcp://{HOST}:9",
            }
            for one in self._selectors:
                one.ask("POST", "/workers", record, ok=(201,))

    def stop(self) -> None:
        for role, path in POOLS.items():
            self._fake.deployment(role, 0, 0)
            for one in self._selectors:
                one.ask("DELETE", f"/workers/{1 + [*POOLS].index(role)}")
            assert self._fake.objects[path]["spec"]["replicas"] == 0


def refused(one: Replica) -> None:
    """It may be led to, has nobody to serve, and says when to ask again."""
    assert one.request("GET", "/ready?for=traffic").status == 200
    assert one.request("GET", "/ready").status == 503
    answer = one.request("POST", "/select_pair", PROMPT | {"reservation_id": "r"})
    assert (answer.status, answer.json["code"]) == (503, "no_schedulable_worker")  # type: ignore[index]
    assert int(answer.headers["retry-after"]) >= 1


def served(one: Replica) -> None:
    answer: Any = one.ask("POST", "/select_pair", PROMPT | {"reservation_id": "r"})
    assert {answer["prefill"]["worker_id"], answer["decode"]["worker_id"]} == {1, 2}


def counting(server: Server) -> bool:
    """Whether the planner has scraped every selector once: what comes later is counted."""
    return server.request("GET", "/ready").status == 200


@pytest.mark.parametrize("keeps_state", [False, True])
def test_the_first_request_wakes_a_fleet_that_never_was(tmp_path: Path, keeps_state: bool) -> None:
    """And a selector that starts anew while the fleet is at zero has it woken again."""
    args = ("--state-dir", str(tmp_path / "state")) if keeps_state else ()
    port = free_port()
    with api_server() as (fake, api):
        with ours(tmp_path, "a", *args, port=port) as a:
            engines = Engines(fake, [a])
            with planner(tmp_path, api, [f"http://{HOST}:{port}"]) as planning:
                eventually(lambda: counting(planning), True)
                assert engines.replicas == [0, 0]
                refused(a)
                engines.start()
                served(a)
                a.ask("DELETE", "/reservations/r")
        # nobody plans while everything goes
        with ours(tmp_path, "b", *args, port=port) as b:
            engines = Engines(fake, [b])
            if keeps_state:
                engines.stop()
            with planner(tmp_path, api, [f"http://{HOST}:{port}"]) as planning:
                eventually(lambda: counting(planning), True)
                b.stop()
                with ours(tmp_path, "c", *args, port=port) as c:
                    engines = Engines(fake, [c])
                    refused(c)
                    engines.start()
                    served(c)


def test_whichever_selector_is_asked_wakes_the_fleet(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    with (
        api_server() as (fake, api),
        ours(tmp_path, "a", replica_port=first, peers=[f"tcp://{HOST}:{second}"]) as a,
        ours(tmp_path, "b", replica_port=second, peers=[f"tcp://{HOST}:{first}"]) as b,
    ):
        engines = Engines(fake, [a, b])
        for one in (a, b):
            eventually(lambda: one.request("GET", "/ready?for=traffic").status, 200)
        with planner(tmp_path, api, [f"http://{HOST}:{one.port}" for one in (a, b)]) as planning:
            eventually(lambda: counting(planning), True)
            refused(b)
            engines.start()
            served(a)
