"""Some of many in each turn: nobody is left out, and who has work left comes again in the next."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

Name = TypeVar("Name", bound="Hashable")


class Rounds(Generic[Name]):
    """Goes round the names of things that come and go.

    It keeps their names only: what is gone before its turn is not kept alive until then.

    Attributes:
        per_turn: so many at most, and as many again of those that have work left.
    """

    def __init__(self, per_turn: int) -> None:
        self.per_turn = per_turn
        self._ahead: deque[Name] = deque()
        self._busy: dict[Name, None] = {}

    def turn(self, everything: Callable[[], Iterable[Name]]) -> list[Name]:
        """Whose turn it is, none twice; after the last of a round another begins.

        Those of the round are first: what a turn may do is not used up by who is always busy.

        Args:
            everything: all there is, asked at the beginning of a round.
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
        """Give it another turn at once, after those that wait for theirs already."""
        self._busy[name] = None

    @property
    def is_over(self) -> bool:
        """Whether the round has ended and nothing has work left."""
        return not (self._ahead or self._busy)

    @property
    def is_busy(self) -> bool:
        """Whether somebody has work left. Of two rounds in one turn, one may ask only for this.

        Each begins anew when it has ended: if both had to end in the same turn, neither would rest.
        """
        return bool(self._busy)

    @property
    def is_new(self) -> bool:
        """Whether the next turn begins a round."""
        return not self._ahead
