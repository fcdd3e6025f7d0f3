"""When a refused request should come again, and that it then finds its place.

Each refusal is given the next free place on the timeline on which its kind of room drains: a
virtual schedule, so that those who were refused together do not return together. Who returns at
its time is recognised by what it asks for and is not refused for load again; it goes, or waits in
front of nobody more important. Without that, newcomers would take the room it was told to wait
for. What is promised is bounded in number and time; nobody is promised what cannot be kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from msgspec import Struct

SLOTS_MAX: Final = 65_536
"""Promises at once, about 200 bytes each."""
HORIZON_S: Final = 300.0
"""No promise lies further ahead; later ones are told to ask again then, without one."""
GRACE_S: Final = 5.0
"""A promise holds so long after its time: the header counts whole seconds, networks take some."""
GRACE_SHARE: Final = 0.1
"""And this share of the wait more."""
EARLY_S: Final = 0.05
"""Timers fire early by no more than that."""
UNKNOWN_S: Final = 1.0
"""Where no rate is known: between this and twice this."""
SAME_MAX: Final = 64
"""Promises for requests nobody can tell apart; one who can be recognised has a single one."""
FORGOTTEN_PER_CALL: Final = 64
LINES_MAX: Final = 8_192
"""Timelines at once: one per pool, or one per tenant with an allowance of its own."""
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0


class Room(NamedTuple):
    """What a refused request waits for."""

    line: str  # whose room: one timeline each
    work: float  # how much of it, in the line's unit
    rate: float  # units that drain per second; 0 or less: nobody knows
    earliest_s: float  # before that it is taken by others anyway


NO_ROOM: Final = Room("", 0.0, 0.0, 0.0)


class PromiseCounts(Struct):
    """How promises ended."""

    kept: int = 0
    """Their request came in time."""
    broken: int = 0
    """Nobody came for them."""


class Promise(NamedTuple):
    """What a refused request is told."""

    retry_after_s: float
    is_kept: bool  # whether a place is held


class _Line:
    """One timeline: until when each band's room is promised."""

    __slots__ = ("free_at",)

    def __init__(self, bands: int) -> None:
        self.free_at = [0.0] * bands


class ReturnBook:
    """Promised returns by key (who asks for what) and time.

    Args:
        bands: how many priorities there are, most important first.
        slots_max: promises at once.
        horizon_s: how far ahead.
        counts: where books count together that follow one another, or stand beside one another.
    """

    def __init__(
        self,
        bands: int,
        *,
        slots_max: int = SLOTS_MAX,
        horizon_s: float = HORIZON_S,
        counts: PromiseCounts | None = None,
    ) -> None:
        self._bands = bands
        self._slots_max = slots_max
        self._horizon_s = horizon_s
        self._lines: OrderedDict[str, _Line] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, list[tuple[float, float]]] = {}  # (at, until), in order given
        self._expiries: list[tuple[float, bytes]] = []  # a heap of what was given
        self._given = 0  # draws the spread of those without a rate
        self.size = 0
        self.counts = counts or PromiseCounts()

    def anew(self, bands: int) -> ReturnBook:
        """Return a book with the same limits and counters, and no promises: those are broken."""
        self.give_up()
        return ReturnBook(
            bands, slots_max=self._slots_max, horizon_s=self._horizon_s, counts=self.counts
        )

    def give_up(self) -> None:
        """Nobody will look into this book again: what it has promised is broken."""
        self.counts.broken += self.size
        self._by_key.clear()
        self._expiries.clear()
        self.size = 0

    def grant(
        self, key: bytes, band: int, room: Room, now: float, *, is_unique: bool = True
    ) -> Promise:
        """Give a refused request its time to return.

        Args:
            key: what it will be recognised by; empty: it cannot be, and is only told a time.
            band: its priority's band; promises of bands below do not delay it.
            room: what it waits for.
            now: monotonic seconds.
            is_unique: whether the key names one request, and not all that look the same.
        """
        line, work, rate, earliest_s = room
        self._given += 1
        self._forget(now)
        held = self._by_key.get(key) if key else None
        most = 1 if is_unique else SAME_MAX
        if held and len(held) >= most and held[-1][0] > now + EARLY_S:
            return Promise(held[-1][0] - now, is_kept=True)  # it came early: the same answer
        spread = self._given * _GOLDEN % 1.0
        if rate <= 0.0:
            return Promise(max(earliest_s, UNKNOWN_S) + UNKNOWN_S * spread, is_kept=False)
        free_at = self._line(line).free_at
        at = max(now + earliest_s, free_at[band])
        if at - now > self._horizon_s:
            return Promise(self._horizon_s * (0.5 + 0.5 * spread), is_kept=False)
        takes = work / rate
        after = at + takes
        for lower in range(band, self._bands):
            moved = free_at[lower] + takes
            free_at[lower] = max(after, moved)
        if not key or self.size >= self._slots_max:
            return Promise(at - now, is_kept=False)
        until = at + 1.0 + GRACE_S + GRACE_SHARE * (at - now)
        if held is None:
            self._by_key[key] = [(at, until)]
        else:
            held.append((at, until))
        heappush(self._expiries, (until, key))
        self.size += 1
        return Promise(at - now, is_kept=True)

    def _line(self, name: str) -> _Line:
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = _Line(self._bands)
            if len(self._lines) > LINES_MAX:
                self._lines.popitem(last=False)
        else:
            self._lines.move_to_end(name)
        return line

    def is_due(self, key: bytes, now: float) -> bool:
        """Tell whether this request was told to come about now."""
        if not self.size or not key:
            return False
        self._forget(now)
        held = self._by_key.get(key)
        if held is None:
            return False
        return any(at <= now + EARLY_S and until > now for at, until in held)

    def redeem(self, key: bytes) -> None:
        """It came and goes on: its oldest promise is kept."""
        held = self._by_key.get(key)
        if held is None:
            return
        held.pop(0)
        self.size -= 1
        self.counts.kept += 1
        if not held:
            del self._by_key[key]
        if len(self._expiries) > 2 * self.size + 1024:
            self._expiries = [
                (until, one) for one, some in self._by_key.items() for _, until in some
            ]
            heapify(self._expiries)

    def _forget(self, now: float) -> None:
        """Drop some promises nobody came for; the heap holds kept ones, too, for a while."""
        for _ in range(FORGOTTEN_PER_CALL):
            if not self._expiries or self._expiries[0][0] > now:
                return
            until, key = heappop(self._expiries)
            held = self._by_key.get(key, [])
            # not always the oldest: a later one may have been promised an earlier time
            at = next((at for at, (_, one) in enumerate(held) if one == until), None)
            if at is None:
                continue  # it was kept
            held.pop(at)
            self.size -= 1
            self.counts.broken += 1
            if not held:
                del self._by_key[key]

    def check(self) -> None:
        """State every promise of the book."""
        assert self.size == sum(len(held) for held in self._by_key.values())
        assert all(self._by_key.values()), "no key without a promise"
        assert self.size <= self._slots_max
        assert len(self._expiries) >= self.size
