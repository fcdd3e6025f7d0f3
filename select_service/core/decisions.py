"""The last decisions, for who asks why: a ring bounded by count and by bytes, found by id.

A selection pays for one tuple of references and a copy of the load columns, no more (under a µs);
what an answer about it costs is paid by who asks (`explaining.py`). `placing.py` and `selecting.py`
leave records here.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from select_service.core.decision_record import (
    HASH_BYTES_KEPT,
    RESERVATION_ID,
    SEEN,
    SELECTION_ID,
    SIZE,
    Odds,
    Record,
)
from select_service.core.lookout import Lookout
from select_service.decision_types import DecisionRefusal
from select_service.errors import AdmissionRefused
from select_service.types import SelectPairRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from indexer.core.stream import EventStream
    from indexer.types import Scope, WorkerRank
    from select_service.core.catalog import Catalog
    from select_service.core.columns import Rows
    from select_service.core.decision_record import Seen
    from select_service.core.matchmaking import Match
    from select_service.core.partition import Partition
    from select_service.core.queue import Ticket
    from select_service.errors import ServiceError

EXPLAINED_MAX: Final = 64
"""Bookings whose answer was explained and whose record stays, ring or none, for who repeats them:
a client repeats within seconds, and explains by hand."""

EXPLAINED_BYTES_MAX: Final = 4 << 20
"""What they may take together: a client may name a booking by a megabyte."""

_CHAR_BYTES: Final = 4  # of a text that is not all ASCII, at most
RECORD_BYTES: Final = 640  # the record with its places in ring and ids; measured, rounded up
_LONG: Final = RECORD_BYTES + HASH_BYTES_KEPT
_GROUP_BYTES: Final = 256  # one group of matches, without its slots
_ODDS_BYTES: Final = 512
_JUDGED_BYTES: Final = 320  # what was asked and said; the classes' names are the gate's own
_PLAN_BYTES_PER_RANK: Final = 160  # columns of a plan
_REFUSED: Final = frozenset({429, 503})
"""Refusals that say something of the fleet. Others are the caller's own fault (400), or about an
id that is somebody's already (409): they must not stand where that one's decision does."""


class Decisions:
    """One ring for the whole process."""

    def __init__(
        self,
        catalog: Catalog,
        stream_of: Callable[[WorkerRank], EventStream | None],
        *,
        count_max: int,
        bytes_max: int,
        first: int = 1,
    ) -> None:
        """Start empty.

        Args:
            catalog: knows who is not schedulable.
            stream_of: the open event stream of a rank.
            count_max: records kept; 0: none.
            bytes_max: bytes they may take together.
            first: number of the first; beyond those of the process's earlier lives.
        """
        self.is_on = count_max > 0 and bytes_max > 0
        self.bytes = 0
        self._catalog = catalog
        self._lookouts: dict[Scope, Lookout] = {}
        catalog.watchers.append(self._note)
        self._stream_of = stream_of
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._first = self._next = first
        self._ring: deque[Record] = deque()
        self._columns = b""  # of the newest
        self._explained: dict[str, Record] = {}
        self._explained_bytes = 0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def evicted(self) -> int:
        """Records that had to go for others."""
        return self._next - self._first - len(self._ring) if self.is_on else 0

    # -- what happened --------------------------------------------------------------------------

    def keep(  # noqa: C901, PLR0912, PLR0915 - in one call and straight on: all pay for it
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        now: float,
        odds: Odds | None = None,
    ) -> Record:
        """A decision was made; 0.6 µs, and what memory costs that is not hot.

        Args:
            ticket: the request.
            seen: what it met, before anything was booked.
            rows: the candidates.
            slot: who was chosen; -1: nobody.
            now: monotonic seconds.
            odds: what is unusual, if the caller knows of something.
        """
        partition, prompt, request = ticket.partition, ticket.prompt, ticket.request
        if odds is None and (
            rows is not partition.everyone or request.routing_constraints is not UNSET
        ):
            odds = odds_of(ticket)
        columns, matched, shared, trust = seen
        hashes = prompt.block_hashes
        size = RECORD_BYTES + len(hashes)
        if size > _LONG:
            hashes = hashes[:HASH_BYTES_KEPT]
            size = _LONG
        lookout = partition.lookout
        if lookout is None or now >= lookout.until:
            lookout = self._look_at(partition, now)
            size += lookout.size
        if matched is not None:
            size += 2 * len(columns) + _GROUP_BYTES * len(matched)
        if shared is not None:
            size += len(columns) + _GROUP_BYTES * len(shared)
        if trust is not None:
            size += len(trust)
        name, booked, number = request.selection_id, ticket.reservation_id, self._next
        if name is not None:
            size += len(name) if name.isascii() else _CHAR_BYTES * len(name)
        if booked is not None:  # the caller's words as well, and of any length
            size += len(booked) if booked.isascii() else _CHAR_BYTES * len(booked)
        judged = ticket.judged
        if judged is not None:  # the tenant is as it was sent
            tenant = judged[0].tenant_id
            size += _JUDGED_BYTES + (len(tenant) if tenant.isascii() else _CHAR_BYTES * len(tenant))
        if odds is not None:
            size += _size_of(odds, rows, len(columns))
        # fmt: off
        record: Record = (  # type: ignore[assignment]
            number, now, ticket.since, lookout.told, rows, seen, hashes, prompt.blocks,
            prompt.isl_tokens, ticket.weights, slot, name, booked, odds, judged, size,
        )
        # fmt: on
        if self.is_on:
            self._next = number + 1
            ring = self._ring
            ring.append(record)
            if columns is not self._columns:  # charged once for a run of records with the same
                self._columns = columns
                size += len(columns)
            if len(ring) > self._count_max:
                oldest = ring.popleft()
                size -= oldest[SIZE]
                columns = oldest[SEEN][0]
                if ring[0][SEEN][0] is not columns:
                    size -= len(columns)
            self.bytes += size
            if self.bytes > self._bytes_max:
                self._shrink()
        return record

    def _shrink(self) -> None:
        """Let the oldest go until what is left takes no more than it may."""
        ring = self._ring
        while self.bytes > self._bytes_max:
            record = ring.popleft()
            self.bytes -= record[SIZE]
            columns = record[SEEN][0]
            if not ring:
                self._columns = b""
            if not ring or ring[0][SEEN][0] is not columns:
                self.bytes -= len(columns)

    def note_explained(self, ticket: Ticket, record: Record) -> None:
        """Keep a record that was told with its booking, for who repeats that."""
        name, explained = ticket.reservation_id, self._explained
        if name is None:
            return
        before = explained.pop(name, None)
        if before is not None:
            self._explained_bytes -= _whole_size(before)
        explained[name] = record
        self._explained_bytes += _whole_size(record)
        while len(explained) > EXPLAINED_MAX or self._explained_bytes > EXPLAINED_BYTES_MAX:
            self._explained_bytes -= _whole_size(explained.pop(next(iter(explained))))

    def paired(self, ticket: Ticket, seen: Seen, match: Match, now: float) -> Record:
        """Two ranks were chosen, or one that does better, and booked."""
        plan, odds = match.plan, odds_of(ticket)
        odds.plan, odds.legs, odds.roles = plan, match.legs, ticket.partition.roles
        if match.placement is not None:
            slot = match.placement.slot
        else:
            assert plan.couple is not None
            slot = plan.couple.decode_slot
        return self.keep(ticket, seen, plan.whole, slot, now, odds)

    def refused(self, ticket: Ticket, refusal: ServiceError, now: float) -> Record | None:
        """It was turned away, before anybody was priced; None: that is no decision."""
        gate = refusal.gate if isinstance(refusal, AdmissionRefused) else None
        if gate is None and refusal.status not in _REFUSED:
            return None
        odds = odds_of(ticket)
        odds.refusal = DecisionRefusal(
            code=refusal.code,
            error=str(refusal),
            gate=gate,
            reason=None if gate is None else refusal.code,
        )
        seen = ticket.partition.ledger.columns(), None, None, None
        return self.keep(ticket, seen, None, -1, now, odds)

    # -- who sits where -------------------------------------------------------------------------

    def _look_at(self, partition: Partition, now: float) -> Lookout:
        lookout = partition.lookout
        if lookout is None:
            lookout = partition.lookout = Lookout(partition, self._catalog, self._stream_of)
            self._lookouts[partition.scope] = lookout
        lookout.look(now)
        return lookout

    def _note(self, scope: Scope, worker_id: int) -> None:
        """Some record is another; of a worker that is seated its partition tells, too."""
        lookout = self._lookouts.get(scope)
        if lookout is not None:
            lookout.note(worker_id)

    # -- who asks -------------------------------------------------------------------------------

    def find(
        self,
        name: str,
        tenants: frozenset[str] | None = None,
        aliases: frozenset[str] = frozenset(),
    ) -> Record | None:
        """Return the newest record under an id: a selection's, a reservation's, or one of ours.

        O(records), some 60 ns each: no selection should pay for finding it.

        Args:
            name: the id.
            tenants: whose it has to be; None: anybody's.
            aliases: names that mean the same.
        """
        names = aliases | {name}
        for record in reversed(self._ring):
            if record[RESERVATION_ID] in names or record[SELECTION_ID] in names:
                found = Record._make(record)
                if is_of(found, tenants):
                    return found
        kept = next((self._explained[one] for one in names if one in self._explained), None)
        if kept is None:
            kept = self._numbered(name)
        return None if kept is None or not is_of(found := Record._make(kept), tenants) else found

    def _numbered(self, name: str) -> Record | None:
        """Return the record under an id that neither a selection nor a reservation gave."""
        digits = name.removeprefix(PREFIX)
        if name == digits or not self._ring or not digits.isdecimal() or len(digits) > _DIGITS_MAX:
            return None
        at = int(digits) - self._ring[0][0]
        return self._ring[at] if 0 <= at < len(self._ring) else None

    def explained(self, name: str) -> Record | None:
        """Return the record behind a booking that is repeated."""
        found = self._explained.get(name)
        return self.find(name) if found is None else Record._make(found)

    def newest_first(self) -> Iterator[Record]:
        """Yield the records there are now, whatever comes meanwhile."""
        return map(Record._make, reversed(list(self._ring)))

    def check(self) -> None:
        """State every promise of the ring."""
        records = list(self.newest_first())
        assert len(records) <= self._count_max
        before: list[bytes] = [one.seen[0] for one in records[1:]]
        held = sum(len(one.seen[0]) for one in records[-1:])
        for one, other in zip(records, before, strict=False):
            held += 0 if one.seen[0] is other else len(one.seen[0])
        assert self.bytes == held + sum(one.size for one in records)
        assert self.bytes <= self._bytes_max
        assert len(self._explained) <= EXPLAINED_MAX
        assert self._explained_bytes == sum(map(_whole_size, self._explained.values()))
        assert self._explained_bytes <= EXPLAINED_BYTES_MAX
        numbers = [one.number for one in records]
        assert numbers == [*range(self._next - 1, self._next - 1 - len(numbers), -1)]


PREFIX: Final = "decision-"
"""Of an id that neither a selection nor a reservation gave."""

_DIGITS_MAX: Final = 20


def odds_of(ticket: Ticket) -> Odds:
    """Return what is unusual about a request and its moment."""
    request, keeper = ticket.request, ticket.partition.admission
    constraints = request.routing_constraints
    odds = Odds(
        request.pinned_worker,
        request.allowed_worker_ids,
        None if constraints is UNSET else constraints,
        is_pair=isinstance(request, SelectPairRequest),
    )
    if keeper is not None and (keeper.busy.slots or keeper.caps.slots):
        odds.busy, odds.full = frozenset(keeper.busy.slots), frozenset(keeper.caps.slots)
    return odds


def _size_of(odds: Odds, rows: Rows | None, columns: int) -> int:
    """Return about how many bytes what is odd takes."""
    size = _ODDS_BYTES + 32 * (len(odds.busy) + len(odds.full))
    if rows is not None and not isinstance(rows, slice):
        size += rows.nbytes
    if odds.allowed is not None:
        size += 48 * len(odds.allowed)
    if odds.refusal is not None:
        size += _text_bytes(odds.refusal.error)
    constraints = odds.constraints
    if constraints is not None:
        size += sum(map(_text_bytes, constraints.required_taints))
        size += sum(map(_text_bytes, constraints.preferred_taints))
    if odds.plan is not None:
        size += _PLAN_BYTES_PER_RANK * (columns // 16)
    return size


def _text_bytes(text: str) -> int:
    return 160 + (len(text) if text.isascii() else _CHAR_BYTES * len(text))


def _whole_size(record: Record) -> int:
    return record[SIZE] + len(record[SEEN][0])


def is_of(record: Record, tenants: frozenset[str] | None) -> bool:
    """Tell whether a record is of one of these tenants; None: of whomever."""
    return tenants is None or record.seating.scope.tenant_id in tenants


def only_scope(
    record: Record, model_name: str | None, tenant_id: str | None, worker_id: int | None
) -> bool:
    """Tell whether a record is of this model and tenant, and its chosen worker is this one."""
    scope = record.seating.scope
    if model_name is not None and scope.model_name != model_name:
        return False
    if tenant_id is not None and scope.tenant_id != tenant_id:
        return False
    return worker_id is None or worker_id in chosen_workers(record)


def chosen_workers(record: Record) -> list[int]:
    """Return who a decision sends the request to: none, one, or both of a pair."""
    slots, odds, seating = [record.slot], record.odds, record.seating
    if odds is not None and odds.plan is not None and odds.plan.mode == "disaggregated":
        assert odds.plan.couple is not None
        slots.append(odds.plan.couple.prefill_slot)
    return [seating.seats[seating.at[slot]].worker_id for slot in slots if slot >= 0]


def decision_id(record: Record) -> str:
    """Return the id a record is told under."""
    if record.selection_id is not None:
        return record.selection_id
    return f"{PREFIX}{record.number}" if record.reservation_id is None else record.reservation_id
