"""A source says that a worker takes no new work: as a drain, beside an operator's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission.queue import Ticket
from select_service.errors import WorkerDraining
from select_service.types import PairSelection, PinnedWorker, RouterConfig, Selection
from select_service.types.admission import AdmissionSettings
from tests.select_service.core.whole_fleet import Fleet, selection_of

SAID = st.sampled_from(["drain", "undrain", "unready", "ready", "upsert", "patch"])


@given(st.lists(SAID, max_size=12))
def test_an_operator_and_a_source_never_undo_each_other(said: list[str]) -> None:
    fleet = Fleet()
    fleet.worker(1)
    operator = source = False
    for verb in said:
        if verb == "drain":
            fleet.drain(1)
            operator = True
        elif verb == "undrain":
            fleet.undrain(1)
            operator = False
        elif verb == "unready":
            fleet.hold_back(1, "not ready")
            source = True
        elif verb == "ready":
            fleet.hold_back(1, None)
            source = False
        else:  # whoever registers it says that it is there, and no more
            fleet.worker(1) if verb == "upsert" else fleet.patch(1, max_queued=3)
            source = False
        record = fleet.core.workers.worker(1)
        assert record.lifecycle == ("draining" if operator or source else "schedulable")
        assert fleet.core.drains.status(1).drains is operator
        counted = fleet.core.drains.status(1)
        assert counted.safe_to_terminate is operator, "what its source says may change"


def test_only_its_source_is_believed() -> None:
    fleet = Fleet()
    fleet.worker(1)
    assert fleet.hold_back(1, "not ready", "kubernetes").lifecycle == "schedulable"
    assert not fleet.core.drains.hold_back(9, "api", "not ready", fleet.now)


@pytest.mark.parametrize("gated", [False, True])
def test_requests_that_wait_respect_it(*, gated: bool) -> None:
    admission = AdmissionSettings(max_inflight=9) if gated else None
    fleet = Fleet(RouterConfig(queue_threshold=1.0), admission=admission)
    for worker_id in (1, 2):
        fleet.worker(worker_id, max_num_batched_tokens=16)
        fleet.book(f"load{worker_id}", worker_id, *range(2))
    anybody, pinned = fleet.take("a", 9), fleet.take("b", 9, pinned_worker=PinnedWorker(1, 0))
    assert isinstance(anybody, Ticket)
    assert isinstance(pinned, Ticket)
    fleet.hold_back(1, "not ready")
    assert isinstance(pinned.answer, WorkerDraining)
    fleet.free("load1")
    assert fleet.effects.answered == [], "room where nobody may go"
    fleet.hold_back(1, None)
    assert selection_of(anybody.answer).worker_id == 1, "at once"


def test_who_waits_goes_to_one_that_comes_back_changed() -> None:
    fleet = Fleet(RouterConfig(queue_threshold=1.0))
    for worker_id in (1, 2):
        fleet.worker(worker_id, max_num_batched_tokens=16)
        fleet.book(f"load{worker_id}", worker_id, *range(2))
    fleet.hold_back(1, "not ready")
    anybody = fleet.take("a", 9)
    assert isinstance(anybody, Ticket)
    fleet.free("load1")
    fleet.worker(1, max_num_batched_tokens=16, endpoint="http://new")
    assert isinstance(anybody.answer, Selection)
    assert anybody.answer.worker_id == 1


def test_pairs_respect_it() -> None:
    fleet = Fleet()
    for worker_id, role in enumerate(("prefill", "prefill", "decode", "decode"), start=1):
        fleet.worker(worker_id, role=role)
    for worker_id in (1, 3):
        fleet.hold_back(worker_id, "terminating")
    for number in range(6):
        selected = fleet.pair(f"r{number}", number, number + 1)
        assert isinstance(selected, PairSelection)
        assert selected.prefill is not None
        assert (selected.prefill.worker_id, selected.decode.worker_id) == (2, 4)
