"""Pairs of reservations: booked in one step, and addressed by one id until the last leg ends.

Each leg is an ordinary reservation with its own rank, load and id, and travels to replicas and to
disk as such, marked with its pair. The ids of the legs derive from the pair's id.
`pricing/pair.py` chooses the ranks; `lifecycle.py` books them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from select_service.core.effects import NOTHING, Effects
from select_service.core.ledger.reservation_ids import leg_ids
from select_service.core.pricing.placement import worker_overlap
from select_service.core.pricing.prompt import prompt_of
from select_service.core.replication.messages import Ended
from select_service.core.replication.tombstones import Tombstone
from select_service.core.reservations.lifecycle import BookingSpec
from select_service.core.reservations.predictions import (
    check_ttft,
)
from select_service.errors import ReservationNotFound
from select_service.types import PairLeg, PairSelection, SelectPairRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from select_service.core.admission.queue import Ticket
    from select_service.core.counters import Counters
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.core.partition import Partition
    from select_service.core.pricing.cost import TierMatches
    from select_service.core.pricing.pair import PairPlan
    from select_service.core.pricing.placement import Placement
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.replication.messages import ReplicaMessage
    from select_service.core.reservations.lifecycle import Lifecycle
    from select_service.types import KvSource


class Pairs:
    """Books pairs, and passes lifecycle calls under a pair's id on to the right legs."""

    def __init__(self, lifecycle: Lifecycle, counters: Counters) -> None:
        self._lifecycle = lifecycle
        self._counters = counters

    # -- begin ---------------------------------------------------------------------------------

    def book(
        self, ticket: Ticket, plan: PairPlan, now: float, effects: Effects
    ) -> tuple[PairSelection, Effects]:
        """Book both legs, or neither.

        Raises:
            ReservationConflict: an id that a leg would have is taken.
            ServiceError: as `Lifecycle.terms`.
        """
        partition, request, couple = ticket.partition, ticket.request, plan.couple
        pair, prompt = ticket.reservation_id, ticket.prompt
        assert couple is not None
        assert pair is not None
        assert isinstance(request, SelectPairRequest)
        ids = leg_ids(pair)
        for name in ids:
            self._lifecycle.repeats.check_unused(name)
        self._lifecycle.terms(request)
        track = ticket.weights.track_prefill_tokens
        tokens = couple.effective_prefill_tokens
        source = plan.kv_source(partition.fleet_slots)
        computed = prompt_of(prompt.block_hashes, b"", prompt.isl_tokens)
        computing = BookingSpec(
            ids[0],
            ticket.fingerprint,
            computed,
            tokens,
            track,
            request.fairness_id,
            pair=pair,
            kv_source=source,
        )
        decoding = BookingSpec(
            ids[1],
            ticket.fingerprint,
            prompt,
            0,
            track_prefill_tokens=False,
            fairness_id=request.fairness_id,
            pair=pair,
            charged=ticket.charged,  # once, as the pair is one request
        )
        prefill = _leg(partition, plan, couple.prefill_slot, ids[0], tokens, 0)
        if source is not None:
            prefill = replace(prefill, kv_source=source)
        decode_blocks = couple.potential_decode_blocks
        answer = _answer(
            ticket,
            plan,
            prefill=prefill,
            decode=_leg(partition, plan, couple.decode_slot, ids[1], 0, decode_blocks),
        )
        slots = couple.prefill_slot, couple.decode_slot
        _predict(partition, answer, slots, tokens, prompt, couple.pull_tokens)
        # Everything that can fail has been checked: from here on both are booked.
        for slot, order in ((couple.prefill_slot, computing), (couple.decode_slot, decoding)):
            effects = self._lifecycle.book(partition, slot, order, request, answer, effects, now)
        computes, dp_rank = partition.fleet_slots.rank_at(couple.prefill_slot)
        self._count(plan, ticket, computes.worker_id, dp_rank, tokens, source)
        return answer, effects

    def book_one(
        self, ticket: Ticket, plan: PairPlan, placement: Placement, now: float, effects: Effects
    ) -> tuple[PairSelection, Effects]:
        """Book the one rank that is cheaper than any pair, under the pair's id.

        Raises:
            ServiceError: as `Lifecycle.terms`.
        """
        partition, request, name = ticket.partition, ticket.request, ticket.reservation_id
        assert name is not None
        assert isinstance(request, SelectPairRequest)
        track = ticket.weights.track_prefill_tokens
        tokens = placement.effective_prefill_tokens
        order = BookingSpec(
            name,
            ticket.fingerprint,
            ticket.prompt,
            tokens,
            track,
            request.fairness_id,
            kv_source=placement.kv_source,
            charged=ticket.charged,
        )
        leg = PairLeg(
            reservation_id=name,
            worker_id=placement.worker.worker_id,
            dp_rank=placement.dp_rank,
            endpoint=placement.worker.spec.endpoint or "",
            overlap=placement.overlap,
            effective_prefill_tokens=tokens,
            potential_decode_blocks=placement.potential_decode_blocks,
            overlap_estimated=partition.estimate.is_in_force(placement.slot) or UNSET,
            kv_source=placement.kv_source or UNSET,
        )
        answer = _answer(ticket, plan, prefill=None, decode=leg)
        slots = placement.slot, placement.slot
        _predict(partition, answer, slots, tokens, ticket.prompt, placement.pull_tokens)
        effects = self._lifecycle.book(
            partition, placement.slot, order, request, answer, effects, now
        )
        worker_id, source = placement.worker.worker_id, placement.kv_source
        self._count(plan, ticket, worker_id, placement.dp_rank, tokens, source)
        return answer, effects

    def _count(
        self,
        plan: PairPlan,
        ticket: Ticket,
        worker_id: int,
        dp_rank: int,
        prefill_tokens: int,
        source: KvSource | None,
    ) -> None:
        key, counters = (plan.mode, plan.reason), self._counters
        isl_tokens = ticket.prompt.isl_tokens
        ticket.partition.demand.place(worker_id, dp_rank, isl_tokens, prefill_tokens, counters)
        counters.pairs[key] = counters.pairs.get(key, 0) + 1
        if source is not None:
            counters.pull(source.blocks * ticket.partition.index.block_size)

    # -- go on, and end ------------------------------------------------------------------------

    def prefill_complete(
        self, name: str, now: float, cached_tokens: int | None = None
    ) -> tuple[Partition | None, Effects] | None:
        """The prompt is computed and moved: end the prefill leg. Repeatable; None: no such pair.

        `cached_tokens`: how much of it the engine found cached, if reported.
        """
        known = self._legs(name)
        if known is None:
            return None
        pair, legs = known
        prefill_id, decode_id = leg_ids(pair)
        ids = self._ids(pair, legs)
        done = [one for one in ids if one == decode_id and self._lifecycle.is_live(one)]
        if decode_id not in ids and legs and legs[0].reservation.origin != "local":
            # We may not have heard of the other leg yet: ending this one would forget the pair.
            done, ids = [leg.reservation.reservation_id for leg in legs], []
        else:
            self._end_unheard(pair, now, prefill_id)
        messages = self._computed(
            [leg for leg in legs if leg.reservation.reservation_id in ids], now, cached_tokens
        )
        partition, ended = self._end([one for one in ids if one == prefill_id], now)
        messages += ended
        booked = [leg for leg in legs if leg.reservation.reservation_id in done]
        for leg in legs if booked else ():
            if leg.reservation.reservation_id == prefill_id:  # it was booked without its blocks
                chain = leg.partition.ledger.chain_of(booked[0].reservation)
                if leg.is_current:
                    leg.partition.estimate.computed(leg.reservation.slot, chain, now)
        known_ids = {leg.reservation.reservation_id for leg in legs}
        for one in done:
            if one not in known_ids and self._lifecycle.elsewhere.find(one) is None:
                continue  # its time is up, and its owner is lost
            lighter, effects = self._lifecycle.prefill_complete(one, now)
            partition = lighter or partition
            messages += effects.published
        return partition, Effects(published=messages) if messages else NOTHING

    def _computed(
        self, legs: Iterable[LiveReservation], now: float, cached_tokens: int | None
    ) -> list[ReplicaMessage]:
        """Complete the prefill of these legs before they end: an unfinished one counts as given up.

        Otherwise the compute rate would not be learnt from them, and their ranks would seem to
        hang.
        """
        messages: list[ReplicaMessage] = []
        announcer = self._lifecycle.announcer
        for leg in legs:
            partition, reservation = leg.partition, leg.reservation
            pair = reservation.pair
            assert pair is not None
            if reservation.prefill_done or reservation.reservation_id != leg_ids(pair)[0]:
                continue
            check_ttft(leg, now)
            partition.ledger.prefill_complete(reservation, now, cached_tokens=cached_tokens)
            if announcer.is_on:
                messages.append(announcer.completed(partition, reservation))
        return messages

    def output_block(self, name: str, decay_fraction: float | None, now: float, count: int) -> bool:
        """Add output blocks to the decode leg; False: there is no such pair.

        Raises:
            ReservationNotFound: its decode leg has ended.
        """
        known = self._legs(name)
        if known is None:
            return False
        decode_id = leg_ids(known[0])[1]
        if decode_id not in self._ids(*known):
            raise ReservationNotFound(name)
        self._lifecycle.output_block(decode_id, decay_fraction, now, count)
        return True

    def outputs(self, name: str) -> int | None:
        """Return the output blocks of both legs; None: there is no such pair."""
        known = self._legs(name)
        return None if known is None else sum(map(self._lifecycle.outputs, self._ids(*known)))

    def free(
        self, name: str, now: float, *, is_withdrawn: bool = False, is_computed: bool = True
    ) -> tuple[Partition | None, Effects] | None:
        """End both legs, or the remaining one; None: there is no such pair."""
        known = self._legs(name)
        if known is None:
            return None
        self._end_unheard(known[0], now)
        partition, messages = self._end(
            self._ids(*known), now, is_withdrawn=is_withdrawn, is_computed=is_computed
        )
        return partition, Effects(published=messages) if messages else NOTHING

    def _end(
        self,
        ids: Iterable[str],
        now: float,
        *,
        is_withdrawn: bool = False,
        is_computed: bool = True,
    ) -> tuple[Partition | None, list[ReplicaMessage]]:
        lighter: Partition | None = None
        messages: list[ReplicaMessage] = []
        for name in ids:
            partition, effects = self._lifecycle.free(
                name, now, is_withdrawn=is_withdrawn, is_computed=is_computed
            )
            lighter = partition or lighter
            messages += effects.published
        return lighter, messages

    def _end_unheard(self, pair: str, now: float, only: str | None = None) -> None:
        """End the leg of a replica's pair that we have not heard of yet, along with the other.

        Both were booked in one step, so their claims have consecutive numbers.
        """
        announcer = self._lifecycle.announcer
        if not announcer.is_on:
            return
        claims = announcer.claims
        prefill_id, decode_id = leg_ids(pair)
        for name, other, step in ((prefill_id, decode_id, 1), (decode_id, prefill_id, -1)):
            if only not in (None, other):
                continue
            for claim in claims.alive(name):
                owner, born = (*claim.record.adopts, claim.key)[0]
                key = owner, born + step
                known = owner == claims.router_id or claims.tombstones.has(other, key)
                if claim.record.pair != pair or known:
                    continue
                if not any(key in (one.key, *one.record.adopts) for one in claims.alive(other)):
                    claims.endings.note(other, Tombstone(*key, freed=True), now, kept=True)
                    claims.outbox.say_later(Ended(other, *key, freed=True))

    def _legs(self, name: str) -> tuple[str, list[LiveReservation]] | None:
        """Return the pair with this id (its own or a leg's), and its legs booked here."""
        if not self._lifecycle.bookings.pairs and not self._lifecycle.announcer.is_on:
            return None
        legs = self._lifecycle.bookings.legs(name)
        if legs:
            pair = legs[0].reservation.pair
            assert pair is not None
            return pair, legs
        if self._lifecycle.bookings.find(name) is not None:
            return None
        if self._claimed(name):
            return name, []
        claim = self._lifecycle.elsewhere.find(name)  # by the selection_id it was made with
        pair = None if claim is None or claim.reservation_id == name else claim.record.pair
        return None if pair is None else (pair, [])

    def _ids(self, pair: str, legs: Iterable[LiveReservation]) -> list[str]:
        """Return the ids of the live legs: booked here, or on ranks only replicas know."""
        booked = {leg.reservation.reservation_id for leg in legs}
        elsewhere = self._claimed(pair)
        return [one for one in leg_ids(pair) if one in booked or one in elsewhere]

    def _claimed(self, pair: str) -> list[str]:
        announcer = self._lifecycle.announcer
        if not announcer.is_on:
            return []
        return [
            name
            for name in leg_ids(pair)
            if any(claim.record.pair == pair for claim in announcer.claims.alive(name))
        ]


def _held_at(
    partition: Partition, found: TierMatches | None
) -> Callable[[int], tuple[int, int, int]]:
    if found is None:
        return lambda _: (0, 0, 0)
    device, host, disk = found.by_slot(partition.index.capacity)
    return lambda slot: (int(device[slot]), int(host[slot]), int(disk[slot]))


def _leg(
    partition: Partition, plan: PairPlan, slot: int, name: str, prefill_tokens: int, blocks: int
) -> PairLeg:
    worker, dp_rank = partition.fleet_slots.rank_at(slot)
    return PairLeg(
        reservation_id=name,
        worker_id=worker.worker_id,
        dp_rank=dp_rank,
        endpoint=worker.spec.endpoint or "",
        overlap=worker_overlap(worker, _held_at(partition, plan.found), partition.index.block_size),
        effective_prefill_tokens=prefill_tokens,
        potential_decode_blocks=blocks,
        overlap_estimated=partition.estimate.is_in_force(slot) or UNSET,
    )


def _answer(
    ticket: Ticket, plan: PairPlan, *, prefill: PairLeg | None, decode: PairLeg
) -> PairSelection:
    scope, request, couple = ticket.partition.scope, ticket.request, plan.couple
    assert ticket.reservation_id is not None
    return PairSelection(
        selection_id=UNSET if request.selection_id is None else request.selection_id,
        reservation_id=ticket.reservation_id,
        model_name=scope.model_name,
        tenant_id=scope.tenant_id,
        block_size=ticket.partition.index.block_size,
        mode=plan.mode,
        reason=plan.reason,
        prefill=prefill,
        decode=decode,
        transfer_blocks=0 if prefill is None or couple is None else couple.transfer_blocks,
        isl_tokens=ticket.prompt.isl_tokens,
        track_prefill_tokens=ticket.weights.track_prefill_tokens,
        aggregated_cost=plan.whole_cost,
        disaggregated_cost=None if couple is None else couple.cost,
    )


def _predict(
    partition: Partition,
    answer: PairSelection,
    slots: tuple[int, int],
    tokens: int,
    prompt: Prompt,
    pull_tokens: int,
) -> None:
    """Tell in an answer what the ranks were measured to take; see `SlotLoads.predicted_ms`."""
    ledger, size = partition.ledger, partition.index.block_size
    blocks = (prompt.blocks or 1) + ledger.sequence_blocks
    answer.predicted_ttft_ms, answer.predicted_itl_ms = ledger.loads.predicted_ms(
        slots, tokens, blocks, size, pull_tokens
    )
