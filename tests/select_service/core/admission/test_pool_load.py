from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from select_service.core.admission.classes import SloClasses
from select_service.core.admission.gaie_legacy import GaieLegacy, utilization
from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.admission.pool_load import PoolLoad
from select_service.core.ledger.first_tokens import learn_first_token
from select_service.core.ledger.ledger import Ledger
from select_service.simulator.trial_pool import RecordedPool, RecordedRankLoad

loads = st.builds(
    RecordedRankLoad,
    st.integers(0, 10**7).map(float),
    st.integers(0, 1000).map(float),
    st.integers(0, 50),
    st.integers(0, 50),
    st.none() | st.integers(0, 20),
    st.none() | st.integers(0, 2**32 - 1),  # reports are u32
).map(lambda load: load._replace(prefilling=min(load.prefilling, load.requests)))


def pool_of(ranks: int, rate: float = 1000.0) -> RecordedPool:
    pool = RecordedPool(prior_tokens_per_s=rate)
    for slot in range(ranks):
        pool.attach(slot, 100)
    return pool


def test_saturation_is_the_mean_of_the_worst_of_each_rank() -> None:
    pool = pool_of(4)
    pool.note(0, RecordedRankLoad(prefill_tokens=500, requests=1, prefilling=1), 0.0)
    pool.note(1, RecordedRankLoad(decode_blocks=80, requests=5), 0.0)
    pool.note(2, RecordedRankLoad(waiting=10, requests=12), 0.0)
    assert pool.saturation == pytest.approx((0.5 + 1.0 + 2.0 + 0.0) / 4)
    assert pool.prefill_backlog == 500
    assert type(pool.saturation) is float, "answers are made of it"
    pool.check()
    pool.detach(2)
    assert pool.saturation == pytest.approx(0.5)
    pool.check()


@pytest.mark.parametrize(("requests", "level"), [(4, 0.0), (8, 0.6), (10, 1.0), (12, 1.4)])
def test_a_rank_fills_with_the_requests_it_runs_at_once(requests: int, level: float) -> None:
    pool = pool_of(0)
    pool.attach(0, 100, max_num_seqs=10)
    pool.note(0, RecordedRankLoad(requests=requests), 0.0)
    assert pool.saturation == pytest.approx(level)
    pool.check()


@pytest.mark.parametrize(("ranks", "requests"), [(1, 192), (4, 224), (64, 248)])
def test_large_pools_leave_a_smaller_share_free_for_more_important_requests(
    ranks: int, requests: int
) -> None:
    """What these take varies with the square root of their number."""
    pool = pool_of(0)
    for slot in range(ranks):
        pool.attach(slot, 10**6, 256)
        pool.note(slot, RecordedRankLoad(requests=requests), 0.0)
    assert pool.saturation == pytest.approx(0.5)
    pool.check()


class Targets:
    """A policy that admits so many requests per second that it never refuses for load."""

    target_ttft_s = 1.0

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def protected_per_s(self, now: float) -> float:
        return self.rate


@pytest.mark.parametrize(
    ("protected", "spare"),
    [(0.0, 2.0), (6.0, 2.0), (7.0, 2.5), (8.5, 5.0), (10.0, 8.0), (99.0, 8.0)],
)
def test_more_is_kept_free_the_less_the_important_requests_leave_over(
    protected: float, spare: float
) -> None:
    """Of ten requests that end per second."""
    pool = pool_of(0)
    for slot in range(4):
        pool.attach(slot, 10**6, 256)
    pool.aim(Targets(protected))
    pool.note(0, RecordedRankLoad(prefill_tokens=1000, requests=100, prefilling=1), 0.0)
    for _ in range(100):
        pool.ended("")
    pool.note(0, RecordedRankLoad(), 10.0)
    assert pool.requests_per_s == pytest.approx(10.0)
    for slot in range(4):
        pool.note(slot, RecordedRankLoad(requests=252), 11.0)
    idle = 1.0 - spare / 32.0
    assert pool.saturation == pytest.approx((252 / 256 - idle) / (1.0 - idle))


@pytest.mark.parametrize("ranks", [8, 64])
def test_an_eighth_of_hot_ranks_does_not_fill_a_pool(ranks: int) -> None:
    pool = RecordedPool()
    for slot in range(ranks):
        pool.attach(slot, 10**6, 256)
    for slot in range(ranks // 8):
        pool.note(slot, RecordedRankLoad(requests=384, waiting=0), 1.0)
    assert pool.saturation == pytest.approx(0.25)


def test_a_small_rank_more_leaves_a_large_pool_as_idle() -> None:
    """What is spared follows from what all ranks run, not from the smallest one."""
    pool = pool_of(0)
    for slot in range(64):
        pool.attach(slot, 10**6, 256)
        pool.note(slot, RecordedRankLoad(requests=230), 0.0)
    assert pool.saturation == 0.0
    pool.attach(64, 10**6, 8)
    assert pool.saturation == 0.0
    pool.check()


def test_a_rank_without_a_record_runs_no_more_than_it_did_when_it_was_full() -> None:
    pool = pool_of(1)
    pool.note(0, RecordedRankLoad(requests=15, waiting=5, running=10), 0.0)
    assert pool.saturation >= 1.0
    pool.note(0, RecordedRankLoad(requests=8, waiting=0, running=8), 1.0)
    assert pool.saturation == pytest.approx(0.6)
    pool.attach(0, 100)
    pool.note(0, RecordedRankLoad(requests=9, waiting=1, running=8), 2.0)
    assert pool.saturation == pytest.approx(0.8), "one that waits for a step shows nothing"
    pool.note(0, RecordedRankLoad(requests=12, waiting=0, running=12), 3.0)
    assert pool.saturation == pytest.approx(0.0), "it runs more than that"
    for running in 10, 9:  # fewer while its blocks are taken: seats do not get fewer
        pool.note(0, RecordedRankLoad(requests=15, waiting=5, running=running), 3.5)
    pool.note(0, RecordedRankLoad(requests=8, waiting=0, running=8), 3.6)
    assert pool.saturation == pytest.approx(0.6)
    pool.note(0, RecordedRankLoad(requests=15, waiting=5, running=10), 4.0)
    pool.attach(0, 100, max_num_seqs=24)
    pool.note(0, RecordedRankLoad(requests=18, waiting=8, running=10), 5.0)
    pool.note(0, RecordedRankLoad(requests=18, waiting=0, running=18), 6.0)
    assert pool.saturation == pytest.approx(0.5), "the record counts"
    pool.check()


def test_a_rank_that_was_seen_full_with_one_long_prompt_takes_more_when_none_waits() -> None:
    pool = pool_of(1)
    pool.note(0, RecordedRankLoad(requests=6, waiting=5, running=1), 0.0)
    sent = 1
    for second in range(1, 100):  # never more than fill it; the engine has places for 16
        while sent < 64:
            pool.note(0, RecordedRankLoad(requests=sent), float(second))
            if pool.saturation >= 1.0:
                break
            sent += 1
        running = min(sent, 16)
        load = RecordedRankLoad(requests=sent, waiting=sent - running, running=running)
        pool.note(0, load, second + 0.5)
    assert sent == 17, "and not without end: one waits"
    pool.check()


def test_a_full_rank_is_seen_to_empty_when_answers_end_and_nothing_else_happens() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    pool = PoolLoad(ledger.loads)
    pool.attach(0, None, max_num_seqs=4)
    running = [ledger.book(str(number), 0, b"", 10, 1.0) for number in range(4)]
    for one in running:
        ledger.prefill_complete(one, 2.0)
    assert pool.saturation == pytest.approx(1.0)
    for level, one in zip((0.5, 0.0, 0.0, 0.0), running, strict=True):
        ledger.free(one)
        assert pool.saturation == pytest.approx(level)
    pool.check()


@pytest.mark.parametrize(("most", "seen"), [(4, 4), (400, 400), (None, 0)])
def test_requests_that_come_together_fill_a_rank(most: int | None, seen: int) -> None:
    ledger = Ledger()
    ledger.ensure(1)
    pool = PoolLoad(ledger.loads)
    pool.attach(0, None, max_num_seqs=most)
    let_in = 0
    while pool.saturation < 1.0 and let_in < 1_000:
        ledger.book(str(let_in), 0, b"", 0, 1.0)
        let_in += 1
    assert let_in == pytest.approx(seen or 1_000, rel=0.06)
    pool.check()


def test_nobody_and_the_silent_are_full() -> None:
    pool = pool_of(2)
    pool.mark_stale(0, stale=True)
    assert pool.saturation == pytest.approx(0.5)
    pool.mark_stale(0, stale=False)
    assert pool.saturation == 0.0
    assert RecordedPool().saturation == 1.0
    pool.detach(0)
    pool.detach(1)
    pool.detach(1)
    pool.detach(99)
    assert pool.saturation == 1.0
    assert pool.instances == 0


@given(st.lists(loads, min_size=1, max_size=5), st.floats(0.5, 20.0), st.floats(0.1, 2.0))
def test_the_quick_bounds_are_bounds(
    ranks: list[RecordedRankLoad], queue_depth: float, kv_utilization: float
) -> None:
    pool = pool_of(len(ranks))
    for slot, load in enumerate(ranks):
        pool.note(slot, load._replace(waiting=None), 0.0)
    most = pool.utilization_most(queue_depth, kv_utilization)
    assert utilization(pool, queue_depth, kv_utilization) <= most * (1 + 1e-9)
    assert pool.heaviest == 2 * max(one.requests for one in ranks)
    pool.check()


def test_a_faster_pool_is_less_saturated() -> None:
    pool = pool_of(1, rate=1000.0)
    pool.note(0, RecordedRankLoad(4000, requests=2), 0.0)
    assert pool.saturation == pytest.approx(4.0)
    for second in range(1, 200):
        pool.prefilled(0, 4000, 0.0, float(second))
        pool.meter.follow()
    assert pool.prefill_rate == pytest.approx(4000, rel=0.05)
    assert pool.saturation == pytest.approx(1.0, rel=0.1)


def test_promises_hold_for_a_rate_that_is_measured_while_somebody_drains() -> None:
    pool = pool_of(2)
    pool.note(0, RecordedRankLoad(4000, requests=2), 0.0)
    pool.detach(1)
    pool.disregard([1])
    pool.check()
    pool.prefilled(0, 8000, 0.0, 0.04)  # sooner than the rate is taken anew where nobody drains
    pool.meter.follow()
    pool.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["note", "attach", "leave"]), loads)))
def test_sums_follow_every_change(steps: list[tuple[int, str, RecordedRankLoad]]) -> None:
    pool = RecordedPool()
    attached: set[int] = set()
    for number, (slot, what, load) in enumerate(steps):
        if what == "attach":
            pool.attach(slot, 1000)
            attached.add(slot)
        elif what == "leave":
            pool.detach(slot)
            attached.discard(slot)
        elif slot in attached:
            pool.note(slot, load, float(number))
        pool.check()
    for slot in attached:
        pool.note(slot, RecordedRankLoad(), float(len(steps)))
    assert pool.saturation == (0.0 if attached else 1.0), "an idle pool is empty, exactly"


def test_a_longer_ledger_needs_no_new_seat() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    pool = PoolLoad(ledger.loads)
    pool.attach(0, 100)
    ledger.book("r", 0, bytes(8 * 40), 0, 1.0)
    assert pool.saturation == pytest.approx(0.5 * ledger.loads.decode[0] / 40)
    before = pool.saturation, pool.kv_utilization.tolist()
    ledger.ensure(3)
    assert (pool.saturation, pool.kv_utilization.tolist()) == (before[0], [*before[1], 0.0, 0.0])
    pool.check()


@pytest.mark.parametrize("total", [35, 55, 70, 95, 100, 605])
def test_a_share_of_blocks_at_the_limit_is_at_the_limit(total: int) -> None:
    """28 times 1/35 is a little less than 28/35, and 0.8 refuses."""
    pool = RecordedPool(prior_tokens_per_s=1000.0)
    pool.attach(0, total)
    pool.note(0, RecordedRankLoad(decode_blocks=total * 4 / 5), 0.0)
    assert utilization(pool, 5, 0.8) == 1.0
    policy = GaieLegacy(SloClasses())
    assert not policy.judge(AdmissionRequest(1, "batch"), pool, 0.0).admitted
    pool.attach(0, None)
    assert pool.kv_utilization[0] == 0.0


def test_a_burst_after_short_prompts_is_predicted_by_what_tokens_take() -> None:
    """Short prompts take mostly a step's time: as a mean they make the rank look slow."""
    ledger = Ledger()
    ledger.ensure(1)
    pool = PoolLoad(ledger.loads)
    pool.attach(0, None)
    for number in range(40):
        now, tokens = 10.0 * number, 2_000 if number % 10 == 9 else 50
        one = ledger.book(str(number), 0, b"", tokens, now, isl_tokens=tokens)
        ledger.prefill_complete(one, now + 0.02 + 1e-4 * tokens)
        assert learn_first_token(ledger.loads, one, now + 1.0)
        ledger.free(one)
        pool.meter.follow()
    ledger.book("long", 0, b"", 8_000, 500.0, isl_tokens=8_000)
    predicted_ms, _ = ledger.loads.predicted_ms((0, 0), 200, 1, 16)
    speed, backlog, _ = pool.outlook()
    assert speed is not None
    assert predicted_ms is not UNSET
    assert speed.ttft_s(backlog, 200) == pytest.approx(0.02 + 1e-4 * 8_200, rel=0.05)
    assert speed.ttft_s(backlog, 200) * 1e3 == pytest.approx(predicted_ms, rel=0.01)
    assert 8_200 / pool.meter.tokens_per_s > 1.5 * speed.ttft_s(backlog, 200), "the mean"
