"""Fair turns: a few of many per turn, each once per round; busy ones come again next turn.

`registry` sweeps indexes with it, the service's upkeep visits scopes.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

Name = TypeVar("Name", bound="Hashable")


class RoundRobinNames(Generic[Name]):
    """Cycles through the names of things that come and go.

    It keeps names only, so it keeps nothing alive that is removed before its turn.

    Attributes:
        per_turn: limit per turn, and the same limit again for those that have work left.
    """

    def __init__(self, per_turn: int) -> None:
        self.per_turn = per_turn
        self._ahead: deque[Name] = deque()
        self._busy: dict[Name, None] = {}

    def turn(self, everything: Callable[[], Iterable[Name]]) -> list[Name]:
        """Return whose turn it is, without duplicates; starts a new round after the last one.

        Regular turns come first, so that busy ones cannot use up the turn.

        Args:
            everything: returns all names; called at the beginning of a round.
        """
        if not self._ahead:
            self._ahead.extend(everything())
        ahead = min(self.per_turn, len(self._ahead))
        some = [self._ahead.popleft() for _ in range(ahead)]
        for name in some:
            self._busy.pop(name, None)
        again = list(islice(self._busy, self.per_turn))
        for name in again:
            del self._busy[name]
        return some + again

    def has_more(self, name: Name) -> None:
        """Give it another turn soon, after those that are already waiting for another one."""
        self._busy[name] = None

    @property
    def is_over(self) -> bool:
        """Whether the round has ended and nothing has work left."""
        return not (self._ahead or self._busy)

    @property
    def is_busy(self) -> bool:
        """Whether anything has work left. The test to use when one turn serves two rounds.

        Each starts again once it has ended; waiting for both to end in the same turn might never
        end.
        """
        return bool(self._busy)

    @property
    def is_new(self) -> bool:
        """Whether the next turn begins a new round."""
        return not self._ahead
