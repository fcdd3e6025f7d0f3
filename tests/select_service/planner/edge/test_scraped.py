"""Arrivals from counters that stand still between scrapes, against all arrivals as they came."""

from __future__ import annotations

import bisect
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.planner.edge.sources.scraped import Arrived, ScrapedArrivals, ScrapedSample
from select_service.planner.types import IDLE, Missing, Value

LOOK_S = 5.0


def sample(at: float, value: float, target: str = "a", series: str = "ok") -> ScrapedSample:
    return ScrapedSample(target, (target, series), at, value)


def number(arrived: Arrived) -> float:
    assert not isinstance(arrived.requests, Missing), arrived
    return arrived.requests.value if isinstance(arrived.requests, Value) else 0.0


def test_looks_between_two_scrapes_count_nothing_new_and_no_idleness() -> None:
    """They were idle, idle, and then a burst of three looks at once."""
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 4000.0)])
    assert arrivals.next(101.0) == Arrived(Missing("counting begins"))
    for now in (106.0, 111.0):
        arrivals.take([sample(100.0, 4000.0)])
        assert arrivals.next(now) == Arrived(IDLE, 0.0, now - 100.0)
    arrivals.take([sample(115.0, 4150.0)])
    assert arrivals.next(116.0) == Arrived(Value(150.0), 15.0, 1.0)
    arrivals.take([sample(130.0, 4150.0)])
    assert arrivals.next(131.0) == Arrived(IDLE, 15.0, 1.0), "now nobody came"


def test_a_counter_that_restarts_and_a_new_status_count_from_zero() -> None:
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 4000.0)])
    arrivals.next(100.0)
    arrivals.take([sample(115.0, 30.0)])
    assert arrivals.next(115.0) == Arrived(Value(30.0), 15.0, 0.0)
    arrivals.take([sample(130.0, 40.0), sample(130.0, 7.0, series="error")])
    assert arrivals.next(130.0) == Arrived(Value(17.0), 15.0, 0.0)
    arrivals.take([sample(145.0, 41.0)])  # a series that is gone takes nothing away
    assert arrivals.next(145.0) == Arrived(Value(1.0), 15.0, 0.0)


def test_targets_are_counted_up_to_the_same_moment() -> None:
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 0.0), sample(107.0, 0.0, "b")])
    arrivals.next(108.0)
    arrivals.take([sample(115.0, 150.0), sample(107.0, 0.0, "b")])
    assert arrivals.next(116.0) == Arrived(IDLE, 0.0, 9.0), "of the other nothing is known"
    arrivals.take([sample(115.0, 150.0), sample(122.0, 1500.0, "b")])
    # from 107 to 115: 8 s at 10 of one, and 8 s at 100 of the other
    arrived = arrivals.next(123.0)
    assert (arrived.seconds, arrived.ago_s) == (8.0, 8.0)
    assert number(arrived) == pytest.approx(880.0)


def test_a_new_target_counts_from_its_first_scrape() -> None:
    """What it counted before it was seen may have come hours ago."""
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 0.0)])
    arrivals.next(100.0)
    arrivals.take([sample(115.0, 150.0), sample(113.0, 1e6, "b")])
    assert number(arrivals.next(115.0)) == pytest.approx(130.0)  # up to 113
    arrivals.take([sample(130.0, 300.0), sample(128.0, 1e6 + 30.0, "b")])
    assert number(arrivals.next(130.0)) == pytest.approx(150.0 + 30.0)


def test_a_target_that_is_gone_is_waited_for_and_then_not() -> None:
    arrivals = ScrapedArrivals()
    for at in (70.0, 85.0, 100.0, 115.0):
        arrivals.take([sample(at, 10 * at), sample(at, 10 * at, "b")])
        arrivals.next(at)
    spans = []
    for now in range(120, 200, 5):
        last = now - now % 15 + 10 if now % 15 >= 10 else now - now % 15 - 5
        arrivals.take([sample(last, 10.0 * last)])
        arrived = arrivals.next(float(now))
        spans.append((arrived.seconds, number(arrived)))
        assert arrived.ago_s <= 45.0
    assert sum(span for span, _ in spans) == pytest.approx(190.0 - 115.0), "nothing is left out"
    assert sum(count for _, count in spans) == pytest.approx(10.0 * (190.0 - 115.0))


def test_a_target_that_comes_back_counts_what_it_missed_evenly() -> None:
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 0.0)])
    arrivals.next(100.0)
    arrivals.take([sample(115.0, 150.0)])
    arrivals.next(115.0)
    assert arrivals.next(140.0) == Arrived(IDLE, 0.0, 25.0)
    arrivals.take([sample(145.0, 450.0)])
    assert arrivals.next(146.0) == Arrived(Value(300.0), 30.0, 1.0)


def test_nothing_scraped_is_not_known_and_counting_begins_again() -> None:
    arrivals = ScrapedArrivals()
    assert arrivals.next(1.0) == Arrived(Missing("no series"))
    for at in (70.0, 85.0, 100.0, 115.0):
        arrivals.take([sample(at, 10 * at)])
        arrivals.next(at)
    for now in (120.0, 145.0):
        arrivals.take([])
        assert arrivals.next(now) == Arrived(IDLE, 0.0, now - 115.0), "one scrape may have failed"
    arrivals.take([])
    assert arrivals.next(160.0) == Arrived(Missing("nothing has been scraped for 45 s"))
    assert arrivals.next(165.0) == Arrived(Missing("no series"))
    arrivals.take([sample(7200.0, 90_000.0)])
    assert arrivals.next(7200.0) == Arrived(Missing("counting begins"))
    arrivals.take([sample(7215.0, 90_150.0)])
    assert arrivals.next(7215.0) == Arrived(Value(150.0), 15.0, 0.0)


def test_two_who_scrape_the_same_count_it_once() -> None:
    """Behind one address two Prometheus servers answer in turns, each with its own samples."""
    arrivals = ScrapedArrivals()
    total = 0.0
    for step in range(40):
        at = 100.0 + LOOK_S * step
        last = at - at % 15 - (7.0 if step % 2 else 0.0)
        arrivals.take([sample(last, 10.0 * last)])
        arrived = arrivals.next(at + (0.05 if step % 2 else 0.0))
        total += 0.0 if isinstance(arrived.requests, Missing) else number(arrived)
    assert total == pytest.approx(10.0 * (285.0 - 90.0))


def test_a_clock_that_goes_back_stops_nothing() -> None:
    arrivals = ScrapedArrivals()
    arrivals.take([sample(5000.0, 0.0)])
    arrivals.next(5000.0)
    arrivals.take([sample(1000.0, 10.0)])
    assert arrivals.next(1001.0) == Arrived(Missing("the clock went back"))
    arrivals.take([sample(1015.0, 20.0)])
    assert arrivals.next(1016.0) == Arrived(Missing("counting begins"))
    arrivals.take([sample(1030.0, 170.0)])
    assert arrivals.next(1031.0) == Arrived(Value(150.0), 15.0, 1.0)


class Front(NamedTuple):
    """A target: when it is scraped, and when requests come."""

    first_at: float
    every_s: float
    came: list[float]
    restarts: list[float]

    def counter(self, at: float) -> float:
        since = max((one for one in self.restarts if one <= at), default=-1.0)
        return float(bisect.bisect_right(self.came, at) - bisect.bisect_right(self.came, since))

    def scrapes(self, until: float) -> list[float]:
        count = int((until - self.first_at) / self.every_s) + 1
        return [self.first_at + index * self.every_s for index in range(max(0, count))]


times = st.lists(st.floats(0.0, 300.0, width=32), max_size=60).map(sorted)
fronts = st.builds(
    Front,
    st.floats(0.0, 5.0, width=32),
    st.sampled_from([1.0, 5.0, 7.0, 15.0, 30.0]),
    times,
    st.just([]),
)


@given(st.lists(fronts, min_size=1, max_size=4), st.sampled_from([2.0, 5.0, 20.0]))
def test_every_arrival_is_counted_once_in_the_span_it_was_scraped(
    targets: list[Front], look_s: float
) -> None:
    """Spans follow on each other; at a target's own scrapes its count is exact."""
    arrivals = ScrapedArrivals()
    total = seconds = 0.0
    began: float | None = None
    now = 6.0
    while now < 300.0:
        latest = [one.scrapes(now)[-1] for one in targets]
        arrivals.take(
            sample(at, one.counter(at), str(index))
            for index, (one, at) in enumerate(zip(targets, latest, strict=True))
        )
        arrived = arrivals.next(now)
        if isinstance(arrived.requests, Missing):
            assert began is None, "every target is scraped in time"
            began = max(latest)
        else:
            assert began is not None
            total += number(arrived)
            seconds += arrived.seconds
            assert arrived.ago_s == pytest.approx(now - began - seconds)
            if arrived.seconds:
                assert began + seconds == pytest.approx(min(latest))
        now += look_s
    assert began is not None
    end = began + seconds
    # what lies inside the whole span for sure, and what may
    least = most = 0.0
    for one in targets:
        seen = sorted({one.scrapes(look)[-1] for look in _looks(look_s)})
        inside = [at for at in seen if began <= at <= end]
        around = [max(at for at in seen if at <= began), min(at for at in seen if at >= end)]
        most += one.counter(around[1]) - one.counter(around[0])
        least += one.counter(inside[-1]) - one.counter(inside[0]) if inside else 0.0
    assert least - 1e-6 <= total <= most + 1e-6


def _looks(look_s: float) -> list[float]:
    found, now = [], 6.0
    while now < 300.0:
        found.append(now)
        now += look_s
    return found


@given(
    st.lists(st.floats(10.0, 290.0, width=32), max_size=3).map(sorted),
    st.sampled_from([5.0, 15.0]),
)
def test_a_steady_rate_is_steady_whatever_the_phases(restarts: list[float], every_s: float) -> None:
    """Ten a second at each of three, which restart; nothing but a restart may lower a rate."""
    targets = [
        Front(phase, every_s, [0.1 * index for index in range(3100)], restarts if not phase else [])
        for phase in (0.0, 1.5, 4.0)
    ]
    arrivals, now = ScrapedArrivals(), 6.0
    while now < 300.0:
        for index, one in enumerate(targets):
            at = one.scrapes(now)[-1]
            arrivals.take([sample(at, one.counter(at), str(index))])
        arrived = arrivals.next(now)
        if arrived.seconds:
            rate = number(arrived) / arrived.seconds
            assert rate <= 30.0 + 0.3 * 3, "one request at each end of each"
            if not restarts:
                assert rate == pytest.approx(30.0, abs=0.9)
        now += LOOK_S


def test_a_distance_that_was_not_seen_scrape_by_scrape_is_no_usual_one() -> None:
    """After ten minutes without Prometheus one that left was waited for for twenty."""
    arrivals = ScrapedArrivals()
    for at in (100.0, 115.0, 130.0, 145.0):
        arrivals.take([sample(at, 10 * at), sample(at, 10 * at, "b")])
        arrivals.next(at)
    arrivals.take([sample(385.0, 3850.0), sample(385.0, 3850.0, "b")])
    assert arrivals.next(385.0).seconds == 240.0
    for at in (400.0, 415.0):
        arrivals.take([sample(at, 10 * at)])
        assert arrivals.next(at) == Arrived(IDLE, 0.0, at - 385.0)
    arrivals.take([sample(430.0, 4300.0)])
    assert arrivals.next(430.0) == Arrived(Value(450.0), 45.0, 0.0)


def test_counts_of_longer_ago_than_prometheus_returns_are_not_made_up() -> None:
    """An hour's arrivals would be compared with the plan of this minute."""
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 0.0)])
    arrivals.next(100.0)
    arrivals.take([sample(3700.0, 36_000.0)])
    assert arrivals.next(3701.0) == Arrived(Missing("nothing is known of 3601 s"))
    arrivals.take([sample(3700.0, 36_000.0)])
    assert arrivals.next(3706.0) == Arrived(Missing("counting begins"))
    arrivals.take([sample(3715.0, 36_150.0)])
    assert arrivals.next(3716.0) == Arrived(Value(150.0), 15.0, 1.0)


def test_two_who_scrape_the_same_right_after_each_other_are_waited_for() -> None:
    """Their last distance was taken for the usual one: a tenth of a second, and nobody was left."""
    arrivals = ScrapedArrivals()
    arrived = []
    for now in range(100, 400, 5):
        first = now - now % 15
        # they answer in turns: both samples are seen in the five seconds after the scrapes
        for last, answered in ((first, now + 0.2), (first + 0.1, now + 0.3)):
            arrivals.take([sample(last, 10.0 * last)])
            arrived.append(arrivals.next(answered))
    missing = [one for one in arrived if isinstance(one.requests, Missing)]
    assert missing == [Arrived(Missing("counting begins"))]
    assert sum(number(one) for one in arrived[1:]) == pytest.approx(10.0 * (390.1 - 90.0))


def test_a_sample_that_is_a_little_lower_is_no_restart() -> None:
    """Of two who scrape the same one was answered earlier: a million requests had come at once."""
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 1e6)])
    arrivals.next(100.0)
    arrivals.take([sample(100.1, 1e6 - 5.0)])
    assert arrivals.next(101.0).requests == IDLE
    arrivals.take([sample(115.0, 1e6 + 145.0)])
    assert number(arrivals.next(116.0)) == pytest.approx(150.0)


def test_a_target_whose_series_all_have_new_labels_counts_from_there() -> None:
    """A label was added in Prometheus: all that had ever come came in the last seconds."""
    arrivals = ScrapedArrivals()
    arrivals.take([sample(100.0, 1e6)])
    arrivals.next(100.0)
    arrivals.take([sample(115.0, 1e6 + 150.0, series="ok, eu")])
    assert arrivals.next(116.0) == Arrived(IDLE, 15.0, 1.0)
    arrivals.take([sample(130.0, 1e6 + 300.0, series="ok, eu")])
    assert arrivals.next(131.0) == Arrived(Value(150.0), 15.0, 1.0)


def test_scrapes_may_be_a_minute_apart_or_two() -> None:
    """One that was scraped once was given up right before it was scraped again."""
    for every_s in (60.0, 90.0, 110.0):
        arrivals = ScrapedArrivals()
        arrived = []
        for now in range(0, 1200, 5):
            last = 1000.0 + every_s * int(now / every_s)
            if now % every_s == 0:
                last -= every_s  # it takes a moment to answer
            arrivals.take([sample(last, 10 * last)])
            arrived.append(arrivals.next(1000.0 + now))
        counted = arrived[1 + int(every_s / 5) :]
        assert not any(isinstance(one.requests, Missing) for one in counted), every_s
        for one in counted:
            assert number(one) == pytest.approx(10.0 * one.seconds)


def test_a_target_that_is_gone_but_still_reported_is_not_waited_for_again() -> None:
    """Without a mark of its end, Prometheus returns the last sample of a series for minutes."""
    arrivals = ScrapedArrivals()
    for at in (100.0, 115.0, 130.0, 145.0):
        arrivals.take([sample(at, 10 * at), sample(at, 10 * at, "b")])
        arrivals.next(at)
    for now in range(150, 440, 5):
        last = float(now - now % 15 - 5)
        arrivals.take([sample(last, 10 * last), sample(145.0, 1450.0, "b")])
        assert arrivals.next(float(now)).ago_s <= 45.0
    alone = ScrapedArrivals()
    for at in (100.0, 115.0, 130.0, 145.0):
        alone.take([sample(at, 10 * at)])
        alone.next(at)
    for later in (35.0, 40.0, 45.0):
        alone.take([sample(145.0, 1450.0)])
        why = f"nothing has been scraped for {later:.0f} s"
        assert alone.next(145.0 + later) == Arrived(Missing(why)), "and nobody is idle"


class Event(NamedTuple):
    """A look at something odd."""

    after_s: float  # since the look before, by the clock of the samples
    ages_s: list[float]  # of the samples of each target that is reported; none: it is not
    counted: float


odd = st.builds(
    Event,
    st.sampled_from([-4000.0, -30.0, 0.0, 5.0, 5.0, 5.0, 5.0, 40.0, 280.0, 4000.0]),
    st.lists(st.sampled_from([0.0, 0.1, 7.0, 70.0, 290.0]), max_size=3),
    st.floats(0.0, 1e9),
)


@given(st.lists(odd, max_size=40), st.sampled_from([1.0, 15.0, 60.0]))
def test_whatever_came_before_it_counts_again_soon(events: list[Event], every_s: float) -> None:
    """Nothing is waited for longer than Prometheus would return it."""
    arrivals, now = ScrapedArrivals(), 100_000.0
    for event in events:
        now += event.after_s
        arrivals.take(
            sample(now - age_s, event.counted, str(index))
            for index, age_s in enumerate(event.ages_s)
        )
        arrived = arrivals.next(now)
        assert arrived.seconds >= 0.0
        assert arrived.ago_s >= 0.0
        if not isinstance(arrived.requests, Missing):
            assert 0.0 <= number(arrived) <= 1e9 * (len(events) + 1) * 3
    counts = []
    for _ in range(int((420.0 + 5 * every_s) / LOOK_S)):
        now += LOOK_S
        last = now - now % every_s
        arrivals.take([sample(last, 10.0 * last)])
        counts.append(arrivals.next(now))
    for arrived in counts[-int(max(every_s, LOOK_S) / LOOK_S) :]:
        assert number(arrived) == pytest.approx(10.0 * arrived.seconds)
        assert arrived.ago_s <= every_s
    assert len(arrivals._targets) == 1
