"""What is learnt of a rank's speed: of unequal engines, through outliers, and forgotten with it."""

from __future__ import annotations

import random

import pytest

from indexer.core.packing import pack_u64
from select_service.core.ledger.first_tokens import learn_first_token
from select_service.core.ledger.ledger import Ledger
from select_service.core.ledger.rank_speeds import (
    BLOCKS_EVERY_S,
    SURE,
    UNEQUAL,
    Fit,
    RankSpeeds,
)

BASE_S, PER_TOKEN_S = 0.02, 1e-4


def measured(speeds: RankSpeeds, slot: int, per_token_s: float, count: int = 200) -> None:
    rng = random.Random(slot)
    for _ in range(count):
        tokens = rng.randrange(100, 20_000)
        speeds.computed(slot, tokens, (BASE_S + per_token_s * tokens) * rng.uniform(0.9, 1.1))


def ttft_of(speeds: RankSpeeds, slot: int, tokens: int) -> float:
    seconds = speeds.by_slot[slot].ttft.at(tokens)
    assert seconds is not None
    return seconds


def test_unequal_engines_are_seen_at_loads_that_were_not_met() -> None:
    speeds = RankSpeeds()
    measured(speeds, 0, PER_TOKEN_S)
    measured(speeds, 1, 4 * PER_TOKEN_S)
    for tokens in (1_000, 10_000, 40_000):
        assert ttft_of(speeds, 0, tokens) == pytest.approx(BASE_S + PER_TOKEN_S * tokens, rel=0.15)
    assert ttft_of(speeds, 1, 40_000) / ttft_of(speeds, 0, 40_000) == pytest.approx(4.0, rel=0.1)
    ratio = speeds.by_slot[0].ttft.mean_ratio / speeds.by_slot[1].ttft.mean_ratio
    assert ratio == pytest.approx(4.0, rel=0.15)


def test_one_pause_teaches_little_and_a_slower_engine_is_believed_soon() -> None:
    speeds = RankSpeeds()
    measured(speeds, 0, PER_TOKEN_S)
    before = ttft_of(speeds, 0, 5_000)
    speeds.computed(0, 5_000, 600.0)
    assert ttft_of(speeds, 0, 5_000) < 1.2 * before
    measured(speeds, 0, 8 * PER_TOKEN_S, count=150)
    assert ttft_of(speeds, 0, 10_000) == pytest.approx(BASE_S + 8 * PER_TOKEN_S * 10_000, rel=0.15)


@pytest.mark.parametrize(("is_level", "twice"), [(True, 1.0), (False, 2.0)])
def test_one_load_alone_says_nothing_of_the_slope(is_level: bool, twice: float) -> None:
    fit = Fit(is_level=is_level)
    for number in range(SURE):
        assert fit.at(100.0) is None, number
        fit.learn(100.0, 3.0)
    assert fit.at(100.0) == pytest.approx(3.0)
    assert fit.at(200.0) == pytest.approx(3.0 * twice)


@pytest.mark.parametrize("cold", [1, SURE - 1])
def test_the_first_prompts_of_an_engine_that_is_warming_up_are_forgotten(cold: int) -> None:
    speeds = RankSpeeds()
    for _ in range(cold):
        speeds.computed(0, 5_000, 30.0)
    measured(speeds, 0, PER_TOKEN_S, count=2 * SURE)
    assert ttft_of(speeds, 0, 5_000) == pytest.approx(BASE_S + PER_TOKEN_S * 5_000, rel=0.2)


@pytest.mark.parametrize(("claimed", "count"), [(10**6, 1), (10**12, 1), (2**63, 5), (2**63, 60)])
def test_a_client_that_claims_more_tokens_than_there_are_teaches_little(
    claimed: int, count: int
) -> None:
    """One such point would bend the line for thousands of honest ones."""
    speeds = RankSpeeds()
    measured(speeds, 0, PER_TOKEN_S, count=300)
    for _ in range(count):
        speeds.computed(0, claimed, 0.1)
    measured(speeds, 0, PER_TOKEN_S, count=64)
    for tokens in (1_000, 20_000):
        expected = BASE_S + PER_TOKEN_S * tokens
        assert ttft_of(speeds, 0, tokens) == pytest.approx(expected, rel=0.6 if count > 5 else 0.2)


def test_neither_base_nor_slope_is_ever_negative() -> None:
    fit = Fit()
    falling = (100.0, 9.0), (200.0, 5.0), (300.0, 3.0), (400.0, 2.0), (500.0, 0.5)
    for x, y in (*falling, (600.0, 1.5), (700.0, 1.0), (800.0, 0.9), (900.0, 0.8)):
        fit.learn(x, y)
        assert fit.base >= 0.0
        assert fit.slope >= 0.0
    assert (fit.at(1e6) or 0.0) > 0.0


@pytest.mark.parametrize("seconds", [0.021, 0.027, 0.047])
def test_rounding_puts_no_base_below_the_origin_as_if_it_were_unknown(seconds: float) -> None:
    speeds = RankSpeeds()
    for number in range(1, 12):
        speeds.computed(0, 640, seconds)
        if number >= SURE:
            row = speeds.row(0)
            assert row.ttft_base_s >= 0.0
            assert row.ttft_s_per_token * 640 == pytest.approx(seconds)


def test_what_was_expected_to_take_no_time_is_believed_when_it_does() -> None:
    """With all prompts alike the line goes through the origin: cached ones are never that fast."""
    fit = Fit()
    for _ in range(10):
        fit.learn(1_000.0, 0.25)
    assert fit.at(0.0) == pytest.approx(0.0)
    for _ in range(50):
        fit.learn(0.0, 0.02)
        fit.learn(1_000.0, 0.25)
    assert fit.at(0.0) == pytest.approx(0.02, rel=0.1)


def test_a_client_that_reports_at_once_does_not_make_the_truth_an_outlier_for_long() -> None:
    fit = Fit()
    for _ in range(100):
        fit.learn(1_000.0, 1e-7)
    for _ in range(100):
        fit.learn(1_000.0, 0.1)
    assert fit.at(1_000.0) == pytest.approx(0.1, rel=0.4)


def test_a_ledger_measures_its_queue_what_was_cached_after_all_and_blocks_of_output() -> None:
    ledger = Ledger()
    ledger.ensure(2)
    speeds, now = ledger.loads.speeds, 0.0
    for number in range(2 * SURE):
        now += 10.0
        first = ledger.book(f"a{number}", 0, b"", 3_000, now, isl_tokens=3_000)
        second = ledger.book(f"b{number}", 0, b"", 2_000, now, isl_tokens=4_000)
        ledger.prefill_complete(first, now + 0.3)
        ledger.prefill_complete(second, now + 0.4, cached_tokens=3_000)
        first.first_token_at = now + 0.3
        for block in range(1, 4):
            ledger.output_block(first, None, now + 0.3 + block, count=2)
        for one in first, second:
            assert learn_first_token(ledger.loads, one, now + 4.0)
            ledger.free(one)
    rank = speeds.by_slot[0]
    assert rank.ttft.at(3_000) == pytest.approx(0.3)
    assert rank.ttft.at(4_000) == pytest.approx(0.4), "3,000 before it, and 1,000 of its own"
    assert rank.block.at(ledger.loads.context.item(0)) == pytest.approx(0.5)
    assert list(speeds.by_slot) == [0]
    ledger.drop_slot(0)
    assert not speeds.by_slot, "another engine may come there"


def test_a_pool_is_as_fast_as_its_ranks_together() -> None:
    speeds = RankSpeeds()
    assert speeds.of_pool(3, 500.0) == (0.0, 1_500.0, 3, 1_500.0)
    measured(speeds, 0, PER_TOKEN_S)
    measured(speeds, 1, 4 * PER_TOKEN_S)
    pool = speeds.of_pool(3, 500.0)
    assert pool.tokens_per_s == pytest.approx(10_000 + 2_500 + 500, rel=0.1)
    bases = [speeds.by_slot[slot].ttft.base for slot in (0, 1)]
    together = (10_000 * bases[0] + 2_500 * bases[1]) / 13_000
    assert pool.base_s == pytest.approx(together, rel=0.1), "as far as each of them computes"
    half = speeds.of_pool(1, 500.0)  # one of them drains
    assert half.tokens_per_s == pytest.approx((pool.tokens_per_s - 500.0) / 2)
    for slot in (0, 1):
        speeds.forget(slot)
    assert speeds.of_pool(3, 500.0) == (0.0, 1_500.0, 3, 1_500.0), "to the last bit"


@pytest.mark.parametrize("seconds", [1e-6, 60.0, 1e6])
def test_one_mad_rank_neither_opens_a_pool_nor_closes_it(seconds: float) -> None:
    """Nobody may send it anything any more, so what was learnt of it stays."""
    speeds = RankSpeeds()
    for slot in range(1, 10):
        measured(speeds, slot, PER_TOKEN_S, count=100)
    for tokens in (2_000, 3_000, 1_000, 2_500, 1_500) * 20:
        speeds.computed(0, tokens, seconds)
    pool = speeds.of_pool(10, 1 / PER_TOKEN_S)
    assert 0.5 < pool.tokens_per_s / (10 / PER_TOKEN_S) < (9 + UNEQUAL) / 10 * 1.1
    assert 0.02 < pool.ttft_s(10_000, 1_000) < 0.5


def test_lines_that_are_level_by_chance_do_not_make_a_pool_fast() -> None:
    speeds, rng, fastest = RankSpeeds(), random.Random(1), 0.0
    for _ in range(100):
        for slot in range(20):  # places in the batch are what takes time
            speeds.computed(slot, round(rng.expovariate(1 / 2_000)), rng.expovariate(1 / 2.0))
        fastest = max(fastest, speeds.of_pool(20, 1_000.0).tokens_per_s / 20)
    assert fastest < 10_000.0


def test_a_pool_is_not_closed_for_what_was_long_ago() -> None:
    """Each rank would have to be measured dozens of times, though hardly anybody may go."""
    speeds = RankSpeeds()
    for slot in range(100):
        for number in range(100):
            speeds.computed(slot, 1_000 + number % 10, 60.0)
    for _ in range(10):
        speeds.computed(0, 1_000, 0.1)
    assert speeds.of_pool(100, 1_000 / 60.0).ttft_s(10_000, 1_000) > 30.0
    assert speeds.of_pool(100, 10_000.0).ttft_s(10_000, 1_000) < 1.0


def test_any_rank_of_a_pool_is_predicted_to_take_what_the_one_is_that_has_its_share() -> None:
    ledger = Ledger()
    ledger.ensure(4)
    loads = ledger.loads
    for slot in range(4):
        measured(loads.speeds, slot, PER_TOKEN_S, count=500)
        ledger.book(f"q{slot}", slot, b"", 8_000, 1.0, isl_tokens=8_000)
    pool = loads.speeds.of_pool(4, 1 / PER_TOKEN_S)
    ttft_ms, _ = loads.predicted_ms((2, 2), 3_000, 1, 16)
    assert pool.ttft_s(loads.prefill_backlog, 3_000) * 1e3 == pytest.approx(ttft_ms, rel=0.05)
    assert pool.alone_s(3_000) == pytest.approx(3_000 * PER_TOKEN_S, rel=0.1)


def test_queues_that_are_kept_at_one_length_tell_nothing_of_longer_ones() -> None:
    """What makes one of them take longer than another is chance, and may be anything."""
    speeds, rng = RankSpeeds(), random.Random(1)
    for _ in range(300):
        tokens = round(3_000 * rng.uniform(0.95, 1.05))
        speeds.computed(0, tokens, 0.3 * rng.uniform(0.8, 1.2))
    assert ttft_of(speeds, 0, 3_000) == pytest.approx(0.3, rel=0.05)
    assert speeds.of_pool(1, 1.0).tokens_per_s == pytest.approx(10_000, rel=0.15)


def test_queues_longer_than_any_that_was_met_take_longer_though_the_line_is_level() -> None:
    """All waited for a place in the batch: their tokens showed nothing."""
    speeds = RankSpeeds()
    for tokens in range(100, 1_100, 100):
        speeds.computed(0, tokens, 2.0)
    assert ttft_of(speeds, 0, 500) == pytest.approx(2.0, rel=0.1)
    assert ttft_of(speeds, 0, 100_000) > 20.0
    assert 0.0 < speeds.of_pool(1, 1.0).tokens_per_s < 10_000


def test_blocks_are_measured_now_and_then() -> None:
    speeds = RankSpeeds()
    for number in range(100):
        speeds.decoded(0, 10.0, 0.3, 1.0 + number * BLOCKS_EVERY_S / 10)
    assert speeds.by_slot[0].block.samples == 10


@pytest.mark.parametrize("burst", [1, 4, 10])
def test_blocks_told_one_by_one_in_bursts_take_the_time_between_bursts(burst: int) -> None:
    """A gateway passes on what gathered: a burst's first call is not all that its time was for."""
    ledger = Ledger()
    ledger.ensure(1)
    one = ledger.book("a", 0, b"", 100, 1.0, isl_tokens=100)
    ledger.prefill_complete(one, 1.2)
    one.first_token_at = 1.2
    for number in range(1, 8):
        for _ in range(burst):
            ledger.output_block(one, None, 1.2 + number * burst * 0.3)
    block = ledger.loads.speeds.by_slot[0].block
    assert block.samples == 6
    assert block.at(1.0) == pytest.approx(0.3)


def test_blocks_that_replicas_were_told_of_count_for_the_time_they_took() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    one = ledger.book("a", 0, b"", 100, 1.0, isl_tokens=100)
    for number in range(1, 13):
        if number % 2:
            ledger.learn_outputs(one, number, 0, 1.0)
        else:
            ledger.output_block(one, None, 1.2 + number * 0.3)
    assert ledger.loads.speeds.by_slot[0].block.at(1.0) == pytest.approx(0.3)


@pytest.mark.parametrize("fraction", [None, 0.25])
def test_what_engines_attend_to_is_told_without_what_a_price_adds(fraction: float | None) -> None:
    """Fixed weights of requests, weights of waiting, fading, and prompts that are not computed."""
    ledger = Ledger(sequence_blocks=256)
    ledger.ensure(1)
    ledger.loads.limit_running_requests(0, 2, wait=512)
    hashes = pack_u64(range(1, 11))
    first, second, _ = [ledger.book(name, 0, hashes, 160, 1.0, isl_tokens=160) for name in "abc"]
    for one in (first, second):
        ledger.prefill_complete(one, 1.0)
        one.first_token_at = SURE + 2.0
    for number in range(SURE + 2):
        ledger.output_block(first, fraction, 2.0 + number)
    learned = ledger.loads.speeds.blocks
    outputs = SURE + 2
    assert (learned.count, learned.x, learned.y) == (1, 10 + outputs + 10, 1.0)
    ledger.output_block(first, fraction, 1.5 + outputs)  # counting them once a second is enough
    assert learned.count == 1
    ledger.output_block(first, fraction, 2.0 + outputs)
    assert learned.count == 2
    before = learned.x
    ledger.output_block(first, fraction, 3.0 + outputs)
    assert learned.x - before == 10 + outputs + 3, (
        "the second has waited for longer than two reports"
    )


def test_callers_that_never_report_output_do_not_wait_where_later_ones_write() -> None:
    """A rank writes for requests in the order in which they came."""
    ledger = Ledger()
    ledger.ensure(1)
    hashes = pack_u64(range(1, 11))
    silent, _ = [ledger.book(name, 0, hashes, 160, 1.0, isl_tokens=160) for name in ("s", "t")]
    writes = ledger.book("w", 0, hashes, 160, 2.0, isl_tokens=160)
    waits = ledger.book("v", 0, hashes, 160, 3.0, isl_tokens=160)
    for one in (silent, writes, waits):
        ledger.prefill_complete(one, 3.0)
        one.first_token_at = 3.0
    reports = SURE + 10
    for number in range(reports):
        ledger.output_block(writes, None, 9.0 + number)
    learned = ledger.loads.speeds.blocks
    before = learned.x
    ledger.output_block(writes, None, 9.0 + reports)
    assert learned.x - before == 2 * 10 + reports + 1, "of the silent one, and its own"


def test_all_blocks_told_at_the_end_are_not_timed() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    one = ledger.book("a", 0, b"", 100, 1.0, isl_tokens=100)
    ledger.prefill_complete(one, 9.0)
    one.first_token_at = 9.0
    for number in range(20):
        ledger.output_block(one, None, 9.0 + number * 1e-3)
    assert not ledger.loads.speeds.by_slot


def test_what_a_prompt_lost_while_it_was_computed_was_computed() -> None:
    ledger = Ledger()
    ledger.ensure(1)
    for number in range(SURE):
        one = ledger.book(str(number), 0, b"", 4_000, 1.0 + number, isl_tokens=4_000)
        ledger.fade_prefill(one, 1_000)
        ledger.prefill_complete(one, 1.4 + number)
        assert not learn_first_token(ledger.loads, one, 1.4 + number), (
            "it came together with the rest"
        )
        assert learn_first_token(ledger.loads, one, 1.5 + number)
        assert not learn_first_token(ledger.loads, one, 1.6 + number), "once"
    assert ledger.loads.speeds.by_slot[0].ttft.at(4_000) == pytest.approx(0.4)


def pool(*times: float) -> RankSpeeds:
    """Ranks that take so many times as long as the first for each prompt."""
    speeds = RankSpeeds()
    for slot, one in enumerate(times):
        measured(speeds, slot, one * PER_TOKEN_S)
    return speeds


def test_a_rank_that_takes_much_longer_than_others_is_worn() -> None:
    speeds = pool(*[1.0] * 6, 10.0)
    assert speeds.worn() == {6: pytest.approx(10.0, rel=0.3)}
    speeds.forget(6)
    assert speeds.worn() == {}


@pytest.mark.parametrize(
    "times",
    [
        (),
        (1.0,),
        (1.0, 9.0),
        (1.0,) * 8,
        (1.0,) * 4 + (2.0,) * 4,
        (1.0,) * 7 + (2.0,),
        (1.0,) * 6 + (4.0,) * 2,
        (4.0,) * 7 + (1.0,),
    ],
)
def test_equal_ranks_and_generations_of_engines_are_not_worn(times: tuple[float, ...]) -> None:
    assert pool(*times).worn() == {}


def test_no_rank_counts_as_slower_than_by_so_many_times() -> None:
    assert pool(*[1.0] * 7, 100.0).worn() == {7: UNEQUAL}


def test_a_rank_of_which_little_is_known_is_not_worn() -> None:
    speeds = pool(*[1.0] * 7)
    for _ in range(SURE - 1):
        speeds.computed(7, 1_000, 50.0)
    assert speeds.worn() == {}
    speeds.computed(7, 1_000, 50.0)
    assert speeds.worn() == {7: UNEQUAL}


def test_what_is_not_known_yet_may_be_slow() -> None:
    speeds = pool(*[1.0] * 7, 10.0)
    assert speeds.worn().keys() == {7}
    for slot in (8, 9):
        speeds.computed(slot, 1_000, 1.0)
    assert speeds.worn() == {}
    for slot in (8, 9):
        measured(speeds, slot, PER_TOKEN_S)
    assert speeds.worn().keys() == {7}
