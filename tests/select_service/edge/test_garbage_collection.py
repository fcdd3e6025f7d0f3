"""Full collections wait for a quiet moment, but not for ever."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from select_service.edge.garbage_collection import (
    FULL_S,
    LOAD,
    LOAD_S,
    QUIET_FULL_S,
    GarbageCollection,
)
from select_service.edge.http.traffic import Traffic


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.traffic = Traffic()
        self.garbage = GarbageCollection(self.traffic, lambda: self.now)

    def request(self) -> None:
        self.traffic.unmatched.observe(200, 0.0)

    def look(self, now: float) -> bool:
        self.now = now
        return self.garbage.look()


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    assert gc.get_threshold() == before
    assert not gc.get_freeze_count()
    gc.collect()
    gc.freeze()  # as tests/conftest.py has it


def test_everything_is_looked_through_once_it_is_quiet() -> None:
    world = World()
    for second in range(int(QUIET_FULL_S) * 2):
        world.request()
        assert not world.look(second)
    world.traffic.in_flight = 1
    assert not world.look(world.now + 1), "somebody waits"
    world.traffic.in_flight = 0
    assert world.look(world.now + 1)
    assert not world.look(world.now + 1), "and not again so soon"


def test_after_a_load_it_is_sooner() -> None:
    world = World()
    for _ in range(LOAD):
        world.request()
    assert not world.look(LOAD_S), "they have only just been answered"
    assert world.look(LOAD_S + 1)
    assert not world.look(2 * LOAD_S + 2), "there was no other load"


def test_without_a_quiet_moment_it_comes_all_the_same() -> None:
    world = World()
    world.request()
    assert not world.look(FULL_S - 1)
    world.request()
    assert world.look(FULL_S)


async def test_python_does_not_look_through_everything_by_itself(
    thresholds: tuple[int, int, int],
) -> None:
    garbage = GarbageCollection(Traffic(), lambda: 0.0)
    garbage.start()
    try:
        full = gc.get_stats()[2]["collections"]
        kept = [Cycle() for _ in range(400 * thresholds[0])]
        assert gc.get_stats()[2]["collections"] == full
        assert len(kept) == 400 * thresholds[0]
    finally:
        garbage.close()
        garbage.close()
