"""Who goes and who stays, in any order of wishes, departures and lowered counts."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from select_service.planner.core.scale_down import GONE_S, Leaving
from tests.effort import examples


class Pool(RuleBasedStateMachine):
    """A pool whose planner names, changes its mind, and lowers counts; beside it what is true."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving = Leaving()
        self.now = 0.0
        self.desired = 6
        self.present = set(range(6))
        self.drained: set[int] = set()  # by what was returned to the caller
        self.born = 6

    @initialize(drained=st.lists(st.integers(0, 5), unique=True), surplus=st.integers(0, 3))
    def begin(self, drained: list[int], surplus: int) -> None:
        self.desired = 6
        self.leaving.want(self.desired, surplus, self.now)
        assert not self.leaving.is_over, "somebody may have been drained before"
        self.leaving.adopt(list(drained), surplus, self.now)
        self.drained |= set(drained)

    @rule(
        surplus=st.integers(0, 4),
        order=st.randoms(use_true_random=False),
        busy=st.sets(st.integers(0, 20)),
        in_order=st.booleans(),
        are_there=st.booleans(),
    )
    def turn(
        self, surplus: int, order: object, busy: set[int], *, in_order: bool, are_there: bool
    ) -> None:
        self.leaving.want(self.desired, surplus, self.now)
        strays = self.drained - self.leaving.known
        self.leaving.adopt(sorted(self.drained), surplus, self.now)
        assert strays <= self.leaving.known, "nobody is left drained whom nobody knows"
        self.leaving.see(self.present, self.now)
        before = set(self.leaving.named)
        candidates = sorted(self.present)
        order.shuffle(candidates)  # type: ignore[attr-defined] # Hypothesis's own
        new = self.leaving.name(candidates, surplus, self.now, are_there=are_there)
        assert not before & set(new)
        for one in list(self.leaving.staying):
            self.drained.discard(one)
            self.leaving.stayed(one)
        named = list(self.leaving.named)
        self.drained |= set(named)
        room = len(self.present) - len(self.leaving.going)
        assert len(named) == min(surplus, room), "as many as are wanted, if there are as many"
        in_flight = dict.fromkeys(busy, "1 reservation")
        why = self.leaving.let_go(in_flight, surplus, self.now, GONE_S, in_order=in_order)
        ready = list(self.leaving.ready)
        assert bool(why) == (len(ready) + self.leaving.blind < surplus)
        assert set(ready) <= set(named)
        assert not in_order or named[: len(ready)] == ready
        assert in_order or set(named) - busy <= set(ready)

    @rule(fewer=st.integers(0, 4))
    def lower(self, fewer: int) -> None:
        """The count is lowered, by us or by somebody else."""
        ready = list(self.leaving.ready)
        going = set(self.leaving.going)
        self.desired -= fewer
        ends = self.leaving.want(self.desired, 0, self.now)
        assert sum(ends.values()) == len(ready[:fewer])
        assert set(self.leaving.going) == going | set(ready[:fewer])

    @rule(one=st.integers(0, 20))
    def lose_sight(self, one: int) -> None:
        """It leaves every catalog that could be read, and is drained in one that could not."""
        self.leaving.see(self.present - {one}, self.now)

    @rule(more=st.integers(1, 4))
    def raise_it(self, more: int) -> None:
        self.desired += more
        self.leaving.want(self.desired, 0, self.now)

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
            self.leaving.want(self.desired, 0, self.now)
            self.leaving.adopt(sorted(self.drained), 0, self.now)
            self.leaving.see(self.present, self.now)
            for one in list(self.leaving.staying):
                self.drained.discard(one)
                self.leaving.stayed(one)
        assert not self.drained
        assert self.leaving.is_over


Pool.TestCase.settings = settings(max_examples=examples(100), deadline=None)
TestPool = Pool.TestCase


def test_a_lower_count_waits_for_work_and_for_names_but_not_for_ever() -> None:
    leaving = Leaving()
    leaving.adopt([], 2, 0.0)
    leaving.want(4, 2, 10.0)
    leaving.name([7], 2, 10.0)
    reason = leaving.let_go({7: "2 reservations"}, 2, 15.0, 30.0)
    assert reason == "worker 7: 2 reservations (5 s of 30); 1 of 2 could be named (0 s of 30)"
    leaving.name([7, 8], 2, 15.0)
    assert leaving.let_go({7: "", 8: ""}, 2, 15.0, 30.0) == ""
    assert leaving.let_go({7: "", 8: "1 reservation"}, 2, 44.9, 30.0)
    assert leaving.ready == [7]
    assert leaving.let_go({7: "", 8: "1 reservation"}, 2, 45.0, 30.0) == ""
    assert leaving.ready == [7, 8]
    leaving.want(4, 0, 46.0)
    assert leaving.staying == [8, 7], "who was named last first"
    leaving.want(4, 1, 50.0)
    assert "(0 s of 30)" in leaving.let_go({}, 1, 50.0, 30.0), "another wish, another wait"
    assert leaving.blind == 0
    assert leaving.let_go({}, 1, 80.0, 30.0) == ""
    assert leaving.blind == 1


def test_hundreds_that_wait_are_not_all_listed() -> None:
    leaving = Leaving()
    leaving.adopt(list(range(300)), 300, 0.0)
    reason = leaving.let_go(dict.fromkeys(range(300), "1 reservation"), 300, 0.0, 30.0)
    assert reason.endswith("worker 7: 1 reservation (0 s of 30); and 292 more")
