from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S, DrainMeter, WorkDone
from select_service.core.ledger.ledger import Ledger

if TYPE_CHECKING:
    from select_service.core.ledger.reservation import LedgerReservation


def test_the_prior_holds_until_something_is_measured() -> None:
    meter = DrainMeter(WorkDone())
    assert meter.tokens_per_s == PRIOR_TOKENS_PER_S
    assert meter.requests_per_s(1) == 0.0


def run(
    meter: DrainMeter, start: float, seconds: int, *, ranks: int, rate: float, every_s: int = 1
) -> float:
    """So many ranks compute for so long; the meter looks now and then."""
    work = meter.work
    work.ensure(ranks)
    work.at = start
    for slot in range(ranks):
        work.starts(slot)
    for second in range(1, seconds + 1):
        work.at = start + second
        for slot in range(ranks):
            work.note_computed(slot, int(rate), start)
        work.ended += 1
        if second % every_s == 0:
            meter.follow()
    for slot in range(ranks):
        work.stops(slot)
    return start + seconds


@pytest.mark.parametrize("every_s", [1, 10])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_rate_is_that_of_one_computing_rank(ranks: int, every_s: int) -> None:
    meter = DrainMeter(WorkDone(), prior_tokens_per_s=1.0)
    run(meter, 0.0, 100, ranks=ranks, rate=500.0, every_s=every_s)
    assert meter.tokens_per_s == pytest.approx(500, rel=0.03)
    assert meter.requests_per_s(1) == pytest.approx(1.0, rel=0.03)


def test_an_idle_night_changes_nothing() -> None:
    meter = DrainMeter(WorkDone())
    end = run(meter, 0.0, 60, ranks=4, rate=900.0)
    before = meter.tokens_per_s, meter.requests_per_s(1)
    meter.work.at = end + 40_000.0
    meter.work.starts(0)
    assert (meter.tokens_per_s, meter.requests_per_s(1)) == before


def test_old_times_are_forgotten() -> None:
    meter = DrainMeter(WorkDone(), memory_s=10.0)
    end = run(meter, 0.0, 100, ranks=1, rate=5000.0)
    run(meter, end, 50, ranks=1, rate=100.0)
    assert 100 <= meter.tokens_per_s < 180


def test_what_was_done_before_it_began_to_look_is_not_its_affair() -> None:
    work = WorkDone()
    run(DrainMeter(work), 0.0, 100, ranks=2, rate=1.0)
    meter = DrainMeter(work)
    assert meter.tokens_per_s == PRIOR_TOKENS_PER_S
    run(meter, 500.0, 100, ranks=2, rate=700.0)
    assert meter.tokens_per_s == pytest.approx(700, rel=0.1)


def test_looking_often_or_seldom_measures_the_same() -> None:
    often, seldom = DrainMeter(WorkDone()), DrainMeter(WorkDone())
    for number in range(6):
        start = 100.0 * number
        run(often, start, 15, ranks=1 + number % 3, rate=400.0)
        run(seldom, start, 15, ranks=1 + number % 3, rate=400.0, every_s=15)
    assert seldom.tokens_per_s == pytest.approx(often.tokens_per_s, rel=0.05)
    assert seldom.requests_per_s(1) == pytest.approx(often.requests_per_s(1), rel=0.05)


def test_each_rank_counts_for_as_long_as_it_computed() -> None:
    work = WorkDone()
    work.ensure(2)
    work.at = 1.0
    work.starts(0)
    work.at = 2.0
    work.starts(1)
    work.at = 4.0
    work.note_computed(0, 10, 1.0)
    work.stops(0)
    assert (work.reported_seconds, work.busy_seconds) == (3.0, 3.0)
    work.at = 7.0
    work.note_computed(1, 10, 2.0)
    work.stops(1)
    work.at = 100.0
    assert (work.reported_seconds, work.busy_seconds) == (3.0 + 5.0, 6.0)


def test_long_answers_end_no_faster_than_those_in_flight_allow() -> None:
    """Prompts are computed for a tenth of the time; each answer takes ten seconds."""
    ledger, in_flight = Ledger(), 20
    ledger.ensure(1)
    meter = DrainMeter(ledger.loads.work)
    live: deque[LedgerReservation] = deque()
    for number in range(400):  # two each second
        now = 0.5 * number
        if len(live) == in_flight:
            ledger.free(live.popleft())
        live.append(ledger.book(str(number), 0, b"", 100, now, isl_tokens=100))
        ledger.prefill_complete(live[-1], now + 0.05)
        meter.follow()
    assert meter.requests_per_s(in_flight) == pytest.approx(2.0, rel=0.05)
    assert meter.requests_per_s(2 * in_flight) == pytest.approx(4.0, rel=0.05), "if it ran as many"
