"""Engines that flood, lie, stop, restart, or answer replays with anything but the truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.faults.engine import Engine, Replay, engines
from tests.faults.patient import Patient, service
from tests.live.replicas import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
FLOOD_BLOCKS = 800_000
FLOOD_PER_SECOND = 250_000


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    folder: Path = tmp_path_factory.mktemp("events")
    with service(folder) as server, engines(2) as publishing:
        patient = Patient(server, publishing)
        patient.register()
        for engine in publishing:
            engine.churn(60)
        patient.index_is_true()
        yield patient


def liar(patient: Patient) -> Engine:
    return patient.engines[0]


def lost(patient: Patient) -> float:
    return patient.server.metric("kv_gaps_total")


@pytest.mark.parametrize("how", [one for one in get_args(Replay) if one != "honest"])
def test_replays_that_are_no_answer(
    patient: Patient, how: Replay, record_property: Record
) -> None:
    """Live events go on being indexed, and the truth is there when replays are."""
    with patient.suffering(f"replay {how}", record_property):
        liar(patient).replay(how)
        patient.engines[1].run(100)
        before = patient.server.metric("kv_replays_asked_total")
        for _ in range(3):
            liar(patient).lose(3)
            liar(patient).churn(5)
            time.sleep(0.3)
        eventually(lambda: patient.server.metric("kv_replays_asked_total") > before, True)
        time.sleep(1.0)
    liar(patient).replay("honest")
    liar(patient).lose(2)  # a gap, so that it is asked again
    liar(patient).churn(2)
    patient.recovers()
