"""What engines report of their prompts: how many tokens were cached.

Compared with the prediction of the selection that booked the prompt (`trust_factors.py`), and used
to correct estimates (`ledger/cache_estimate.py`). A caller may report to any replica, so a report
that is of no use here alone is sent to the others: the replica that predicted compares it.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import Struct

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


class _Prompt(Struct):
    """What a report is compared with: facts of a reservation, which may have ended.

    Without the reservation itself: kept beyond its end, it costs every booking the memory that the
    last one has just left.
    """

    partition: Partition
    slot: int
    reservation_id: str
    isl_tokens: int
    booked_at: float
    predicted: int | None
    """Cached tokens; None: no selection here made a prediction."""
    is_compared: bool = False
    is_foreign: bool = False  # known from a replica only
    # of one that has ended
    rank: WorkerRank | None = None
    at: float = 0.0
    second_names: tuple[str, ...] = ()
    places: int = 1  # of the bound


class _SecondName(NamedTuple):
    """Another name of a reservation that has ended."""

    reservation_id: str
    at: float
    places: int  # 0, but for one with another tenant's prefix


class CachedTokenReports:
    """Compares reports with predictions, and keeps what is to be sent of them to the replicas."""

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

        `limits` are read each time. `may_be_known_elsewhere` returns whether a report of
        an id is to be sent to the replicas if there is no prediction for it here.
        """
        self._membership = membership
        self._bookings = bookings
        self._outcomes = counters.cached_token_reports
        self._may_be_known_elsewhere = may_be_known_elsewhere
        shares, bounds = shares or Shares(), limits or CoreLimits()
        self._freed: TenantMemory[str, _Prompt | _SecondName] = TenantMemory(
            shares,
            "freed_unreported",
            lambda: bounds.cached_token_reports_max,
            by_prefix=True,
            size_of=attrgetter("places"),
        )
        """By each of their names."""
        self._unsent: TenantMemory[str, int] = TenantMemory(
            shares,
            "cached_tokens_untold",
            lambda: bounds.cached_token_reports_max,
            by_prefix=True,
        )
        """What is to be sent to the replicas: id → cached tokens."""

    @property
    def lost(self) -> int:
        """Ended reservations forgotten, and reports not sent, because of the limit."""
        return self._freed.lost + self._unsent.lost

    # -- reports -----------------------------------------------------------------------------------

    def report(self, name: str, cached_tokens: int, now: float) -> None:
        """Apply the engine's report of a prompt's cached tokens, which a caller made here.

        Only the first report counts, with the completion, in a repeat of it, or with or after the
        end (engines that stream report in their last chunk). It is compared where a selection made
        a prediction: here, or at the replica that booked the prompt.

        Raises:
            InvalidField: more than the prompt is long; nothing has changed.
        """
        if cached_tokens < 0:  # embedding calls without a codec
            raise InvalidField("cached_tokens must be at least 0", field="cached_tokens")
        booking = self._booking(name)
        prompt = self._just_freed(name) if booking is None else _prompt_of(booking)
        if prompt is None:
            is_sent = self._may_be_known_elsewhere(name)
            if is_sent:
                self._send(name, cached_tokens)
            self._count("told_replicas" if is_sent else "elsewhere")  # if anywhere
            return
        isl_tokens = prompt.isl_tokens
        if isl_tokens and cached_tokens > isl_tokens:
            raise InvalidField(
                f"cached_tokens ({cached_tokens}) must not exceed isl_tokens ({isl_tokens})",
                field="cached_tokens",
            )
        is_estimated = prompt.slot in prompt.partition.estimate.followed
        outcome = self._apply(prompt, booking, cached_tokens, now)
        is_elsewhere = outcome == "unpredicted" and prompt.is_foreign
        if is_elsewhere or (is_estimated and outcome != "repeated"):
            name = prompt.reservation_id
            if self._may_be_known_elsewhere(name):
                self._send(name, cached_tokens)
                outcome = "told_replicas" if is_elsewhere else outcome
        self._count(outcome)

    def apply(self, name: str, cached_tokens: int, now: float) -> None:
        """Apply a report that a caller made at a replica, if it concerns us."""
        booking = self._booking(name)
        prompt = self._just_freed(name) if booking is None else _prompt_of(booking)
        if prompt is None:
            return
        if prompt.isl_tokens and cached_tokens > prompt.isl_tokens:
            self._count("impossible")
        elif self._apply(prompt, booking, cached_tokens, now) == "compared":
            self._count("compared")

    def _apply(
        self, prompt: _Prompt, booking: LiveReservation | None, cached_tokens: int, now: float
    ) -> str:
        """Compare the first report of a prompt, and correct the estimate; return the outcome."""
        if prompt.is_compared:
            return "repeated"
        prompt.is_compared = True
        if booking is not None:
            booking.is_compared = True
            if booking.reservation.live:
                _correct_estimate(booking, cached_tokens, now)
        partition, slot, predicted = prompt.partition, prompt.slot, prompt.predicted
        if predicted is None or not partition.ledger.is_current(slot, prompt.booked_at):
            return "unpredicted"
        predicted = min(predicted, _findable(partition, prompt.isl_tokens))
        if cached_tokens < predicted:
            self._look_for_a_clearing(partition, slot, now)
        partition.trust.compare(slot, predicted, cached_tokens, prompt.booked_at)
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

    def _send(self, name: str, cached_tokens: int) -> None:
        """Have a report sent to the replicas; at the bound one that waits is given up."""
        holder, lost = prefix_in(name), self._unsent.lost
        if self._unsent.has(holder, name):
            return  # the first one counts
        self._unsent.put(holder, name, cached_tokens)
        if self._unsent.lost > lost:
            self._count("left_out")

    def take_unsent(self, limit: int) -> list[tuple[str, int]]:
        """Take up to `limit` reports to be sent to the replicas: (id, cached tokens)."""
        some = self._unsent.items()[:limit] if self._unsent else []
        for name, _ in some:
            self._unsent.pop(prefix_in(name), name)
        return some

    # -- ends --------------------------------------------------------------------------------------

    def note_ended(self, booking: LiveReservation, now: float) -> None:
        """Remember a reservation that ends before its engine has reported, however it ends.

        As long as its id is remembered: after that nobody can report anything of it. Without a
        prediction there is nothing to compare, and what an earlier reservation of that id predicted
        counts no more.
        """
        reservation = booking.reservation
        name, second, pair = (
            reservation.reservation_id,
            reservation.selection_id,
            reservation.pair,
        )
        if pair is not None and not _computes(reservation):
            return
        predicted = None if booking.is_compared else _predicted(booking)
        if predicted is None:
            if self._freed:
                self._forget_ended(name, second, pair)
            return
        prompt = _prompt_of(booking, predicted)
        prompt.rank, prompt.at = prompt.partition.index.rank_of(prompt.slot), now
        if pair is None and (second is None or second == name):  # nearly always
            before = self._freed.put(prefix_in(name), name, prompt)
            if type(before) is _Prompt and before.second_names:
                self._forget_second_names(before)
            return
        self._forget_ended(name, second, pair)
        others = with_places(name, second, pair)[:-1]
        prompt.second_names = tuple(other for other, _ in others)
        for other, places in others:
            self._freed.put(prefix_in(other), other, _SecondName(name, now, places))
        self._freed.put(prefix_in(name), name, prompt)

    def _forget_ended(self, *names: str | None) -> None:
        """Forget ended reservations by names; by its own, by all: others may have no place."""
        for name in names:
            ended = None if name is None else self._freed.pop(prefix_in(name), name)
            if type(ended) is _Prompt:
                self._forget_second_names(ended)

    def _forget_second_names(self, ended: _Prompt) -> None:
        """Forget the other names of an ended reservation, but for those that are another's now."""
        for other in ended.second_names:
            found = self._freed.get(prefix_in(other), other)
            if type(found) is _SecondName and found.reservation_id == ended.reservation_id:
                self._freed.pop(prefix_in(other), other)

    def _just_freed(self, name: str) -> _Prompt | None:
        """Return an ended reservation, if its rank is still the same."""
        found = self._freed.get(prefix_in(name), name)
        if type(found) is _SecondName:
            own = found.reservation_id
            found = self._freed.get(prefix_in(own), own)
            if type(found) is not _Prompt or name not in found.second_names:
                return None
        if type(found) is not _Prompt or found.partition.index.rank_of(found.slot) != found.rank:
            return None
        return found

    def forget(self, partition: Partition) -> None:
        """Forget the ended reservations of a partition that was closed."""
        for name, one in self._freed.items():
            if type(one) is _Prompt and one.partition is partition:
                self._forget_ended(name)

    def purge(self, now: float) -> None:
        """Forget some of the ended reservations whose ids are forgotten."""
        self._freed.purge(lambda one: one.at <= now - FREED_MEMORY_S, _FORGOTTEN_PER_TURN)


def _prompt_of(booking: LiveReservation, predicted: int | None = None) -> _Prompt:
    """Return what a report of a booking is compared with; `predicted` if that is known already."""
    reservation = booking.reservation
    return _Prompt(
        booking.partition,
        reservation.slot,
        reservation.reservation_id,
        reservation.isl_tokens,
        reservation.created,
        _predicted(booking) if predicted is None else predicted,
        booking.is_compared,
        booking.answer is None,
    )


def _computes(reservation: LedgerReservation) -> bool:
    """Return whether its rank computes the prompt: the decode leg of a pair does not."""
    pair = reservation.pair
    return pair is None or reservation.reservation_id == leg_ids(pair)[0]


def _predicted(booking: LiveReservation) -> int | None:
    """Return the cached tokens predicted by a selection here; None: there was no prediction.

    Without blocks that it was to pull from another rank: whether it did, its events do not show.
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
    slot = reservation.slot
    is_current = partition.ledger.is_current(slot, reservation.created)
    if slot not in partition.estimate.followed or not is_current:
        return
    chain = partition.ledger.chain_of(reservation)
    found = cached_tokens // partition.index.block_size
    if cached_tokens >= _findable(partition, reservation.isl_tokens):
        found = len(chain) // HASH_BYTES  # it cannot find more
    partition.estimate.correct(slot, chain, found, reservation.created, now)


def _findable(partition: Partition, isl_tokens: int) -> int:
    """Return the tokens of a prompt that an engine can possibly have cached.

    Whole blocks only, and never the last token, which must be computed for the first output.
    """
    size = partition.index.block_size
    blocks = max(0, isl_tokens - 1) // size
    if partition.index.is_eagle:
        blocks -= 1  # its draft model recomputes the last block found
    return max(0, blocks) * size
