"""Engines that flood, lie, stop, restart, or answer replays with anything but the truth."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.faults.engine import Engine, Replay, engines
from tests.faults.patient import Patient, service
from tests.wait import eventually

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


@pytest.mark.parametrize("how", [one for one in get_args(Replay) if one != "honest"])
def test_replays_that_are_no_answer(patient: Patient, how: Replay, record_property: Record) -> None:
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


def test_a_flood(patient: Patient, record_property: Record) -> None:
    """Far more blocks than any fleet of this size has; selections go on."""
    names = ("kv_blocks_stored_total", "kv_blocks_removed_total", "kv_lost_batches_total")
    before = [patient.server.metric(name) for name in names]
    rates: list[float] = []
    with patient.suffering("flood", record_property, growth_mb=160) as line:
        share, pace = FLOOD_BLOCKS // 2, FLOOD_PER_SECOND // 2
        threads = [
            threading.Thread(target=lambda one=one: rates.append(one.flood(share, pace)))
            for one in patient.engines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        line.note = f"{sum(rates) / 1e3:.0f}k blocks/s offered"
    patient.recovers()
    stored, removed, lost = (
        patient.server.metric(name) - then for name, then in zip(names, before, strict=True)
    )
    assert not lost
    assert min(stored, removed) >= FLOOD_BLOCKS // 2 - 1024, "every one of them was indexed"


def test_frames_of_fifty_megabytes(patient: Patient, record_property: Record) -> None:
    """The connection that sends them is dropped; the neighbour's events keep coming."""
    huge = b"\x93" + bytes(50 << 20)
    with patient.suffering("50 MB frames", record_property, growth_mb=160) as line:
        patient.engines[1].run(100)
        for _ in range(6):
            liar(patient).send(b"kv-events", (1 << 40).to_bytes(8, "big"), huge)
            liar(patient).churn(3)
            time.sleep(0.2)
        line.note = "6 x 50 MB"
    liar(patient).churn(5)
    patient.recovers()


def test_messages_that_mean_nothing(patient: Patient, record_property: Record) -> None:
    """Wrong frames, depth, lies about length: between good events, thousands of them."""
    bad = [
        [b""],
        [b"kv-events"],
        [b"kv-events", b"\0" * 7, b"\x90"],
        [b"kv-events", b"\xff" * 8, b"\x93\xcb"],
        [b"kv-events", b"\0" * 8, b"\x91" * 100_000],
        [b"kv-events", b"\0" * 8, b"\xdd\xff\xff\xff\xff"],
        [b"kv-events", b"\0" * 8, b"\xc6\xff\xff\xff\xffabc"],
        [b"\x80\x04K*."] * 3,
    ]
    with patient.suffering("garbage events", record_property):
        for _ in range(60):
            for frames in bad:
                liar(patient).send(*frames)
            for engine in patient.engines:
                engine.churn(2)
    patient.recovers()


def test_a_storm_of_restarts(patient: Patient, record_property: Record) -> None:
    """An engine that dies young, again and again: what it holds is what its last life holds."""
    with patient.suffering("restarts x 25", record_property):
        for _ in range(25):
            liar(patient).restart()
            liar(patient).churn(4)
            time.sleep(0.05)
        liar(patient).churn(10)
    patient.recovers()


def test_an_engine_that_stands_still(patient: Patient, record_property: Record) -> None:
    """Its connections stay open and nothing moves on them: SIGSTOP, and a gap before."""
    with patient.suffering("engine frozen", record_property):
        liar(patient).lose(5)
        liar(patient).churn(2)
        liar(patient).freeze()
        patient.engines[1].run(100)
        time.sleep(3.0)
        liar(patient).thaw()
    liar(patient).churn(3)
    patient.recovers()
