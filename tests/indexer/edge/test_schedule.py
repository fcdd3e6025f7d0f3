"""Who is looked at when, beside a twin that looks through all of them each time."""

from __future__ import annotations

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from indexer.edge.schedule import Schedule

ONES = st.integers(0, 7)
TIMES = st.one_of(st.integers(0, 40).map(float), st.just(inf))


class RoundsMachine(RuleBasedStateMachine):
    """Whoever is looked at always is, and whoever is due is, once, and never later than asked."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds = Schedule()
        self.always: set[int] = set()
        self.due: dict[int, float] = {}
        self.now = 0.0

    @rule(one=ONES)
    def look_always(self, one: int) -> None:
        self.rounds.always(one)
        self.always.add(one)

    @rule(one=ONES)
    def rest(self, one: int) -> None:
        self.rounds.rest(one)
        self.always.discard(one)

    @rule(one=ONES, due=TIMES)
    def look_at(self, one: int, due: float) -> None:
        self.rounds.at(one, due)
        self.due[one] = min(due, self.due.get(one, inf))

    @rule(one=ONES)
    def forget(self, one: int) -> None:
        self.rounds.forget(one)
        self.always.discard(one)
        self.due.pop(one, None)

    @rule(seconds=st.integers(0, 15))
    def take(self, seconds: int) -> None:
        self.now += seconds
        taken = self.rounds.take(self.now)
        wanted = self.always | {one for one, due in self.due.items() if due <= self.now}
        assert sorted(taken) == sorted(wanted)
        self.due = {one: due for one, due in self.due.items() if due > self.now}

    def teardown(self) -> None:
        self.rounds.check()


TestRounds = RoundsMachine.TestCase


def test_what_is_put_off_again_and_again_takes_no_room() -> None:
    rounds = Schedule()
    for now in range(1_000):
        rounds.always(1)
        rounds.rest(1)
        rounds.at(1, now + 10.0)
        if 1 in rounds.take(now):
            rounds.at(1, now + 10.0)
    assert len(rounds._heap) == 1
    rounds.check()
