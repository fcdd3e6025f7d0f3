"""What answers predict in milliseconds, where it is told, and how far off it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import UNSET

from select_service.core.decisions.explain import ExplainedRecord
from select_service.types import PairSelection, RouterConfig, Selection
from tests.select_service.core.reservations.apart import apart, paired
from tests.select_service.core.whole_fleet import DEFAULT, Fleet, selection_of

if TYPE_CHECKING:
    from select_service.core.ledger.rank_speeds import RankSpeed
    from select_service.types.router_config import Policy

TTFT_S, BLOCK_S, ISL = 0.25, 0.32, 640
HELD = range(1, 9)


def served(fleet: Fleet, name: str, content: int) -> Selection:
    """Serve one prompt to its end; return its answer."""
    answer = selection_of(fleet.take(name, content, isl=ISL))
    fleet.now += TTFT_S
    fleet.done(name)
    for _ in range(3):
        fleet.now += BLOCK_S
        fleet.core.reservations.output_block(name, None, fleet.now)
    fleet.free(name)
    return answer


def test_answers_decisions_and_trust_tell_milliseconds_once_a_rank_was_measured() -> None:
    fleet = Fleet()
    fleet.worker(1)
    first = served(fleet, "first", 1_000)
    assert first.predicted_ttft_ms is UNSET, "nothing was measured yet"
    assert first.predicted_itl_ms is UNSET
    for number in range(10):
        served(fleet, f"r{number}", 2_000 + number)
        fleet.now += 1.0  # so that a record looks at the fleet anew
    answer = served(fleet, "last", 3_000)
    block_size = fleet.core.partitions[DEFAULT].index.block_size
    itl_ms = BLOCK_S * 1e3 / block_size
    assert answer.predicted_ttft_ms == pytest.approx(TTFT_S * 1e3)
    assert answer.predicted_itl_ms == pytest.approx(itl_ms)
    record = fleet.core.decisions.find("last")
    assert record is not None
    told = ExplainedRecord(record, 0.0, 0.1).whole()
    assert told.predicted_ttft_ms == answer.predicted_ttft_ms
    assert told.predicted_itl_ms == answer.predicted_itl_ms
    assert told.candidates
    assert told.candidates[0].predicted_ttft_ms == answer.predicted_ttft_ms
    (row,) = fleet.core.trust_monitor.table().ranks
    assert row.speed is not None
    assert row.speed.prefill_tokens_per_s == pytest.approx(ISL / TTFT_S)
    assert row.speed.itl_ms == pytest.approx(itl_ms)
    assert row.speed.ttft_abs_error_ms == pytest.approx(0.0, abs=0.01)
    assert row.speed.itl_error_ms == pytest.approx(0.0, abs=0.01)
    fleet.delete(1)
    fleet.worker(1)
    (row,) = fleet.core.trust_monitor.table().ranks
    assert row.speed is None, "it may be another engine"
    again = selection_of(fleet.take("again", 1, isl=ISL))
    assert again.predicted_ttft_ms is UNSET


def test_a_longer_queue_is_predicted_to_take_longer() -> None:
    fleet = Fleet()
    fleet.worker(1)
    for number in range(10):
        served(fleet, f"r{number}", 2_000 + number)
    alone = selection_of(fleet.select(1, isl=ISL))
    fleet.take("ahead", 9, isl=ISL)
    behind = selection_of(fleet.select(1, isl=ISL))
    assert alone.predicted_ttft_ms == pytest.approx(TTFT_S * 1e3)
    assert behind.predicted_ttft_ms == pytest.approx(2 * TTFT_S * 1e3)


def test_pairs_predict_what_each_leg_does() -> None:
    fleet = apart()
    answer: PairSelection | None = None
    for number in range(10):
        answer = paired(fleet.pair(f"p{number}", 2_000 + number, isl=ISL))
        fleet.now += TTFT_S
        fleet.done(f"p{number}")
        for _ in range(3):
            fleet.now += BLOCK_S
            fleet.core.reservations.output_block(f"p{number}", None, fleet.now)
        fleet.free(f"p{number}")
    assert answer is not None
    assert answer.mode == "disaggregated"
    assert answer.predicted_ttft_ms == pytest.approx(TTFT_S * 1e3)
    block_size = fleet.core.partitions[DEFAULT].index.block_size
    assert answer.predicted_itl_ms == pytest.approx(BLOCK_S * 1e3 / block_size)
    errors = [row.speed for row in fleet.core.trust_monitor.table().ranks]
    assert [one is not None and one.ttft_error_ms is not None for one in errors] == [True, False]


def test_a_first_token_of_before_a_restart_tells_nothing_of_its_prediction() -> None:
    fleet = Fleet()
    fleet.worker(1)
    for number in range(10):
        served(fleet, f"r{number}", 2_000 + number)
    ledger = fleet.core.partitions[DEFAULT].ledger
    error = ledger.loads.speeds.by_slot[0].ttft_error
    before = error.samples
    fleet.take("old", 3_000, isl=ISL)
    ledger.loads.work.resumed_at = fleet.now  # as if it had been booked again here
    fleet.now += TTFT_S / 10
    fleet.done("old")
    assert error.samples == before


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
def test_decisions_predict_as_answers_do_behind_a_queue(policy: Policy) -> None:
    fleet = Fleet(RouterConfig(policy=policy))
    fleet.worker(1)
    for number in range(10):
        fleet.take(f"r{number}", 2_000 + number, isl=ISL)
        fleet.now += 0.021
        fleet.done(f"r{number}")
        fleet.now += 1.0
        fleet.free(f"r{number}")
    for number in range(3):
        fleet.take(f"q{number}", 3_000 + number, isl=ISL)
        fleet.now += 0.5
    answer = selection_of(fleet.take("last", 4_000, isl=ISL - 1))
    record = fleet.core.decisions.find("last")
    assert record is not None
    told = ExplainedRecord(record, 0.0, 0.1).whole()
    assert answer.predicted_ttft_ms is not UNSET
    assert told.predicted_ttft_ms == answer.predicted_ttft_ms
    assert told.predicted_itl_ms == UNSET


def test_a_first_token_told_at_the_end_of_its_answer_teaches_nothing() -> None:
    """A client that does not stream has both at once: the answer's whole time is no TTFT."""
    fleet = Fleet()
    fleet.worker(1)
    for number in range(10):
        name = f"r{number}"
        fleet.take(name, 2_000 + number, isl=ISL)
        fleet.now += 20 * TTFT_S
        fleet.done(name)
        fleet.core.reservations.output_block(name, None, fleet.now, 4)
        fleet.free(name)
    assert selection_of(fleet.select(1, isl=ISL)).predicted_ttft_ms is UNSET
    for number in range(10):
        served(fleet, f"s{number}", 3_000 + number)
    answer = selection_of(fleet.select(1, isl=ISL))
    assert answer.predicted_ttft_ms == pytest.approx(TTFT_S * 1e3)


def pulling(kv_transfer_cost: float = 0.5) -> tuple[Fleet, RankSpeed]:
    """Worker 1 is measured and idle; worker 2 is busy and holds eight blocks."""
    fleet = Fleet(RouterConfig(kv_pull=True, kv_transfer_cost_per_block=kv_transfer_cost))
    fleet.worker(1)
    for number in range(10):
        served(fleet, f"r{number}", 2_000 + number)
    fleet.worker(2)
    fleet.hold(2, list(HELD))
    fleet.book("busy", 2, *range(100, 200))
    return fleet, fleet.core.partitions[DEFAULT].ledger.loads.speeds.by_slot[0]


def test_a_predicted_first_token_comes_after_what_is_pulled() -> None:
    """Queue, pull and computing are added up, as in the price."""
    fleet, _ = pulling()
    answer = selection_of(fleet.take("r", *HELD, 9, 10, explain=True))
    assert answer.worker_id == 1
    assert answer.kv_source
    tokens = answer.effective_prefill_tokens + 8 * 16 * 0.5
    assert tokens == 32 + 64
    assert answer.predicted_ttft_ms == pytest.approx(tokens / ISL * TTFT_S * 1e3)
    record = fleet.core.decisions.find("r")
    assert record is not None
    told = ExplainedRecord(record, 0.0, 0.5).whole()
    assert told.predicted_ttft_ms == answer.predicted_ttft_ms
    fleet.free("r")
    fleet.take("ahead", *range(300, 305), allowed_worker_ids=[1])
    behind = selection_of(fleet.take("r2", *HELD, 9, 10))
    assert behind.worker_id == 1
    assert behind.kv_source
    assert behind.predicted_ttft_ms == pytest.approx((80 + 64 + 32) / ISL * TTFT_S * 1e3)


@pytest.mark.parametrize("cost", [0.5, 0.0], ids=["dear", "free"])
@pytest.mark.parametrize("cached", [None, 128, 0], ids=["untold", "pulled", "not"])
def test_a_prompt_that_pulls_says_nothing_of_the_speed_of_its_rank(
    cached: int | None, cost: float
) -> None:
    """How long moving takes is what a flag says: if that is wrong, ranks must not seem slower."""
    fleet, speed = pulling(cost)
    samples, compared = speed.ttft.samples, speed.ttft_error.samples
    fleet.take("r", *HELD, 9, 10)
    fleet.now += 10.0
    fleet._did(fleet.core.reservations.prefill_complete("r", fleet.now, cached))
    fleet.now += BLOCK_S
    fleet.core.reservations.output_block("r", None, fleet.now)
    fleet.free("r")
    assert speed.ttft.samples == samples
    assert speed.ttft_error.samples == compared + 1, "its prediction was wrong all the same"


@pytest.mark.parametrize("cost", [0.5, 0.0], ids=["dear", "free"])
def test_the_prefill_leg_of_a_pair_predicts_what_it_pulls(cost: float) -> None:
    fleet = apart(config=RouterConfig(kv_pull=True, kv_transfer_cost_per_block=cost))
    for number in range(10):
        fleet.pair(f"p{number}", 2_000 + number, isl=ISL)
        fleet.now += TTFT_S
        fleet.done(f"p{number}")
        fleet.free(f"p{number}")
    fleet.worker(3, role="prefill")
    fleet.hold(3, list(HELD))
    fleet.book("busy", 3, *range(100, 200))
    answer = paired(fleet.pair("last", *HELD, 9, 10))
    assert answer.prefill
    assert answer.prefill.kv_source
    tokens = 32 + 8 * 16 * cost
    assert answer.predicted_ttft_ms == pytest.approx(tokens / ISL * TTFT_S * 1e3)
    samples = fleet.core.partitions[DEFAULT].ledger.loads.speeds.by_slot[0].ttft.samples
    fleet.now += 10.0
    fleet.done("last")
    speed = fleet.core.partitions[DEFAULT].ledger.loads.speeds.by_slot[0]
    assert speed.ttft.samples == samples
