"""What others took of the machine."""

from __future__ import annotations

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


def test_waiting_for_quiet_looks_only_while_there_is_time() -> None:
    assert wait_for_quiet(0.0) == 0.0
    assert 0.0 <= wait_for_quiet(0.02, look_s=0.01) <= 1.5


def test_the_clocks_can_be_read_and_go_forward() -> None:
    before, after = Watch.now(), Watch.now()
    assert 0 < before.busy_s <= after.busy_s
    assert 0 < before.own_s <= after.own_s
