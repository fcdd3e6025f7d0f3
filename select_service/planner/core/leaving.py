"""Who of a pool is to go, and whether they may: a scale-down that cuts nobody off.

Engines that go are named before any replica count is lowered: they get no more work, what they have
goes on to its end, and then the count is lowered, by as many as are ready. `edge/retiring.py` asks
the selectors and tells them; here is what follows from their answers. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

__all__ = ["GONE_S", "Leaving"]

GONE_S: Final = 120.0
"""So long after its count was lowered a worker should have left every catalog; of one that has not,
somebody else was taken in its place: it works on."""

WORDS_MAX: Final = 8
"""Workers that are named in one reason: hundreds may go, and every decision is kept."""


class Leaving:
    """Those of one pool that are to go, by worker_id, each in one of three lists."""

    def __init__(self) -> None:
        self.named: list[int] = []
        """They get no more work, in the order they were chosen."""
        self.staying: list[int] = []
        """They were named and may stay after all: this is to be undone."""
        self.ready: list[int] = []
        """Those of the named that may go now."""
        self.blind = 0
        """So many may go now whom nobody could name."""
        self._gone: dict[int, float] = {}
        """The count was lowered for them, and when: they should disappear."""
        self._found: set[int] = set()
        """Of those that are gone: they were drained before us, perhaps for a count still high."""
        self._named_at: dict[int, float] = {}
        self._late: set[int] = set()
        self._short_since = math.inf
        self._desired: int | None = None
        self.is_new = True
        """Nobody has looked yet whom others have drained before us."""

    @property
    def is_over(self) -> bool:
        """Nothing is left to be done about anybody."""
        return not (self.is_new or self.named or self.staying or self._gone)

    @property
    def going(self) -> list[int]:
        """Those for whom the count was lowered that have not left yet."""
        return list(self._gone)

    def adopt(self, drained: Sequence[int], surplus: int, now: float) -> None:
        """Go on with those who were drained before us, or are drained still where we lost sight.

        Those who are known are passed over; others are named, or taken as on their way out.
        """
        self.is_new = False
        known = self.known
        strays = [one for one in drained if one not in known]
        room = max(0, surplus - len(self.named))
        self.named += strays[:room]
        self._named_at |= dict.fromkeys(strays[:room], now)
        self._gone |= dict.fromkeys(strays[room:], now)
        self._found |= set(strays[room:])

    @property
    def known(self) -> set[int]:
        """Everybody in one of the lists."""
        return {*self.named, *self.staying, *self._gone}

    def want(self, desired: int, surplus: int, now: float) -> dict[str, int]:
        """So many replicas are asked for, and so many of them are too many.

        Where fewer are asked for than before, those that were ready go, whoever lowered the count:
        an answer of an API server may get lost. Who was named last of more than `surplus` may stay.

        Returns:
            how many go that were idle, and how many that were late.
        """
        lowered = 0 if self._desired is None else max(0, self._desired - desired)
        self._desired = desired
        gone = self.ready[:lowered]
        self._gone |= dict.fromkeys(gone, now)
        self.named = [one for one in self.named if one not in self._gone]
        self.ready, self.blind = [], 0
        self.staying += self.named[surplus:][::-1]
        del self.named[surplus:]
        if not surplus:
            self._short_since = math.inf
        late = sum(one in self._late for one in gone)
        return {"idle": len(gone) - late, "late": late}

    def see(self, present: Collection[int], now: float) -> None:
        """Forget who has left by itself; who should have left long ago stays."""
        self.named = [one for one in self.named if one in present]
        self.staying = [one for one in self.staying if one in present]
        left = {id_: at for id_, at in self._gone.items() if id_ in present}
        self._gone = {id_: at for id_, at in left.items() if now - at < GONE_S}
        self._found &= self._gone.keys()
        self.staying += [one for one in left if one not in self._gone]

    def name(
        self, candidates: Sequence[int], surplus: int, now: float, *, are_there: bool = False
    ) -> list[int]:
        """Name those of them who are not, `surplus` in all at most; returns the new ones.

        Args:
            candidates: first those who go first.
            surplus: how many are to go.
            now: monotonic seconds.
            are_there: nobody stops them yet: whom others drained before us was drained for this.
        """
        known = {*self.named, *self._gone}
        if are_there:
            known -= self._found
        new = [one for one in candidates if one not in known]
        new = new[: max(0, surplus - len(self.named))]
        again = set(new)
        self.staying = [one for one in self.staying if one not in again]
        self._gone = {id_: at for id_, at in self._gone.items() if id_ not in again}
        self._found -= again
        self.named += new
        self._named_at |= dict.fromkeys(again, now)
        return new

    def stayed(self, one: int) -> None:
        """All is undone for one of those who stay."""
        self.staying.remove(one)

    def let_go(
        self,
        in_flight: Mapping[int, str],
        surplus: int,
        now: float,
        most_s: float,
        *,
        in_order: bool = False,
    ) -> str:
        """Find who is `ready`, and say in words what the others wait for; empty: nobody waits.

        Args:
            in_flight: on those who are named, in words; empty: nothing.
            surplus: how many are to go.
            now: monotonic seconds.
            most_s: nobody is waited for longer than that after he was named.
            in_order: nobody can go before those who were named before him.
        """
        self._named_at = {one: self._named_at[one] for one in self.named}
        self.ready, self.blind, self._late = [], 0, set()
        words: list[str] = []
        for one in self.named:
            why = in_flight.get(one, "")
            waited_s = now - self._named_at[one]
            if why and waited_s < most_s:
                words.append(f"worker {one}: {why} ({waited_s:.0f} s of {most_s:.0f})")
            elif not (in_order and words):
                self.ready.append(one)
                self._late |= {one} if why else set()
        missing = surplus - len(self.named)
        self._short_since = min(self._short_since, now) if missing > 0 else math.inf
        if missing > 0:
            waited_s = now - self._short_since
            if waited_s < most_s:
                named = f"{len(self.named)} of {surplus} could be named"
                words.append(f"{named} ({waited_s:.0f} s of {most_s:.0f})")
            elif not (in_order and words):
                self.blind = missing
        more = [f"and {len(words) - WORDS_MAX} more"] if len(words) > WORDS_MAX else []
        return "; ".join([*words[:WORDS_MAX], *more])

    def check(self) -> None:
        """Assert what is promised."""
        ids = [*self.named, *self.staying, *self._gone]
        assert len(set(ids)) == len(ids), "nobody is in two lists, or twice in one"
        assert set(self.named) <= self._named_at.keys(), "of everybody it is known since when"
        assert self._found <= self._gone.keys()
