"""GET /dump: the whole index as JSON in pieces, bounded in concurrent readers and in time.

A dump keeps the index from tidying up, and a slow reader prolongs that: hence both bounds.
`driver.py` has one `Dumps`, `http/handlers/` and `tenancy/tenant_view.py` call it, and the HTTP
transport sends what it yields.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Final

import msgspec

from select_service.errors import TooManyDumps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from select_service.core.service import SelectionCore
    from select_service.types import DumpLimits

SLICE_S: Final = 0.0003
"""How long /dump may hold the loop before it lets requests through."""

PAUSE_S: Final = 0.001
"""How long it then rests while selections arrive: a process that never sleeps has to wait for a CPU
like any other, and its requests wait with it."""

COMPANY_S: Final = 0.1
"""Selections are taken to be arriving for this long after the last one."""

_encode: Final = msgspec.json.Encoder().encode


class Dumps:
    """The dumps under way.

    Attributes:
        outcomes: how many dumps ended in each way, including refusals.
    """

    def __init__(self, core: SelectionCore, limits: DumpLimits, clock: Callable[[], float]) -> None:
        """Serve dumps of a core's indexes.

        Args:
            core: owns the indexes.
            limits: how many at once and how long; changes to it take effect at once.
            clock: monotonic seconds.
        """
        self._core, self._limits, self._clock = core, limits, clock
        self._places = StreamLimit()
        self._tenants = core.shares.bound("dumps_max", lambda: limits.at_once_max)
        self.outcomes = dict.fromkeys(("complete", "cut_off", "timeout", "refused"), 0)

    @property
    def running(self) -> int:
        """How many dumps are under way."""
        return self._places.taken

    def begin(
        self, tenants: frozenset[str] | None = None, charged_to: str | None = None
    ) -> AsyncIterator[bytes]:
        """GET /dump: begin one; it yields to the event loop every few hundred microseconds.

        Args:
            tenants: whose indexes; None: all.
            charged_to: the tenant whose part of the bound it takes; None: no tenant's.

        Raises:
            TooManyDumps: `--dumps-max` are already under way, or this tenant's part of them.
        """
        if not self._tenants.has_room(charged_to):
            self.outcomes["refused"] += 1
            raise TooManyDumps(self._limits.at_once_max, self._tenants.refuse(charged_to))
        self._tenants.take(charged_to)
        return self._pieces(tenants, self._places.take(lambda: self._tenants.give(charged_to)))

    async def _pieces(
        self, tenants: frozenset[str] | None, place: StreamSlot
    ) -> AsyncIterator[bytes]:
        outcome, ends_at = "cut_off", self._clock() + self._limits.timeout_s
        counters = self._core.counters
        now = self._clock()
        until, selections, alone_at = now + SLICE_S, counters.selections, now
        piece: list[bytes] = []
        try:
            with closing(self._parts(tenants)) as parts:
                for part in parts:
                    piece.append(part)
                    now = self._clock()
                    if now < until:
                        continue
                    if text := b"".join(piece):
                        yield text
                    piece.clear()
                    if counters.selections != selections:
                        selections, alone_at = counters.selections, now + COMPANY_S
                    await asyncio.sleep(PAUSE_S if now < alone_at else 0)
                    now = self._clock()  # a slow reader may have kept us waiting
                    if now >= ends_at:
                        outcome = "timeout"
                        raise StreamCut
                    until = now + SLICE_S
            yield b"".join(piece)
            outcome = "complete"
        finally:
            place.leave()
            self.outcomes[outcome] += 1

    def _parts(self, tenants: frozenset[str] | None) -> Generator[bytes]:
        """Yield the dump in small parts; an empty part is a step that found nothing."""
        registry, opening = self._core.registry, b"{"
        for scope in [one for one, _ in registry.indexes()]:  # a copy: indexes come and go
            index = registry.index(scope)
            if index is None or (tenants is not None and scope.tenant_id not in tenants):
                continue
            name = _encode(f"{scope.model_name}:{scope.tenant_id}")
            yield opening + name + b':{"block_size":%d,"events":[' % index.block_size
            comma = b""
            with closing(index.dump()) as steps:
                for event in steps:
                    if event is None:
                        yield b""
                        continue
                    yield comma + _encode(event)
                    comma = b","
            yield b"]}"
            opening = b","
        yield b"{}" if opening == b"{" else b"}"


# Counts concurrent streams of a kind, so that they can be limited; also the error that cuts one. A
# place is taken when a stream is requested, not when its first piece is read: many may be requested
# in one turn of the loop.


class StreamCut(Exception):
    """A stream is cut short, for a reason already counted; the client sees it end incomplete."""


class StreamLimit:
    """The places of one kind of stream.

    Attributes:
        taken: how many are in use.
    """

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken = 0

    def take(self, released: Callable[[], None] | None = None) -> StreamSlot:
        """Take one, and have `released` called at its end; the caller has checked for room."""
        return StreamSlot(self, released)


class StreamSlot:
    """One place; released when its stream ends, or is discarded unread."""

    __slots__ = ("_places", "_released")

    def __init__(self, places: StreamLimit, released: Callable[[], None] | None = None) -> None:
        self._places: StreamLimit | None = places
        self._released = released
        places.taken += 1

    def leave(self) -> None:
        """Release the place. Idempotent."""
        if self._places is not None:
            self._places.taken -= 1
            self._places = None
            if self._released is not None:
                self._released()

    __del__ = leave  # for HEAD, which reads no pieces
