"""Keeps the trust of every partition up to date, from engines' reports and event freshness.

`trust_factors.py` does the arithmetic. This module connects it to bookings (the predictions), event
streams (lag, gaps, rereads of doubtful indexes) and the API. Housekeeping looks at a few event
streams per turn; a request pays only for the comparison its caller reports. The same look tells
`fleet/outliers.py` whether a publisher can be reached.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from indexer.types import HASH_BYTES
from select_service.core.decisions.event_freshness import FRESH, StreamWatch, Verdict, judge
from select_service.core.decisions.trust_factors import HOPELESS
from select_service.core.effects import TrustNews
from select_service.core.ledger.freed_ids import FREED_MEMORY_S
from select_service.core.ledger.reservation_ids import leg_ids
from select_service.core.tenancy.shares import Shares, prefix_in
from select_service.core.tenancy.tenant_memory import TenantMemory
from select_service.errors import InvalidField
from select_service.types import (
    IndexFreshness,
    PairSelection,
    RankSpeedRow,
    RankTrustRow,
    Selection,
    TrustTable,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import TypeAlias

    from indexer.core.stream import EventStream
    from indexer.types import WorkerRank
    from select_service.core.counters import Counters
    from select_service.core.decisions.trust_factors import RankTrust
    from select_service.core.ledger.reservation_ids import LiveReservation, ReservationIds
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition
    from select_service.types import CoreLimits, TrustSettings

    TrustedRank: TypeAlias = tuple[Partition, WorkerRank]

LOOK_S: Final = 1.0
"""Seconds between two looks at one event stream."""

DOUBTFUL_PER_TURN: Final = 32
"""Distrusted ranks handled per turn of housekeeping: forgetting a rank's blocks takes 5 µs."""

FREED_MAX: Final = 1024
"""Ended reservations whose engines may still tell how much of their prompts was cached."""

_NO_INDEX: Final = IndexFreshness(
    state="none",
    lag_s=None,
    open_gaps=0,
    lost_batches=0,
    unknown_batches=0,
    known_share=0.0,
    last_batch=None,
)


class TrustMonitor:
    """Compares predictions with reports, watches streams, and requests rereads."""

    def __init__(
        self,
        settings: TrustSettings,
        membership: Membership,
        bookings: ReservationIds,
        counters: Counters,
        limits: CoreLimits,
        shares: Shares | None = None,
    ) -> None:
        settings.check()
        self._limits = limits
        self.wall_ahead: float | None = None
        """Wall clock minus monotonic clock, roughly; None: unknown, and so is every lag."""
        self._settings = settings
        self._membership = membership
        self._bookings = bookings
        self._told = counters.cached_tokens_told
        self._rereads = counters.rereads
        self._freed: TenantMemory[str, tuple[LiveReservation, WorkerRank | None, float]] = (
            TenantMemory(shares or Shares(), "freed_unreported", lambda: FREED_MAX, by_prefix=True)
        )
        """Ended before their engine was heard, with their ranks and when they ended."""
        self._watches: dict[EventStream, StreamWatch] = {}
        self._round: deque[EventStream] = deque()  # still to be visited
        self._looked: dict[EventStream, StreamWatch] = {}  # visited in this round
        # stale ranks found in this round
        self._found: dict[tuple[Partition, WorkerRank], Verdict] = {}
        # stale ranks of the last round
        self._stale: dict[tuple[Partition, WorkerRank], Verdict] = {}
        self._verdicts: list[tuple[Partition, WorkerRank, Verdict]] = []  # still to be told
        self._doubtful: dict[tuple[Partition, int], None] = {}  # still to be handled
        self._next_look = 0.0
        self._rereading: list[EventStream] = []
        self._asked: list[EventStream] = []  # since the last `take_rereads`

    # -- what engines found ----------------------------------------------------------------------

    def hear(self, name: str, cached_tokens: int, now: float) -> None:
        """Apply the engine's report of a prompt's cached tokens.

        Only the first report counts, with the completion, in a repeat of it, or with or after the
        end (engines that stream tell in their last chunk), and only if a selection here made a
        prediction.

        Raises:
            InvalidField: more than the prompt is long; nothing has changed.
        """
        booking = self._booking(name) or self._just_freed(name)
        if booking is None:
            self._count("elsewhere")  # if anywhere
            return
        reservation = booking.reservation
        isl_tokens = reservation.isl_tokens
        if cached_tokens < 0:  # embedding calls without a codec
            raise InvalidField("cached_tokens must be at least 0", field="cached_tokens")
        if isl_tokens and cached_tokens > isl_tokens:
            raise InvalidField(
                f"cached_tokens ({cached_tokens}) must not exceed isl_tokens ({isl_tokens})",
                field="cached_tokens",
            )
        predicted = None if booking.is_compared else _predicted(booking)
        if not booking.is_compared and reservation.live:
            _correct_estimate(booking, cached_tokens, now)
        if predicted is None:
            self._count("repeated" if booking.is_compared else "unpredicted")
            return
        booking.is_compared = True
        self._count("compared")
        partition, slot = booking.partition, reservation.slot
        predicted = min(predicted, _findable(partition, isl_tokens))
        if cached_tokens < predicted:
            self._look_for_a_clearing(partition, slot, now)
        partition.trust.compare(slot, predicted, cached_tokens, reservation.created)

    def note_freed(self, name: str, now: float) -> None:
        """Remember a reservation that is about to end before its engine has been heard.

        As long as its id is remembered: after that nobody can tell anything of it. Without a
        prediction there is nothing to compare.
        """
        booking = self._bookings.by_id.get(name)
        if booking is None or booking.is_compared:
            return
        if _predicted(booking) is not None:
            rank = booking.partition.index.rank_of(booking.reservation.slot)
            self._freed.put(prefix_in(name), name, (booking, rank, now))

    def forget(self, partition: Partition) -> None:
        """Forget the ended reservations of a partition that was closed."""
        for name, one in self._freed.items():
            if one[0].partition is partition:
                self._freed.pop(prefix_in(name), name)

    def _just_freed(self, name: str) -> LiveReservation | None:
        """Return an ended reservation, if its rank is still the same."""
        booking, rank, _ = self._freed.get(prefix_in(name), name) or (None, None, 0.0)
        if booking is None or booking.partition.index.rank_of(booking.reservation.slot) != rank:
            return None
        return booking

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
        pair = legs[0].reservation.pair
        assert pair is not None
        prefill_id = leg_ids(pair)[0]
        return next((leg for leg in legs if leg.reservation.reservation_id == prefill_id), None)

    def _count(self, outcome: str) -> None:
        self._told[outcome] = self._told.get(outcome, 0) + 1

    # -- time ------------------------------------------------------------------------------------

    def keep(self, now: float) -> bool:
        """Look at some streams, and have doubtful indexes reread; True: there is more to do."""
        self._freed.purge(lambda one: one[2] <= now - FREED_MEMORY_S, DOUBTFUL_PER_TURN)
        more = self._looks_at_streams and self._look(now)
        for partition, slot in list(islice(self._doubtful, DOUBTFUL_PER_TURN)):
            del self._doubtful[partition, slot]
            rank = partition.trust.find(slot)
            if rank is not None and rank.is_distrusted:  # it may have gone meanwhile
                self._reread(partition, slot, rank, now)
        return more or bool(self._doubtful)

    @property
    def _looks_at_streams(self) -> bool:
        settings = self._settings
        looks = settings.weigh_freshness or settings.estimate_after_s > 0.0
        return looks or bool(self._limits.outlier_unreachable_s)

    def _look(self, now: float) -> bool:
        if self._verdicts:
            self._announce()
            return True
        if not self._round:
            if now < self._next_look:
                return False
            self._next_look = now + LOOK_S
            self._round.extend(self._membership.streams())
        for _ in range(min(self._limits.streams_watched_per_turn_max, len(self._round))):
            stream = self._round.popleft()
            if not stream.closed:
                self._look_at(stream, now)
        if self._round:
            return True
        self._conclude()
        return bool(self._verdicts)

    def _look_at(self, stream: EventStream, now: float) -> None:
        partition = self._membership.partitions[stream.scope]
        if stream.unreachable_since is not None or partition.outliers.ranks:
            slot = partition.fleet_slots.slot_of(stream.rank)
            if slot is not None:
                partition.outliers.follow_publisher(slot, stream.unreachable_since, now)
        settings, watch = self._settings, self._watches.get(stream) or StreamWatch()
        self._looked[stream] = watch
        if settings.weigh_freshness:
            watch.look(stream, now, self.wall_ahead)
        if settings.estimate_after_s:
            watch.look_for_silence(stream, partition, now)
        verdict = judge(stream, watch, settings, now)
        if settings.estimate_after_s and not verdict.is_missing:
            self._prepare_estimate(stream, watch, partition)
        if verdict == FRESH:
            return
        for rank in stream.ranks_written:
            known = self._found.get((partition, rank), verdict)
            self._found[partition, rank] = known.joined(verdict)

    def _prepare_estimate(
        self, stream: EventStream, watch: StreamWatch, partition: Partition
    ) -> None:
        """Begin to estimate a rank whose events may be missing, and stop if they are not."""
        worker = partition.fleet_slots.present.get(stream.rank.worker_id)
        slot, estimate = partition.index.slot_of(stream.rank), partition.estimate
        if worker is None or slot is None:
            return
        if (partition, stream.rank) in self._stale:
            return  # there is a verdict to come
        if watch.may_miss_events:
            estimate.follow(slot, worker.spec.total_kv_blocks, in_force=False)
        elif slot in estimate.followed:
            estimate.drop(slot)

    def _conclude(self) -> None:
        """End a round: queue the verdicts on ranks that are stale, and on those no longer stale."""
        fresh = dict.fromkeys(self._stale, FRESH)
        self._verdicts = [(*at, verdict) for at, verdict in (fresh | self._found).items()]
        self._stale, self._found = self._found, {}
        self._watches, self._looked = self._looked, {}

    def _announce(self) -> None:
        most = self._limits.streams_watched_per_turn_max
        some = self._verdicts[-most:]
        del self._verdicts[-most:]
        for partition, rank, verdict in some:
            worker = partition.fleet_slots.present.get(rank.worker_id)
            slot = None if worker is None else worker.slots.get(rank.dp_rank)
            if worker is None or slot is None:  # it may have gone meanwhile
                continue
            partition.trust.note_freshness(slot, verdict.factor, verdict.stale)
            estimate, room = partition.estimate, worker.spec.total_kv_blocks
            if worker.kv_events == "engine" and (verdict.is_missing or slot in estimate.followed):
                estimate.follow(slot, room, in_force=verdict.is_missing)

    def _reread(self, partition: Partition, slot: int, rank: RankTrust, now: float) -> None:
        """Have the index of a distrusted rank reread, with growing intervals."""
        settings = self._settings
        fresh = rank.samples - rank.reread_samples
        is_again = rank.reread_wait_s > 0.0
        if now < rank.reread_after or (is_again and fresh < settings.samples / 2):
            return
        at = partition.index.rank_of(slot)
        stream = None if at is None else self._membership.stream_at(at)
        self._rereading = [one for one in self._rereading if one.is_replaying]
        if len(self._rereading) >= settings.rereads_max:
            return
        outcome: str = "no_stream" if stream is None else stream.reread(now)
        if outcome == "later":
            return  # a replay is on its way anyway
        if stream is not None and outcome == "asked":
            self._rereading.append(stream)
            self._asked.append(stream)
        if (
            stream is not None
            and outcome in {"no_replay", "past_gone"}
            and rank.missing_share >= HOPELESS
            and partition.trust.most_tell_the_truth
        ):
            stream.forget_blocks()
            outcome = "forgotten"
        self._rereads[outcome] = self._rereads.get(outcome, 0) + 1
        if outcome in {"asked", "forgotten"}:
            rank.rereads += 1
            rank.void_before = now
        doubled = min(2 * rank.reread_wait_s, settings.reread_max_s)
        rank.reread_wait_s = doubled or settings.reread_s
        rank.reread_after = now + rank.reread_wait_s
        rank.reread_samples = rank.samples

    def take_rereads(self) -> list[EventStream]:
        """Return the streams that requested a replay since the last call."""
        asked, self._asked = self._asked, []
        return asked

    def look_at(self, partition: Partition) -> list[TrustNews]:
        """Return a scope's ranks whose reasons changed; note those in doubt."""
        trust = partition.trust
        if trust.column is not None:
            self._doubtful |= dict.fromkeys((partition, at) for at in trust.distrusted())
        if not trust.changed:
            return []
        news: list[TrustNews] = []
        changed, trust.changed = trust.changed, {}
        for slot, before in changed.items():
            known, at = trust.find(slot), partition.index.rank_of(slot)
            if known is not None and at is not None and known.reasons != before:
                news.append(
                    TrustNews(at, partition.scope, known.factor, known.reasons, known.missing_share)
                )
        return news

    # -- looking ---------------------------------------------------------------------------------

    def trusted_ranks(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[TrustedRank]:
        """Return the ranks to report."""
        steps = self.ranks_in_steps(model_name, tenant_id)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                trusted_ranks: list[TrustedRank] = end.value
                return trusted_ranks

    def ranks_in_steps(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> Generator[None, None, list[TrustedRank]]:
        """Do the same, pausing after every scope; the ranks of one scope are a snapshot."""
        trusted_ranks: list[TrustedRank] = []
        for scope in self._membership.scopes(model_name, tenant_id):
            partition = self._membership.partitions.get(scope)
            if partition is not None:  # it may have been removed meanwhile
                trusted_ranks += [
                    (partition, rank) for rank, _ in partition.fleet_slots.ranks_and_slots()
                ]
            yield
        return trusted_ranks

    def table(self, model_name: str | None = None, tenant_id: str | None = None) -> TrustTable:
        """Return the trust in every rank's index; O(ranks), a µs for each."""
        return TrustTable(
            [self.row(*trusted_rank) for trusted_rank in self.trusted_ranks(model_name, tenant_id)]
        )

    def row(self, partition: Partition, rank: WorkerRank) -> RankTrustRow:
        """Return the trust in one rank's index; a rank that has gone is reported without any."""
        slot = partition.fleet_slots.slot_of(rank)
        known = None if slot is None else partition.trust.find(slot)
        return RankTrustRow(
            model_name=partition.scope.model_name,
            tenant_id=partition.scope.tenant_id,
            worker_id=rank.worker_id,
            dp_rank=rank.dp_rank,
            trust=1.0 if slot is None else partition.trust.factor(slot),
            reasons=[] if known is None else list(known.reasons),
            prediction_error=known.mean_error_tokens if known and known.reports else None,
            missing_share=0.0 if known is None else known.missing_share,
            samples=0 if known is None else known.samples,
            rereads=0 if known is None else known.rereads,
            index=_NO_INDEX if slot is None else self.freshness(rank),
            estimated=(slot is not None and partition.estimate.is_in_force(slot)) or UNSET,
            speed=None if slot is None else _speed(partition, slot),
        )

    def lag_of(self, stream: EventStream) -> float | None:
        """Return by how many seconds a stream's events are late; None: its clock does not tell."""
        watch = self._watches.get(stream)
        return None if watch is None else watch.lag_s

    def freshness(self, rank: WorkerRank) -> IndexFreshness:
        """Return the state of a rank's event stream."""
        stream = self._membership.stream_at(rank)
        if stream is None:
            return _NO_INDEX
        state = stream.kv_state
        is_silent = stream.last_event_at is None and state == "current"
        return IndexFreshness(
            state="replaying" if stream.is_replaying else "silent" if is_silent else state,
            lag_s=self.lag_of(stream),
            open_gaps=int(stream.is_replaying and bool(stream.backlog)),
            lost_batches=stream.lost_batches,
            unknown_batches=stream.unknown_batches,
            known_share=_known_share(stream),
            last_batch=stream.cursor.last,
        )


def _speed(partition: Partition, slot: int) -> RankSpeedRow | None:
    """Return what was measured of a rank; None: nothing."""
    loads, block_size = partition.ledger.loads, partition.index.block_size
    rank = loads.speeds.by_slot.get(slot)
    if rank is None:
        return None
    block_s = rank.block.at(loads.context.item(slot))
    ttft, block = rank.ttft_error, rank.block_error
    per_token = 1e3 / block_size
    return RankSpeedRow(
        prefill_tokens_per_s=rank.ttft.mean_ratio or None,
        itl_ms=None if block_s is None else block_s * per_token,
        ttft_error_ms=ttft.mean * 1e3 if ttft.samples else None,
        ttft_abs_error_ms=ttft.mean_abs * 1e3 if ttft.samples else None,
        itl_error_ms=block.mean * per_token if block.samples else None,
        itl_abs_error_ms=block.mean_abs * per_token if block.samples else None,
    )


def _known_share(stream: EventStream) -> float:
    """Return the share of a stream's batches that were applied; 1.0 before the first."""
    heard = stream.tallies.batches
    return heard / (heard + stream.lost_batches) if stream.lost_batches else 1.0


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
