"""The life of a reservation: the only place where one begins, and where calls end it.

It keeps ledger, ids, counters and replicas in step; `reservation_ends.py` ends what no call ends.
The verbs choose a rank and book it here. A booking is refused only for its id: everything else was
checked before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from indexer.core.group_index import EARLY_PROMPTS_MAX, PROMPT_END
from indexer.core.packing import unpack_i64
from select_service.core.effects import NOTHING, Effects
from select_service.core.fleet.catalog import check_name
from select_service.core.ledger.deadlines import rounded_up
from select_service.core.ledger.reservation_ids import LiveReservation
from select_service.core.replication.announcer import Announcer
from select_service.core.replication.claim import Claim
from select_service.core.reservations.idempotency import Idempotency
from select_service.core.reservations.predictions import check_itl, learn_ttft
from select_service.core.reservations.remote_reservations import RemoteReservations
from select_service.core.reservations.renewal import Renewal
from select_service.core.reservations.reservation_ends import ReservationEnds
from select_service.core.tenancy.shares import Shares
from select_service.errors import (
    InvalidField,
    NameRefused,
    ReservationNotFound,
    TooManyReservations,
)
from select_service.types import PulledBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from indexer.types import PackedHashes
    from select_service.core.counters import Counters
    from select_service.core.ledger.charge import Charge
    from select_service.core.ledger.reservation import Lease, LedgerReservation
    from select_service.core.observers import ReservationRecorder, Tracer
    from select_service.core.partition import Partition
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.replication.messages import ClaimRecord
    from select_service.types import (
        CoreLimits,
        KvSource,
        PairSelection,
        ReservationAnswer,
        ReservationRequest,
        SelectAndReserveRequest,
        Selection,
    )
    from select_service.types.admission import ChargedRequest


class Lifecycle(ReservationEnds):
    """Begins, repeats and ends reservations across all partitions."""

    def __init__(
        self,
        limits: CoreLimits,
        counters: Counters,
        router_id: int,
        epoch: int,
        shares: Shares | None = None,
        *,
        tracer: Tracer | None = None,
        recorder: ReservationRecorder | None = None,
    ) -> None:
        shares = shares or Shares(limits)
        announcer = Announcer(limits, router_id, epoch, shares)
        super().__init__(limits, counters, shares, announcer, recorder)
        self._tracer = tracer
        self._tenants = shares.bound("reservations_max", lambda: limits.reservations_max)
        self._limits = limits
        self.renewal = Renewal(self.bookings, self.leases, self.announcer, limits)
        self.elsewhere = RemoteReservations(
            self.bookings, self.announcer, self.renewal.renew_claimed
        )
        self.repeats = Idempotency(self.bookings, self.elsewhere, counters)
        self.show_hashes: Callable[[PackedHashes], list[int]] = unpack_i64
        """How answers carry hashes: as numbers, or as JSON text of them if the edge wants that."""

    # -- room ----------------------------------------------------------------------------------

    def check_room(self, request: SelectAndReserveRequest | ReservationRequest) -> None:
        """Refuse a booking if there is no room for it, or one of its names is invalid.

        Raises:
            TooManyReservations: as many are live or waited for as allowed.
            NameRefused: an id or a name that is too long, or not printable.
        """
        limits = self._limits
        tenants = self.bookings.tenants
        if tenants is None:
            has_room = self.bookings.own + len(self.bookings.waiting) < limits.reservations_max
        else:
            has_room = tenants.has_room(request.scope.tenant_id)
        if not has_room:
            self._counters.reservations_refused += 1
            crowded = self._tenants.refuse(request.scope.tenant_id)
            raise TooManyReservations(limits.reservations_max, crowded)
        most, name, second = limits.id_length_max, request.reservation_id, request.selection_id
        if name is not None and (len(name) > most or not name.isprintable()):
            raise NameRefused.of("reservation_id", name, most, "id_length_max")
        if second is not None and (len(second) > most or not second.isprintable()):
            raise NameRefused.of("selection_id", second, most, "id_length_max")
        if request.lora_name is not None:
            check_name("lora_name", request.lora_name, limits.name_length_max)

    # -- time to live --------------------------------------------------------------------------

    def terms(
        self, request: SelectAndReserveRequest | ReservationRequest
    ) -> tuple[Lease | None, float]:
        """Return the lease a booking will live under, or its own time to live.

        Raises:
            InvalidField: `ttl_s` is out of bounds, or comes with a lease.
            LeaseNotFound: the lease is not open.
        """
        ttl_s = request.ttl_s
        if request.lease_id is None:
            if ttl_s is None:
                return None, self._limits.reservation_ttl_s
            longest = self._limits.reservation_ttl_max_s
            if not 0.0 < ttl_s <= longest:
                raise InvalidField(f"ttl_s must be above 0 and at most {longest:g}", field="ttl_s")
            return None, rounded_up(ttl_s)
        if ttl_s is not None:
            raise InvalidField("what has a lease has no ttl_s of its own", field="ttl_s")
        return self.leases.get(request.lease_id), 0.0

    # -- begin ---------------------------------------------------------------------------------

    def book(  # noqa: C901, PLR0912, PLR0915, PLR0917 - every booking pays for names and frames
        self,
        partition: Partition,
        slot: int,
        spec: BookingSpec,
        request: SelectAndReserveRequest | ReservationRequest,
        answer: Selection | PairSelection | ReservationAnswer,
        effects: Effects,
        now: float,
    ) -> Effects:
        """Put the load of a new reservation on a slot, and tell the replicas.

        Raises:
            ServiceError: as `terms`; then nothing has changed.
        """
        prompt, track = spec.prompt, spec.track_prefill_tokens
        name, isl_tokens = spec.reservation_id, prompt.isl_tokens
        lease, ttl_s, whose = None, self._limits.reservation_ttl_s, spec.fairness_id
        if request.lease_id is not None or request.ttl_s is not None:
            lease, ttl_s = self.terms(request)
        prefill_tokens = spec.computed_tokens if track else 0
        if self._recorder is not None:
            facts = name, prefill_tokens, isl_tokens
            self._recorder.begun("booked", partition, slot, facts, now)
        if self._tracer is not None:
            self._tracer.booking(partition, slot, name, isl_tokens)
        reservation = partition.ledger.book(
            name,
            slot,
            prompt.sequence_hashes,
            prefill_tokens,
            now,
            isl_tokens=isl_tokens,
            ttl_s=ttl_s,
            fairness_id=partition.scope.tenant_id if whose is None else whose,
        )
        if lease is not None:
            self.leases.join(lease, reservation)
            self.leases.touch(lease, now)
        reservation.fingerprint, reservation.charged = spec.fingerprint, spec.charged
        reservation.selection_id = request.selection_id
        if not track:
            reservation.track_prefill_tokens = False
        source = spec.kv_source
        if source is not None:
            pulled = PulledBlocks(source.worker_id, source.blocks, source.dp_rank, source.tier)
            partition.note_pull(reservation, pulled)
        if spec.pair is not None or spec.batch is not None or spec.session_id is not None:
            reservation.pair, reservation.batch = spec.pair, spec.batch
            if spec.session_id is not None and self.sessions is not None:
                reservation.session_id = spec.session_id
                reservation.session_version = self.sessions.run(partition, spec.session_id)
        if request.lora_name is not None:
            reservation.lora_name = request.lora_name
        if request.expected_output_tokens is not None:
            reservation.expected_output_tokens = request.expected_output_tokens
        self.bookings.add(LiveReservation(partition, reservation, answer))
        self._counters.reservations_booked += 1
        index, groups = partition.index, partition.index.groups
        if isl_tokens == prompt.blocks * index.block_size:
            # before the first event it is not known what an engine has
            if groups.needs_whole_prompts:
                groups.note_whole_prompt(prompt.block_hashes)
            elif len(groups.whole_prompts) < EARLY_PROMPTS_MAX and not index.tree.root.children:
                groups.whole_prompts.setdefault(prompt.block_hashes[-PROMPT_END:])
        if self.announcer.is_on:
            effects = Effects() if effects is NOTHING else effects
            held = self.bookings.hold is not None
            message = self.announcer.booked(partition, reservation, answer, held=held)
            effects.published.append(message)
        return effects

    def note_charge(self, name: str, charge: Charge) -> None:
        """Let the end of a request that was admitted correct what it was charged.

        Of a pair, output is reported for one leg only.
        """
        booking = self.bookings.live(name)
        for one in self.bookings.legs(name) if booking is None else (booking,):
            one.reservation.charge = charge

    def learn(
        self,
        partition: Partition,
        slot: int,
        record: ClaimRecord,
        hashes: PackedHashes,
        origin: str | int,
        now: float,
        *,
        watched: bool = False,
        is_new: bool = False,
    ) -> LedgerReservation:
        """Book a reservation of a replica, or one of ours again; its id must not be live here.

        `watched`: a copy of its lease decides how long it lives. `is_new`: it was made just now;
        of others it is not known here how long they take.
        """
        if self._recorder is not None:
            facts = record.reservation_id, record.prefill_tokens, record.isl_tokens
            self._recorder.begun("learnt", partition, slot, facts, now)
        lease, is_ours = None, origin == "local"
        if is_ours and record.lease is not None:
            lease = self.leases.find(record.lease.lease_id)
            assert lease is not None, "it has ended with its lease"
        default_s = self._limits.reservation_ttl_s if is_ours else self._limits.replica_orphan_ttl_s
        unbound = lease is None and not watched
        reservation = partition.ledger.book(
            record.reservation_id,
            slot,
            hashes,
            record.prefill_tokens,
            now,
            isl_tokens=record.isl_tokens,
            ttl_s=self.announcer.claims.copies.orphan_ttl(record, default_s) if unbound else 0.0,
            fairness_id=record.fairness_id or partition.scope.tenant_id,
        )
        if lease is not None:
            self.leases.join(lease, reservation)
            self.leases.inherit(lease, record.adopts, self.announcer.claims.is_silent)
        reservation.track_prefill_tokens = record.track_prefill_tokens
        reservation.is_timed = is_new
        partition.note_pull(reservation, record.pulled)
        reservation.selection_id = record.selection_id
        reservation.pair = record.pair
        reservation.batch = record.batch
        reservation.lora_name = record.lora_name
        name = record.session_id
        if name and len(name) <= self._limits.id_length_max:
            reservation.session_id = name
            reservation.session_version = version = record.session_version
            if self.sessions is not None:
                if isinstance(origin, int):
                    is_later = self.sessions.apply(
                        partition,
                        name,
                        slot,
                        now,
                        version=version,
                        sender=origin,
                        is_new=is_new,
                    )
                    if is_new and not is_later:
                        self.sessions.queue(partition, name)
                self.sessions.run(partition, name)
        reservation.expected_output_tokens = record.expected_output_tokens
        reservation.origin = origin
        if is_new and record.charged is not None and partition.admission is not None:
            if len(record.fairness_id) > self._limits.name_length_max:  # no client may say it here
                self.announcer.claims.counters.ignored += 1
            else:
                reservation.charge = partition.admission.charge_of_replica(
                    reservation, record.charged, partition.index.block_size, now
                )
        self.bookings.add(LiveReservation(partition, reservation, None))
        return reservation

    # -- lifecycle -----------------------------------------------------------------------------

    def prefill_complete(
        self, name: str, now: float, cached_tokens: int | None = None
    ) -> tuple[Partition | None, Effects]:
        """The prompt is computed: release its prefill tokens, keep its blocks. Repeatable.

        `name` is its reservation_id or selection_id.

        Returns:
            The partition that lost load, None if its worker is not here; and the effects.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        booking = self._get(name)
        if isinstance(booking, Claim):
            message = self.elsewhere.prefill_complete(booking, now)
            return None, Effects(published=[message])
        partition, reservation = booking.partition, booking.reservation
        if not reservation.prefill_done:
            demand = partition.demand
            demand.first_tokens += 1
            demand.ttft_s += now - reservation.created
            reservation.first_token_at = now
        partition.ledger.prefill_complete(reservation, now, cached_tokens=cached_tokens)
        if (  # usually none of these applies
            reservation.lease is not None
            or reservation.claim is not None
            or self.bookings.changes is not None
        ):
            self.renewal.cared_for(booking, now)
        if self._recorder is not None:
            self._recorder.lived("prefill_complete", name, now)
        if not self.announcer.is_on:
            return partition, NOTHING
        effects = Effects()
        effects.published.append(self.announcer.completed(partition, reservation))
        return partition, effects

    def output_block(
        self, name: str, decay_fraction: float | None, now: float, count: int = 1
    ) -> None:
        """Add `count` output blocks; a fraction reweights all blocks that only this one holds.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        booking = self._get(name)
        if isinstance(booking, Claim):
            self.elsewhere.output_block(booking, decay_fraction, now, count)
        else:
            reservation = booking.reservation
            if reservation.first_token is not None:
                learn_ttft(booking, now)
            booking.partition.ledger.output_block(reservation, decay_fraction, now, count)
            self.renewal.cared_for(booking, now)
            if self.announcer.is_on:
                self.announcer.claims.output(reservation.reservation_id, decay_fraction, count)
        if self._recorder is not None:
            self._recorder.lived("output_block", name, now, count, decay_fraction)

    def outputs(self, name: str) -> int:
        """Return its output blocks, including those only other replicas were told of.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        known = self._get(name)
        return known.output_blocks if isinstance(known, Claim) else known.reservation.output_blocks

    def tenant_of(self, name: str) -> str | None:
        """Return whose a live reservation is, by its id, selection_id or pair; None: not live."""
        booking = self.bookings.find(name) or next(iter(self.bookings.legs(name)), None)
        if booking is not None:
            return booking.partition.scope.tenant_id
        return self.elsewhere.tenant_of(name)

    def may_be_known_elsewhere(self, name: str) -> bool:
        """Tell whether replicas may know what has or had this name: it is, or was, known here."""
        if not self.announcer.is_on:
            return False
        return self.bookings.was_freed(name) or self.elsewhere.tenant_of(name) is not None

    def is_live(self, name: str) -> bool:
        """Tell whether lifecycle calls for a name find something: what has aged does not count."""
        return (self.bookings.find(name) or self.elsewhere.find(name)) is not None

    def _get(self, name: str) -> LiveReservation | Claim:
        """Return what a lifecycle call is for: a live booking, or a claim of an absent worker.

        Raises:
            ReservationNotFound: nothing live has that id.
        """
        known = self.bookings.find(name) or self.elsewhere.find(name)
        if known is None:
            self._miss(name)
            raise ReservationNotFound(name)
        return known

    def _miss(self, name: str) -> None:
        """Count a call for an id that expired: it was perhaps given up too early."""
        if self._expired_ids.discard(name):
            self._counters.reservations_expired_early += 1

    # -- end -----------------------------------------------------------------------------------

    def free(
        self,
        name: str,
        now: float,
        *,
        is_withdrawn: bool = False,
        is_computed: bool = True,
        is_taken_back: bool = False,
    ) -> tuple[Partition | None, Effects]:
        """End a reservation; ending a recently freed one is no error and frees nothing.

        `is_withdrawn`: no client was told of it here, so no request has ended. `is_computed`:
        a prompt not reported complete may have been computed all the same. `is_taken_back`:
        no client asked for its end, so what another replica booked under its id, and perhaps
        told of, stays.

        Raises:
            ReservationNotFound: the id was never seen.
        """
        booking = self.bookings.find(name)
        if booking is None:
            self._miss(name)
            message = self.elsewhere.free(name, now)
            if message is not None:
                return None, Effects(published=[message])
            if self.bookings.was_freed(name):
                if self.announcer.is_on:
                    self.announcer.claims.endings.note_freed(name, now)
                return None, NOTHING
            raise ReservationNotFound(name)
        partition, reservation = booking.partition, booking.reservation
        if reservation.lease is not None or reservation.claim is not None:
            self.renewal.renew(booking, now)
        effects = NOTHING
        if self.announcer.is_on:
            is_ours_alone = reservation.origin == "local" and (is_withdrawn or is_taken_back)
            end = self.announcer.expired if is_ours_alone else self.announcer.freed
            effects = Effects(published=[end(partition, reservation, now)])
        if is_withdrawn:
            self.release(booking, now, "freed")
            self._counters.reservations_withdrawn += 1
            return partition, effects
        if is_computed and not reservation.prefill_done:  # it was not reported, and it is over
            partition.ledger.note_computed(reservation, now)
        _learn_from(booking, now)
        self.release(booking, now, "freed")
        self._counters.reservations_freed += 1
        return partition, effects

    def follow_tenants(self, partitions: Iterable[Partition]) -> None:
        """Count by tenant from now on, because tenants have parts of the bounds. O(ranks)."""
        self.bookings.follow_tenants(self._tenants, partitions)


class BookingSpec(Struct, frozen=True):
    """What to book, once the rank is known; replicas hear of it as a claim."""

    reservation_id: str
    fingerprint: bytes
    prompt: Prompt
    computed_tokens: int  # of the prompt, that its rank has to compute
    track_prefill_tokens: bool  # whether these count, and are sent to replicas
    fairness_id: str | None = None  # whose share of the pool it counts against; None: its tenant's
    kv_source: KvSource | None = None  # where its rank pulls blocks of the prompt from
    charged: ChargedRequest | None = None  # to the account of its tenant
    pair: str | None = None  # the pair it is a leg of
    batch: tuple[int, int] | None = None  # its group in the batch that books it, and shared tokens
    session_id: str | None = None  # the session it belongs to, where sessions are kept


def _learn_from(booking: LiveReservation, now: float) -> None:
    """Learn from a request that its client ends how long one takes, and how much it wrote."""
    partition, reservation = booking.partition, booking.reservation
    demand = partition.demand
    demand.ended += 1
    demand.request_s += now - reservation.created
    if partition.admission is not None:
        partition.admission.ended(reservation, now)
    outputs = reservation.whole_outputs + reservation.faded_outputs
    if outputs:
        tokens = outputs * partition.index.block_size
        demand.add_output(tokens, reservation.first_token_at, now)
        check_itl(booking)
