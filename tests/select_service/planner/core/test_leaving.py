"""Who goes and who stays, in any order of wishes, departures and lowered counts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from select_service.planner.core.leaving import GONE_S, Leaver, Leaving
from tests.effort import examples


def leaver(worker_id: int) -> Leaver:
    return Leaver(worker_id, f"10.0.0.{worker_id}", ours=True)


class Pool(RuleBasedStateMachine):
    """A pool whose planner names, changes its mind, and lowers counts; beside it what is true."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving = Leaving()
        self.now = 0.0
        self.surplus = 0
        self.present = set(range(6))
        self.drained: set[int] = set()  # by what the caller was told to do
        self.born = 6

    @initialize(drained=st.lists(st.integers(0, 5), unique=True), surplus=st.integers(0, 3))
    def begin(self, drained: list[int], surplus: int) -> None:
        self.surplus = surplus
        self.leaving.want(surplus, self.now)
        assert not self.leaving.is_over, "somebody may have been drained before"
        self.leaving.take_over([leaver(one) for one in drained], surplus, self.now)
        self.drained |= set(drained)

    @rule(surplus=st.integers(0, 4), order=st.randoms(use_true_random=False))
    def turn(self, surplus: int, order: object) -> None:
        self.surplus = surplus
        self.leaving.want(surplus, self.now)
        self.leaving.see(self.present, self.now)
        before = {one.worker_id for one in self.leaving.named}
        candidates = sorted(self.present)
        order.shuffle(candidates)  # type: ignore[attr-defined] # Hypothesis's own
        new = self.leaving.name([leaver(one) for one in candidates], surplus)
        assert not before & {one.worker_id for one in new}
        for one in list(self.leaving.staying):
            self.drained.discard(one.worker_id)
            self.leaving.stayed(one)
        named = {one.worker_id for one in self.leaving.named}
        self.drained |= named
        room = len(self.present) - self.leaving.going
        assert len(named) == min(surplus, room), "as many as are wanted, if there are as many"

    @rule()
    def lower(self) -> None:
        self.leaving.lower(self.now)
        self.surplus = 0

    @rule(one=st.integers(0, 20))
    def leave(self, one: int) -> None:
        self.present.discard(one)
        self.drained.discard(one)

    @rule()
    def come(self) -> None:
        self.present.add(self.born)
        self.born += 1

    @rule(seconds=st.sampled_from([1.0, 50.0, GONE_S]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def promises_hold(self) -> None:
        self.leaving.check()

    def teardown(self) -> None:
        """Nobody is left drained for ever: whoever is wanted works again in the end."""
        for _ in range(3):
            self.now += GONE_S
            self.turn_of(0)
        assert not self.drained
        assert self.leaving.is_over

    def turn_of(self, surplus: int) -> None:
        self.leaving.want(surplus, self.now)
        self.leaving.see(self.present, self.now)
        for one in list(self.leaving.staying):
            self.drained.discard(one.worker_id)
            self.leaving.stayed(one)


Pool.TestCase.settings = settings(max_examples=examples(100), deadline=None)
TestPool = Pool.TestCase


def test_a_lower_count_waits_for_work_and_for_names_but_not_for_ever() -> None:
    leaving = Leaving()
    leaving.take_over([], 2, 0.0)
    leaving.want(2, 10.0)
    leaving.name([leaver(7)], 2)
    told = leaving.waits_for({7: "2 reservations"}, 2, 15.0, 30.0)
    assert told == "worker 7: 2 reservations; 1 of 2 could be named (5 s of 30)"
    leaving.name([leaver(7), leaver(8)], 2)
    assert leaving.waits_for({7: "", 8: ""}, 2, 15.0, 30.0) == ""
    assert leaving.waits_for({7: "", 8: "1 reservation"}, 2, 39.9, 30.0)
    assert leaving.waits_for({7: "", 8: "1 reservation"}, 2, 40.0, 30.0) == ""
    leaving.want(0, 41.0)
    assert [one.worker_id for one in leaving.staying] == [8, 7], "who was named last first"
    leaving.want(1, 50.0)
    assert leaving.waited_s(60.0) == 10.0, "another wish, another wait"
