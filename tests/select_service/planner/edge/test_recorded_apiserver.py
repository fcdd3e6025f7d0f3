"""The planner does right by what a real API server answered."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.live.recorded_apiserver import Exchange, recorded, replay
from tests.select_service.planner.edge.apiserver_scenarios import PLANNER
from tests.select_service.planner.edge.custom_resource_scenarios import CUSTOM
from tests.select_service.planner.edge.fakes import FakeKube
from tests.wait import run


@pytest.mark.parametrize("name", PLANNER | CUSTOM)
def test_a_recorded_scenario_ends_as_the_live_one(name: str, tmp_path: Path) -> None:
    run(replay(name, (PLANNER | CUSTOM)[name], tmp_path))


def reason(body: bytes) -> str:
    return str(json.loads(body).get("reason"))


def test_the_fake_server_refuses_as_the_real_one() -> None:
    fake = FakeKube()
    fake.deployment("decode", 3, 2)
    for scaled in fake.objects.values():
        scaled["metadata"]["resourceVersion"] = "207"  # the recorded request has another
    compared = 0

    def ask(one: Exchange) -> httpx.Response:
        url = "https://kube" + one.path.replace("/llm/", "/inference/")
        sent = one.sent.encode("latin-1")
        return fake.answer(
            httpx.Request(one.method, url, content=sent, headers={"content-type": one.kind})
        )

    for one in recorded("planner_refusals").exchanges:
        if one.status in {404, 409, 415, 422}:  # the others are about rights
            answer = ask(one)
            assert (answer.status_code, reason(answer.content)) == (one.status, reason(one.body))
            compared += 1
    creations = [one for one in recorded("leases").exchanges if one.method == "POST"]
    for one in sorted(creations, key=lambda one: one.status):
        answer = ask(one)
        assert (answer.status_code, reason(answer.content)) == (one.status, reason(one.body))
    assert (compared, len(creations)) == (5, 2)
