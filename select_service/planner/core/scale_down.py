"""The state of a graceful scale-down: which workers of a pool leave, and which may go now.

Workers are named before the replica count is lowered. They get no more work, finish what they have,
and the count then falls by as many as are ready. Pure: `edge/engine_drain.py` talks to the
selectors, this decides what follows from their answers. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

GONE_S: Final = 120.0
"""A worker leaves every catalog within this time after the count was lowered for it. If it has not,
another one was stopped in its place, and it serves again."""

WORDS_MAX: Final = 8
"""Workers listed in one reason: hundreds may leave, and every decision is kept."""


class Leaving:
    """The leaving workers of one pool, by worker_id, each in one of three lists."""

    def __init__(self) -> None:
        self.named: list[int] = []
        """Workers that get no more work, in the order they were chosen."""
        self.staying: list[int] = []
        """Workers that were named but stay after all; their drain is still to be undone."""
        self.ready: list[int] = []
        """The named workers that may go now."""
        self.blind = 0
        """Further replicas that may go now although no worker could be named for them."""
        self._gone: dict[int, float] = {}
        """Workers for which the count was lowered, and when; they should disappear."""
        self._found: set[int] = set()
        """Those in `_gone` that an earlier planner drained; the count may not be lowered yet."""
        self._named_at: dict[int, float] = {}
        self._late: set[int] = set()
        self._short_since = math.inf
        self._desired: int | None = None
        self.is_new = True
        """Drains of an earlier planner have not been looked for yet."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.is_new or self.named or self.staying or self._gone)

    @property
    def going(self) -> list[int]:
        """Workers for which the count was lowered and that have not left yet."""
        return list(self._gone)

    def adopt(self, drained: Sequence[int], surplus: int, now: float) -> None:
        """Take over drains of an earlier planner, or drains that were lost sight of.

        Known workers are skipped. Of the others, as many as fit into `surplus` are named, and the
        rest counts as on its way out.
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
        """All workers in one of the lists."""
        return {*self.named, *self.staying, *self._gone}

    def want(self, desired: int, surplus: int, now: float) -> dict[str, int]:
        """Note that `desired` replicas exist, of which `surplus` are too many.

        If `desired` fell since the last call, ready workers go, whatever lowered it: the API
        server's answer to us may have been lost. Workers named beyond `surplus` stay, the last
        named first.

        Returns:
            how many workers went idle, and how many late.
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
        """Forget workers that have left. A worker that should have left long ago stays."""
        self.named = [one for one in self.named if one in present]
        self.staying = [one for one in self.staying if one in present]
        left = {id_: at for id_, at in self._gone.items() if id_ in present}
        self._gone = {id_: at for id_, at in left.items() if now - at < GONE_S}
        self._found &= self._gone.keys()
        self.staying += [one for one in left if one not in self._gone]

    def name(
        self, candidates: Sequence[int], surplus: int, now: float, *, are_there: bool = False
    ) -> list[int]:
        """Name candidates until `surplus` workers are named; returns the new ones.

        Args:
            candidates: in the order in which they should go.
            surplus: how many are to go.
            now: monotonic seconds.
            are_there: their pods still run, so the drains of an earlier planner were for this
                scale-down.
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
        """Note that the drain of a staying worker is undone."""
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
        """Find the `ready` workers, and say what the others wait for; empty: nothing.

        Args:
            in_flight: work on the named workers, as text; empty: none.
            surplus: how many are to go.
            now: monotonic seconds.
            most_s: the longest wait for a worker, from when it was named.
            in_order: a worker cannot go before those named before it.
        """
        self._named_at = {one: self._named_at[one] for one in self.named}
        self.ready, self.blind, self._late = [], 0, set()
        waits: list[str] = []
        for one in self.named:
            why = in_flight.get(one, "")
            waited_s = now - self._named_at[one]
            if why and waited_s < most_s:
                waits.append(f"worker {one}: {why} ({waited_s:.0f} s of {most_s:.0f})")
            elif not (in_order and waits):
                self.ready.append(one)
                self._late |= {one} if why else set()
        missing = surplus - len(self.named)
        self._short_since = min(self._short_since, now) if missing > 0 else math.inf
        if missing > 0:
            waited_s = now - self._short_since
            if waited_s < most_s:
                named = f"{len(self.named)} of {surplus} could be named"
                waits.append(f"{named} ({waited_s:.0f} s of {most_s:.0f})")
            elif not (in_order and waits):
                self.blind = missing
        more = [f"and {len(waits) - WORDS_MAX} more"] if len(waits) > WORDS_MAX else []
        return "; ".join([*waits[:WORDS_MAX], *more])

    def check(self) -> None:
        """Assert all invariants."""
        ids = [*self.named, *self.staying, *self._gone]
        assert len(set(ids)) == len(ids), "none is in two lists, or twice in one"
        assert set(self.named) <= self._named_at.keys(), "of all it is known since when"
        assert self._found <= self._gone.keys()
