"""Plain selections in a few frames, from request to answer.

The pure-Python twin of `Shortcut` in `_shortcut.pyx`, and less eager. It takes requests with
nothing but scope, prompt as packed hashes, and ids, in a partition without gate, waiting requests
or trust factors, whose lower tiers hold nothing of the prompt. All others take the full path
through `Selecting` (`reading.py`, `placing.py`, `partition.py`), which does the same to the same
objects. Nothing is decided here: the index finds, the pricer prices and picks, the ledger books,
the ring records. It saves frames that only pass arguments on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace
from xxhash import xxh3_128_digest

from indexer.types import HASH_BYTES
from select_service.core.admission.queue import Ticket
from select_service.core.booking.fingerprints import in_order
from select_service.core.books.bookings import Booking
from select_service.core.effects import NOTHING, Effects
from select_service.core.pricing.placement import device_overlap, forgone_tokens
from select_service.core.pricing.prompt import Prompt
from select_service.core.verbs.placing import sketch
from select_service.types import SelectAndReserveRequest, SelectRequest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from indexer.types import Scope
    from select_service.core.booking.desk import Desk
    from select_service.core.books.demand_tally import DemandTally
    from select_service.core.books.reservation import Reservation
    from select_service.core.columns import Groups, Rows
    from select_service.core.counters import Counters
    from select_service.core.decisions.keeping import Decisions
    from select_service.core.partition import Partition
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.weights import Weights
    from select_service.core.verbs.placing import Placing
    from select_service.types import (
        Answer,
        CoreLimits,
        Selection,
    )
    from select_service.types.admission import AdmissionSettings

    _Plain: TypeAlias = tuple[Partition, "Glance", bytes, bytes, int, Groups | None]
    """What a plain request comes down to: its partition, block hashes, sequence hashes and tokens,
    and the matches per slot."""

__all__ = ["Shortcut"]

_BOOKING: Final = SelectAndReserveRequest.__name__.encode()
"""How the fingerprinted bytes of a booking begin; see `fingerprint_of`."""


def _says_more(request: SelectRequest) -> bool:
    """Whether a request has a member plain ones lack; unrolled, as every request pays for it."""
    return not (
        request.token_ids is None
        and request.mm_routing_info is None
        and request.block_mm_infos is None
        and request.lora_name is None
        and request.cache_salt is None
        and request.cache_namespace is None
        and request.is_eagle is None
        and request.router_config_override is None
        and request.priority_jump is None
        and request.strict_priority is None
        and request.pinned_worker is None
        and request.allowed_worker_ids is None
        and request.routing_constraints is UNSET
        and request.slo_class is None
        and request.priority is None
        and request.slo_ttft_ms is None
        and request.fairness_id is None
        and request.cache_hit_threshold is None
        and request.cache_hit_scope is None
        and request.cache_hit_basis is None
        and request.on_cache_threshold == "reject"
        and request.attempt == 0
        and request.session_id is None
        and request.explain is UNSET
    )


class Glance:
    """What was derived from a partition since a worker last came, went or changed there."""

    __slots__ = (
        "answers",
        "busy_above",
        "chains",
        "count",
        "is_plain",
        "loads",
        "queue",
        "root",
        "rows",
    )

    def __init__(self, partition: Partition) -> None:
        seating = partition.seating
        self.rows = seating.everyone
        self.count = seating.ranks
        self.is_plain = (
            partition.admission is None
            and len(partition.policy.classes) == 1
            and not seating.roles.given
            and len(seating.workers) > 0
            and type(self.rows) is slice
        )
        if not self.is_plain:
            return
        self.root, self.chains = partition.index.tree.root, partition.ledger.blocks.root
        self.loads = partition.ledger.loads
        self.queue = partition.queues.of_class[0]
        self.busy_above = partition.queues.busy_above(0, 0)
        self.answers: list[Selection | None] = [None] * self.count  # by slot; built on first use

    def answer(self, partition: Partition, slot: int) -> Selection:
        """Return the answer for a request without matches that goes to this slot."""
        answer = self.answers[slot]
        if answer is None:
            answer = self.answers[slot] = sketch(partition, slot)
        return answer


class Shortcut:
    """Answers plain selections of one core; see above."""

    def __init__(  # noqa: PLR0917 - the rooms of a core
        self,
        partitions: Mapping[Scope, Partition],
        limits: CoreLimits,
        settings: AdmissionSettings,
        weights: Weights,
        placing: Placing,
        decisions: Decisions,
        counters: Counters,
        rng: random.Random,
        desk: Desk,
        new_id: Callable[[], str],
    ) -> None:
        """Take the rooms of a core.

        Args:
            partitions: by scope.
            limits: of the core.
            settings: of admission.
            weights: of requests without an override; they satisfy `suits`.
            placing: places whatever is not plain.
            decisions: keeps records.
            counters: of the core.
            rng: draws.
            desk: the plain Desk, not a subclass that records its calls.
            new_id: makes the id of a booking that has none.
        """
        self._partitions, self._limits, self._settings = partitions, limits, settings
        self._placing, self._counters = placing, counters
        self._keep, self._keep_usual = decisions.keep, decisions.ring.keep
        self._draw, self._new_id = rng.random, new_id
        self._weights, self._is_kv_cost = weights, weights.is_kv_cost
        self._desk, self._bookings = desk, desk.bookings
        self._speaks = desk.announcer.speaks

    @staticmethod
    def suits(weights: Weights) -> bool:
        """Whether the formula of these weights has none of its rarer terms."""
        return weights.overlap_score_credit_decay <= 0.0 and weights.temperature == 0.0

    def select(self, request: SelectRequest, now: float) -> tuple[Answer, Effects] | None:
        """Return (answer, effects) as `Selecting.select` does; None: leave it to that."""
        if type(request) is not SelectRequest or request.reservation_id is not None:
            return None  # the record would contain it
        found = self._look(request)
        return None if found is None else self._place(*found, request, None, b"", now)

    def select_and_reserve(
        self, request: SelectAndReserveRequest, now: float
    ) -> tuple[Answer, Effects] | None:
        """As `Selecting.select_and_reserve`, or None: leave it to that."""
        if (
            type(request) is not SelectAndReserveRequest
            or request.lease_id is not None
            or request.ttl_s is not None
        ):
            return None
        found = self._look(request)
        if found is None or found[0].ledger.changes is not None:
            return None
        name, second, limits = request.reservation_id, request.selection_id, self._limits
        most = limits.id_length_max
        if (
            not self._bookings.may_add(name, limits.reservations_max)
            or (name is not None and (len(name) > most or not name.isprintable()))
            or (second is not None and (len(second) > most or not second.isprintable()))
        ):
            return None
        fingerprint = b""
        if name is None:
            name = self._new_id()
        else:
            fingerprint = xxh3_128_digest(_BOOKING + in_order(request))
        return self._place(*found, request, name, fingerprint, now)

    def _look(self, request: SelectRequest) -> _Plain | None:  # noqa: PLR0911 - as above
        """Return what a request comes down to; None: it is not plain."""
        if _says_more(request):
            return None
        tenant = request.tenant_id
        if tenant is UNSET:
            tenant = request.routing_group
        key = request.model_name, "default" if tenant is UNSET else tenant
        partition: Partition | None
        partition = self._partitions.get(key)  # type: ignore[call-overload] # equal to its scope
        if partition is None:
            return None
        glance = partition.glance
        if type(glance) is not Glance:
            glance = partition.glance = Glance(partition)
        placing = self._placing
        if (
            not glance.is_plain
            or placing.shadow is not None
            or partition.trust.column is not None
            or (placing.sampler is not None and placing.sampler.left)
            or glance.queue.pending
            or self._settings.cache_hit_threshold > 0.0
            or (
                glance.loads.prefill_left[0] > glance.busy_above
                and partition.queues.all_busy(0, glance.rows)
            )
        ):
            return None
        local, chain, isl_tokens = request.block_hashes, request.sequence_hashes, request.isl_tokens
        if (
            type(local) is not bytes
            or type(chain) is not bytes
            or not isl_tokens
            or (size := len(local)) != len(chain)
            or size % HASH_BYTES
            or size > self._limits.blocks_per_request_max * HASH_BYTES
        ):
            return None
        if local[:HASH_BYTES] not in glance.root.children:
            return partition, glance, local, chain, isl_tokens, None
        matches = partition.index.find_matches(local)
        if matches.host or matches.disk:
            return None
        groups = [(blocks, matches.slots(mask)) for blocks, mask in matches.groups]
        return partition, glance, local, chain, isl_tokens, groups or None

    def _place(  # noqa: PLR0917 - one by one: all pay for what puts them together
        self,
        partition: Partition,
        glance: Glance,
        local: bytes,
        chain: bytes,
        isl_tokens: int,
        matched: Groups | None,
        request: SelectRequest,
        name: str | None,
        fingerprint: bytes,
        now: float,
    ) -> tuple[Answer, Effects]:
        """Choose a rank, and book it if there is a name to book under."""
        ledger, weights, shared = partition.ledger, self._weights, None
        if chain[:HASH_BYTES] in glance.chains.children:
            shared = ledger.shared_groups(chain)
        present = weights if self._is_kv_cost else partition.at_present(weights)
        size, track = partition.index.block_size, weights.track_prefill_tokens
        slot, _, decode = partition.pricer.cheapest(
            glance.count,
            isl_tokens,
            size,
            len(local) // HASH_BYTES,
            weights.prefill_load_scale,
            weights.overlap_score_credit,
            track,
            matched,
            shared,
            self._draw,
            None,
            None if self._is_kv_cost else present.of_ours,
            now,
        )
        sketched, left = glance.answers[slot] or glance.answer(partition, slot), isl_tokens
        overlap, second = sketched.overlap, request.selection_id
        if matched is not None:
            blocks, worker = partition.pricer.matched_at(slot), partition.seating.rank_at(slot)[0]
            overlap = device_overlap(worker, partition.pricer, size, blocks)
            left = max(isl_tokens - blocks * size, 0)
            if left:
                forgone = forgone_tokens(matched, glance.rows, isl_tokens, size, left, None)
                if forgone:
                    self._counters.selected_forgone_tokens += forgone
                    self._counters.selections_forgoing += 1
        self._count(partition.demand, sketched.worker_id, isl_tokens, left)
        packed = self._packed(partition) if partition.is_watched else b""  # before it is booked
        answer = replace(
            sketched,
            selection_id=UNSET if second is None else second,
            overlap=overlap,
            effective_prefill_tokens=left,
        )
        effects = NOTHING
        if name is not None:
            answer.reservation_id, answer.isl_tokens = name, isl_tokens
            answer.track_prefill_tokens, answer.potential_decode_blocks = track, decode
            reservation = ledger.book(
                name,
                slot,
                chain,
                left if track else 0,
                now,
                isl_tokens=isl_tokens,
                ttl_s=self._limits.reservation_ttl_s,
                fairness_id=answer.tenant_id,
            )
            reservation.fingerprint = fingerprint
            effects = self._confirm(partition, reservation, request, answer)
            answer = replace(answer, sequence_hashes=self._desk.show_hashes(chain))
        if packed:
            prompt, seen = Prompt(local, chain, isl_tokens), (packed, matched, shared, None)
            ticket = Ticket(partition, request, prompt, weights, name, fingerprint)
            self._note(ticket, seen, glance.rows, slot, now, present)
        return answer, effects

    def _count(self, demand: DemandTally, worker_id: int, isl_tokens: int, left: int) -> None:
        """Count a selection with `left` tokens of its prompt to compute."""
        counters = self._counters
        counters.selections += 1
        counters.selected_isl_tokens += isl_tokens
        counters.selected_prefill_tokens += left
        demand.place(worker_id, isl_tokens, left)

    @staticmethod
    def _packed(partition: Partition) -> bytes:
        """Return the packed load columns; see `SlotLoads.pack`."""
        loads = partition.ledger.loads
        packed = loads.packed
        if not packed:
            recent = loads.recent
            pace = recent.pace if loads.follows_queues else None
            packed = partition.pricer.packed(loads.prefilling, recent.turnover, pace)
            loads.packed = packed
        return packed

    def _confirm(
        self,
        partition: Partition,
        reservation: Reservation,
        request: SelectRequest,
        kept: Selection,
    ) -> Effects:
        """Record the owner of a reservation and its answer, and tell the replicas."""
        reservation.track_prefill_tokens = self._weights.track_prefill_tokens
        reservation.selection_id = request.selection_id
        reservation.expected_output_tokens = request.expected_output_tokens
        self._bookings.add(Booking(partition, reservation, kept))
        self._counters.reservations_booked += 1
        if not self._speaks:
            return NOTHING
        effects = Effects()
        effects.published.append(self._desk.announcer.booked(partition, reservation, kept))
        return effects

    def _note(
        self, ticket: Ticket, seen: Seen, rows: Rows, slot: int, now: float, present: Weights
    ) -> None:
        """Record a decision: in the ring directly while the lookout is up to date."""
        lookout = ticket.partition.lookout
        if lookout is None or now >= lookout.until or rows is not lookout.everyone:
            self._keep(ticket, seen, rows, slot, now, None, None, present)
        else:
            self._keep_usual(ticket, seen, rows, slot, now, None, None, present, lookout.told, 0)
