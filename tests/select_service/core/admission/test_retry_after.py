from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from select_service.core.admission import retry_after
from select_service.core.admission.retry_after import RetryPromises, Room
from select_service.errors import retry_after_header


def room(work: float = 10, rate: float = 10, earliest_s: float = 0.0, line: str = "pool") -> Room:
    return Room(line, work, rate, earliest_s)


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_each_gets_the_next_free_place() -> None:
    book = RetryPromises(2)
    got = [book.grant(key(n), 0, room(earliest_s=2.0), 0.0).retry_after_s for n in range(4)]
    assert got == [2.0, 3.0, 4.0, 5.0]
    assert book.grant(key(9), 0, room(line="other"), 0.0).retry_after_s == 0.0
    book.check()


def test_lower_bands_come_after_higher_ones_and_do_not_delay_them() -> None:
    book = RetryPromises(2)
    assert [book.grant(key(n), 1, room(), 0.0).retry_after_s for n in range(2)] == [0.0, 1.0]
    assert [book.grant(key(n), 0, room(), 0.0).retry_after_s for n in range(2, 4)] == [0.0, 1.0]
    assert book.grant(key(5), 1, room(), 0.0).retry_after_s == 4.0


def test_who_comes_in_time_is_recognised_once() -> None:
    book = RetryPromises(1)
    book.grant(key(1), 0, room(earliest_s=5.0), 0.0)
    assert not book.is_due(key(1), 4.9)
    assert not book.is_due(key(2), 5.0)
    assert not book.is_due(b"", 5.0)
    assert book.is_due(key(1), 4.96)
    assert book.is_due(key(1), 11.4)
    book.redeem(key(1))
    assert not book.is_due(key(1), 5.0)
    assert (book.size, book.counts.kept, book.counts.broken) == (0, 1, 0)
    book.redeem(key(1))
    book.check()


def test_a_moment_in_which_nearly_nothing_drains_does_not_promise_hours() -> None:
    book = RetryPromises(2, horizon_s=300.0)
    assert book.grant(key(1), 0, room(work=1_000, rate=0.05), 0.0).retry_after_s == 0.0
    for band in range(2):
        assert book.grant(key(2 + band), band, room(), 601.0).is_kept, band


def test_no_time_to_return_is_beyond_the_horizon_also_where_the_rate_is_unknown() -> None:
    book = RetryPromises(1, horizon_s=300.0)
    promise = book.grant(key(1), 0, room(rate=0.0, earliest_s=1e6), 0.0)
    assert promise.retry_after_s <= 302.0
    assert not promise.is_kept


def test_a_promise_ends() -> None:
    book = RetryPromises(1)
    book.grant(key(1), 0, room(earliest_s=5.0), 0.0)
    assert not book.is_due(key(1), 11.6)
    assert (book.size, book.counts.kept, book.counts.broken) == (0, 0, 1)
    book.check()


def test_a_later_promise_outlives_an_earlier_one_that_was_kept() -> None:
    book = RetryPromises(1)
    book.grant(key(1), 0, room(earliest_s=1.0), 0.0)
    book.redeem(key(1))
    book.grant(key(1), 0, room(earliest_s=7.0), 1.0)
    assert not book.is_due(key(1), 7.5), "the first one's time is over"
    assert book.is_due(key(1), 8.0)
    assert book.counts.broken == 0


def test_those_nobody_can_tell_apart_get_a_place_each() -> None:
    book = RetryPromises(1)
    got = [
        book.grant(b"same", 0, room(earliest_s=1.0), 0.0, is_unique=False).retry_after_s
        for _ in range(retry_after.SAME_MAX + 1)
    ]
    assert len(set(got)) == retry_after.SAME_MAX
    assert got[-1] == got[-2]
    for second in range(1, 5):
        assert book.is_due(b"same", float(second))
        book.redeem(b"same")
    book.check()


def test_without_a_rate_returns_are_spread() -> None:
    book = RetryPromises(1)
    got = [book.grant(key(n), 0, room(rate=0.0), 0.0) for n in range(100)]
    assert not any(promise.is_kept for promise in got)
    assert all(1.0 <= promise.retry_after_s <= 2.0 for promise in got)
    tenths = {int((promise.retry_after_s - 1.0) * 10) for promise in got}
    assert tenths == set(range(10))


def test_nothing_is_promised_beyond_the_horizon() -> None:
    book = RetryPromises(1, horizon_s=10.0)
    assert book.grant(key(0), 0, room(work=100), 0.0).is_kept
    assert book.grant(key(1), 0, room(work=1), 0.0) == (10.0, True)
    late = book.grant(key(2), 0, room(), 0.0)
    assert not late.is_kept
    assert 5.0 <= late.retry_after_s <= 10.0


def test_after_a_burst_of_seconds_nobody_is_told_to_come_in_an_hour() -> None:
    book = RetryPromises(1)
    hour = room(work=10 * 3600.0)
    assert book.grant(key(0), 0, hour, 0.0).is_kept  # an hour's work at once: as much as one has
    promises = [book.grant(key(n), 0, hour, n / 10) for n in range(1, 100)]
    assert max(promise.retry_after_s for promise in promises) <= 600.0
    book.check()


def test_the_longer_an_overload_lasts_the_farther_ahead_places_are_promised() -> None:
    book = RetryPromises(1)
    # each second brings work for 25: places are ever farther ahead, and each has one
    promises = [book.grant(key(n), 0, room(work=250.0), float(n)) for n in range(140)]
    assert all(promise.is_kept for promise in promises)
    assert promises[-1].retry_after_s == pytest.approx(24.0 * 139)
    last = 139 + retry_after.CALM_S + 1.0  # it was over, and begins anew
    late = book.grant(key(999), 0, room(), last)
    assert not late.is_kept
    assert late.retry_after_s <= retry_after.HORIZON_LEAST_S


def test_promises_are_bounded() -> None:
    book = RetryPromises(1, slots_max=3)
    got = [book.grant(key(n), 0, room(work=1), 0.0).is_kept for n in range(5)]
    assert got == [True, True, True, False, False]
    assert not book.grant(b"", 0, room(), 0.0).is_kept
    book.check()


def test_timelines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_after, "LINES_MAX", 2)
    book = RetryPromises(1)
    for line in "abc":
        book.grant(b"", 0, room(line=line, earliest_s=3.0), 0.0)
    assert book.grant(b"", 0, room(line="c", work=1), 0.0).retry_after_s == 4.0
    assert book.grant(b"", 0, room(line="a"), 0.0).retry_after_s == 0.0


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, 1), (0.3, 1), (1.0, 1), (1.01, 2), (59.99, 60), (60.0, 60)]
)
def test_the_header_is_whole_and_never_early(seconds: float, header: int) -> None:
    assert retry_after_header(seconds) == header


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 1), st.floats(0, 3), st.booleans()),
        max_size=200,
    )
)
def test_the_book_stays_consistent(steps: list[tuple[int, int, float, bool]]) -> None:
    book = RetryPromises(2, slots_max=5)
    now = 0.0
    granted = 0
    for number, band, gap, comes in steps:
        now += gap
        if comes:
            if book.is_due(key(number), now):
                book.redeem(key(number))
        else:
            before = book.size + book.counts.broken
            promise = book.grant(key(number), band, room(), now)
            granted += book.size + book.counts.broken - before
            assert promise.retry_after_s >= 0.0
        book.check()
        assert granted == book.size + book.counts.kept + book.counts.broken


def test_kept_promises_leave_no_memory() -> None:
    book = RetryPromises(1)
    for number in range(20_000):
        now = number / 100
        book.grant(key(number), 0, room(work=0.01), now)
        assert book.is_due(key(number), now + 0.1)
        book.redeem(key(number))
    assert book.size == 0
    assert len(book._expiries) < 2_000
