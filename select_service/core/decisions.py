"""The last decisions, for who asks why: a ring bounded by count and by bytes, found by id.

A selection pays for one tuple of references and a copy of the load columns, no more (half a µs);
what an answer about it costs is paid by who asks (`explaining.py`). `placing.py` and `selecting.py`
leave records here.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from indexer.types import WorkerRank
from select_service.core.decision_record import (
    HASH_BYTES_KEPT,
    Absent,
    Odds,
    Record,
    Seat,
    Seating,
    Seen,
    StreamState,
)
from select_service.core.roles import role_of
from select_service.decision_types import DecisionRefusal
from select_service.types import SelectPairRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from indexer.core.stream import EventStream
    from select_service.core.catalog import Catalog
    from select_service.core.columns import Rows
    from select_service.core.matchmaking import Match
    from select_service.core.partition import Partition, Placement
    from select_service.core.queue import Ticket
    from select_service.errors import ServiceError

EXPLAINED_MAX: Final = 64
"""Bookings whose answer was explained and whose record stays, ring or none, for who repeats them:
a client repeats within seconds, and explains by hand."""

STREAMS_S: Final = 0.25
"""How old what is written down of event streams may be: to ask a thousand takes 0.3 ms."""

RECORD_BYTES: Final = 640  # the record with its places in ring and ids; measured, rounded up
_GROUP_BYTES: Final = 256  # one group of matches, without its slots
_ODDS_BYTES: Final = 512
_PLAN_BYTES_PER_RANK: Final = 160  # columns of a plan
_REFUSED: Final = frozenset({429, 500, 503, 529})
"""Refusals that say something of the fleet. Others are the caller's own fault (400), or about an
id that is somebody's already (409): they must not stand where that one's decision does."""


class Lookout:
    """What a record needs to know of a partition and that seldom changes."""

    __slots__ = ("open", "seating", "streams", "until", "version")

    def __init__(
        self, seating: Seating, version: int, streams: list[EventStream | None], now: float
    ) -> None:
        self.seating = seating
        self.version = version
        self.open = streams  # by seat
        self.look(now)

    def look(self, now: float) -> None:
        """Write down how the streams stand."""
        self.streams = tuple([_NO_STREAM if one is None else _stream_state(one) for one in self.open])
        self.until = now + STREAMS_S


_NO_STREAM: Final = StreamState("none", None, 0)


def _stream_state(stream: EventStream) -> StreamState:
    if stream.is_replaying:
        return StreamState("replaying", stream.last_batch_ts, 1)
    state = stream.kv_state
    if state == "current" and stream.last_event_at is None:
        return StreamState("silent", stream.last_batch_ts, 0)
    return StreamState(state, stream.last_batch_ts, 0)


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
        transfer_cost: float = 0.0,
    ) -> None:
        """Start empty.

        Args:
            catalog: knows who is not schedulable.
            stream_of: the open event stream of a rank.
            count_max: records kept; 0: none.
            bytes_max: bytes they may take together.
            first: number of the first; others than those of the process's earlier lives.
            transfer_cost: of moving a block between two legs, in blocks of prefill.
        """
        self.is_on = count_max > 0 and bytes_max > 0
        self.bytes = 0
        self.evicted = 0
        self.transfer_cost = transfer_cost
        self._catalog = catalog
        self._stream_of = stream_of
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._next = first
        self._ring: deque[Record] = deque()
        self._last: Record | None = None  # the newest in the ring
        self._ids: dict[str, Record] = {}
        self._explained: dict[str, Record] = {}

    def __len__(self) -> int:
        return len(self._ring)

    # -- what happened ------------------------------------------------------------------------------

    def placed(
        self, ticket: Ticket, rows: Rows, placement: Placement, now: float, *, holds: bool
    ) -> Record:
        """A rank was chosen, and booked if that was asked for.

        Args:
            ticket: the request.
            rows: the candidates.
            placement: what came of it, with what it had seen.
            now: monotonic seconds.
            holds: whether a cache-hit threshold chose the candidates.
        """
        assert placement.seen is not None
        odds = None
        if (
            holds
            or ticket.judged is not None
            or not isinstance(rows, slice)
            or ticket.request.routing_constraints is not UNSET
        ):
            odds = _odds_of(ticket)
            odds.holds_to_cache = holds
        return self._keep(ticket, placement.seen, rows, placement.slot, odds, now)

    def paired(self, ticket: Ticket, seen: Seen, match: Match, now: float) -> Record:
        """Two ranks were chosen, or one that does better, and booked."""
        plan = match.plan
        odds = _odds_of(ticket)
        odds.plan, odds.legs, odds.roles = plan, match.legs, ticket.partition.roles
        if match.placement is not None:
            slot = match.placement.slot
        else:
            assert plan.couple is not None
            slot = plan.couple.decode_slot
        return self._keep(ticket, seen, plan.whole, slot, odds, now)

    def held_back(self, ticket: Ticket, rows: Rows, seen: Seen, now: float) -> Record:
        """Nobody holds enough of the prompt for the threshold in force."""
        odds = _odds_of(ticket)
        odds.holds_to_cache = odds.is_threshold = True
        return self._keep(ticket, seen, rows, -1, odds, now)

    def refused(self, ticket: Ticket, refusal: ServiceError, now: float) -> Record | None:
        """It was turned away, before anybody was priced; None: that is no decision."""
        if refusal.status not in _REFUSED and not hasattr(refusal, "gate"):
            return None
        odds = _odds_of(ticket)
        odds.refusal = DecisionRefusal(
            code=refusal.code,
            error=str(refusal),
            gate=getattr(refusal, "gate", None),
            reason=refusal.code if hasattr(refusal, "gate") else None,
        )
        seen = Seen(ticket.partition.ledger.columns(), None, None)
        return self._keep(ticket, seen, None, -1, odds, now)

    def _keep(
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        odds: Odds | None,
        now: float,
    ) -> Record:
        partition, prompt, request = ticket.partition, ticket.prompt, ticket.request
        lookout = partition.lookout
        if lookout is None or lookout.version != self._catalog.version:
            lookout = self._look_at(partition, now)
        elif now >= lookout.until:
            lookout.look(now)
        columns, matched, shared = seen
        hashes = prompt.block_hashes
        if len(hashes) > HASH_BYTES_KEPT:
            hashes = hashes[:HASH_BYTES_KEPT]
        size = RECORD_BYTES + len(columns) + len(hashes)
        if matched is not None:
            size += 2 * len(columns) + _GROUP_BYTES * len(matched)
        if shared is not None:
            size += len(columns) + _GROUP_BYTES * len(shared)
        if odds is not None:
            size += _size_of(odds, rows, len(columns))
        number, selection_id, name = self._next, request.selection_id, ticket.reservation_id
        self._next = number + 1
        if selection_id is not None:
            size += len(selection_id)
        record = Record(
            *(number, now, ticket.since, lookout.seating, lookout.streams, rows),
            *(columns, matched, shared, hashes, prompt.blocks, prompt.isl_tokens),
            *(ticket.weights, slot, selection_id, name, odds, size),
        )
        if request.explain and name is not None and slot >= 0:
            self._explained[name] = record
            if len(self._explained) > EXPLAINED_MAX:
                del self._explained[next(iter(self._explained))]
        if self.is_on:
            self._push(record)
        return record

    def _push(self, record: Record) -> None:
        last = self._last
        if last is not None and last.columns is record.columns:
            # one copy, charged to the newest, which leaves last
            last.size -= len(record.columns)
            self.bytes -= len(record.columns)
        self._last = record
        ring = self._ring
        ring.append(record)
        self.bytes += record.size
        if record.reservation_id is not None:
            self._ids[record.reservation_id] = record
        if record.selection_id is not None:
            self._ids[record.selection_id] = record
        while len(ring) > self._count_max or self.bytes > self._bytes_max:
            self._evict(ring.popleft())

    def _evict(self, record: Record) -> None:
        self.bytes -= record.size
        self.evicted += 1
        ids = self._ids
        for name in (record.reservation_id, record.selection_id):
            if name is not None and ids.get(name) is record:
                del ids[name]
        if record is self._last:
            self._last = None

    # -- who sits where -----------------------------------------------------------------------------

    def _look_at(self, partition: Partition, now: float) -> Lookout:
        version = self._catalog.version
        seats = tuple(
            Seat(slot, worker.worker_id, rank, worker.spec.endpoint, worker.taints, role_of(worker))
            for worker_id in sorted(partition.workers)
            for worker in (partition.workers[worker_id],)
            for rank, slot in worker.slots.items()
        )
        absent = tuple(
            Absent(worker.worker_id, rank, worker.spec.endpoint)
            for worker in self._catalog
            if worker.scope == partition.scope and worker.worker_id not in partition.workers
            for rank in worker.ranks
        )
        streams = [self._stream_of(WorkerRank(seat.worker_id, seat.dp_rank)) for seat in seats]
        seating = Seating(partition.scope, partition.index.block_size, seats, absent)
        lookout = partition.lookout = Lookout(seating, version, streams, now)
        return lookout

    # -- who asks -----------------------------------------------------------------------------------

    def find(self, name: str) -> Record | None:
        """Return the newest record under an id: a selection's, a reservation's, or one of ours."""
        record = self._ids.get(name) or self._explained.get(name)
        if record is not None or not name.startswith(PREFIX):
            return record
        digits = name[len(PREFIX) :]
        if not self._ring or not digits.isdecimal() or len(digits) > _DIGITS_MAX:
            return None
        at = int(digits) - self._ring[0].number
        return self._ring[at] if 0 <= at < len(self._ring) else None

    def explained(self, name: str) -> Record | None:
        """Return the record behind a booking that is repeated."""
        return self._explained.get(name) or self._ids.get(name)

    def newest_first(self, limit: int | None = None) -> Iterator[Record]:
        """Yield records; not to be gone on with once another one has come."""
        return islice(reversed(self._ring), limit)

    def check(self) -> None:
        """State every promise of the ring."""
        assert len(self._ring) <= self._count_max
        assert self.bytes == sum(record.size for record in self._ring) <= self._bytes_max
        held = set(map(id, self._ring))
        assert all(id(record) in held for record in self._ids.values())
        for name, record in self._ids.items():
            assert name in (record.selection_id, record.reservation_id)
        assert len(self._explained) <= EXPLAINED_MAX
        assert self._last is (self._ring[-1] if self._ring else None)
        numbers = [record.number for record in self._ring]
        assert numbers == list(range(self._next - len(numbers), self._next))


PREFIX: Final = "decision-"
"""Of an id that neither a selection nor a reservation gave."""

_DIGITS_MAX: Final = 20


def _odds_of(ticket: Ticket) -> Odds:
    request, keeper = ticket.request, ticket.partition.admission
    constraints = request.routing_constraints
    odds = Odds(
        request.pinned_worker,
        request.allowed_worker_ids,
        None if constraints is UNSET else constraints,
        ticket.judged,
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
        size += 40 * len(odds.allowed)
    constraints = odds.constraints
    if constraints is not None:
        size += sum(map(_text_bytes, constraints.required_taints))
        size += sum(map(_text_bytes, constraints.preferred_taints))
    if odds.plan is not None:
        size += _PLAN_BYTES_PER_RANK * (columns // 16)
    return size


def _text_bytes(text: str) -> int:
    return 120 + len(text)


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
