"""Dead engines: who is passed over, for how long, and what puts a rank back."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.types import WorkerRank
from select_service.core.decisions.explain import ExplainedRecord
from select_service.core.decisions.trust_monitor import LOOK_S
from select_service.errors import InvalidField
from select_service.types import (
    BatchFree,
    CoreLimits,
    Outcome,
    PinnedWorker,
    RouterConfig,
)
from tests.select_service.core.whole_fleet import Fleet, selection_of, ticket_of

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]
LIMITS: dict[str, Any] = {
    "outlier_failures": 3,
    "outlier_unreachable_s": 5.0,
    "outlier_ejection_s": 10.0,
    "outlier_ejection_max_s": 30.0,
}


class Ward(Fleet):
    """Worker 1 holds the prompt and so is the first choice; 2 is there, too."""

    def __init__(self, config: RouterConfig | None = None, **limits: Any) -> None:
        super().__init__(config, limits=CoreLimits(**(LIMITS | limits)))
        for worker_id in (1, 2):
            self.worker(worker_id)
        self.hold(1, PROMPT)
        self.booked = 0

    def end(self, worker_id: int, outcome: Outcome | None) -> None:
        """Book something there, which ends like this a second later."""
        self.booked += 1
        self.now += 0.5
        self.book(f"b{self.booked}", worker_id, 97)
        self.now += 0.5
        reservations = self.core.reservations
        self._did(reservations.free(f"b{self.booked}", self.now, None, outcome))

    def fail(self, times: int = 3, worker_id: int = 1) -> None:
        for _ in range(times):
            self.end(worker_id, "failed")

    @property
    def choice(self) -> int:
        return selection_of(self.select(*PROMPT)).worker_id

    def excluded(self, **wishes: Any) -> dict[int, str | None]:
        """Why each worker was left out of a decision, as that explains itself."""
        record: Any = selection_of(self.select(*PROMPT, explain=True, **wishes)).decision
        candidates: Any = ExplainedRecord(record, 0.0, 0.1).whole().candidates
        return {one.worker_id: one.excluded for one in candidates}

    def lose(self, worker_id: int = 1) -> None:
        """The publisher's connection breaks now."""
        self.stream(worker_id).unreachable_since = self.now

    def stream(self, worker_id: int) -> Any:
        return self.core.membership.stream_at(WorkerRank(worker_id, 0))

    def look(self, seconds: float) -> None:
        self.tick(seconds)
        self.tick(LOOK_S)


def test_a_rank_that_fails_again_and_again_is_passed_over() -> None:
    ward = Ward()
    ward.fail(2)
    assert ward.choice == 1
    ward.end(1, None)  # not said: taken for a success
    ward.fail(2)
    ward.end(1, "cancelled")  # says nothing of the engine
    assert ward.choice == 1
    ward.fail(1)
    assert ward.choice == 2
    assert ward.excluded() == {1: "failing", 2: None}
    (found,) = ward.core.workers.worker(1).outliers  # type: ignore[misc]
    assert (found.dp_rank, found.reason, found.passed_over) == (0, "failing", True)
    assert (found.failures, found.backoff_s) == (3, 10.0)
    assert ward.core.membership.outlier_tally.ejections == {"failing": 1, "unreachable": 0}
    assert ward.core.counters.outcomes == {"completed": 0, "failed": 5, "cancelled": 1}
    ward.tick(1.0)
    (ejection,) = ward.effects.ejected
    assert (ejection.rank, ejection.change.is_ejected) == (WorkerRank(1, 0), True)


def test_a_backoff_ends_with_one_probe_and_doubles() -> None:
    ward = Ward()
    ward.fail()
    for pause_s in (10.0, 20.0, 30.0, 30.0):
        assert ward.choice == 2
        ward.tick(pause_s - 1.0)
        assert ward.choice == 2
        ward.tick(1.0)
        assert [ward.choice, ward.choice] == [1, 2], "one request is the probe"


@pytest.mark.parametrize(("outcome", "chosen"), [(None, 1), ("completed", 1), ("cancelled", 2)])
def test_a_success_puts_it_back(outcome: Outcome | None, chosen: int) -> None:
    ward = Ward()
    ward.book("before", 1, 98)
    ward.fail()
    ward._did(ward.core.reservations.free("before", ward.now, None, "completed"))
    assert ward.choice == 2, "what was booked before says nothing of how it is now"
    ward.end(1, outcome)
    assert ward.choice == chosen
    ward.fail(2)
    assert ward.choice == chosen, "and it begins anew"


def test_suspicion_alone_refuses_nobody() -> None:
    ward = Ward()
    ward.fail()
    ward.fail(worker_id=2)
    assert ward.choice == 1
    assert ward.excluded() == {1: None, 2: None}
    pinned = selection_of(ward.select(*PROMPT, pinned_worker=PinnedWorker(worker_id=1, dp_rank=0)))
    assert pinned.worker_id == 1
    assert ward.excluded(allowed_worker_ids=[2]) == {1: "not_allowed", 2: None}


def test_a_publisher_that_is_gone() -> None:
    ward = Ward()
    ward.look(100.0)
    assert ward.choice == 1, "one that was never there is no evidence"
    ward.lose()
    ward.look(3.0)
    assert ward.choice == 1
    ward.look(2.0)
    assert ward.excluded() == {1: "unreachable", 2: None}
    ward.end(1, None)
    assert ward.choice == 2, "nobody says that it did not fail"
    ward.stream(1).unreachable_since = None
    ward.look(0.0)
    assert ward.choice == 1


@pytest.mark.parametrize("sign", ["prefill_complete", "output_block", "completed"])
def test_an_engine_that_lives_without_its_publisher(sign: str) -> None:
    ward = Ward()
    ward.book("before", 1, 98)
    ward.lose()
    ward.look(6.0)
    ward.done("before")
    assert ward.choice == 2
    ward.book("since", 1, 99)
    calls = ward.core.reservations
    if sign == "prefill_complete":
        ward.done("since")
    elif sign == "output_block":
        ward._did(calls.output_block("since", None, ward.now))
    else:
        ward._did(calls.free("since", ward.now, None, "completed"))
    ward.look(10.0)
    assert ward.choice == 1, "also at the next look"
    ward.stream(1).unreachable_since = ward.now  # it came back and went again
    ward.look(6.0)
    assert ward.choice == 2


def test_both_can_be_switched_off_at_any_time() -> None:
    ward = Ward()
    ward.fail()
    ward.lose(2)
    ward.look(6.0)
    assert ward.excluded() == {1: None, 2: None}, "both are suspected"
    ward.core.limits.outlier_failures = 0
    ward.tick(1.0)
    assert ward.excluded() == {1: None, 2: "unreachable"}
    ward.core.limits.outlier_unreachable_s = 0.0
    ward.tick(1.0)
    ward.fail(9)
    ward.look(9.0)
    assert ward.excluded() == {1: None, 2: None}
    assert not ward.core.membership.outlier_tally.ranks


def test_who_leaves_is_forgotten() -> None:
    ward = Ward()
    ward.fail()
    ward.delete(1)
    ward.worker(1)
    ward.hold(1, PROMPT)
    assert ward.choice == 1
    assert not ward.core.membership.outlier_tally.ranks


def test_waiting_requests_get_a_rank_that_is_due_for_a_probe() -> None:
    ward = Ward(RouterConfig(queue_threshold=1.0))
    for worker_id in (1, 2):
        ward.patch(worker_id, max_num_batched_tokens=16)
    ward.fail()
    ward.book("busy", 2, 94, 95, 96)
    waits = ticket_of(ward.select(*PROMPT))
    ward.tick(5.0)
    assert not ward.effects.answered
    ward.tick(5.0)
    assert ward.effects.answered == [waits]


def test_of_a_pair_the_leg_whose_turn_it_was_is_blamed() -> None:
    fleet = Fleet(limits=CoreLimits(**(LIMITS | {"outlier_failures": 1})))
    roles = {1: "prefill", 2: "prefill", 3: "decode", 4: "decode"}
    for worker_id, role in roles.items():
        fleet.worker(worker_id, role=role)
    calls = fleet.core.reservations
    first: Any = fleet.pair("p", 1, 2)
    fleet._did(calls.free("p", fleet.now, None, "failed"))
    second: Any = fleet.pair("q", 1, 2)
    assert second.prefill.worker_id != first.prefill.worker_id
    assert second.decode.worker_id == first.decode.worker_id or fleet.load(3) is not None
    fleet.done("q")
    fleet._did(calls.free("q", fleet.now, None, "failed"))
    third: Any = fleet.pair("r", 1, 2)
    assert third.prefill.worker_id == second.prefill.worker_id
    assert third.decode.worker_id != second.decode.worker_id


def test_a_batch_tells_and_refuses_what_it_does_not_know() -> None:
    ward = Ward(outlier_failures=1)
    ward.book("b", 1, 7)
    with pytest.raises(InvalidField, match="outcome must be one of completed, failed, cancelled"):
        ward.core.reservations.free("b", ward.now, None, "broken")  # type: ignore[arg-type]
    free = BatchFree(reservation_id="b", outcome="failed")
    for status in (200, 200):
        result, effects = ward.core.reservations.operate(free, ward.now)
        ward._did(effects)
        assert result.status == status
    assert ward.choice == 2
    assert ward.core.counters.outcomes["failed"] == 1, "a repeat says nothing new"
