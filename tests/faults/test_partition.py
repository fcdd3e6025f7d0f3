"""A cable is pulled: nobody is informed, nothing is refused, packets are just gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.engine import Engine, engines
from tests.faults.namespaces import Namespace, why_not
from tests.faults.patient import Patient, is_sum, service
from tests.faults.traffic import Traffic
from tests.live.window import WATCHED
from tests.wait import eventually

pytestmark = [pytest.mark.heavy, pytest.mark.e2e]

Record = Callable[[str, object], None]
CUT_S = 4.0


@pytest.fixture(scope="module")
def place() -> Iterator[Namespace]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Namespace() as namespace:
        yield namespace


def test_an_engine_is_cut_off(tmp_path: Path, place: Namespace, record_property: Record) -> None:
    """It goes on meanwhile; nobody waits, its neighbour is received, then all of it is known."""
    far = Engine(31, host=place.there, namespace=place.name)
    with service(tmp_path) as server, engines(1, first=32) as near, far:
        patient = Patient(server, [far, *near])
        patient.register()
        for engine in patient.engines:
            engine.churn(40)
        patient.index_is_true()
        with patient.suffering("engine cut off", record_property):
            for engine in patient.engines:
                engine.run(100)
            time.sleep(0.5)
            place.cut()
            time.sleep(CUT_S)
            near[0].run(0)
            near_only = Patient(server, near)
            near_only.index_is_true(deadline_s=10.0)
            place.join()
        patient.recovers(deadline_s=60.0)


def test_a_replica_is_cut_off(tmp_path: Path, place: Namespace, record_property: Record) -> None:
    """Both sides go on; when the cable is back, each carries what clients have at either."""
    folders = [tmp_path / name for name in ("near", "far")]
    for folder in folders:
        folder.mkdir()
    near = service(folders[0], "--host", "0.0.0.0")
    command = (*place.command, *WATCHED)
    far = service(folders[1], "--host", "0.0.0.0", command=command, host=place.there)
    with near, contextlib.ExitStack() as stack:
        stack.enter_context(far)
        near.listen_to(f"tcp://{place.there}:{far.replica_port}")
        far.listen_to(f"tcp://{place.here}:{near.replica_port}")
        for one in (near, far):
            one.add_worker(1, 2)
        for one in (near, far):
            eventually(
                lambda: one.metric("replica_publishers", state="synced"),
                1.0,
            )
        patient = Patient(near)
        patient.worker_ids = [1, 2]
        with patient.suffering("replica cut off", record_property):
            time.sleep(0.5)
            place.cut()
            time.sleep(CUT_S)
            place.join()
        there = Traffic([far.port], [1, 2], clients=1, seed=9, host=place.there)
        with there:
            time.sleep(0.3)
        assert not there.odd
        for traffic in (patient.traffic, there):
            traffic.resolve_doubts()
        wanted = patient.traffic.live | there.live

        def found() -> list[dict[str, int]]:
            views = [one.view() for one in (near, far)]
            for view in views:
                is_sum(view)
            return [{one.name: one.worker_id for one in view.booked} for view in views]

        eventually(found, [wanted, wanted], deadline_s=60.0)
        patient.traffic.free_all()
        there.free_all()
        eventually(found, [{}, {}], deadline_s=60.0)
