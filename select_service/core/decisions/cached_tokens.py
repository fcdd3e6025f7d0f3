"""What engines report of their prompts: how many tokens were cached.

Compared with the prediction of the selection that booked the prompt (`trust_factors.py`), and used
to correct estimates (`ledger/cache_estimate.py`). A caller may report to any replica, so a report
that is of no use here alone is told to the others: the replica that predicted compares it.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.types import HASH_BYTES
from select_service.core.ledger.freed_ids import FREED_MEMORY_S
from select_service.core.ledger.reservation_ids import leg_ids
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.core.tenancy.tenant_memory import TenantMemory, with_places
from select_service.errors import InvalidField
from select_service.types import CoreLimits, PairSelection, Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from indexer.types import WorkerRank
    from select_service.core.counters import Counters
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.ledger.reservation_ids import LiveReservation, ReservationIds
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition

_FORGOTTEN_PER_TURN: Final = 32


class _Ended(NamedTuple):
    """A reservation that ended before its engine was heard, under one of its names."""

    booking: LiveReservation
    rank: WorkerRank | None
    at: float
    places: int  # of the bound; 0: another name of one that has a place


class CachedTokenReports:
    """Compares reports with predictions, and keeps what replicas are to be told of them."""

    def __init__(
        self,
        membership: Membership,
        bookings: ReservationIds,
        counters: Counters,
        shares: Shares | None = None,
        *,
        limits: CoreLimits | None = None,
        may_be_known_elsewhere: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """Start without reports.

        Args:
            membership: finds ranks and their streams.
            bookings: live ids.
            counters: of the outcomes.
            shares: what each tenant may hold of the two memories.
            limits: how much each of them holds; read each time.
            may_be_known_elsewhere: whether a report of an id is to be told to the replicas if there
                is no prediction for it here.
        """
        self._membership = membership
        self._bookings = bookings
        self._outcomes = counters.cached_tokens_told
        self._may_be_known_elsewhere = may_be_known_elsewhere
        shares, bounds = shares or Shares(), limits or CoreLimits()
        self._freed: TenantMemory[str, _Ended] = TenantMemory(
            shares,
            "freed_unreported",
            lambda: bounds.cached_token_reports_max,
            by_prefix=True,
            size_of=attrgetter("places"),
        )
        """By each of their names."""
        self._untold: TenantMemory[str, int] = TenantMemory(
            shares,
            "cached_tokens_untold",
            lambda: bounds.cached_token_reports_max,
            by_prefix=True,
        )
        """What the replicas are to be told: id → cached tokens."""

    @property
    def lost(self) -> int:
        """Ended reservations forgotten, and reports not told, because of the limit."""
        return self._freed.lost + self._untold.lost

    # -- reports -----------------------------------------------------------------------------------

    def hear(self, name: str, cached_tokens: int, now: float) -> None:
        """Apply the engine's report of a prompt's cached tokens, which a caller made here.

        Only the first report counts, with the completion, in a repeat of it, or with or after the
        end (engines that stream tell in their last chunk). It is compared where a selection made a
        prediction: here, or at the replica that booked the prompt.

        Raises:
            InvalidField: more than the prompt is long; nothing has changed.
        """
        if cached_tokens < 0:  # embedding calls without a codec
            raise InvalidField("cached_tokens must be at least 0", field="cached_tokens")
        booking = self._booking(name) or self._just_freed(name)
        if booking is None:
            is_told = self._may_be_known_elsewhere(name)
            if is_told:
                self._tell(name, cached_tokens)
            self._count("told_replicas" if is_told else "elsewhere")  # if anywhere
            return
        reservation = booking.reservation
        isl_tokens = reservation.isl_tokens
        if isl_tokens and cached_tokens > isl_tokens:
            raise InvalidField(
                f"cached_tokens ({cached_tokens}) must not exceed isl_tokens ({isl_tokens})",
                field="cached_tokens",
            )
        is_estimated = reservation.slot in booking.partition.estimate.followed
        outcome = self._apply(booking, cached_tokens, now)
        is_elsewhere = outcome == "unpredicted" and booking.answer is None
        if is_elsewhere or (is_estimated and outcome != "repeated"):
            name = reservation.reservation_id
            if self._may_be_known_elsewhere(name):
                self._tell(name, cached_tokens)
                outcome = "told_replicas" if is_elsewhere else outcome
        self._count(outcome)

    def heard(self, name: str, cached_tokens: int, now: float) -> None:
        """Apply a report that a caller made at a replica, if it concerns us."""
        booking = self._booking(name) or self._just_freed(name)
        if booking is None:
            return
        isl_tokens = booking.reservation.isl_tokens
        if isl_tokens and cached_tokens > isl_tokens:
            self._count("impossible")
        elif self._apply(booking, cached_tokens, now) == "compared":
            self._count("compared")

    def _apply(self, booking: LiveReservation, cached_tokens: int, now: float) -> str:
        """Compare the first report of a prompt, and correct the estimate; return the outcome."""
        if booking.is_compared:
            return "repeated"
        booking.is_compared = True
        partition, reservation = booking.partition, booking.reservation
        if reservation.live:
            _correct_estimate(booking, cached_tokens, now)
        predicted = _predicted(booking)
        if predicted is None:
            return "unpredicted"
        slot = reservation.slot
        predicted = min(predicted, _findable(partition, reservation.isl_tokens))
        if cached_tokens < predicted:
            self._look_for_a_clearing(partition, slot, now)
        partition.trust.compare(slot, predicted, cached_tokens, reservation.created)
        return "compared"

    def _look_for_a_clearing(self, partition: Partition, slot: int, now: float) -> None:
        """Void predictions from before a cleared cache: a restarted engine is not inaccurate."""
        at = partition.index.rank_of(slot)
        stream = None if at is None else self._membership.stream_at(at)
        if stream is not None:
            partition.trust.void(slot, stream.clearings, now)

    def _booking(self, name: str) -> LiveReservation | None:
        """Return the reservation that computes the prompt: of a pair, the prefill leg."""
        legs = self._bookings.legs(name) if self._bookings.pairs else []
        if not legs:
            return self._bookings.find(name)
        return next((leg for leg in legs if _computes(leg.reservation)), None)

    def _count(self, outcome: str) -> None:
        self._outcomes[outcome] = self._outcomes.get(outcome, 0) + 1

    # -- replicas ----------------------------------------------------------------------------------

    def _tell(self, name: str, cached_tokens: int) -> None:
        """Have the replicas told of a report; at the bound one that waits is given up."""
        holder, lost = prefix_in(name), self._untold.lost
        if self._untold.has(holder, name):
            return  # the first one counts
        self._untold.put(holder, name, cached_tokens)
        if self._untold.lost > lost:
            self._count("left_out")

    def untold(self, limit: int) -> list[tuple[str, int]]:
        """Take up to `limit` reports that replicas are to be told: (id, cached tokens)."""
        some = self._untold.items()[:limit] if self._untold else []
        for name, _ in some:
            self._untold.pop(prefix_in(name), name)
        return some

    # -- ends --------------------------------------------------------------------------------------

    def note_ended(self, booking: LiveReservation, now: float) -> None:
        """Remember a reservation that ends before its engine has been heard, whoever ends it.

        As long as its id is remembered: after that nobody can tell anything of it. Without a
        prediction there is nothing to compare, and what an earlier reservation of that id predicted
        counts no more.
        """
        reservation = booking.reservation
        if not _computes(reservation):
            return
        is_awaited = not booking.is_compared and _predicted(booking) is not None
        if not is_awaited and not self._freed:
            return
        rank = booking.partition.index.rank_of(reservation.slot) if is_awaited else None
        names = reservation.reservation_id, reservation.selection_id, reservation.pair
        for name, places in with_places(*names):
            self._forget_ended(name)
            if is_awaited:
                self._freed.put(prefix_in(name), name, _Ended(booking, rank, now, places))

    def _forget_ended(self, name: str) -> None:
        """Forget an ended reservation by a name; by its own, by all: others may have no place."""
        ended = self._freed.pop(prefix_in(name), name)
        if ended is None or name != ended.booking.reservation.reservation_id:
            return
        booking = ended.booking
        for other in (booking.reservation.selection_id, booking.reservation.pair):
            if other is not None:
                found = self._freed.get(prefix_in(other), other)
                if found is not None and found.booking is booking:
                    self._freed.pop(prefix_in(other), other)

    def _just_freed(self, name: str) -> LiveReservation | None:
        """Return an ended reservation, if its rank is still the same."""
        ended = self._freed.get(prefix_in(name), name)
        if ended is None:
            return None
        booking = ended.booking
        rank = booking.partition.index.rank_of(booking.reservation.slot)
        return booking if rank == ended.rank else None

    def forget(self, partition: Partition) -> None:
        """Forget the ended reservations of a partition that was closed."""
        for name, one in self._freed.items():
            if one.booking.partition is partition:
                self._freed.pop(prefix_in(name), name)

    def purge(self, now: float) -> None:
        """Forget some of the ended reservations whose ids are forgotten."""
        self._freed.purge(lambda one: one.at <= now - FREED_MEMORY_S, _FORGOTTEN_PER_TURN)


def _computes(reservation: LedgerReservation) -> bool:
    """Return whether its rank computes the prompt: the decode leg of a pair does not."""
    pair = reservation.pair
    return pair is None or reservation.reservation_id == leg_ids(pair)[0]


def _predicted(booking: LiveReservation) -> int | None:
    """Return the cached tokens predicted by a selection here; None: there was no prediction.

    Without blocks that it was to pull from another rank: whether it did, its events do not tell.
    For a distrusted rank this is what its index says, not what was credited: otherwise it could
    never show that it is accurate again.
    """
    answer, reservation = booking.answer, booking.reservation
    if isinstance(answer, PairSelection):
        leg = answer.decode if answer.prefill is None else answer.prefill
        if leg.reservation_id != reservation.reservation_id:
            return None  # computed elsewhere
        isl_tokens = answer.isl_tokens
        left, overlap, dp_rank = leg.effective_prefill_tokens, leg.overlap, leg.dp_rank
        source = leg.kv_source
    elif isinstance(answer, Selection) and answer.needs_prefill is not True:
        isl_tokens = reservation.isl_tokens
        left, overlap, dp_rank = answer.effective_prefill_tokens, answer.overlap, answer.dp_rank
        source = answer.kv_source
    else:
        return None
    if source:
        left += source.blocks * booking.partition.index.block_size
    return max(isl_tokens - left, min(isl_tokens, overlap.dp.get(str(dp_rank), 0)))


def _correct_estimate(booking: LiveReservation, cached_tokens: int, now: float) -> None:
    """Let an engine's report of a prompt's cached tokens correct the estimate of its rank."""
    partition, reservation = booking.partition, booking.reservation
    if reservation.slot not in partition.estimate.followed:
        return
    chain = partition.ledger.chain_of(reservation)
    found = cached_tokens // partition.index.block_size
    if cached_tokens >= _findable(partition, reservation.isl_tokens):
        found = len(chain) // HASH_BYTES  # it cannot find more
    partition.estimate.correct(reservation.slot, chain, found, reservation.created, now)


def _findable(partition: Partition, isl_tokens: int) -> int:
    """Return the tokens of a prompt that an engine can possibly have cached.

    Whole blocks only, and never the last token, which must be computed for the first output.
    """
    size = partition.index.block_size
    blocks = max(0, isl_tokens - 1) // size
    if partition.index.is_eagle:
        blocks -= 1  # its draft model recomputes the last block found
    return max(0, blocks) * size
