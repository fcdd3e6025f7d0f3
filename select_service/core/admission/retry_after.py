"""Promises to refused requests: when to return, and that they then find a place.

Each refusal is given the next free place on the timeline on which its kind of room drains, a
virtual schedule, so that requests refused together do not return together. A request that returns
in time is recognised by its content and not refused for load again; it goes, or waits behind only
more important ones. Without that, newcomers would take the room it waits for. Promises
are bounded in number and time, and none is made that cannot be kept.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from msgspec import Struct

from select_service.core.tenancy.shares import Shares
from select_service.core.tenancy.tenant_memory import TenantMemory
from select_service.types.admission import AdmissionSettings

_USUAL: Final = AdmissionSettings()
GRACE_S: Final = 5.0
"""A promise holds this long past its time: the header has whole seconds, networks add delay."""
GRACE_SHARE: Final = 0.1
"""A promise holds longer by this share of the wait."""
EARLY_S: Final = 0.05
"""Timers fire at most this early."""
UNKNOWN_S: Final = 1.0
"""Without a known rate, the wait is between this and twice this."""
SAME_MAX: Final = 64
"""Promises per key of indistinguishable requests; a request with a unique key has one."""
HORIZON_LEAST_S: Final = 600.0
"""As far ahead promises are made at once; `horizon_s`, if that is less."""
HORIZON_SHARE: Final = 60.0
"""Farther only as far as this many times the seconds for which a line has refused: after a burst of
seconds no client is asked to return in an hour."""
CALM_S: Final = 30.0
"""A line without a refusal for so long begins anew."""
FORGOTTEN_PER_CALL: Final = 64
LINES_MAX: Final = 8_192
"""Timelines held at once: one per pool, or one per tenant with an allowance of its own."""
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0


class Room(NamedTuple):
    """The room a refused request waits for."""

    line: str  # the timeline of this room
    work: float  # how much of it, in the line's unit
    rate: float  # units that drain per second; 0 or less: unknown
    earliest_s: float  # until then others are served anyway


NO_ROOM: Final = Room("", 0.0, 0.0, 0.0)


class PromiseCounts(Struct):
    """How promises ended."""

    kept: int = 0
    """The request came in time."""
    broken: int = 0
    """No request came for it."""


class Promise(NamedTuple):
    """The answer to a refused request."""

    retry_after_s: float
    is_kept: bool  # whether a place is held


class _Held(NamedTuple):
    """A promise that may yet be kept."""

    at: float
    until: float
    tenant: str | None


class _Line:
    """One timeline: the time until which each band's room is promised."""

    __slots__ = ("free_at", "refused_at", "since", "tenant")

    def __init__(self, bands: int, tenant: str | None) -> None:
        self.free_at = [0.0] * bands
        self.tenant = tenant
        self.since = self.refused_at = -math.inf  # the first refusal without a calm since, the last

    def horizon_s(self, now: float) -> float:
        """Return how far ahead promises are made to a request that is refused now."""
        if now - self.refused_at > CALM_S:
            self.since = now
        self.refused_at = now
        return max(HORIZON_LEAST_S, HORIZON_SHARE * (now - self.since))


class RetryPromises:
    """Promised returns by key (requester and content) and time.

    Args:
        bands: the number of priorities, most important first.
        slots_max: promises at once, about 200 bytes each; a tenant of `shares` has a part of them.
        horizon_s: how far ahead at most, see `HORIZON_SHARE`; later requests are to ask again by
            then, without a promise.
        counts: shared by successive or parallel books that count together.
        shares: of the tenants whose pools have this book in common; None: it is of one pool.
    """

    def __init__(
        self,
        bands: int,
        *,
        slots_max: int = _USUAL.return_slots_max,
        horizon_s: float = _USUAL.return_horizon_s,
        counts: PromiseCounts | None = None,
        shares: Shares | None = None,
    ) -> None:
        self._bands = bands
        self._slots_max = slots_max
        self._horizon_s = horizon_s
        shares = shares or Shares()
        self._slots = shares.bound("return_slots_max", lambda: self._slots_max)
        self._lines: TenantMemory[str, _Line] = TenantMemory(
            shares, "return_lines", lambda: LINES_MAX
        )
        """By tenant and name, least recently used first."""
        self._by_key: dict[bytes, list[_Held]] = {}  # in the order given
        self._expiries: list[tuple[float, bytes]] = []  # a heap of all promises given
        self._given = 0  # spreads the returns of requests without a rate
        self.size = 0
        self.counts = counts or PromiseCounts()

    def anew(self, bands: int) -> RetryPromises:
        """Return a book with the same limits and counters; the promises of this one are broken."""
        self.give_up()
        return RetryPromises(
            bands, slots_max=self._slots_max, horizon_s=self._horizon_s, counts=self.counts
        )

    def begin(self, bands: int, *, slots_max: int, horizon_s: float) -> None:
        """Begin anew, with other limits; all promises are broken."""
        self.give_up()
        self._bands, self._slots_max, self._horizon_s = bands, slots_max, horizon_s
        for name, line in self._lines.items():
            self._lines.pop(line.tenant, name)

    def give_up(self) -> None:
        """Count all promises as broken: this book will not be consulted again."""
        self.counts.broken += self.size
        self._by_key.clear()
        self._expiries.clear()
        self._slots.recount({})
        self.size = 0

    def grant(
        self,
        key: bytes,
        band: int,
        room: Room,
        now: float,
        *,
        is_unique: bool = True,
        tenant: str | None = None,
    ) -> Promise:
        """Give a refused request its time to return.

        `key` recognises the request later; if empty, it cannot be, and gets a time without
        a promise. `is_unique`: it names one request, not all that look the same. Promises
        to bands below its own do not delay it.
        """
        line, work, rate, earliest_s = room
        self._given += 1
        self._forget(now)
        held = self._by_key.get(key) if key else None
        most = 1 if is_unique else SAME_MAX
        if held and len(held) >= most and held[-1].at > now + EARLY_S:
            return Promise(held[-1].at - now, is_kept=True)  # it came early: repeat the answer
        spread = self._given * _GOLDEN % 1.0
        if rate <= 0.0:
            earliest_s = min(max(earliest_s, UNKNOWN_S), self._horizon_s)
            return Promise(earliest_s + UNKNOWN_S * spread, is_kept=False)
        timeline = self._line(line, tenant)
        free_at, horizon_s = timeline.free_at, min(self._horizon_s, timeline.horizon_s(now))
        at = max(now + earliest_s, free_at[band])
        if at - now > horizon_s:
            return Promise(horizon_s * (0.5 + 0.5 * spread), is_kept=False)
        takes = min(work / rate, horizon_s)  # nearly nothing drains just now, perhaps
        after = at + takes
        for lower in range(band, self._bands):
            moved = free_at[lower] + takes
            free_at[lower] = max(after, moved)
        if key and not self._slots.has_room(tenant):
            self._slots.refuse(tenant)
            key = b""
        if not key:
            return Promise(at - now, is_kept=False)
        until = at + 1.0 + GRACE_S + GRACE_SHARE * (at - now)
        self._by_key.setdefault(key, []).append(_Held(at, until, tenant))
        heappush(self._expiries, (until, key))
        self._slots.take(tenant)
        self.size += 1
        return Promise(at - now, is_kept=True)

    def _line(self, name: str, tenant: str | None) -> _Line:
        line = self._lines.get(tenant, name) or _Line(self._bands, tenant)
        self._lines.put(tenant, name, line)
        return line

    def is_due(self, key: bytes, now: float) -> bool:
        """Return whether this request was promised a place about now."""
        if not self.size or not key:
            return False
        self._forget(now)
        held = self._by_key.get(key)
        if held is None:
            return False
        return any(one.at <= now + EARLY_S and one.until > now for one in held)

    def redeem(self, key: bytes) -> None:
        """Keep the oldest promise of a request that came and goes on."""
        held = self._by_key.get(key)
        if held is None:
            return
        self._slots.give(held.pop(0).tenant)
        self.size -= 1
        self.counts.kept += 1
        if not held:
            del self._by_key[key]
        if len(self._expiries) > 2 * self.size + 1024:
            self._expiries = [
                (each.until, one) for one, some in self._by_key.items() for each in some
            ]
            heapify(self._expiries)

    def _forget(self, now: float) -> None:
        """Drop some expired promises; kept ones also stay in the heap for a while."""
        for _ in range(FORGOTTEN_PER_CALL):
            if not self._expiries or self._expiries[0][0] > now:
                return
            until, key = heappop(self._expiries)
            held = self._by_key.get(key, [])
            # not always the oldest: a later promise may be for an earlier time
            at = next((at for at, one in enumerate(held) if one.until == until), None)
            if at is None:
                continue  # it was kept
            self._slots.give(held.pop(at).tenant)
            self.size -= 1
            self.counts.broken += 1
            if not held:
                del self._by_key[key]

    def check(self) -> None:
        """Assert all invariants of the book."""
        assert self.size == sum(len(held) for held in self._by_key.values())
        assert all(self._by_key.values()), "no key without a promise"
        assert self.size <= self._slots_max or self._slots.promised
        self._slots.check(one.tenant for held in self._by_key.values() for one in held)
        self._lines.check()
        assert len(self._expiries) >= self.size
