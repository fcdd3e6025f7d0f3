"""What others took of the machine."""

from __future__ import annotations

import os

import pytest

from bench.neighbours import Watch, busy_ticks, wait_for_quiet


def test_busy_is_everything_but_idle_and_waiting() -> None:
    stat = "cpu  100 20 30 9999 8888 4 5 6 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    assert busy_ticks(stat) == 165


def test_others_are_what_is_busy_and_not_ours() -> None:
    before = Watch(busy_s=100.0, own_s=10.0, at_s=1000.0)
    assert before.share(Watch(110.0, 15.0, 1010.0), processors=2) == pytest.approx(0.25)
    assert before.share(Watch(104.0, 15.0, 1010.0), processors=2) == 0.0
    assert before.share(before, processors=2) == 0.0


def waited(most_s: float, busy: list[float]) -> tuple[float, int]:
    """What waiting says, and how often it looked; `busy` are the neighbours' seconds per look."""
    looks = 0
    watch = Watch(busy_s=0.0, own_s=0.0, at_s=100.0)

    def sleep(seconds: float) -> None:
        nonlocal looks, watch
        watch = Watch(watch.busy_s + busy[looks], 0.0, watch.at_s + seconds)
        looks += 1

    share = wait_for_quiet(most_s, 2.0, read=lambda: watch, sleep=sleep)
    return share, looks


def test_waiting_for_quiet_looks_only_while_there_is_time() -> None:
    much = 2.0 * (os.cpu_count() or 1)
    assert waited(0.0, []) == (0.0, 0)
    assert waited(1.9, []) == (0.0, 0), "no time for a look"
    assert waited(5.0, [much, much]) == (1.0, 2)
    assert waited(60.0, [much, much / 2, 0.0]) == (0.0, 3), "until it is quiet"


def test_the_clocks_can_be_read_and_go_forward() -> None:
    before, after = Watch.now(), Watch.now()
    assert 0 < before.busy_s <= after.busy_s
    assert 0 < before.own_s <= after.own_s
