"""The book of active load of one partition: reservations, and P, D and requests per slot.

The only writer of load. It does not decide who gets a request, knows no HTTP and reads no clock;
`partition.py` books and frees here, `projection.py` reads the columns and the shared prefixes,
`active_blocks.py` below counts distinct blocks, `deadlines.py` knows who expires and `lanes.py`
what becomes of a slot whose rank has gone. Contract 4.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np

from indexer.compiled import usable
from indexer.types import HASH_BYTES
from select_service.core.books.active_blocks import ActiveBlocks
from select_service.core.books.deadlines import Deadlines
from select_service.core.books.decode_blocks import DecodeBlocks, rounded
from select_service.core.books.drain_meter import PRIOR_TOKENS_PER_S, DrainMeter
from select_service.core.books.lanes import Lanes
from select_service.core.books.loads import PACE, TOTALS
from select_service.core.books.reservation import Reservation
from select_service.core.books.work_done import WorkDone

if not TYPE_CHECKING and usable("select_service.core._load_rows", 2):
    from select_service.core._load_rows import LoadRows
else:
    from select_service.core.books.plain_load_rows import LoadRows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sized

    from numpy.typing import NDArray

    from indexer.types import PackedHashes
    from select_service.core.books.load_changes import LoadChanges
    from select_service.core.books.reservation import Lane
    from select_service.core.columns import Floats, Slots

CHURN_MEMORY_S: Final = 300.0
"""After so long a booking counts for a third. What is compared are ranks of one fleet: between a
minute and a quarter of an hour it makes no difference that could be measured."""

CHURN_STEP_S: Final = 1.0
"""Between two looks at how old it is."""

STEP_TOKENS: Final = 8_192
"""What a rank computes in one step where its record says nothing (`max_num_batched_tokens`)."""

SEATS_MAX: Final = 2**62
"""Requests that a rank runs at once where its record says nothing (`max_num_seqs`), or more."""

BLOCKS_PER_STEP: Final = 64
"""Blocks nobody else has booked that cost about as much to forget as one short reservation."""


class Ledger:
    """Active load per slot, kept up with every booking and lifecycle call.

    The columns are replaced, not resized, by `ensure`; read them through the ledger every time.
    """

    __slots__ = (
        "__weakref__",
        "_all_lanes",
        "_asked",
        "_churn",
        "_churn_faded",
        "_computed",
        "_computing",
        "_context",
        "_deadlines",
        "_decode",
        "_lanes",
        "_loads",
        "_meter",
        "_prefill",
        "_queues",
        "_rows",
        "_weights",
        "ahead",
        "blocks",
        "changes",
        "churn",
        "churned",
        "computing",
        "context",
        "decode",
        "follows_queues",
        "heard",
        "live",
        "pace",
        "packed",
        "prefill",
        "prefill_backlog",
        "prefill_left",
        "prefilling",
        "requests",
        "seats",
        "sequence_blocks",
        "step",
        "tenures",
        "wait",
        "work",
    )

    def __init__(  # noqa: PLR0915 - one line a column
        self, *, prior_tokens_per_s: float = PRIOR_TOKENS_PER_S, sequence_blocks: int = 0
    ) -> None:
        self.prefill: Floats = np.zeros(0)
        """P: booked prefill tokens of reservations whose prefill is not complete."""
        self.decode: Floats = np.zeros(0)
        """D: weight of the distinct live blocks, rounded half up."""
        self.requests: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Live reservations."""
        self.computing: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Of them, those whose prefill is not complete."""
        self.context: Floats = np.zeros(0)
        """Blocks that live requests attend to: those several have in common count for each, as an
        engine reads them for each, and a prompt without a whole block counts as one. Each request
        has `sequence_blocks` beside them, and from the one in the last seat on `wait`. Whole
        numbers."""
        self.sequence_blocks = sequence_blocks
        """What a request weighs in the context by being one: `SEQUENCE_TOKENS` of the pricing."""
        self.seats: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Requests that each rank runs at once; who comes when they are taken waits there."""
        self.wait: Floats = np.zeros(0)
        """What it weighs in the context to wait until one more of them has ended."""
        self.tenures: list[int] = []
        """How many ranks had the slot before."""
        self.churn: Floats = np.zeros(0)
        """Prefill tokens booked lately, which `CHURN_MEMORY_S` forgets: what went into a cache."""
        self.churned = 0.0
        """The sum of that."""
        self._asked = 0.0  # tokens of the prompts booked lately, forgotten in the same way
        self._computed = 0.0  # of them, those that nobody had cached
        self._churn_faded = 0.0  # when
        self.prefill_backlog = 0
        """The sum of P."""
        self.work = WorkDone()
        self.heard: Floats = np.zeros(0)
        """When P was known to be what is still to be computed, in monotonic seconds: when somebody
        came to an empty queue, and whenever a prompt is said to be computed."""
        self.ahead: Floats = np.zeros(0)
        """Tokens of P that may have been computed since without a word: what was in it then, and no
        more than the steps of the prompt whose turn it was, after which its first token would have
        come. Of a rank that hangs no more is thought to be done, however long it says nothing."""
        self.step: Floats = np.zeros(0)
        """Tokens that each rank computes in a step."""
        # its own: who else looks at a meter, and when, must not decide anything
        self._meter = DrainMeter(self.work, prior_tokens_per_s=prior_tokens_per_s)
        self.pace = prior_tokens_per_s
        """Tokens that a rank which has any computes in a second; measured anew with the churn."""
        self.follows_queues = False
        """Whether it is known whose turn it is, and `columns` says what is behind P, too: only who
        prices by it pays for that."""
        self._view()
        self.prefill_left: list[int] = []
        """P again, by slot, as whole numbers: doubles would drift beyond 2^53."""
        self._weights = DecodeBlocks()  # by lane
        self.blocks = ActiveBlocks(self._weights)  # chains by lane
        self._deadlines: Deadlines[Reservation] = Deadlines()
        self.live = 0  # reservations
        self.prefilling = 0  # those whose prefill is not complete
        self._all_lanes = Lanes(self._weights)
        self._lanes = self._all_lanes.by_slot
        self.changes: LoadChanges | None = None  # for a gate that follows; see `gatekeeping.py`

    def ensure(self, capacity: int) -> None:
        """Make room for slots below `capacity`; never shrinks."""
        missing = capacity - len(self._lanes)
        if missing <= 0:
            return
        self.prefill = np.concatenate([self.prefill, np.zeros(missing)])
        self.decode = np.concatenate([self.decode, np.zeros(missing)])
        self.requests = np.concatenate([self.requests, np.zeros(missing, dtype=np.int64)])
        self.computing = np.concatenate([self.computing, np.zeros(missing, dtype=np.int64)])
        self.churn = np.concatenate([self.churn, np.zeros(missing)])
        self.context = np.concatenate([self.context, np.zeros(missing)])
        self.heard = np.concatenate([self.heard, np.zeros(missing)])
        self.ahead = np.concatenate([self.ahead, np.zeros(missing)])
        self.step = np.concatenate([self.step, np.full(missing, float(STEP_TOKENS))])
        self.seats = np.concatenate([self.seats, np.full(missing, SEATS_MAX)])
        self.wait = np.concatenate([self.wait, np.zeros(missing)])
        self._view()
        self.prefill_left += [0] * missing
        self.tenures += [0] * missing
        self.work.ensure(capacity)
        self._all_lanes.ensure(capacity)

    def _view(self) -> None:
        """The columns once more, for one element at a time: numpy takes half as long again."""
        self._prefill = self.prefill.data
        self._decode = self.decode.data
        self._computing = self.computing.data
        self._churn = self.churn.data
        self._context = self.context.data
        self._loads = self._prefill, self._decode, self._churn, self._context
        self._queues = self.heard.data, self.ahead.data
        columns = self.prefill, self.decode, self.churn, self.context, self.requests, self.computing
        self._rows = LoadRows(*columns, self.heard, self.ahead, self.step, self.seats, self.wait)
        self.packed = b""
        """What `columns` returns, b"" when it has to be made anew: any load has changed."""

    @property
    def turnover(self) -> float:
        """The churn of all slots over the share of prompts that was found lately, in tokens.

        What a rank's churn is measured by: where little is found, little of what goes out of a
        cache would have been asked for again; infinite where nothing is.
        """
        found = self._asked - self._computed
        return self.churned / (found / self._asked) if found > 0.0 else math.inf

    def columns(self) -> bytes:
        """Return P, D, churn and context of every slot, and their `TOTALS`; see `loads.py`.

        It is the same object while nothing changes.
        """
        packed = self.packed
        if not packed:
            totals = TOTALS.pack(self.prefilling, self.turnover)
            packed = b"".join((*self._loads, totals))
            if self.follows_queues:
                packed = b"".join((packed, *self._queues, PACE.pack(self.pace)))
            self.packed = packed
        return packed

    def follow_queues(self, wanted: bool) -> None:  # noqa: FBT001 - a switch
        """Begin to follow queues, or end; of who is in them already nobody learns."""
        if self.follows_queues and not wanted:
            for lane in self._lanes:
                lane.queue = OrderedDict()
        self.follows_queues, self.packed = wanted, b""

    def limit_step(self, slot: int, tokens: int | None) -> None:
        """Who sits on a slot computes so many tokens in a step; None: nobody says."""
        step = float(STEP_TOKENS if tokens is None else tokens)
        if step == self.step[slot]:  # as whoever registers again and again says
            return
        self.step[slot] = step
        self.ahead[slot] = min(self.ahead[slot], step)
        self.packed = b""

    def limit_seats(self, slot: int, seats: int | None, wait: int) -> None:
        """Who sits on a slot runs so many requests at once.

        Args:
            slot: whose.
            seats: 1 or more; None: nobody says.
            wait: blocks that the context has more for each that the next one must wait for.
        """
        seats = SEATS_MAX if seats is None else min(seats, SEATS_MAX)
        if seats == self.seats[slot] and wait == self.wait[slot]:  # as above
            return
        self.context[slot] -= self._waits(slot)
        self.seats[slot], self.wait[slot] = seats, wait
        self.context[slot] += self._waits(slot)
        self.packed = b""

    # -- lifecycle -----------------------------------------------------------------------------

    def book(  # noqa: PLR0915 - straight on: all pay for it
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
    ) -> Reservation:
        """Book a request on a slot below the capacity; the id must not be live in this ledger.

        `sequence_hashes` may hold any values in any order. O(nodes on the path of the chain), plus
        some tens of nanoseconds for each block that nobody has booked on any slot.
        """
        lane = self._lanes[slot]
        assert reservation_id not in lane.reservations
        chain = self.blocks.acquire(sequence_hashes, lane.number)
        reservation = Reservation(reservation_id, slot, lane, chain, prefill_tokens, now)
        reservation.isl_tokens = isl_tokens
        reservation.fairness_id = fairness_id
        booked = lane.reservations
        booked[reservation_id] = reservation
        self.live += 1
        self.prefilling += 1
        decode = self._weights.count(lane.number)
        # a prompt shorter than a block is no nothing
        blocks = (len(sequence_hashes) // HASH_BYTES or 1) + self.sequence_blocks
        reservation.prompt_blocks = reservation.context_blocks = blocks
        self.packed = b""
        work = self.work
        if now > work.at:  # noqa: PLR1730 - time does not go back; max() is slow
            work.at = now
        if now - self._churn_faded > CHURN_STEP_S:
            self._grow_older(now)
        self._computed += prefill_tokens
        self._asked += isl_tokens
        left = self.prefill_left[slot]
        if prefill_tokens:
            if not left:
                work.starts(slot)
            left += prefill_tokens
            self.prefill_left[slot] = left
            self.prefill_backlog += prefill_tokens
            self.churned += prefill_tokens
            if self.follows_queues:
                lane.queue[reservation_id] = prefill_tokens
        self._rows.book(slot, left, prefill_tokens, len(booked), decode, blocks, now)
        if ttl_s:
            self._deadlines.add(reservation, ttl_s, now)
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
        self, reservation: Reservation, now: float, *, is_news: bool = True
    ) -> None:
        """The prompt is computed: its tokens leave P, its blocks stay. Repeatable.

        It is no news where it was computed before it was booked here, as of what was kept or what
        a replica tells: how fast ranks compute nobody learns by it.
        """
        assert reservation.lane.is_open
        reservation.touched = now
        if reservation.ttl_s:
            self._deadlines.touch(reservation, now)
        if not reservation.prefill_done:
            reservation.prefill_done = True
            slot, tokens = reservation.slot, reservation.prefill_tokens
            self.prefilling -= 1
            work = self.work
            if now > work.at:  # noqa: PLR1730 - as above
                work.at = now
            left, head = self.prefill_left[slot], 0
            if tokens:
                if is_news:
                    work.hear(slot, tokens, reservation.created)
                left -= tokens
                self.prefill_left[slot] = left
                self.prefill_backlog -= tokens
                if not left:
                    work.stops(slot)
            queue = reservation.lane.queue
            if queue:
                queue.pop(reservation.reservation_id, None)
                head = next(iter(queue.values()), 0)
            self._rows.complete(slot, left, head, now)
            self.packed = b""
            changes = self.changes
            if (
                changes is not None
                and changes.look
                and (slot in changes.busy or slot in changes.full)
            ):
                changes.note(slot)

    def fade_prefill(self, reservation: Reservation, tokens: int) -> None:
        """Of an incomplete prefill, so many tokens are left."""
        assert not reservation.prefill_done
        self._give_up(reservation, reservation.lane, tokens)
        self.packed = b""
        reservation.prefill_tokens = tokens
        self._changed(reservation.slot)

    def output_block(
        self, reservation: Reservation, decay_fraction: float | None, now: float, count: int = 1
    ) -> None:
        """Add private blocks; with a fraction, all blocks of this reservation alone get it.

        `decay_fraction` in [0, 1] is absolute, not cumulative; without it the fractions stay as
        they are and a new block weighs 1. `count` blocks at once are as many one after another.
        """
        assert reservation.live
        self.touch(reservation, now)
        number = reservation.lane.number
        if decay_fraction is None:
            reservation.whole_outputs += count
            self._weights.whole[number] += count
        else:
            outputs = reservation.output_blocks + count
            self._drop_outputs(reservation)
            reservation.output_fraction = decay_fraction
            if decay_fraction == 1.0:
                reservation.whole_outputs = outputs
            else:
                reservation.faded_outputs = outputs
            self._weights.add(number, outputs, decay_fraction)
            self.blocks.fade(reservation.chain, number, decay_fraction)
        self._decode[reservation.slot] = self._weights.count(number)
        self._attend(reservation)
        self.packed = b""
        self._changed(reservation.slot)

    def resume_outputs(
        self, reservation: Reservation, whole: int, faded: int, fraction: float
    ) -> None:
        """Give a reservation that has none the output blocks it had in another life.

        The blocks it alone references get the fraction again. A prompt block that was faded and
        shared afterwards weighs 1 again: which history it had is not among a reservation's facts.
        """
        number = reservation.lane.number
        reservation.whole_outputs, reservation.faded_outputs = whole, faded
        reservation.output_fraction = fraction
        self._weights.whole[number] += whole
        if faded:
            self._weights.add(number, faded, fraction)
        if fraction != 1.0:
            self.blocks.fade(reservation.chain, number, fraction)
        self._decode[reservation.slot] = self._weights.count(number)
        self._attend(reservation)
        self.packed = b""
        self._changed(reservation.slot)

    def learn_outputs(
        self, reservation: Reservation, outputs: int, faded_at: int, fraction: float
    ) -> None:
        """Follow what others say: so many output blocks, the first `faded_at` with a fraction."""
        assert reservation.live
        number = reservation.lane.number
        faded = faded_at if fraction != 1.0 else 0
        refade = faded_at > 0 and (
            reservation.faded_outputs != faded or reservation.output_fraction != fraction
        )
        self._drop_outputs(reservation)
        reservation.output_fraction = fraction
        reservation.whole_outputs = outputs - faded
        reservation.faded_outputs = faded
        self._weights.whole[number] += outputs - faded
        self._weights.add(number, faded, fraction)
        if refade:
            self.blocks.fade(reservation.chain, number, fraction)
        self._decode[reservation.slot] = self._weights.count(number)
        self._attend(reservation)
        self.packed = b""
        self._changed(reservation.slot)

    def free(self, reservation: Reservation) -> None:
        """Take a live reservation out of the book."""
        slot, lane = reservation.slot, reservation.lane
        assert lane.is_open
        self._take_out(reservation)
        self.live -= 1
        decode = self._weights.count(lane.number)
        self._rows.free(slot, len(lane.reservations), decode, reservation.context_blocks)
        self.packed = b""
        if not reservation.prefill_done:
            self._computing[slot] -= 1
            self.prefilling -= 1
            self._give_up(reservation, lane)
        else:
            self.work.stirred[slot] = self.work.at
        changes = self.changes
        if changes is not None and changes.look and (slot in changes.busy or slot in changes.full):
            changes.note(slot)

    def _take_out(self, reservation: Reservation) -> None:
        lane = reservation.lane
        del lane.reservations[reservation.reservation_id]
        self._deadlines.remove(reservation)
        self.blocks.release(reservation.chain, lane.number)
        reservation.chain = self.blocks.root  # who still holds the reservation holds no blocks
        if reservation.whole_outputs or reservation.faded_outputs:
            self._drop_outputs(reservation)
        reservation.leave()
        self.work.ended += 1
        if self.changes is not None and self.changes.names_wanted:
            self.changes.ended.append(reservation.fairness_id)

    def _grow_older(self, now: float) -> None:
        """Let what was computed count for less, and measure. O(slots), a µs for a thousand."""
        left = math.exp((self._churn_faded - now) / CHURN_MEMORY_S)
        self.churn *= left
        self.churned = float(self.churn.sum())
        self._asked *= left
        self._computed *= left
        self._churn_faded = now
        self.pace = self._meter.tokens_per_s

    def silent(self, now: float) -> int:
        """Count ranks that have something to compute and seem to hang; see `WorkDone.silent`."""
        return self.work.silent(now, self.prefill, self.ahead, self.pace)

    def _forget_churn(self, slot: int) -> None:
        """Whoever comes to a slot has an empty cache."""
        self.churn[slot] = 0.0
        self.packed = b""
        self.churned = float(self.churn.sum())

    # -- a rank goes ---------------------------------------------------------------------------

    def drop_slot(self, slot: int) -> int:
        """Empty a slot whose rank has gone; returns how many reservations that ended.

        They are live no longer and count nowhere; `sweep` returns them later. O(1), whatever their
        number.
        """
        self._forget_churn(slot)
        self.tenures[slot] += 1
        dropped = len(self._lanes[slot].reservations)
        if not dropped:
            return 0
        self._all_lanes.close(slot)
        self.live -= dropped
        self.prefilling -= self._computing[slot]
        self._add_prefill(slot, -self.prefill_left[slot])
        self.requests[slot] = self.decode[slot] = self._computing[slot] = 0
        self.context[slot] = 0.0
        self.packed = b""
        self._changed(slot)
        return dropped

    def sweep(self, limit: int) -> list[Reservation]:
        """Let go of up to `limit` dropped reservations and return them; see `is_swept`.

        Long prompts of their own count for several.
        """
        swept: list[Reservation] = []
        blocks, closed = self.blocks.blocks, self._all_lanes.closed
        while closed and len(swept) + (blocks - self.blocks.blocks) // BLOCKS_PER_STEP < limit:
            lane = closed[0]
            reservation = next(reversed(lane.reservations.values()))  # a dict is slow at its head
            if reservation.claim is not None:  # may be booked again when the rank comes back
                reservation.claim.hashes = self.blocks.chain(reservation.chain)
            self._take_out(reservation)
            swept.append(reservation)
            if not lane.reservations:
                self._all_lanes.forget_oldest()
        return swept

    @property
    def is_swept(self) -> bool:
        """Whether nothing is left of dropped slots."""
        return not self._all_lanes.closed

    # -- expiry --------------------------------------------------------------------------------

    def touch(self, reservation: Reservation, now: float, ttl_s: float | None = None) -> None:
        """Note a sign of life, and a new time to live if one is given (0: never expires). O(1)."""
        reservation.touched = now
        if ttl_s is None or ttl_s == reservation.ttl_s:
            self._deadlines.touch(reservation, now)
            return
        self._deadlines.remove(reservation)
        if ttl_s:
            self._deadlines.add(reservation, ttl_s, now)

    def expired(self, now: float, limit: int) -> list[Reservation]:
        """Live reservations whose time has passed since they were last touched.

        Looks at no more than `limit` deadlines; `next_expiry() <= now` tells that there is more to
        look at. Frees nothing: what is returned will be returned again until it is freed.
        """
        due = self._deadlines.due(now, limit)
        for reservation in due:
            if not reservation.live:  # dropped, and not swept yet
                self._deadlines.remove(reservation)
        return [reservation for reservation in due if reservation.live]

    def next_expiry(self) -> float:
        """When `expired` may have something to do next; infinity if nothing can expire."""
        return self._deadlines.next()

    # -- reading -------------------------------------------------------------------------------

    def column_of(self, groups: list[tuple[int, Slots]]) -> Floats:
        """Return (blocks, slots) as a column by slot."""
        column = np.zeros(len(self._lanes))
        for blocks, slots in groups:
            column[slots] = blocks
        return column

    def shared_groups(self, sequence_hashes: PackedHashes) -> list[tuple[int, Slots]] | None:
        """The formula's m as (blocks, slots), disjoint; None when it is 0 everywhere.

        The longest common prefix, in blocks, with the chain of any live reservation on the slot.
        """
        groups = self.blocks.shared_prefix(sequence_hashes)
        return self._all_lanes.slots_in(groups) or None

    def chain_of(self, reservation: Reservation) -> PackedHashes:
        """The sequence hashes a live reservation was booked with."""
        assert reservation.live
        return self.blocks.chain(reservation.chain)

    def prefill_tokens(self, slot: int) -> int:
        """P as an exact integer, for answers."""
        return self.prefill_left[slot]

    def lane_of(self, slot: int) -> int:
        """The number under which chains know who is on a slot now."""
        return self._lanes[slot].number

    def all_reservations(self) -> Iterator[Reservation]:
        """Yield every reservation in the book, also those whose rank has gone."""
        for lane in self._all_lanes:
            yield from lane.reservations.values()

    def reservations_on(self, slot: int) -> Collection[Reservation]:
        """Live reservations of a slot, oldest booking first; a view."""
        return self._lanes[slot].reservations.values()

    # -- inside --------------------------------------------------------------------------------

    def _changed(self, slot: int) -> None:
        """Its blocks or tokens have, its requests have not become more."""
        changes = self.changes
        if changes is not None and (
            self._decode[slot] > changes.decode_alarm
            or self.prefill_left[slot] > changes.prefill_alarm
            or slot in changes.busy
            or slot in changes.full
        ):
            changes.note(slot)

    def _add_prefill(self, slot: int, tokens: int) -> None:
        if not tokens:
            return
        self.prefill_backlog += tokens
        left = self.prefill_left[slot] + tokens
        self.prefill_left[slot] = self._prefill[slot] = left
        if tokens < 0 and self.ahead[slot] > left:  # given up, which says nothing of the rest
            self.ahead[slot] = left
        if left == tokens:
            self.work.starts(slot)
        elif not left:
            self.work.stops(slot)

    def _give_up(self, reservation: Reservation, lane: Lane, left: int = 0) -> None:
        """A prompt leaves P without having been computed, or all but `left` of it does.

        If its turn had come, what may have been done was of its tokens: with them it is over, or
        those behind it would count as done, by nobody's word, for as long as nobody says any.
        """
        slot, name, queue = reservation.slot, reservation.reservation_id, lane.queue
        tokens = reservation.prefill_tokens
        if name not in queue or next(iter(queue)) == name:  # if nobody knows, it may have come
            self.ahead[slot] = max(0.0, self.ahead[slot] - tokens)
        if not left:
            queue.pop(name, None)
            if tokens:
                self.work.doubt(slot)
        elif name in queue:
            queue[name] = left
        self._add_prefill(slot, left - tokens)

    def _attend(self, reservation: Reservation) -> None:
        """Follow its output; a fraction of its blocks is a fraction of its context."""
        blocks = reservation.prompt_blocks + reservation.output_blocks
        if reservation.output_fraction != 1.0:
            blocks = rounded(reservation.output_fraction * blocks)
        self._context[reservation.slot] += blocks - reservation.context_blocks
        reservation.context_blocks = blocks

    def _waits(self, slot: int) -> float:
        """What the next one on a slot waits for weighs so much."""
        before = max(0, int(self.requests[slot]) + 1 - int(self.seats[slot]))
        return before * float(self.wait[slot])

    def _drop_outputs(self, reservation: Reservation) -> None:
        number = reservation.lane.number
        self._weights.whole[number] -= reservation.whole_outputs
        if reservation.faded_outputs:
            self._weights.add(number, -reservation.faded_outputs, reservation.output_fraction)
        reservation.whole_outputs = reservation.faded_outputs = 0

    def check(self) -> None:
        """Assert every promise of the ledger; O(everything)."""
        self.blocks.check()
        assert self.live == sum(len(lane.reservations) for lane in self._lanes)
        for slot, lane in enumerate(self._lanes):
            of_slot = lane.reservations.values()
            assert all(r.live and r.lane is lane and r.slot == slot for r in of_slot)
            assert self.requests[slot] == len(of_slot)
            assert self.computing[slot] == sum(not r.prefill_done for r in of_slot)
            waiting = sum(r.prefill_tokens for r in of_slot if not r.prefill_done)
            assert self.prefill_left[slot] == waiting, "P is the sum of what is not complete"
            assert self.prefill[slot] == float(waiting)
            assert self.decode[slot] == self._weights.count(lane.number)
            waits = {r.reservation_id: r.prefill_tokens for r in of_slot if not r.prefill_done}
            assert self.follows_queues or not lane.queue
            assert lane.queue.items() <= waits.items(), "whose turn may come"
            assert list(lane.queue) == [one for one in waits if one in lane.queue], "as they came"
            attended = sum(r.context_blocks for r in of_slot)
            assert self.context[slot] == attended + self._waits(slot)
            if not of_slot:
                assert self.decode[slot] == 0, "an idle slot carries nothing, exactly"
        columns = self.prefill, self.decode, self.churn, self.context
        loads = b"".join(column.tobytes() for column in columns)
        loads += TOTALS.pack(self.prefilling, self.turnover)
        if self.follows_queues:
            loads += self.heard.tobytes() + self.ahead.tobytes() + PACE.pack(self.pace)
        assert self.columns() == loads, "a true copy"
        assert (self.ahead >= 0.0).all()
        assert (self.ahead <= self.prefill).all(), "no more can be done than there is to do"
        assert (self.heard <= self.work.at).all()
        assert self.pace > 0.0
        assert (self.churn >= 0.0).all()
        assert self.turnover >= self.churned, "no more is found than is asked for"
        assert math.isclose(self.churned, self.churn.sum(), rel_tol=1e-9, abs_tol=1e-3)
        assert self.prefilling == self.computing.sum()
        assert self.prefill_backlog == sum(self.prefill_left)
        self.work.check(self.prefill_left)
        self._all_lanes.check()
        self._deadlines.check(r for r in self.all_reservations() if r.ttl_s)

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with reservations; see `slimming.py`."""
        yield self.blocks.root.children
        yield from [lane.reservations for lane in self._lanes]
        if self.follows_queues:
            yield from [lane.queue for lane in self._lanes]
