"""Decisions told to who asks, a slice at a time: large fleets must not hold the loop.

`core/decisions/explaining.py` makes the numbers; handlers and `embedded.py` stand before it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, cast

import msgspec
from msgspec import UNSET

from select_service.core.decisions.keeping import is_of, only_scope
from select_service.core.decisions.record import Record
from select_service.errors import DecisionNotFound, DecisionsOff

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from select_service.core.decisions.explaining import Told
    from select_service.core.decisions.keeping import Decisions
    from select_service.errors import ServiceError
    from select_service.types import Answer, SelectRequest
    from select_service.types.decisions import Candidate, Decision

__all__ = ["LISTED", "LISTED_MAX", "Teller", "Wanted", "as_told"]

SLICE: Final = 64
"""Ranks told in one go, and written if they are to be: some 150 µs."""

LISTED: Final = 50
LISTED_MAX: Final = 1000
"""Decisions in one answer, unless `limit` says otherwise, and at the most; sent as a stream."""

_LOOKED_AT: Final = 512
"""Records looked at in one go for those that are wanted: a tenth of a ms."""

_WALL_MOVED_S: Final = 0.005
"""So far apart the two clocks are read on a busy machine; more, and the wall clock was set."""

_SEATING: Final = 256
"""So many records take no longer than to find out who sat where, of a thousand ranks."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which decisions are asked for."""

    worker_id: int | None = None  # whom they chose
    model_name: str | None = None
    tenant_id: str | None = None
    tenants: frozenset[str] | None = None  # the asker may know of; None: all
    limit: int = LISTED
    candidates: bool = False  # with all ranks


def as_told(candidate: Candidate) -> Candidate:
    """Leave a rank as it is: who is in the same process reads it, nobody writes it."""
    return candidate


class Teller:
    """Finds records, and tells them by the wall clock."""

    def __init__(
        self, decisions: Decisions, clock: Callable[[], float], transfer_cost: float
    ) -> None:
        self._decisions = decisions
        self._clock = clock
        self._transfer_cost = transfer_cost
        self._wall_ahead = 0.0  # of our clock; kept, so that a decision told twice says the same

    def told(self, record: Record) -> Told:
        """Return what a record has to tell."""
        from select_service.core.decisions.explaining import Told  # who never asks pays nothing

        ahead = time.time() - self._clock()  # noqa: TID251 - people read it
        if abs(ahead - self._wall_ahead) > _WALL_MOVED_S:
            self._wall_ahead = ahead
        return Told(record, self._wall_ahead, self._transfer_cost)

    def find(
        self,
        name: str,
        tenants: frozenset[str] | None = None,
        aliases: frozenset[str] = frozenset(),
    ) -> Record:
        """Return the newest decision under an id.

        Args:
            name: the id.
            tenants: whose it has to be; None: anybody's.
            aliases: names that mean the same.

        Raises:
            DecisionsOff: nothing is kept.
            DecisionNotFound: nothing of that name is.
        """
        if not self._decisions.is_on:
            raise DecisionsOff
        record = self._decisions.find(name, tenants, aliases)
        if record is None:
            raise DecisionNotFound(name)
        return record

    async def tell(
        self, record: object, write: Callable[[Candidate], object] = as_told
    ) -> Decision:
        """Tell a whole decision, letting others have their turn every so many ranks.

        Args:
            record: of the decision.
            write: what stands in its candidates in the place of each. Who sends it has them written
                here: to write a thousand of them at once would take as long as to tell them.
        """
        if not isinstance(record, Record):  # told already: callers may wait for one answer
            return cast("Decision", record)
        told = self.told(record)
        decision = told.decision()
        some: list[object] = []
        decision.candidates = cast("list[Candidate]", some)
        for start in range(0, len(told), SLICE):
            if start:
                await asyncio.sleep(0)
            some += map(write, told.candidates(start, start + SLICE))
        return decision

    async def finish(
        self,
        answer: Answer,
        request: SelectRequest,
        write: Callable[[Candidate], object] = as_told,
    ) -> Answer:
        """Return an answer as it goes out: with its decision told if that was asked for.

        A request that came twice while it waited has one answer, and each caller asked on its own.
        """
        record: object = answer.decision
        if not request.explain:
            return answer if record is UNSET else msgspec.structs.replace(answer, decision=UNSET)
        if record is UNSET:
            record = self._decisions.explained(request.reservation_id or "")
            if record is None:
                return answer
        return msgspec.structs.replace(answer, decision=await self.tell(record, write))

    async def finish_refusal(
        self, error: ServiceError, write: Callable[[Candidate], object] = as_told
    ) -> None:
        """Tell what led to a refusal, if that was asked for."""
        if error.decision is not None:
            error.decision = await self.tell(error.decision, write)

    async def matching(self, wanted: Wanted) -> list[Record]:
        """Return the records wanted, newest first.

        Raises:
            DecisionsOff: nothing is kept.
        """
        if not self._decisions.is_on:
            raise DecisionsOff
        found: list[Record] = []
        seating, looked_at = None, 0
        for record in self._decisions.newest_first():
            looked_at += 1 if record.seating is seating else _SEATING
            seating = record.seating
            if is_of(record, wanted.tenants) and only_scope(
                *(record, wanted.model_name, wanted.tenant_id, wanted.worker_id)
            ):
                found.append(record)
                if len(found) >= wanted.limit:
                    break
            if looked_at >= _LOOKED_AT:
                looked_at = 0
                await asyncio.sleep(0)
        return found

    async def each(
        self,
        records: list[Record],
        *,
        candidates: bool,
        write: Callable[[Candidate], object] = as_told,
    ) -> AsyncIterator[Decision]:
        """Tell one after another; in between, others have their turn."""
        for record in records:
            yield await self.tell(record, write) if candidates else self.told(record).decision()
            await asyncio.sleep(0)
