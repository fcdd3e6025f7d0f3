"""Which set of `count` workers is the cheapest to lose together.

Losing a worker costs what only it holds, and losing the last of several costs what they share. So
the cost of one only grows with those lost before it, and the cheapest pair need not include the
cheapest one. `operations/scale_down.py` determines what is at stake; here
workers are only positions in a list ("places") with numbers.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Final

from indexer.core.node import bits

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

SETS_MAX: Final = 2_000
"""Partial sets examined: a tenth of a second of work, in slices, for 64 workers. If little is
shared, a few dozen are enough to be sure."""

GROUPS_PER_SLICE: Final = 32

_BETTER: Final = 1.0 - 1e-9
"""A set must beat another by more than the rounding errors of float sums."""


class _Account:
    """The current cost of each place, given those already taken."""

    def __init__(self, alone: Sequence[float], shared: Mapping[int, float]) -> None:
        self.marginal = list(alone)
        self._left = list(shared)  # for each group: mask of its places that are still there
        self._weight = list(shared.values())
        self._groups: list[list[int]] = [[] for _ in alone]

    def fill(self) -> Generator[None, None, None]:
        """Record the groups of every place, and add unshared costs; yields in between."""
        for number, mask in enumerate(self._left):
            if not number % GROUPS_PER_SLICE:
                yield
            if not mask & mask - 1:
                self.marginal[mask.bit_length() - 1] += self._weight[number]
                continue
            for place in bits(mask):
                self._groups[place].append(number)

    def take(self, place: int) -> None:
        """Remove a place; the last one left of a group then bears its whole weight."""
        left = self._left
        for group in self._groups[place]:
            rest = left[group] = left[group] ^ 1 << place
            if rest and not rest & rest - 1:
                self.marginal[rest.bit_length() - 1] += self._weight[group]

    def put_back(self, place: int) -> None:
        """Undo the most recent `take`."""
        left = self._left
        for group in self._groups[place]:
            rest = left[group]
            if rest and not rest & rest - 1:
                self.marginal[rest.bit_length() - 1] -= self._weight[group]
            left[group] = rest ^ 1 << place

    def cheapest(self, places: Collection[int]) -> int:
        """Return the place that costs least now, the first of equals."""
        return min(places, key=lambda place: (self.marginal[place], place))


def cheapest_set(
    alone: Sequence[float], shared: Mapping[int, float], firsts: Sequence[int], count: int
) -> Generator[None, None, list[int]]:
    """Choose up to `count` places, in the order to lose them; yields between slices of work.

    Those in `firsts` come first. The rest is found by repeatedly taking the cheapest, unless one of
    `SETS_MAX` other sets costs less together. Either way each next place in the answer is the
    cheapest of the set once those before it are gone.

    Args:
        alone: cost of losing each place, whatever else goes; not negative.
        shared: mask of places → cost of losing all of them; not negative.
        firsts: places to lose before others.
        count: how many to choose.
    """
    account = _Account(alone, shared)
    yield from account.fill()
    before = yield from _one_by_one(account, firsts, count)
    others = set(range(len(alone))).difference(before)
    wanted = min(count - len(before), len(others))
    if wanted < 1:
        return before
    search = _Search(account, others, wanted)
    yield from search.run()
    return before + (yield from _one_by_one(account, search.best, wanted))


def marginals(
    order: Sequence[int], alone: Sequence[float], shared: Mapping[int, float]
) -> Generator[None, None, list[float]]:
    """Return what each of `order` costs once those before it are gone; in slices."""
    turn = {place: number for number, place in enumerate(order)}
    lost = [alone[place] for place in order]
    for number, (mask, weight) in enumerate(shared.items()):
        if not number % GROUPS_PER_SLICE:
            yield
        last = max(turn.get(place, len(order)) for place in bits(mask))
        if last < len(order):
            lost[last] += weight
    return lost


def _one_by_one(
    account: _Account, places: Collection[int], count: int
) -> Generator[None, None, list[int]]:
    """Repeatedly take the cheapest place; `account` is left without them."""
    left, taken = set(places), list[int]()
    while left and len(taken) < count:
        place = account.cheapest(left)
        account.take(place)
        left.remove(place)
        taken.append(place)
        yield
    return taken


class _Search:
    """Branch and bound over sets of `wanted` places: costs only grow as others go."""

    def __init__(self, account: _Account, places: Collection[int], wanted: int) -> None:
        self._account = account
        self._order = sorted(places, key=lambda place: (account.marginal[place], place))
        self._wanted = wanted
        self._left = SETS_MAX
        self._cost = 0.0
        self._picked: list[int] = []
        self.best: list[int] = []

    def run(self) -> Generator[None, None, None]:
        """Find the best set; `account` is restored."""
        account = self._account
        before = account.marginal.copy()
        for _ in range(self._wanted):
            place = account.cheapest(set(self._order).difference(self.best))
            self._cost += account.marginal[place]
            account.take(place)
            self.best.append(place)
            yield
        for place in reversed(self.best):
            account.put_back(place)
            yield
        account.marginal[:] = before  # float sums are not exactly reversible
        if self._wanted < len(self._order):
            yield from self._branch(0, 0.0)
        account.marginal[:] = before

    def _branch(self, start: int, cost: float) -> Generator[None, None, None]:
        need = self._wanted - len(self._picked)
        if not need:
            if cost < self._cost * _BETTER:
                self._cost, self.best = cost, self._picked.copy()
            return
        marginal = self._account.marginal
        for number in range(start, len(self._order) - need + 1):
            rest = self._order[number:]
            least = cost + sum(nsmallest(need, map(marginal.__getitem__, rest)))
            if self._left <= 0 or least >= self._cost * _BETTER:
                return
            self._left -= 1
            yield
            place = rest[0]
            price = marginal[place]
            self._account.take(place)
            self._picked.append(place)
            yield from self._branch(number + 1, cost + price)
            self._picked.pop()
            self._account.put_back(place)
            yield
