"""The latest decisions, to be explained on request: a ring bounded by count and by bytes.

A record is a row of references with a copy of the prompt's hashes, and of the load columns if a
load has changed. The cost of explaining it is paid on request (`explain.py`). `place.py`
records its decisions here; those with nothing unusual go to the ring directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from indexer.compiled import usable
from select_service.core.decisions import fleet_snapshot as fleet_snapshots
from select_service.core.decisions.fleet_snapshot import FleetSnapshot
from select_service.core.decisions.record import (
    SEEN,
    SIZE,
    DecisionRecord,
    UnusualFacts,
)
from select_service.core.decisions.tenant_rings import TenantRings
from select_service.core.ledger.freed_ids import key_of
from select_service.core.ledger.loads import ranks_in
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.core.tenancy.tenant_memory import TenantMemory
from select_service.errors import AdmissionRefused
from select_service.types import SelectPairRequest
from select_service.types.decisions import DecisionRefusal

if not TYPE_CHECKING and usable("select_service.core._record_ring", 1):
    from select_service.core._record_ring import RecordRing
else:
    from select_service.core.decisions.plain_record_ring import RecordRing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from indexer.core.stream import EventStream
    from indexer.types import Scope, WorkerRank
    from select_service.core.admission.queue import Ticket
    from select_service.core.columns import Rows
    from select_service.core.fleet.catalog import Catalog
    from select_service.core.observers import DecisionRecorder
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import PairMatch, Seen
    from select_service.core.pricing.weights import Weights
    from select_service.errors import ServiceError
    from select_service.types import CacheHit
    from select_service.types.decisions import Outcome

EXPLAINED_MAX: Final = 64
"""Explained bookings whose records stay even without a ring, for repeats: a client repeats within
seconds, and asks for explanations by hand."""

EXPLAINED_BYTES_MAX: Final = 4 << 20
"""Bytes they may take together: a client may name a booking with a megabyte."""

_CHAR_BYTES: Final = 4  # maximum, in a text that is not all ASCII
_UNUSUAL_BYTES: Final = 512
_SIGHTING_BYTES: Final = 768  # two tuples of numbers; the weights are shared
_PLAN_BYTES_PER_RANK: Final = 160  # columns of a plan
_REFUSED: Final = frozenset({429, 503})
"""Refusals that say something about the fleet. Others are the caller's own fault (400), or concern
an id that is already taken (409): they must not replace the record of that id."""


class DecisionLog:
    """The decisions of the whole process."""

    def __init__(
        self,
        catalog: Catalog,
        stream_of: Callable[[WorkerRank], EventStream | None],
        partitions: Mapping[Scope, Partition],
        *,
        count_max: int,
        bytes_max: int,
        first: int = 1,
        shares: Shares | None = None,
        recorder: DecisionRecorder | None = None,
    ) -> None:
        """Start empty.

        `first` is the number of the first record, above those of earlier lives of the
        process. `recorder` notes every decision, whether or not its record is kept.
        `partitions` are live.
        """
        self._recorder = recorder
        self.is_on = count_max > 0 and bytes_max > 0
        self._catalog = catalog
        self._partitions = partitions
        catalog.watchers.append(self._note)
        self._stream_of = stream_of
        self.count_max = count_max
        self._bytes_max = bytes_max
        shares = shares or Shares()
        self._rings = TenantRings(
            RecordRing,
            shares,
            count_max=count_max,
            bytes_max=bytes_max,
            first=first,
        )
        self.common: RecordRing | None = None if recorder is not None else self._rings.common
        """What `ring_of` returns as long as no tenant has a ring of its own."""
        self._explained: TenantMemory[str, DecisionRecord] = TenantMemory(
            shares,
            "explained_bytes",
            lambda: EXPLAINED_BYTES_MAX,
            by_prefix=True,
            size_of=_explained_size,
        )
        self._withdrawn: TenantMemory[tuple[str, float], None] = TenantMemory(
            shares, "withdrawn_decisions", lambda: count_max, by_prefix=True
        )
        """By id and time: decisions whose bookings were withdrawn, at most as many as records."""

    def __len__(self) -> int:
        return len(self._rings)

    def follow_tenants(self) -> None:
        """Give rings of their own to the tenants of the token file as it is now."""
        if self.is_on:
            self._rings.follow_tenants()
            is_one = self._recorder is None and not self._rings.is_parted
            self.common = self._rings.common if is_one else None

    @property
    def is_wanted(self) -> bool:
        """Whether decisions are recorded."""
        return self.is_on or self._recorder is not None

    def ring_of(self, tenant_id: str) -> RecordRing | None:
        """Return the ring that takes a tenant's usual decisions directly; None: `keep` them all.

        With a recorder the ring would take them unnoticed.
        """
        return None if self._recorder is not None else self._rings.of(tenant_id)

    @property
    def bytes(self) -> int:
        """The bytes of all records."""
        return self._rings.bytes

    @property
    def evicted(self) -> int:
        """Records evicted for newer ones."""
        return self._rings.evicted

    # -- recording ------------------------------------------------------------------------------

    def keep(  # noqa: PLR0917 - in one call: all pay for it
        self,
        ticket: Ticket,
        seen: Seen,
        rows: Rows | None,
        slot: int,
        now: float,
        unusual: UnusualFacts | None = None,
        cache_hit: CacheHit | None = None,
        weights: Weights | None = None,
    ) -> DecisionRecord | None:
        """Record a decision; return the record if it is to be explained.

        `seen` is the state it met, before anything was booked; `slot` -1: none was chosen.
        Without `weights`, those of the ticket were used.
        """
        if self._recorder is not None:
            self._recorder.decision(ticket, seen, rows, slot, now, unusual)
        partition, more = ticket.partition, 0
        if unusual is None and (
            rows is not partition.fleet_slots.everyone
            or ticket.request.routing_constraints is not UNSET
        ):
            unusual = unusual_facts_of(ticket)
        if unusual is not None:
            more = _size_of(unusual, rows, seen[0])
        fleet_snapshot = partition.fleet_snapshot
        if fleet_snapshot is None or now >= fleet_snapshot.until:
            fleet_snapshot = self._look_at(partition, now)
            more += fleet_snapshot.size
        if weights is None:
            weights = ticket.weights
        ring = self._rings.of(partition.scope.tenant_id)
        return ring.keep(
            ticket, seen, rows, slot, now, unusual, cache_hit, weights, fleet_snapshot.latest, more
        )

    def note_explained(self, ticket: Ticket, record: DecisionRecord) -> None:
        """Keep an explained record along with its booking, for repeats of that."""
        name = ticket.reservation_id
        if name is not None:
            self._explained.put(prefix_in(name), name, record)

    def note_withdrawn(self, reservation_id: str, at: float) -> None:
        """Note that what a decision booked was withdrawn: its answer could not be written.

        `at` is when it was booked, which is when it was decided.
        """
        if not self.is_on:
            return
        self._withdrawn.put(prefix_in(reservation_id), (key_of(reservation_id), at), None)

    def is_withdrawn(self, record: DecisionRecord) -> bool:
        """Tell whether what a decision booked was withdrawn."""
        name = record.reservation_id
        if name is None or not self._withdrawn:
            return False
        return self._withdrawn.has(prefix_in(name), (key_of(name), record.at))

    def paired(
        self, ticket: Ticket, seen: Seen, match: PairMatch, now: float
    ) -> DecisionRecord | None:
        """Record the booking of a pair, or of the one rank that is cheaper."""
        plan, unusual = match.plan, unusual_facts_of(ticket)
        unusual.plan, unusual.legs, unusual.roles = (
            plan,
            match.legs,
            ticket.partition.fleet_slots.roles,
        )
        if match.placement is not None:
            slot = match.placement.slot
        else:
            assert plan.couple is not None
            slot = plan.couple.decode_slot
        return self.keep(ticket, seen, plan.whole, slot, now, unusual, None, plan.weights)

    def refused(self, ticket: Ticket, refusal: ServiceError, now: float) -> DecisionRecord | None:
        """Record a refusal before pricing, if it is a decision."""
        gate = refusal.gate if isinstance(refusal, AdmissionRefused) else None
        if gate is None and refusal.status not in _REFUSED:
            return None
        unusual = unusual_facts_of(ticket)
        unusual.refusal = DecisionRefusal(
            code=refusal.code,
            error=str(refusal),
            gate=gate,
            reason=None if gate is None else refusal.code,
        )
        seen = ticket.partition.ledger.loads.pack(), None, None, None
        return self.keep(ticket, seen, None, -1, now, unusual)

    # -- fleet --------------------------------------------------------------------------------

    def _look_at(self, partition: Partition, now: float) -> FleetSnapshot:
        fleet_snapshot = partition.fleet_snapshot or self._fleet_snapshot_for(partition)
        fleet_snapshot.look(now)
        return fleet_snapshot

    def _fleet_snapshot_for(self, partition: Partition) -> FleetSnapshot:
        fleet_snapshot = partition.fleet_snapshot = FleetSnapshot(
            partition.scope,
            partition.fleet_slots,
            partition.index.block_size,
            self._catalog,
            self._stream_of,
            partition.estimate,
            speeds=partition.ledger.loads.speeds,
        )
        return fleet_snapshot

    def _note(self, scope: Scope, worker_id: int) -> None:
        """Note a changed catalog record; for attached workers the partition does so itself, too."""
        partition = self._partitions.get(scope)
        if partition is None:
            return
        fleet_snapshot = partition.fleet_snapshot
        if (
            fleet_snapshot is None
            and self.is_on
            and len(partition.fleet_slots.present) >= fleet_snapshots.NOTED_MAX
        ):  # with fewer, the first selection creates it; partitions may be many
            fleet_snapshot = self._fleet_snapshot_for(partition)
        if fleet_snapshot is not None:
            fleet_snapshot.note(worker_id)

    # -- reading --------------------------------------------------------------------------------

    def find(
        self,
        name: str,
        tenants: frozenset[str] | None = None,
        aliases: frozenset[str] = frozenset(),
    ) -> DecisionRecord | None:
        """Return the newest record of an id: a selection's, a reservation's, or one of ours.

        O(records), some 40 ns each: selections must not pay for an index.

        It must be of one of the `tenants`, if given; `aliases` are names that mean the
        same.
        """
        names = aliases | {name}
        for found in self._rings.named(names):
            if is_of(found, tenants):
                return found
        found_by_name = (self._explained.get(prefix_in(one), one) for one in names)
        kept = next((one for one in found_by_name if one is not None), None)
        if kept is None:
            kept = self._numbered(name)
        return (
            None
            if kept is None or not is_of(found := DecisionRecord._make(kept), tenants)
            else found
        )

    def _numbered(self, name: str) -> DecisionRecord | None:
        """Return the record of an id that neither a selection nor a reservation gave."""
        digits = name.removeprefix(PREFIX)
        if name == digits or not digits.isdecimal() or len(digits) > _DIGITS_MAX:
            return None
        number = int(digits)
        return self._rings.numbered(number) if number < _NUMBERS_END else None

    def explained(self, name: str) -> DecisionRecord | None:
        """Return the record behind a repeated booking."""
        found = self._explained.get(prefix_in(name), name)
        return self.find(name) if found is None else DecisionRecord._make(found)

    def newest_first(self) -> Iterator[DecisionRecord]:
        """Yield the records present now, except those evicted in the meantime.

        Later ones are left out.
        """
        return self._rings.newest_first()

    def check(self) -> None:
        """Assert all invariants of the rings."""
        held = count = 0
        for ring in self._rings:
            numbers = range(ring.next - 1, ring.next - 1 - len(ring), -1)
            found = [ring.numbered(number) for number in numbers]
            records = [DecisionRecord._make(one) for one in found if one is not None]
            assert [one.number for one in records] == list(numbers)
            before: list[bytes] = [one.seen[0] for one in records[1:]]
            columns = sum(len(one.seen[0]) for one in records[-1:])
            for one, other in zip(records, before, strict=False):
                columns += 0 if one.seen[0] is other else len(one.seen[0])
            assert ring.bytes == columns + sum(one.size for one in records)
            held, count = held + ring.bytes, count + len(records)
        assert count == len(self) <= self.count_max
        assert held == self.bytes <= self._bytes_max
        assert len(self._explained) <= EXPLAINED_MAX
        self._explained.check()
        self._withdrawn.check()
        every = list(self.newest_first())
        assert len(every) == count
        assert [one.at for one in every] == sorted((one.at for one in every), reverse=True)
        assert all(self._rings.numbered(one.number) == one for one in every)


PREFIX: Final = "decision-"
"""Prefix of ids that neither a selection nor a reservation gave."""

_DIGITS_MAX: Final = 19  # of a 64-bit number
_NUMBERS_END: Final = 1 << 63


def unusual_facts_of(ticket: Ticket) -> UnusualFacts:
    """Return the unusual facts about a request and the current state."""
    request, admission = ticket.request, ticket.partition.admission
    constraints = request.routing_constraints
    unusual = UnusualFacts(
        request.pinned_worker,
        request.allowed_worker_ids,
        None if constraints is UNSET else constraints,
        is_pair=isinstance(request, SelectPairRequest),
        in_batch=ticket.in_batch,
        in_session=ticket.in_session,
        ejected=ticket.partition.outliers.ejected or None,
    )
    if admission is not None and (admission.busy.slots or admission.caps.slots):
        unusual.busy, unusual.full = (
            frozenset(admission.busy.slots),
            frozenset(admission.caps.slots),
        )
    return unusual


def _size_of(unusual: UnusualFacts, rows: Rows | None, loads: bytes) -> int:
    """Return the approximate bytes of unusual facts."""
    size = _UNUSUAL_BYTES + 32 * (
        len(unusual.busy) + len(unusual.full) + len(unusual.ejected or ())
    )
    if rows is not None and not isinstance(rows, slice):
        size += rows.nbytes
    if unusual.allowed is not None:
        size += 48 * len(unusual.allowed)
    if unusual.refusal is not None:
        size += _text_bytes(unusual.refusal.error)
    constraints = unusual.constraints
    if constraints is not None:
        size += sum(map(_text_bytes, constraints.required_taints))
        size += sum(map(_text_bytes, constraints.preferred_taints))
    if unusual.shadow is not None:
        size += _SIGHTING_BYTES
    if unusual.plan is not None:
        size += _PLAN_BYTES_PER_RANK * ranks_in(loads)
    return size


def _text_bytes(text: str) -> int:
    return 160 + (len(text) if text.isascii() else _CHAR_BYTES * len(text))


def _explained_size(record: DecisionRecord) -> int:
    """Return what an explained record counts for: small ones more, which bounds their number."""
    size: int = record[SIZE] + len(record[SEEN][0])
    return max(size, EXPLAINED_BYTES_MAX // EXPLAINED_MAX)


def is_of(record: DecisionRecord, tenants: frozenset[str] | None) -> bool:
    """Tell whether a record is of one of these tenants; None: any."""
    return tenants is None or record.fleet_slots.scope.tenant_id in tenants


def only_scope(
    record: DecisionRecord, model_name: str | None, tenant_id: str | None, worker_id: int | None
) -> bool:
    """Tell whether a record is of this model and tenant, and its chosen worker is this one."""
    scope = record.fleet_slots.scope
    if model_name is not None and scope.model_name != model_name:
        return False
    if tenant_id is not None and scope.tenant_id != tenant_id:
        return False
    return worker_id is None or worker_id in chosen_workers(record)


def outcome_of(record: DecisionRecord) -> Outcome:
    """Return how a decision ended."""
    if record.unusual is not None and record.unusual.refusal is not None:
        return "refused"
    return "placed" if record.slot >= 0 else "cache_threshold"


def chosen_workers(record: DecisionRecord) -> list[int]:
    """Return the workers a decision chose: none, one, or both of a pair."""
    slots, unusual, fleet_slots = [record.slot], record.unusual, record.fleet_slots
    if unusual is not None and unusual.plan is not None and unusual.plan.mode == "disaggregated":
        assert unusual.plan.couple is not None
        slots.append(unusual.plan.couple.prefill_slot)
    return [fleet_slots.rank_states[fleet_slots.at[slot]].worker_id for slot in slots if slot >= 0]


def decision_id(record: DecisionRecord) -> str:
    """Return the id a record is published under."""
    if record.selection_id is not None:
        return record.selection_id
    return f"{PREFIX}{record.number}" if record.reservation_id is None else record.reservation_id
