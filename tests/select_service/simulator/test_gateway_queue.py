"""The field's gateway queue: as recorded, beside a dumb twin, and over HTTP."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.classes import SloClasses
from select_service.simulator.admit import InstanceState
from select_service.simulator.cli import main
from select_service.simulator.gateway_queue import GatewayQueue, QueueSettings, saturation_of
from tests.select_service.core.admission.golden import SIMULATOR

CASES = SIMULATOR["gateway_queue"]
KEYS = QueueSettings.__struct_fields__


def settings_of(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key in KEYS}


def run(
    config: dict[str, Any],
    lines: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> list[dict[str, Any]]:
    asked = "\n".join(map(json.dumps, lines)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(asked)))
    assert main(["queue", "--config", json.dumps(config)]) == 0
    return [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_line_as_recorded(
    case: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    assert run(settings_of(case), case["log"], monkeypatch, capsysbinary) == case["log"]


@pytest.mark.parametrize("state", SIMULATOR["slo_aware"], ids=lambda state: state["state"])
def test_detectors_as_recorded(state: dict[str, Any]) -> None:
    pool = [InstanceState(**one) for one in state["snapshots"] or []]
    found = {name: saturation_of(QueueSettings(detector=name), pool) for name in DETECTORS}
    assert found["never"] == 0.0
    assert found["utilization"] == state["utilization_saturation_5_0.8"]
    assert found["concurrency"] == state["concurrency_saturation_64"]


DETECTORS: Any = ("never", "utilization", "concurrency")


def queue_of(**settings: Any) -> GatewayQueue:
    return GatewayQueue(QueueSettings(**settings))


def test_rounds_go_by_name() -> None:
    queue = queue_of(fairness="round-robin")
    for name, tenant in (("z1", "z"), ("z2", "z"), ("b1", "b"), ("a1", "a"), ("a2", "a")):
        queue.enqueue(name, "standard", tenant)
    assert [queue.dequeue_gated(0.0) for _ in range(5)] == ["a1", "b1", "a2", "z1", "z2"]


class Twin:
    """A list; the text of the rules, one after another."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings, self.waiting, self.bands = settings, list[tuple[int, int, str]](), set[int]()

    def enqueue(self, number: int, slo_class: str) -> tuple[str, str]:
        limits, priority = self.settings, SloClasses().priority(slo_class)
        self.bands.add(priority)
        if 0 < limits.per_band_capacity <= sum(one[0] == priority for one in self.waiting):
            return "Rejected", ""
        outcome, victim = "Enqueued", ""
        if 0 < limits.max_depth <= len(self.waiting):
            losing = min(self.waiting, key=lambda one: (one[0], -one[1]))
            if not limits.queue_shedding or losing[0] >= 0 or losing[0] >= priority:
                return "Rejected", ""
            self.waiting.remove(losing)
            outcome, victim = "ShedVictim", losing[2]
        self.waiting.append((priority, number, str(number)))
        return outcome, victim

    def dequeue_gated(self, saturation: float) -> str:
        bands = sorted(self.bands, reverse=True)
        for place, priority in enumerate(bands):
            below = 1.0 - self.settings.usage_limit_threshold
            if saturation >= 1.0 - (place * below / (len(bands) - 1) if place else 0.0):
                return ""
            first = min((one for one in self.waiting if one[0] == priority), default=None)
            if first is not None:
                self.waiting.remove(first)
                return first[2]
        return ""


@given(
    st.builds(
        QueueSettings,
        max_depth=st.integers(0, 5),
        per_band_capacity=st.integers(0, 3),
        queue_shedding=st.booleans(),
        usage_limit_threshold=st.sampled_from([0.2, 0.5, 1.0]),
    ),
    st.lists(
        st.tuples(
            st.sampled_from(["critical", "standard", "batch", "background", "?"]), st.text("ab")
        )
        | st.sampled_from([0.0, 0.3, 0.5, 0.6, 0.75, 0.9, 1.0]),
        max_size=40,
    ),
)
def test_it_does_as_its_twin(settings: QueueSettings, steps: list[Any]) -> None:
    queue, twin = GatewayQueue(settings), Twin(settings)
    for number, step in enumerate(steps):
        if isinstance(step, float):
            assert queue.dequeue_gated(step) == twin.dequeue_gated(step)
        else:
            assert queue.enqueue(str(number), *step) == twin.enqueue(number, step[0])
        queue.check()
    assert len(queue) == len(twin.waiting)


def test_a_detector_judges_where_no_saturation_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    lines: list[dict[str, Any]] = [
        {"op": "enqueue", "id": "a"},
        {"op": "dequeue_gated"},
        {"op": "dequeue_gated", "snapshots": [{"in_flight": 32}]},
    ]
    got = run({"detector": "concurrency"}, lines, monkeypatch, capsysbinary)
    assert [(one["saturation"], one["id"]) for one in got[1:]] == [(1.0, ""), (0.5, "a")]


@pytest.mark.parametrize(
    "config",
    [
        {"max_depth": -1},
        {"usage_limit_threshold": 0},
        {"max_concurrency": 0},
        {"fairness": "?"},
        {"nonsense": 1},
        {"slo_priorities": {"": 1}},
        {"slo_priorities": {"gold": 101}},
    ],
)
def test_settings_that_make_no_sense(
    config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError)):
        msgspec.convert(config, QueueSettings)
    with pytest.raises(SystemExit) as ended:
        main(["queue", "--config", json.dumps(config)])
    assert ended.value.code == 2
    assert "error: --config: " in capsys.readouterr().err


def test_a_line_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = io.TextIOWrapper(io.BytesIO(b'\n{"op": "enqueue"}\n{"op": "evict"}\n'))
    monkeypatch.setattr(sys, "stdin", asked)
    assert main(["queue"]) == 1
    assert "line 3: " in capsys.readouterr().err, "it is JSON, of something else"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"evict\n")))
    assert main(["queue"]) == 1
    assert "line 1 is not JSON: " in capsys.readouterr().err
