"""The book of active load of one partition: what is booked where, and until when.

The only writer of load. It does not choose ranks, knows no HTTP and reads no clock;
`partition.py` books and frees here, and `slot_loads.py` has the resulting load of each slot. Below
it, `active_blocks.py` counts distinct blocks, `deadlines.py` knows what expires and
`slot_generations.py` what happens to a slot whose rank has left. The numbers are those of
deploy/docs/contract.md, section 4.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Final

from indexer.types import HASH_BYTES
from select_service.core.ledger.active_blocks import ActiveBlocks, check
from select_service.core.ledger.cache_estimate import CacheEstimate
from select_service.core.ledger.deadlines import Deadlines
from select_service.core.ledger.drain_meter import PRIOR_TOKENS_PER_S
from select_service.core.ledger.exact_sums import rounded
from select_service.core.ledger.first_tokens import learn_prefill
from select_service.core.ledger.output_blocks import OutputBlocks
from select_service.core.ledger.rank_speeds import BEGINS_WITHIN, BLOCKS_EVERY_S
from select_service.core.ledger.reservation import LedgerReservation, OutputReport
from select_service.core.ledger.slot_generations import SlotGenerations
from select_service.core.ledger.slot_loads import LOOK_EVERY_S, SlotLoads

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterator, Sized

    from indexer.types import PackedHashes
    from select_service.core.columns import Slots
    from select_service.core.ledger.loads import LoadChanges
    from select_service.core.ledger.reservation import SlotGeneration

BLOCKS_PER_STEP: Final = 64
"""Unshared blocks that cost about as much to remove as one short reservation."""


class Ledger:
    """Reservations by slot, and the load they cause, updated with every lifecycle call."""

    def __init__(
        self,
        *,
        prior_tokens_per_s: float = PRIOR_TOKENS_PER_S,
        sequence_blocks: int = 0,
        estimate: CacheEstimate | None = None,
    ) -> None:
        self.loads = SlotLoads(prior_tokens_per_s=prior_tokens_per_s)
        """The load of every slot; always the same object."""
        self.sequence_blocks = sequence_blocks
        """A request's fixed weight in the context: `SEQUENCE_TOKENS` of the pricing."""
        self.previous_ranks: list[int] = []
        """Number of previous ranks of each slot, and of other engines of this one."""
        self.engine_since: dict[int, float] = {}
        """By slot, when its rank's worker came to another endpoint; see `is_current`."""
        self.live = 0
        """Number of reservations."""
        self.estimate = estimate or CacheEstimate()
        """Told of every prompt that was computed."""
        self.changes: LoadChanges | None = None
        """Set for a gate that follows changes; see `rank_limits.py`."""
        self.blocks = ActiveBlocks()  # by generation
        self.first_blocks: Container[bytes] = self.blocks.root.children
        """The first blocks of all booked prompts: others share nothing with any."""
        self._outputs = OutputBlocks(self.blocks)
        self._deadlines: Deadlines[LedgerReservation] = Deadlines()
        self._all_generations = SlotGenerations(self.blocks.counts)
        self._generations = self._all_generations.by_slot

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        self.loads.ensure(capacity)
        self.previous_ranks += [0] * (capacity - len(self.previous_ranks))
        self._all_generations.ensure(capacity)

    def follow_queues(self, wanted: bool) -> None:  # noqa: FBT001 - a switch
        """Start or stop following queues; requests already queued at the start stay unknown."""
        loads = self.loads
        if loads.follows_queues and not wanted:
            for generation in self._generations:
                generation.queue = OrderedDict()
        loads.follows_queues, loads.packed = wanted, b""

    # -- lifecycle -----------------------------------------------------------------------------

    def book(
        self,
        reservation_id: str,
        slot: int,
        sequence_hashes: PackedHashes,
        prefill_tokens: int,
        now: float,
        *,
        isl_tokens: int = 0,
        ttl_s: float = 0.0,
        fairness_id: str = "",
    ) -> LedgerReservation:
        """Book a request on a slot below the capacity; the id must not be live in this ledger.

        `sequence_hashes` may hold any values in any order. O(nodes on the path of the chain), plus
        some ten nanoseconds for each block that is not booked on this slot yet.
        """
        generation = self._generations[slot]
        booked, number = generation.reservations, generation.number
        assert reservation_id not in booked
        chain = self.blocks.acquire(sequence_hashes, number)
        # a prompt shorter than a block still counts
        blocks = (len(sequence_hashes) // HASH_BYTES or 1) + self.sequence_blocks
        reservation = booked[reservation_id] = LedgerReservation(
            reservation_id,
            slot,
            generation,
            chain,
            prefill_tokens,
            now,
            now,
            isl_tokens,
            fairness_id,
            blocks,
            blocks,
            ttl_s=ttl_s,
        )
        self.live += 1
        decode = self.blocks.counts.count(number)
        loads = self.loads
        loads.prefilling += 1
        loads.packed = b""
        work = loads.work
        if now > work.at:  # noqa: PLR1730 - time does not go back; max() is slow
            work.at = now
        recent = loads.recent
        if now - recent.looked_at > LOOK_EVERY_S:
            loads.look(now)
        recent.computed += prefill_tokens
        recent.asked += isl_tokens
        by_slot = loads.prefill_left
        left = by_slot[slot]
        if prefill_tokens:
            if not left:
                work.starts(slot)
            reservation.queued_tokens = left
            by_slot[slot] = left = left + prefill_tokens
            loads.prefill_backlog += prefill_tokens
            recent.churned += prefill_tokens
            if loads.follows_queues:
                generation.queue[reservation_id] = prefill_tokens
        loads.rows.book(slot, left, prefill_tokens, len(booked), decode, blocks, now)
        if ttl_s:
            self._deadlines.queues[ttl_s][reservation] = None
        changes = self.changes
        if changes is not None:
            if (
                len(booked) >= changes.requests_alarm
                or left > changes.prefill_alarm
                or decode > changes.decode_alarm
            ):
                changes.note(slot)
            if changes.names_wanted:
                changes.begun.append(fairness_id)
        return reservation

    def prefill_complete(
        self,
        reservation: LedgerReservation,
        now: float,
        *,
        is_measured: bool = True,
        cached_tokens: int | None = None,
    ) -> None:
        """The prompt is computed: its tokens leave P, its blocks stay. Idempotent.

        With `is_measured` false it was computed before it was booked here, according to the disk or
        a replica, and does not count towards the measured speed of ranks. `cached_tokens`, if its
        engine reported them, are those that need not be computed.
        """
        generation = reservation.generation
        assert generation.is_open
        reservation.touched = now
        if reservation.ttl_s:
            self._deadlines.touch(reservation)
        if not reservation.prefill_done:
            reservation.prefill_done = True
            slot, tokens = reservation.slot, reservation.prefill_tokens
            loads = self.loads
            loads.prefilling -= 1
            work = loads.work
            if now > work.at:  # noqa: PLR1730 - as above
                work.at = now
            by_slot = loads.prefill_left
            left, head = by_slot[slot], 0
            if tokens:
                if is_measured and self.is_current(slot, reservation.created):
                    learn_prefill(loads, reservation, now, cached_tokens)
                left -= tokens
                by_slot[slot] = left
                loads.prefill_backlog -= tokens
                if not left:
                    work.stops(slot)
            queue = generation.queue
            if queue:
                queue.pop(reservation.reservation_id, None)
                head = next(iter(queue.values()), 0)
            loads.rows.complete(slot, left, head, now)
            loads.packed = b""
            if slot in self.estimate.followed:
                self.note_computed(reservation, now)
            if self.changes is not None and self.changes.look:
                self.changes.lighter(slot)

    def note_computed(self, reservation: LedgerReservation, now: float) -> None:
        """Note that a live reservation's prompt is cached on its rank, where that is estimated."""
        slot = reservation.slot
        if slot in self.estimate.followed and self.is_current(slot, reservation.created):
            self.estimate.computed(slot, self.blocks.chain(reservation.chain), now)

    def fade_prefill(self, reservation: LedgerReservation, tokens: int) -> None:
        """Reduce the remaining tokens of an incomplete prefill to `tokens`."""
        assert not reservation.prefill_done
        self._give_up(reservation, reservation.generation, tokens)
        reservation.queued_tokens += reservation.prefill_tokens - tokens  # they are computed, too
        reservation.prefill_tokens = tokens
        self._changed(reservation.slot)

    def output_block(
        self,
        reservation: LedgerReservation,
        decay_fraction: float | None,
        now: float,
        count: int = 1,
    ) -> None:
        """Add private blocks; with a fraction, all blocks of this reservation alone get it.

        `decay_fraction` in [0, 1] is absolute, not cumulative; without it the fractions stay as
        they are and a new block weighs 1. `count` blocks at once equal that many single calls.
        """
        assert reservation.live
        self.touch(reservation, now)
        if decay_fraction is None:
            reservation.whole_outputs += count
            self.blocks.counts.add(reservation.generation.number, count)
        else:
            self._outputs.fade(reservation, count, decay_fraction)
        self._grew(reservation)
        outputs, last = reservation.output_blocks, reservation.output_report
        if last is None:
            if self.is_current(reservation.slot, reservation.created):
                reservation.output_report = OutputReport(now, outputs, now, outputs)
        elif now - last.at >= BLOCKS_EVERY_S:  # else of one burst: its first call was for all
            slot, loads = reservation.slot, self.loads
            if outputs > last.outputs:
                seconds = (now - last.at) / (outputs - last.outputs)
                believed = loads.speeds.decoded(slot, loads.context.item(slot), seconds, now)
                if believed is not None:
                    since = now - BEGINS_WITHIN * (now - last.at)
                    blocks = reservation.generation.attended_blocks(self.sequence_blocks, since)
                    loads.speeds.blocks.add(float(blocks), believed)
            reservation.output_report = OutputReport(
                last.first_at, last.first_outputs, now, outputs
            )

    def resume_outputs(
        self, reservation: LedgerReservation, whole: int, faded: int, fraction: float
    ) -> None:
        """Restore the output blocks of a reservation from before a restart; it must have none."""
        assert reservation.live
        self._outputs.resume(reservation, whole, faded, fraction)
        self._grew(reservation)

    def learn_outputs(
        self, reservation: LedgerReservation, outputs: int, faded_at: int, fraction: float
    ) -> None:
        """Adopt the output reported by a replica: `outputs` blocks, the first `faded_at` faded."""
        assert reservation.live
        self._outputs.learn(reservation, outputs, faded_at, fraction)
        self._grew(reservation)

    def free(self, reservation: LedgerReservation) -> None:
        """Remove a live reservation from the book."""
        slot, generation = reservation.slot, reservation.generation
        assert generation.is_open
        self._take_out(reservation)
        self.live -= 1
        decode = self.blocks.counts.count(generation.number)
        loads = self.loads
        loads.rows.free(slot, len(generation.reservations), decode, reservation.context_blocks)
        loads.packed = b""
        if not reservation.prefill_done:
            self._give_up(reservation, generation)
        else:
            work = loads.work
            work.stirred[slot] = work.at
        if self.changes is not None and self.changes.look:
            self.changes.lighter(slot)

    def _take_out(self, reservation: LedgerReservation) -> None:
        generation = reservation.generation
        del generation.reservations[reservation.reservation_id]
        self._deadlines.remove(reservation)
        blocks = self.blocks
        if reservation.charge is not None:
            reservation.charge.ended(reservation.reported_blocks)
        blocks.release(reservation.chain, generation.number)
        reservation.chain = blocks.root  # a reference to the reservation must not keep blocks
        if reservation.whole_outputs or reservation.faded_outputs:
            self._outputs.drop(reservation)
        reservation.leave()
        work = self.loads.work
        work.ended += 1
        work.stayed_s += work.at - reservation.created
        if self.changes is not None and self.changes.names_wanted:
            self.changes.ended.append(reservation.fairness_id)

    # -- ranks that leave ----------------------------------------------------------------------

    def replace_engine(self, slot: int, now: float) -> None:
        """Forget what was learnt of a slot's engine; its reservations stay, and teach nothing."""
        self._forget_engine(slot)
        self.estimate.clear(slot)
        self.engine_since[slot] = now
        for reservation in self.reservations_on(slot):
            reservation.first_token = reservation.output_report = None

    def _forget_engine(self, slot: int) -> None:
        self.loads.forget_churn(slot)
        self.previous_ranks[slot] += 1
        self.loads.speeds.forget(slot)

    def is_current(self, slot: int, booked_at: float) -> bool:
        """Whether what was booked on a slot then is at the engine that is there now."""
        return booked_at > self.engine_since.get(slot, -inf)

    def drop_slot(self, slot: int) -> int:
        """Empty a slot whose rank has left; return how many reservations that ended.

        They are no longer live and count nowhere; `sweep` returns them later. O(1), whatever their
        number.
        """
        self._forget_engine(slot)
        self.engine_since.pop(slot, None)
        dropped = len(self._generations[slot].reservations)
        if not dropped:
            return 0
        self._all_generations.close(slot)
        self.live -= dropped
        self.loads.clear(slot)
        self._changed(slot)
        return dropped

    def sweep(self, limit: int) -> list[LedgerReservation]:
        """Remove up to `limit` dropped reservations and return them; see `is_swept`.

        A long unshared prompt counts as several.
        """
        swept: list[LedgerReservation] = []
        blocks, closed = self.blocks.blocks, self._all_generations.closed
        while closed and len(swept) + (blocks - self.blocks.blocks) // BLOCKS_PER_STEP < limit:
            generation = closed[0]
            # from the end: a dict is slow at its head
            reservation = next(reversed(generation.reservations.values()))
            if reservation.claim is not None:  # may be booked again when the rank comes back
                reservation.claim.hashes = self.blocks.chain(reservation.chain)
            self._take_out(reservation)
            swept.append(reservation)
            if not generation.reservations:
                self._all_generations.forget_oldest()
        return swept

    @property
    def is_swept(self) -> bool:
        """Whether nothing is left of dropped slots."""
        return not self._all_generations.closed

    # -- expiry --------------------------------------------------------------------------------

    def touch(self, reservation: LedgerReservation, now: float, ttl_s: float | None = None) -> None:
        """Note a sign of life, and a new time to live if one is given (0: never expires). O(1)."""
        reservation.touched = now
        self._deadlines.restart(reservation, reservation.ttl_s if ttl_s is None else ttl_s)

    def expired(self, now: float, limit: int) -> list[LedgerReservation]:
        """Return live reservations whose deadline has passed.

        Looks at no more than `limit` deadlines; `next_expiry() <= now` shows that there are more to
        look at. Frees nothing: a reservation is returned again until it is freed.
        """
        due = self._deadlines.due(now, limit)
        for reservation in due:
            if not reservation.live:  # dropped, and not swept yet
                self._deadlines.remove(reservation)
        return [reservation for reservation in due if reservation.live]

    def next_expiry(self) -> float:
        """When `expired` may next have something to do; infinity if nothing can expire."""
        return self._deadlines.next()

    # -- reading -------------------------------------------------------------------------------

    def shared_groups(self, sequence_hashes: PackedHashes) -> list[tuple[int, Slots]] | None:
        """Return the formula's m as (blocks, slots), disjoint; None if it is 0 everywhere.

        The longest common prefix, in blocks, with the chain of any live reservation on the slot.
        """
        generations, shared = self._all_generations, self.blocks.shared_prefix(sequence_hashes)
        return [(blocks, generations.slots_of(mask)) for blocks, mask in shared] or None

    def chain_of(self, reservation: LedgerReservation) -> PackedHashes:
        """Return the sequence hashes a live reservation was booked with."""
        assert reservation.live
        return self.blocks.chain(reservation.chain)

    def generation_of(self, slot: int) -> int:
        """Return the generation number under which chains know the current users of a slot."""
        return self._generations[slot].number

    def all_reservations(self) -> Iterator[LedgerReservation]:
        """Yield every reservation in the book, including those whose rank has left."""
        for generation in self._all_generations:
            yield from generation.reservations.values()

    def reservations_on(self, slot: int) -> Collection[LedgerReservation]:
        """Live reservations of a slot, oldest booking first; a view."""
        return self._generations[slot].reservations.values()

    # -- inside --------------------------------------------------------------------------------

    def _changed(self, slot: int) -> None:
        """Note a change of a slot's blocks or tokens, without more requests."""
        if self.changes is not None:
            self.changes.changed(slot, self.loads.decode[slot], self.loads.prefill_left[slot])

    def _give_up(
        self, reservation: LedgerReservation, generation: SlotGeneration, left: int | None = None
    ) -> None:
        """Remove a prompt, or all but `left` of its tokens, from P without its being computed.

        If its turn had come, the tokens that may already be computed were its own and are removed
        with it. Otherwise the prompts behind it would be credited with them, without any report,
        until the rank reports again.
        """
        slot, name, queue = reservation.slot, reservation.reservation_id, generation.queue
        loads, tokens, gone = self.loads, reservation.prefill_tokens, left is None
        # if its place is unknown, its turn may have come
        begun = tokens if name not in queue or next(iter(queue)) == name else 0
        if not left:
            left = 0
            queue.pop(name, None)
            if tokens:
                loads.work.doubt(slot)
        elif name in queue:
            queue[name] = left
        loads.give_up(slot, loads.prefill_left[slot] - tokens + left, begun, gone)

    def _grew(self, reservation: LedgerReservation) -> None:
        """Follow an output change; a fraction of its blocks is a fraction of its context."""
        blocks = reservation.prompt_blocks + reservation.output_blocks
        if reservation.output_fraction != 1.0:
            blocks = rounded(reservation.output_fraction * blocks)
        slot, loads = reservation.slot, self.loads
        decode = self.blocks.counts.count(reservation.generation.number)
        loads.rows.lengthen(slot, decode, blocks - reservation.context_blocks)
        reservation.context_blocks = blocks
        loads.packed = b""
        self._changed(slot)

    def check(self) -> None:
        """Assert all invariants of the ledger; O(everything)."""
        loads = self.loads
        check(self.blocks)
        assert self.live == sum(len(generation.reservations) for generation in self._generations)
        for slot, generation in enumerate(self._generations):
            of_slot = generation.reservations.values()
            assert all(r.live and r.generation is generation and r.slot == slot for r in of_slot)
            assert loads.requests[slot] == len(of_slot)
            waits = {r.reservation_id: r.prefill_tokens for r in of_slot if not r.prefill_done}
            assert loads.computing[slot] == len(waits)
            assert loads.prefill_left[slot] == sum(waits.values()), "P is what is not complete"
            assert loads.decode[slot] == self.blocks.counts.count(generation.number)
            assert loads.follows_queues or not generation.queue
            assert generation.queue.items() <= waits.items(), "whose turn may come"
            as_they_came = [one for one in waits if one in generation.queue]
            assert list(generation.queue) == as_they_came
            attended = sum(r.context_blocks for r in of_slot)
            assert loads.context[slot] == attended + loads.waits(slot)
            assert of_slot or loads.decode[slot] == 0, "an idle slot carries nothing, exactly"
        loads.check()
        self._all_generations.check()
        self._deadlines.check(r for r in self.all_reservations() if r.ttl_s)

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with reservations; see `dict_compaction.py`."""
        yield self.blocks.root.children
        yield from self.estimate.tables()
        yield from [generation.reservations for generation in self._generations]
        if self.loads.follows_queues:
            yield from [generation.queue for generation in self._generations]
