"""Who of a pool is to go, and whether they may: a scale-down that cuts nobody off.

Engines that go are named before any replica count is lowered: they get no more work, what they have
goes on to its end, and only then is the count lowered. `edge/retiring.py` asks the selectors and
tells them; here is what follows from their answers. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["GONE_S", "Leaver", "Leaving"]

GONE_S: Final = 120.0
"""So long after its count was lowered a worker should have left every catalog; of one that has not,
somebody else was taken in its place: it works on."""


@dataclass(frozen=True, slots=True)
class Leaver:
    """A worker that gets no more work."""

    worker_id: int
    host: str
    """Of its endpoint: an address, as pods have one; empty: it has not said."""
    ours: bool
    """We drain it, and may take that back; False: somebody else does."""


class Leaving:
    """Those of one pool that are to go, each in one of three lists."""

    def __init__(self) -> None:
        self.named: list[Leaver] = []
        """They get no more work, in the order they were chosen."""
        self.staying: list[Leaver] = []
        """They were named and may stay after all: this is to be undone."""
        self._gone: dict[int, tuple[Leaver, float]] = {}
        """The count was lowered for them, and when: they should disappear."""
        self._began_at = math.inf
        self.is_new = True
        """Nobody has looked yet whom others have drained before us."""

    @property
    def is_over(self) -> bool:
        """Nothing is left to be done about anybody."""
        return not (self.is_new or self.named or self.staying or self._gone)

    @property
    def going(self) -> int:
        """For how many the count was lowered that have not left yet."""
        return len(self._gone)

    def waited_s(self, now: float) -> float:
        """Return since when fewer are wanted."""
        return max(0.0, now - self._began_at)

    def take_over(self, drained: Sequence[Leaver], surplus: int, now: float) -> None:
        """Go on with those who were drained before us: as named, or as on their way out."""
        self.is_new = False
        self.named = list(drained[:surplus])
        self._gone = {one.worker_id: (one, now) for one in drained[surplus:]}

    def want(self, surplus: int, now: float) -> None:
        """So many are too many: who was named last of more may stay."""
        self._began_at = min(self._began_at, now) if surplus else math.inf
        self.staying += self.named[surplus:][::-1]
        del self.named[surplus:]

    def see(self, present: Collection[int], now: float) -> None:
        """Forget who has left by itself; who should have left long ago stays."""
        self.named = [one for one in self.named if one.worker_id in present]
        self.staying = [one for one in self.staying if one.worker_id in present]
        left = {id_: seen for id_, seen in self._gone.items() if id_ in present}
        self._gone = {id_: seen for id_, seen in left.items() if now - seen[1] < GONE_S}
        self.staying += [one for id_, (one, _) in left.items() if id_ not in self._gone]

    def name(self, candidates: Sequence[Leaver], surplus: int) -> list[Leaver]:
        """Name those of them who are not, `surplus` in all at most; returns the new ones."""
        known = {one.worker_id for one in self.named} | self._gone.keys()
        new = [one for one in candidates if one.worker_id not in known]
        new = new[: max(0, surplus - len(self.named))]
        again = {one.worker_id for one in new}
        self.staying = [one for one in self.staying if one.worker_id not in again]
        self.named += new
        return new

    def stayed(self, one: Leaver) -> None:
        """All is undone for one of those who stay."""
        self.staying.remove(one)

    def lower(self, now: float) -> None:
        """The count was lowered: who is named goes."""
        self._gone |= {one.worker_id: (one, now) for one in self.named}
        self.named = []
        self._began_at = math.inf

    def waits_for(
        self, in_flight: Mapping[int, str], surplus: int, now: float, most_s: float
    ) -> str:
        """Say what the lower count waits for; empty: for nothing, or for too long already.

        Args:
            in_flight: on those who are named, in words; empty: nothing.
            surplus: how many are to go.
            now: monotonic seconds.
            most_s: nobody waits for longer.
        """
        waited_s = self.waited_s(now)
        if waited_s >= most_s:
            return ""
        words = [f"worker {id_}: {why}" for id_, why in in_flight.items() if why]
        if len(self.named) < surplus:
            words.append(f"{len(self.named)} of {surplus} could be named")
        return f"{'; '.join(words)} ({waited_s:.0f} s of {most_s:.0f})" if words else ""

    def check(self) -> None:
        """Assert what is promised."""
        ids = [one.worker_id for one in (*self.named, *self.staying)]
        ids += list(self._gone)
        assert len(set(ids)) == len(ids), "nobody is in two lists, or twice in one"
        assert not self.named or self._began_at < math.inf, "nobody is named for nothing"
