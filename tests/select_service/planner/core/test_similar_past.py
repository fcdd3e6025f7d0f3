"""Where in its past traffic is, found by a filter, and by adding up every path there is."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.planner.core import similar_past
from select_service.planner.core.similar_past import ANEW, Past, PastPosition, tried

PART_S = 10.0


def naive(past: Past, counted: list[float]) -> list[float]:
    """Every place by every place before it, in plain loops."""
    places = [place for place in range(len(past)) if past.usable[place]]
    belief = {place: 1.0 / len(places) for place in places}
    for requests in counted:
        moved = {place + 1: share for place, share in belief.items() if past.usable[place + 1]}
        total = sum(moved.values())
        ease = past._ease + similar_past._ALIKE**2 * requests
        weighed = {}
        for place in places:
            before = moved.get(place, 0.0) / total if total else 1.0 / len(places)
            prior = (1 - ANEW) * before + ANEW / len(places)
            expected = max(past.rates[place] * PART_S, 1e-3)
            poisson = requests * math.log(expected) - expected - math.lgamma(requests + 1)
            weighed[place] = prior * math.exp(poisson / ease)
        whole = sum(weighed.values())
        belief = {place: share / whole for place, share in weighed.items()}
    return [belief.get(place, 0.0) for place in range(len(past))]


@given(
    st.lists(st.integers(50, 150), min_size=20, max_size=40),
    st.lists(st.integers(50, 150), min_size=1, max_size=8),
)
def test_the_filter_is_bayes_rule(counts: list[int], counted: list[int]) -> None:
    past = Past([float(one) for one in counts], PART_S, 25.0)
    place = PastPosition(past)
    for requests in counted:
        place.observe(float(requests), PART_S, PART_S)
    assert place.belief == pytest.approx(naive(past, [float(one) for one in counted]), abs=1e-9)
    assert place.belief.sum() == pytest.approx(1.0)


def rising(bursts: int = 6, *, rise: int = 30, rng: random.Random | None = None) -> list[float]:
    """Counts of parts: quiet at 10 a second, a rise to 36, as many parts down again."""
    rng = rng or random.Random(3)
    counts: list[float] = []
    for _ in range(bursts):
        quiet = [10.0] * rng.randint(40, 110)
        up = [10.0 + 26.0 * step / rise for step in range(rise)]
        rates = [*quiet, *up, *[36.0] * rng.randint(10, 20), *reversed(up)]
        counts += [max(0.0, rng.gauss(one, math.sqrt(one / PART_S))) * PART_S for one in rates]
    return counts


def test_a_begun_rise_goes_on_as_past_ones_did() -> None:
    past = Past(rising(), PART_S, 65.0)
    place = PastPosition(past)
    for _ in range(30):
        place.observe(100.0, PART_S, PART_S)
    grid = past.grid()
    quiet = float(place.most(grid) @ grid)
    assert 10.0 < quiet < 13.0
    assert place.rate == pytest.approx(10.0, rel=0.05)
    for step in range(8):  # to 16 a second
        place.observe(PART_S * (10.0 + 26.0 * step / 30), PART_S, PART_S)
    risen = float(place.most(grid) @ grid)
    assert place.rate == pytest.approx(16.0, rel=0.1)
    assert risen == pytest.approx(16.0 + 26.0 * 7 / 30, rel=0.1), "seven parts more"


def test_two_looks_of_half_a_part_are_one_part() -> None:
    past = Past(rising(), PART_S, 65.0)
    one, two = PastPosition(past), PastPosition(past)
    for requests in (100.0, 108.0, 121.0, 130.0, 150.0, 171.0):
        one.observe(requests, PART_S, PART_S)
        two.observe(requests / 2, PART_S / 2, PART_S / 2)
        two.observe(requests / 2, PART_S / 2, PART_S / 2)
    assert two.rate == pytest.approx(one.rate, rel=0.1)


def test_a_past_that_grows_keeps_the_belief() -> None:
    counts = rising()
    place = PastPosition(Past(counts, PART_S, 65.0))
    for requests in counts[100:140]:
        place.observe(requests, PART_S, PART_S)
    before = place.rate
    place.move_to(Past([*counts[6:], *[100.0] * 12], PART_S, 65.0), 6)
    assert place.rate == pytest.approx(before, rel=0.02)
    assert place.belief.sum() == pytest.approx(1.0)


def test_what_nobody_counted_is_no_place_to_be() -> None:
    counts = rising()
    counts[50:56] = [math.nan] * 6
    past = Past(counts, PART_S, 65.0)
    assert not past.usable[50 - past.lead : 56].any()
    assert past.usable[50 - past.lead - 1]
    assert past.usable[56]
    assert not past.usable[-past.lead :].any(), "what came after is not known yet"
    place = PastPosition(past)
    place.observe(100.0, PART_S, 1e9)  # longer than all that is known
    assert place.belief.sum() == pytest.approx(1.0)
    assert np.isfinite(tried(past).predicted).all()


def test_a_past_is_predicted_from_its_other_bursts() -> None:
    trial = tried(Past(rising(8), PART_S, 65.0))
    assert trial.predicted.sum(axis=1) == pytest.approx(1.0)
    predicted = trial.predicted @ trial.grid
    assert np.corrcoef(predicted, trial.came)[0, 1] > 0.9
    chance = Past([100.0 + 10.0 * random.Random(at).gauss(0, 1) for at in range(600)], PART_S, 65.0)
    assert (tried(chance).predicted @ tried(chance).grid).std() < 0.3, "there is nothing to predict"


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60), st.floats(0, 1e9))
def test_whatever_came_a_belief_is_one(counts: list[float], requests: float) -> None:
    past = Past(counts, PART_S, 30.0)
    place = PastPosition(past)
    place.observe(requests, 5.0, 5.0)
    place.observe(0.0, 5.0, 1e6)
    grid = past.grid()
    assert all(low < high for low, high in pairwise(grid))
    usable = bool(past.usable.any())
    assert place.most(grid).sum() == pytest.approx(1.0 if usable else 0.0)
    assert np.isfinite(tried(past).predicted).all()


def test_what_rises_has_a_course_and_what_jumps_has_none() -> None:
    assert Past(rising(rise=18), PART_S, 65.0).is_smooth
    assert Past([100.0] * 50, PART_S, 65.0).is_smooth
    assert not Past(rising(rise=1), PART_S, 65.0).is_smooth


def noisy(rates: list[float], rng: random.Random) -> list[float]:
    return [max(0.0, rng.gauss(one, math.sqrt(one / PART_S))) * PART_S for one in rates]


@pytest.mark.parametrize("seed", range(5))
def test_a_rise_above_all_that_was_is_like_nothing(seed: int) -> None:
    """On a ramp every place was followed by more, but for those that matter: the last ones."""
    rng = random.Random(seed)
    ramp = noisy([4.0 + 0.1 * part for part in range(360)], rng)
    assert Past(ramp, PART_S, 65.0).is_surpassed
    top = noisy([40.0] * 120, rng)
    assert not Past([*ramp, *top], PART_S, 65.0).is_surpassed, "it has been there for a while"
    assert not Past([*ramp, *top, *noisy([10.0] * 30, rng)], PART_S, 65.0).is_surpassed


@pytest.mark.parametrize("seed", range(20))
def test_a_burst_as_high_as_those_before_is_no_record(seed: int) -> None:
    past = rising(5, rng=random.Random(seed))
    for gone in range(0, 200, 10):  # by chance one of five is the highest
        assert not Past(past[: len(past) - gone], PART_S, 65.0).is_surpassed


def test_of_a_past_that_is_all_one_event_nothing_is_predicted() -> None:
    assert Past([100.0] * 60, PART_S, 65.0).is_surpassed
    assert Past([math.nan] * 100 + [100.0] * 60, PART_S, 65.0).is_surpassed
    assert not Past([0.0] * 200, PART_S, 65.0).is_surpassed
