"""Discovery does right by what a real API server answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from select_service.kubernetes_api import KubernetesStatus
from tests.live.recorded_apiserver import recorded, replay
from tests.select_service.edge.discovery.apiserver_scenarios import DISCOVERY
from tests.select_service.edge.discovery.endpointslice_scenarios import CURRENT
from tests.select_service.edge.discovery.fake_kubernetes import status
from tests.select_service.edge.discovery.test_watch_failures import TOO_LARGE
from tests.wait import run


@pytest.mark.parametrize("name", DISCOVERY | CURRENT)
def test_a_recorded_scenario_ends_as_the_live_one(name: str, tmp_path: Path) -> None:
    run(replay(name, (DISCOVERY | CURRENT)[name], tmp_path))


SAID = {
    400: ("BadRequest", 0.0, False),
    404: ("NotFound", 0.0, False),
    429: ("", 1.0, False),
    504: ("Timeout", 1.0, False),
}


@pytest.mark.parametrize(
    ("name", "codes"), [("refusals", (400, 404, 429, 504)), ("current_refusals", (400, 504))]
)
def test_refusals_are_read_for_what_they_say(name: str, codes: tuple[int, ...]) -> None:
    said = {}
    for one in recorded(name).exchanges:
        fields = dict(line.split(": ", 1) for line in one.head.lower().split("\r\n")[1:])
        try:
            found = msgspec.json.decode(one.body, type=KubernetesStatus)
        except msgspec.MsgspecError:  # of 429 it is a sentence
            found = KubernetesStatus()
        if one.status != 200:
            said[one.status] = found.reason, found.retry_after_s(fields), found.is_gone
    assert said == {code: SAID[code] for code in codes}


def error_event(name: str) -> Any:
    """The only one of a recording."""
    events = [chunk.text for one in recorded(name).exchanges for chunk in one.chunks]
    (event,) = (json.loads(text) for text in events if text.startswith('{"type":"ERROR"'))
    return event


def test_the_fake_server_says_the_same() -> None:
    (too_large,) = (one for one in recorded("refusals").exchanges if one.status == 504)
    assert json.loads(too_large.body) == TOO_LARGE
    for name in ("gone", "current_gone"):
        event = error_event(name)
        message = event["object"]["message"]
        assert message.startswith("too old resource version: ")
        assert event == {"type": "ERROR", "object": status(410, "Expired", message)}
    # a watch that is to begin with the objects says it as an event, a list as its answer
    (current,) = (one for one in recorded("current_refusals").exchanges if one.status == 504)
    event = error_event("current_refusals")
    assert event == {"type": "ERROR", "object": json.loads(current.body)}
    message = event["object"]["message"]
    assert message.startswith("Timeout: Too large resource version: 99999999, current: ")
    assert event["object"] == {**TOO_LARGE, "message": message}
    (refused,) = (one for one in recorded("rights").exchanges if one.status == 401)
    assert json.loads(refused.body) == status(401, "Unauthorized", "Unauthorized")
