"""A network between the service and its engines that is late, slow, mute, lying, or gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.engine import engines
from tests.faults.patient import Patient, service
from tests.faults.proxy import BLACK_HOLE, HEALTHY, REFUSING, Fault, Proxy

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
FAULTS = {
    "late": Fault(late_s=0.1),
    "slow": Fault(bytes_per_s=20_000),
    "garbled": Fault(garbled=0.05),
    "black hole": BLACK_HOLE,
    "refusing": REFUSING,
}


@dataclass
class Wired:
    """A patient whose engines are behind proxies, PUB and replay each."""

    patient: Patient
    events: list[Proxy]
    replays: list[Proxy]

    def set(self, fault: Fault) -> None:
        for proxy in (*self.events, *self.replays):
            proxy.set(fault)


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wired]:
    folder: Path = tmp_path_factory.mktemp("network")
    with (
        contextlib.ExitStack() as stack,
        service(folder) as server,
        engines(2, first=11) as publishing,
    ):
        proxies = [
            [stack.enter_context(Proxy(one.ports[at])) for one in publishing] for at in (0, 1)
        ]
        wired = Wired(Patient(server, publishing), *proxies)
        wired.patient.register(
            {
                one.worker_id: (pub.endpoint, replay.endpoint)
                for one, pub, replay in zip(publishing, *proxies, strict=True)
            }
        )
        for one in publishing:
            one.churn(40)
        wired.patient.index_is_true()
        yield wired


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_way(wired: Wired, name: str, record_property: Record) -> None:
    patient = wired.patient
    with patient.suffering(f"network {name}", record_property):
        wired.set(FAULTS[name])
        for engine in patient.engines:
            engine.run(100)
        for _ in range(4):
            time.sleep(0.5)
            wired.events[0].reset()  # and it has to connect through that
        wired.set(HEALTHY)
    for engine in patient.engines:
        engine.run(0)
        if FAULTS[name].garbled:  # a hash with another bit is a hash: no checksum would show it
            engine.restart()
        engine.churn(3)  # something after all that was lost, or nobody could know of it yet
    patient.recovers()
