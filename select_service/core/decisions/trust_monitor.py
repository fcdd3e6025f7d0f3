"""Keeps the trust of every partition up to date, from event freshness, and acts on it.

`trust_factors.py` does the arithmetic, and `cached_tokens.py` compares predictions. This module
connects it to event streams (lag, gaps, rereads of doubtful indexes) and the API. Housekeeping
looks at a few event streams per turn. The same look reports to `fleet/outliers.py` whether a
publisher can be reached.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from msgspec import UNSET

from select_service.core.decisions.event_freshness import FRESH, StreamWatch, Verdict, judge
from select_service.core.decisions.trust_factors import HOPELESS
from select_service.core.effects import TrustChange
from select_service.types import (
    IndexFreshness,
    PullSpeedRow,
    RankSpeedRow,
    RankTrustRow,
    TrustTable,
)

if TYPE_CHECKING:
    from collections.abc import Generator
    from typing import TypeAlias

    from indexer.core.stream import EventStream
    from indexer.types import WorkerRank
    from select_service.core.counters import Counters
    from select_service.core.decisions.trust_factors import RankTrust
    from select_service.core.membership import Membership
    from select_service.core.partition import Partition
    from select_service.types import CoreLimits, TrustSettings

    TrustedRank: TypeAlias = tuple[Partition, WorkerRank]

LOOK_S: Final = 1.0
"""Seconds between two looks at one event stream."""

DOUBTFUL_PER_TURN: Final = 32
"""Distrusted ranks handled per turn of housekeeping: forgetting a rank's blocks takes 5 µs."""

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
    """Watches streams, and requests rereads."""

    def __init__(
        self,
        settings: TrustSettings,
        membership: Membership,
        counters: Counters,
        limits: CoreLimits,
    ) -> None:
        settings.check()
        self._limits = limits
        self.wall_ahead: float | None = None
        """Wall clock minus monotonic clock, roughly; None: unknown, and so is every lag."""
        self._settings = settings
        self._membership = membership
        self._rereads = counters.rereads
        self._watches: dict[EventStream, StreamWatch] = {}
        self._round: deque[EventStream] = deque()  # still to be visited
        self._looked: dict[EventStream, StreamWatch] = {}  # visited in this round
        # stale ranks found in this round
        self._found: dict[tuple[Partition, WorkerRank], Verdict] = {}
        # stale ranks of the last round
        self._stale: dict[tuple[Partition, WorkerRank], Verdict] = {}
        self._verdicts: list[tuple[Partition, WorkerRank, Verdict]] = []  # not applied yet
        self._doubtful: dict[tuple[Partition, int], None] = {}  # still to be handled
        self._next_look = 0.0
        self._rereading: list[EventStream] = []
        self._asked: list[EventStream] = []  # since the last `take_rereads`

    # -- time ------------------------------------------------------------------------------------

    def keep(self, now: float) -> bool:
        """Look at some streams, and have doubtful indexes reread; True: there is more to do."""
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
            and partition.trust.most_are_accurate
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

    def look_at(self, partition: Partition) -> list[TrustChange]:
        """Return a scope's ranks whose reasons changed; note those in doubt."""
        trust = partition.trust
        if trust.column is not None:
            self._doubtful |= dict.fromkeys((partition, at) for at in trust.distrusted())
        if not trust.changed:
            return []
        changes: list[TrustChange] = []
        changed, trust.changed = trust.changed, {}
        for slot, before in changed.items():
            known, at = trust.find(slot), partition.index.rank_of(slot)
            if known is not None and at is not None and known.reasons != before:
                changes.append(
                    TrustChange(
                        at, partition.scope, known.factor, known.reasons, known.missing_share
                    )
                )
        return changes

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
        """Return by how many seconds a stream's events are late; None: unknown."""
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
        pulls=_pulls(partition) or UNSET,
    )


def _pulls(partition: Partition) -> list[PullSpeedRow]:
    """Return what was measured of pulls in a scope, by path."""
    speeds, block_size = partition.ledger.loads.pull_speeds, partition.index.block_size
    rows = []
    for path, known in speeds.by_path.items():
        line, error, cost = known.line, known.error, speeds.cost(path, block_size)
        rows.append(
            PullSpeedRow(
                domain=path.domain,
                tier=path.tier,
                samples=line.samples,
                base_ms=line.base * 1e3,
                ms_per_block=line.slope * 1e3,
                cost_per_block=None if cost is None else cost[1],
                error_ms=error.mean * 1e3 if error.samples else None,
                abs_error_ms=error.mean_abs * 1e3 if error.samples else None,
            )
        )
    return rows


def _known_share(stream: EventStream) -> float:
    """Return the share of a stream's batches that were applied; 1.0 before the first."""
    applied = stream.tallies.batches
    return applied / (applied + stream.lost_batches) if stream.lost_batches else 1.0
