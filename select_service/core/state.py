"""What survives the process: records of workers, reservations and freed ids, and their restoring.

A record is the whole current state of one key, so writing is idempotent and needs no order. Other
kinds of state (leases, peers) plug in through `State.sections`. `edge/state/journal.py` stores the
bytes and knows when they are safe; `changes.py` knows which keys changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from indexer.types import Scope
from select_service.core.admission.controller import scope_of_key
from select_service.core.changes import CONFIG, LEASE, PEER, RESERVATION, WORKER
from select_service.core.effects import NOTHING
from select_service.core.fleet.roster import API
from select_service.core.ledger.leases import Ending
from select_service.core.ledger.reservation_ids import LiveReservation
from select_service.core.replication.first_answers import first_answer
from select_service.core.replication.tombstones import Tombstone
from select_service.errors import ServiceError
from select_service.types import (
    LeaseState,
    PairSelection,
    PulledBlocks,
    ReservationAnswer,
    Selection,
    WorkerSpec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from select_service.core.admission.controller import AdmissionController
    from select_service.core.changes import Changes, StateKey
    from select_service.core.effects import Effects
    from select_service.core.fleet.catalog import Catalog
    from select_service.core.ledger.leases import Leases
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.partition import Partition
    from select_service.core.reservations.lifecycle import Lifecycle

_FREED = b""
"""The record of a recently freed id."""

_ENDED = b"\xc1"
"""Prefix before the claims of replicas that ended with the id; never the start of MessagePack.

Earlier builds wrote it; now `replication/durable_rows.py` keeps such claims.
"""


class ReservationRecord(msgspec.Struct, array_like=True, frozen=True):
    """Every fact of a live reservation. New fields go to the end, with a default."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    sequence_hashes: bytes
    prefill_tokens: int
    prefill_done: bool
    whole_outputs: int
    faded_outputs: int
    output_fraction: float
    ttl_s: float
    isl_tokens: int
    selection_id: str | None
    lora_name: str | None
    expected_output_tokens: int | None
    track_prefill_tokens: bool
    fingerprint: bytes | None
    selection: Selection | None  # the answer for a repeated request, if it was a selection
    reservation: ReservationAnswer | None  # or an explicit booking
    lease_id: str | None = None
    born: int = 0  # the number of our claim on it, if replicas are informed
    adopts: list[tuple[int, int]] = []  # and the claims of gone replicas that it took over
    fairness_id: str = ""
    pair: str | None = None  # of which it is a leg
    pair_answer: PairSelection | None = None  # the answer for a repeat, if it asked for a pair
    outputs: list[tuple[int, int]] = []  # by the replica that received the reports, if any
    batch: tuple[int, int] | None = None  # its group in the batch that made it, and shared tokens
    faded_at: int = 0  # output blocks when the last fraction came, also one that fades nothing
    session_id: str | None = None
    pulled: PulledBlocks | None = None  # blocks of its prompt that come from another rank
    session_version: int = 1


class WorkerState(msgspec.Struct, array_like=True, frozen=True):
    """A worker as it was registered, and its source."""

    spec: WorkerSpec
    source: str = API
    drain: str | tuple[str | None, str] | None = None
    """Why an operator lets it take no more work; with the reason of its source, if that has one."""
    attached: bool = True  # the last field: `Workers.is_late` looks at the last byte


_NOT_ATTACHED = b"\xc2"
"""False in MessagePack; no record of another build ends with it, because no text does."""


_encode = msgspec.msgpack.Encoder().encode
_decode_reservation = msgspec.msgpack.Decoder(ReservationRecord).decode
_lease: msgspec.msgpack.Decoder[LeaseState | Ending] = msgspec.msgpack.Decoder(LeaseState | Ending)
_decode_ended = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode
_decode_worker = msgspec.msgpack.Decoder(WorkerState).decode


class Section(Protocol):
    """One kind of state."""

    def record(self, name: str) -> bytes | None:
        """Return the current record of a name; None if there is nothing to keep."""

    def restore(self, name: str, record: bytes, now: float) -> Effects | None:
        """Restore a record; None if it no longer has a place.

        Raises:
            msgspec.DecodeError: the bytes are not a record.
        """


class State:
    """All kinds of state, in the order of their restoring."""

    def __init__(self, sections: Mapping[str, Section]) -> None:
        self.sections = dict(sections)
        self.restored: dict[str, int] = dict.fromkeys(self.sections, 0)
        self.dropped: dict[str, int] = dict.fromkeys(self.sections, 0)
        self.unreadable: list[str] = []  # dropped records that this build cannot read, and why
        self._turns = {kind: number for number, kind in enumerate(self.sections)}

    @property
    def kinds(self) -> list[str]:
        """The kinds, in the order in which records must be restored."""
        return list(self.sections)

    def turn(self, kind: str, record: bytes) -> tuple[int, bool]:
        """Return the sort key of records, of known kinds, for restoring.

        Workers that had no slot come after those that had one: the first to be attached sets the
        block size of its scope, and that must not be a record that contradicted the others.
        """
        return self._turns[kind], kind == WORKER and Workers.is_late(record)

    def record(self, key: StateKey) -> bytes | None:
        """Return the current record of a key; None: delete the row."""
        return self.sections[key[0]].record(key[1])

    def restore(self, key: StateKey, record: bytes, now: float) -> Effects | None:
        """Restore one record.

        Returns:
            The effects; None if it was dropped (and counted), because what it refers to is gone or
            it cannot be read, in which case `unreadable` says why.
        """
        kind, name = key
        section = self.sections.get(kind)
        effects = None
        try:
            effects = None if section is None else section.restore(name, record, now)
        except ServiceError:
            pass
        except (msgspec.DecodeError, ValueError) as error:
            self.unreadable.append(f"{kind} {name}: {error}")
        counts = self.dropped if effects is None else self.restored
        counts[kind] = counts.get(kind, 0) + 1
        return effects


class Workers:
    """The catalog: specs as they were registered."""

    def __init__(
        self,
        catalog: Catalog,
        admit: Callable[[WorkerSpec, float, str, str | None, str | None], Effects],
    ) -> None:
        self._catalog = catalog
        self._admit = admit

    def record(self, name: str) -> bytes | None:
        """Return a worker's whole spec."""
        worker = self._catalog.find(int(name))
        if worker is None:
            return None
        drain, unready = worker.operator_drain, worker.unready
        drains = drain if unready is None else (drain, unready)
        return _encode(WorkerState(worker.spec, worker.source, drains, worker.has_slot))

    @staticmethod
    def is_late(record: bytes) -> bool:
        """Tell whether a record is of a worker that was not attached. O(1)."""
        return record.endswith(_NOT_ATTACHED)

    def restore(self, _: str, record: bytes, now: float) -> Effects | None:
        """Register the worker again."""
        state = _decode_worker(record)
        drain = state.drain if isinstance(state.drain, tuple) else (state.drain, None)
        return self._admit(state.spec, now, state.source, *drain)


class LeaseSection:
    """Owners and their times to live, and recently ended leases.

    A reservation's own record says which lease it is under.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    def record(self, name: str) -> bytes | None:
        """Return the state of an open lease, or how it ended."""
        lease = self._leases.find(name)
        if lease is not None:
            return _encode(self._leases.state(lease))
        how = self._leases.ending(name)
        return None if how is None else _encode(how)

    def restore(self, name: str, record: bytes, now: float) -> Effects | None:
        """Open the lease with its full time to live, or remember its end for as long again."""
        state = _lease.decode(record)
        if not isinstance(state, LeaseState):
            return NOTHING if self._leases.recall_ended(name, state, now) else None
        if state.lease_id != name or self._leases.find(name) is not None:
            return None
        self._leases.restore(state, now)
        return NOTHING


class Reservations:
    """Live reservations of this process, and recently freed ids."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        catalog: Catalog,
        partitions: Mapping[Scope, Partition],
    ) -> None:
        self._lifecycle = lifecycle
        self._catalog = catalog
        self._partitions = partitions

    def record(self, name: str) -> bytes | None:
        """Return the record of an id; other replicas keep their own bookings."""
        bookings = self._lifecycle.bookings
        booking = bookings.live(name)
        if booking is None:
            return _FREED if bookings.is_remembered(name) else None
        hold = booking.hold
        if hold is not None and hold.is_whole and hold.is_open:
            return _FREED  # recently freed, and its batch is incomplete
        if booking.reservation.origin != "local":
            return None
        return _encode(record_of(booking))

    def _restore_freed(self, name: str, record: bytes, now: float) -> None:
        self._lifecycle.bookings.remember(name, now)
        endings = self._lifecycle.announcer.claims.endings
        for key in _decode_ended(record[1:]) if record else ():
            endings.note(name, Tombstone(*key), now, kept=True)

    def restore(self, name: str, record: bytes, now: float) -> Effects | None:
        """Book the reservation again, with every fact; its time to live restarts.

        If its rank or lease no longer exists it counts as freed.
        """
        bookings = self._lifecycle.bookings
        if record == _FREED or record.startswith(_ENDED):
            self._restore_freed(name, record, now)
            return NOTHING
        facts = _decode_reservation(record)
        partition = self._partitions.get(Scope(facts.model_name, facts.tenant_id))
        worker = self._catalog.find(facts.worker_id)
        slot = None
        if partition is not None and worker is not None and worker.scope == partition.scope:
            slot = worker.slots.get(facts.dp_rank)
        lease = None if facts.lease_id is None else self._lifecycle.leases.find(facts.lease_id)
        claims = self._lifecycle.announcer.claims
        if facts.born and claims.tombstones.has(name, (claims.router_id, facts.born)):
            bookings.remember(name, now)  # its end was stored, and this row not yet
            return NOTHING
        orphaned = facts.lease_id is not None and lease is None
        if partition is None or slot is None or orphaned or bookings.live(name) is not None:
            bookings.remember(name, now)
            if facts.pair is not None:
                bookings.remember(facts.pair, now)  # unless its other leg is there
            return None
        booking = _rebook(partition, slot, name, facts, now)
        announcer, leases = self._lifecycle.announcer, self._lifecycle.leases
        if lease is not None:
            leases.join(lease, booking.reservation)
            leases.inherit(lease, facts.adopts, announcer.claims.is_silent)
        bookings.add(booking)
        if facts.session_id is not None and self._lifecycle.sessions is not None:
            self._lifecycle.sessions.run(partition, facts.session_id)
        if announcer.is_on:
            born = facts.born or announcer.claims.outbox.stamp().seq
            shared = facts.adopts, facts.outputs
            claim = announcer.own(partition, booking.reservation, born, booking.answer, *shared)
            claim.grow(faded_at=max(claim.growth.faded_at, facts.faded_at))
            for key in facts.adopts:
                heir = announcer.claims.router_id, born
                claims.endings.note(name, Tombstone(*key, heir=heir), now, kept=True)
        return NOTHING


class PolicyRecord(msgspec.Struct, array_like=True, frozen=True):
    """The admission policy in force."""

    name: str
    config: dict[str, object]


_decode_policy = msgspec.msgpack.Decoder(PolicyRecord).decode
_decode_entry = msgspec.msgpack.Decoder(dict[str, float | None]).decode


class AdmissionSection:
    """The policy set by an operator at run time; otherwise the command line's applies."""

    def __init__(self, controller: AdmissionController) -> None:
        self._controller = controller

    def record(self, _: str) -> bytes | None:
        """Return the policy and its configuration."""
        return _encode(PolicyRecord(self._controller.policy, self._controller.config))

    def restore(self, _: str, record: bytes, __: float) -> Effects | None:
        """Put it into force again, before workers come."""
        policy = _decode_policy(record)
        self._controller.put_in_force(policy.name, policy.config)
        return NOTHING


class ThresholdSection:
    """Busy thresholds by model and tenant."""

    def __init__(self, controller: AdmissionController) -> None:
        self._controller = controller

    def record(self, name: str) -> bytes | None:
        """Return an entry as it was set."""
        entry = self._controller.thresholds.entry(*scope_of_key(name))
        return None if entry is None else _encode(entry)

    def restore(self, name: str, record: bytes, _: float) -> Effects | None:
        """Restore an entry; it has no effect while admission control is off."""
        model, tenant = scope_of_key(name)
        self._controller.thresholds.restore(model, tenant, _decode_entry(record))
        return NOTHING


_decode_overrides = msgspec.msgpack.Decoder(dict[str, object]).decode


class Overrides:
    """Settings changed by an operator at run time; the edge interprets them."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.changes: Changes | None = None

    def put(self, values: Mapping[str, object]) -> None:
        """Replace all settings by these."""
        self.values = dict(values)
        if self.changes is not None:
            self.changes.mark(CONFIG, "put")

    def record(self, _: str) -> bytes | None:
        """Return all settings."""
        return _encode(self.values) if self.values else None

    def restore(self, _: str, record: bytes, __: float) -> Effects | None:
        """Restore all settings."""
        self.values = _decode_overrides(record)
        return NOTHING


class PeerEndpoints:
    """Replicas registered at run time; those of the command line come from there again."""

    def __init__(self) -> None:
        self.endpoints: dict[str, None] = {}
        self.changes: Changes | None = None

    def add(self, endpoint: str) -> None:
        """Add an endpoint."""
        self.endpoints[endpoint] = None
        self._changed(endpoint)

    def remove(self, endpoint: str) -> None:
        """Remove an endpoint, if it is known."""
        self.endpoints.pop(endpoint, None)
        self._changed(endpoint)

    def _changed(self, endpoint: str) -> None:
        if self.changes is not None:
            self.changes.mark(PEER, endpoint)

    def record(self, name: str) -> bytes | None:
        """Return an empty record if the endpoint is known."""
        return b"" if name in self.endpoints else None

    def restore(self, name: str, _: bytes, __: float) -> Effects | None:
        """Restore an endpoint; the owner of the sockets registers it."""
        self.endpoints[name] = None
        return NOTHING


def record_of(booking: LiveReservation) -> ReservationRecord:
    """Return every fact of a live booking."""
    reservation, partition = booking.reservation, booking.partition
    fingerprint, answer = first_answer(booking)
    worker, dp_rank = partition.fleet_slots.rank_at(reservation.slot)
    return ReservationRecord(
        partition.scope.model_name,
        partition.scope.tenant_id,
        worker.worker_id,
        dp_rank,
        partition.ledger.chain_of(reservation),
        reservation.prefill_tokens,
        reservation.prefill_done,
        reservation.whole_outputs,
        reservation.faded_outputs,
        reservation.output_fraction,
        reservation.ttl_s,
        reservation.isl_tokens,
        reservation.selection_id,
        reservation.lora_name,
        reservation.expected_output_tokens,
        reservation.track_prefill_tokens,
        fingerprint,
        answer if isinstance(answer, Selection) else None,
        answer if isinstance(answer, ReservationAnswer) else None,
        None if reservation.lease is None else reservation.lease.lease_id,
        0 if reservation.claim is None else reservation.claim.born,
        [] if reservation.claim is None else reservation.claim.record.adopts,
        reservation.fairness_id,
        reservation.pair,
        answer if isinstance(answer, PairSelection) else None,
        [] if reservation.claim is None else list(reservation.claim.growth.outputs.items()),
        reservation.batch,
        0 if reservation.claim is None else reservation.claim.growth.faded_at,
        reservation.session_id,
        reservation.pulled,
        reservation.session_version,
    )


def _rebook(
    partition: Partition, slot: int, name: str, facts: ReservationRecord, now: float
) -> LiveReservation:
    ledger = partition.ledger
    ledger.loads.work.resumed_at = now
    reservation: LedgerReservation = ledger.book(
        name,
        slot,
        facts.sequence_hashes,
        facts.prefill_tokens,
        now,
        isl_tokens=facts.isl_tokens,
        ttl_s=facts.ttl_s,
        fairness_id=facts.fairness_id or facts.tenant_id,
    )
    reservation.selection_id, reservation.pair = facts.selection_id, facts.pair
    reservation.session_id, reservation.session_version = facts.session_id, facts.session_version
    reservation.batch, reservation.pulled = facts.batch, facts.pulled
    reservation.lora_name = facts.lora_name
    reservation.expected_output_tokens = facts.expected_output_tokens
    reservation.track_prefill_tokens = facts.track_prefill_tokens
    reservation.fingerprint = facts.fingerprint
    if facts.prefill_done:
        ledger.prefill_complete(reservation, now, is_measured=False)
    ledger.resume_outputs(
        reservation, facts.whole_outputs, facts.faded_outputs, facts.output_fraction
    )
    answer = facts.selection or facts.pair_answer or facts.reservation
    return LiveReservation(partition, reservation, answer)


__all__ = [
    "LEASE",
    "RESERVATION",
    "WORKER",
    "AdmissionSection",
    "LeaseSection",
    "Overrides",
    "PeerEndpoints",
    "ReservationRecord",
    "Reservations",
    "Section",
    "State",
    "ThresholdSection",
    "Workers",
    "record_of",
]
