"""What a rank's word is worth: exactly 1 without a reason, less by the share that was not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.decisions.trust_factors import OUTLIER, Trust
from select_service.types import TrustSettings

SETTINGS = TrustSettings()
HALF = SETTINGS.samples // 2


def trust(**settings: object) -> Trust:
    one = Trust(TrustSettings(**settings))  # type: ignore[arg-type]
    one.ensure(4)
    return one


def all_believed(one: Trust) -> bool:
    return one.column is None


def report(one: Trust, slot: int, predicted: int, actual: int, times: int = 1) -> None:
    for _ in range(times):
        one.compare(slot, predicted, actual, 0.0)
        one.check()


def test_who_tells_the_truth_costs_nothing() -> None:
    one = trust()
    report(one, 0, 100, 100, times=100)
    report(one, 1, 0, 500, times=100)
    report(one, 2, 100, 300, times=100)
    assert all_believed(one)
    assert [one.factor(slot) for slot in range(4)] == [1.0] * 4
    assert not one.changed


def test_small_errors_are_evictions() -> None:
    one = trust()
    report(one, 0, 1000, 701, times=200)
    assert all_believed(one)
    rank = one.find(0)
    assert rank is not None
    assert rank.missing_share == pytest.approx(0.299)
    assert rank.mean_error_tokens == pytest.approx(299)


def test_a_liar_loses_credit_by_the_share_that_was_not_there() -> None:
    one = trust()
    report(one, 1, 100, 100, times=200)
    report(one, 0, 100, 100, times=200)
    report(one, 0, 100, 0, times=5)
    assert all_believed(one)
    report(one, 0, 100, 0)
    assert not all_believed(one)
    assert 0.6 < one.factor(0) < 0.7
    report(one, 0, 100, 0, times=SETTINGS.samples)
    assert one.factor(0) < 0.25
    assert one.factor(1) == 1.0
    assert one.changed == {0: ()}


def test_it_needs_half_of_the_window_first() -> None:
    one = trust()
    report(one, 1, 100, 100)
    report(one, 0, 100, 0, times=HALF - 1)
    assert all_believed(one)
    report(one, 0, 100, 0)
    assert one.factor(0) == 0.0


def test_it_is_believed_again_but_not_at_once() -> None:
    one = trust()
    report(one, 1, 100, 100)
    report(one, 0, 100, 0, times=30)
    factors = []
    while one.factor(0) < 1.0:
        report(one, 0, 100, 100)
        factors.append(one.factor(0))
    assert factors == sorted(factors)
    assert factors[-2] <= 1.0 - SETTINGS.error_clear
    assert len(factors) < 2 * SETTINGS.samples
    assert all_believed(one)
    assert one.changed == {0: ()}, "nobody has looked: it is as it was before"


def test_between_the_two_thresholds_nothing_changes() -> None:
    one = trust()
    report(one, 1, 10, 10)
    report(one, 0, 100, 80, times=100)
    assert one.factor(0) == 1.0
    report(one, 0, 100, 0, times=20)
    report(one, 0, 100, 80, times=200)
    assert one.factor(0) == pytest.approx(0.8, abs=0.01)


def test_engines_that_do_not_count_are_told_of_as_zero_and_prove_nothing() -> None:
    one = trust()
    for slot in range(4):
        report(one, slot, 100, 0, times=100)
    assert all_believed(one)
    report(one, 0, 100, 1)
    report(one, 1, 100, 0)
    assert one.factor(1) == 0.0, "somebody counts, after all"


def test_one_long_prompt_that_was_evicted_is_no_lie() -> None:
    one = trust()
    report(one, 1, 10, 10)
    report(one, 0, 100, 100, times=50)
    report(one, 0, 1_000_000, 0)
    assert one.factor(0) == 1.0
    rank = one.find(0)
    assert rank is not None
    assert rank.missing_share <= OUTLIER / (SETTINGS.samples + OUTLIER - 1) + 0.01


def test_a_share_of_one_is_never_too_much() -> None:
    one = trust(error_max=1.0)
    report(one, 1, 100, 100)
    report(one, 0, 100, 0, times=100)
    assert all_believed(one)


def test_the_next_rank_on_a_slot_is_believed() -> None:
    one = trust()
    report(one, 1, 100, 100)
    report(one, 0, 100, 0, times=100)
    one.note_freshness(2, 0.5, ("lag",))
    one.forget(0)
    one.check()
    assert one.factor(0) == 1.0
    assert one.factor(2) == 0.5
    assert one.find(0) is None
    assert 0 not in one.changed
    one.forget(2)
    one.check()
    assert all_believed(one)


def test_staleness_multiplies_and_goes() -> None:
    one = trust()
    report(one, 1, 100, 100)
    one.note_freshness(0, 1.0, ())
    assert one.find(0) is None, "who is fresh takes no room"
    one.note_freshness(0, 0.5, ("lag",))
    assert one.factor(0) == 0.5
    report(one, 0, 100, 50, times=100)
    assert one.factor(0) == pytest.approx(0.25)
    known = one.find(0)
    assert known is not None
    assert known.reasons == ("prediction", "lag")
    one.note_freshness(0, 1.0, ())
    one.check()
    assert one.factor(0) == pytest.approx(0.5)


def test_more_room_keeps_who_is_there() -> None:
    one = trust()
    one.note_freshness(3, 0.25, ("gaps",))
    one.ensure(500)
    one.check()
    assert one.factor(3) == 0.25
    assert one.factor(499) == 1.0
    assert one.column is not None
    assert len(one.column) >= 500


def test_settings_that_make_no_sense() -> None:
    for settings in (
        *({"error_clear": 0.5}, {"error_clear": 0.0}, {"samples": 0}),
        *({"reread_s": 0.0}, {"lag_half_s": 0.0}),
    ):
        with pytest.raises(ValueError, match=next(iter(settings))):
            TrustSettings(**settings).check()


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 5000), st.booleans()),
        max_size=200,
    )
)
def test_whatever_is_told_every_promise_holds(reported: list[tuple[int, int, int, bool]]) -> None:
    one = trust(samples=4)
    for slot, predicted, actual, goes in reported:
        one.compare(slot, predicted, actual, 0.0)
        one.check()
        if goes and actual % 7 == 0:
            one.forget(slot)
            one.check()


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.71, 3.0)), max_size=200))
def test_whoever_has_most_of_what_was_predicted_counts_in_full(
    reported: list[tuple[int, float]],
) -> None:
    one = trust()
    for predicted, found in reported:
        one.compare(0, predicted, -int(-predicted * found // 1), 0.0)
        assert all_believed(one)
