"""Workers and ranks as JSON rows, updated incrementally and in slices.

A round compares every worker and rank with what it saw last and encodes only what has changed: a
fleet at rest costs only the comparison. Rows are kept as text, so that a page opened later gets all
of them for the cost of joining them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import orjson

from indexer.types import U64_MASK, WorkerRank
from select_service.core.diagnostics.causes import EVENTS_UNREACHABLE
from select_service.core.ledger.demand_tally import RankTally
from select_service.edge.driver.sources import state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from indexer.core.stream import EventStream
    from select_service.core.admission.load_reports import TimedReport
    from select_service.core.fleet.catalog import Worker
    from select_service.core.partition import Partition
    from select_service.edge.cooperative import TimeSlices
    from select_service.edge.driver.driver import Driver

RANK_FIELDS: Final = (
    "worker_id",
    "dp_rank",
    "prefill_tokens",
    "decode_blocks",
    "requests",
    "kv_state",
    "event_at_ms",
    "lag_s",
    "gaps",
    "lost_batches",
    "cached_blocks",
    "kv_used_blocks",
    "kv_total_blocks",
    "requests_waiting",
    "busy",
    "trust",
    "estimated",
    "selections",
    "isl_tokens",
    "selected_prefill_tokens",
)
"""The fields of a rank's row: `kv_used_blocks` to `requests_waiting` by the word of the worker, and
those after `estimated` as totals."""

UNREACHABLE_AFTER_S: Final = EVENTS_UNREACHABLE.after_s
"""A publisher without a connection for this long is unreachable; the doctor's threshold."""

_Row = tuple[object, ...]

_STAMP_MAX: Final = 1e12  # seconds; the comparison is false for NaN and infinity, too


class FleetChanges(NamedTuple):
    """The changes found in a round, as JSON."""

    workers: list[bytes]
    ranks: list[bytes]
    gone: list[str]  # worker ids


class _RankSource(NamedTuple):
    """Where a rank's numbers are found, until its worker or event stream changes."""

    rank: WorkerRank
    slot: int
    stream: EventStream | None


class _Seen:
    """One worker as last sent."""

    __slots__ = ("judged", "rank_sources", "ranks", "rows", "text", "worker")

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.judged: tuple[str, tuple[str, ...]] | None = None  # lifecycle, reasons
        self.text = b""
        self.rank_sources: list[_RankSource] = []
        self.ranks: dict[int, _Row] = {}  # numbers by dp_rank
        self.rows: dict[int, bytes] = {}  # the same, encoded


class FleetTable:
    """The rows of all workers and ranks."""

    def __init__(self, service: Driver) -> None:
        self._service = service
        self._seen: dict[int, _Seen] = {}

    def all_rows(self) -> FleetChanges:
        """Return all rows as last sent, for the cost of collecting them."""
        seen = self._seen.values()
        return FleetChanges(
            [one.text for one in seen], [row for one in seen for row in one.rows.values()], []
        )

    async def look(self, slices: TimeSlices) -> FleetChanges:
        """Return what has changed since the last call, yielding to the loop in between."""
        core = self._service.core
        changes = FleetChanges([], [], [])
        ids = core.catalog.ids()
        for worker_id in ids:
            worker = core.catalog.find(worker_id)
            if worker is not None:  # it may be gone since `ids` was read
                self._look_at(worker, changes)
            await slices.yield_if_due()
        if len(self._seen) > len(ids):
            here = set(ids)
            for worker_id in [one for one in self._seen if one not in here]:
                del self._seen[worker_id]
                changes.gone.append(str(worker_id))
        return changes

    def _look_at(self, worker: Worker, changes: FleetChanges) -> None:
        seen = self._seen.get(worker.worker_id)
        if seen is None:
            seen = self._seen[worker.worker_id] = _Seen()
        judged = (worker.lifecycle, tuple(worker.reasons))
        if seen.worker is not worker or seen.judged != judged:
            seen.worker, seen.judged = worker, judged
            seen.text = _describe(worker)
            seen.ranks.clear()  # its ranks may have changed
            seen.rows.clear()
            changes.workers.append(seen.text)
            seen.rank_sources = self._rank_sources(worker)
        elif any(
            rank_source.stream is not None and rank_source.stream.closed
            for rank_source in seen.rank_sources
        ):
            seen.rank_sources = self._rank_sources(worker)  # the event source has been reopened
        if not seen.rank_sources:
            return
        core = self._service.core
        partition = core.partitions[worker.scope]
        reports = core.admission_controller.reports.by_worker.get(worker.worker_id, _NO_REPORTS)
        tallies = partition.demand.ranks.get(worker.worker_id, _NOT_CHOSEN)
        for rank_source in seen.rank_sources:
            dp_rank, stream = rank_source.rank.dp_rank, rank_source.stream
            lag_s = None if stream is None else core.trust_monitor.lag_of(stream)
            kv_state = "none" if stream is None else self._state_of(stream)
            tally = tallies.get(dp_rank, _NOTHING)
            numbers = (
                *_numbers(rank_source, partition, reports.get(dp_rank), kv_state, lag_s),
                tally.selections,
                min(tally.isl_tokens, U64_MASK),
                min(tally.prefill_tokens, U64_MASK),
            )
            if seen.ranks.get(dp_rank) != numbers:
                seen.ranks[dp_rank] = numbers
                row = seen.rows[dp_rank] = orjson.dumps((str(worker.worker_id), dp_rank, *numbers))
                changes.ranks.append(row)

    def _state_of(self, stream: EventStream) -> str:
        link = self._service.sources.link(stream)
        if link is None or link.is_connected:
            return state_of(stream)
        out_of_reach_s = self._service.now() - link.since
        return "unreachable" if out_of_reach_s >= UNREACHABLE_AFTER_S else state_of(stream)

    def _rank_sources(self, worker: Worker) -> list[_RankSource]:
        streams = self._service.core.membership.streams_of(worker) if worker.slots else []
        by_rank = {one.rank.dp_rank: one for one in streams}
        return [
            _RankSource(WorkerRank(worker.worker_id, dp_rank), slot, by_rank.get(dp_rank))
            for dp_rank, slot in worker.slots.items()
        ]


_NO_REPORTS: Final[Mapping[int, TimedReport]] = {}
_NOT_CHOSEN: Final[Mapping[int, RankTally]] = {}
_NOTHING: Final = RankTally()


def _numbers(
    rank_source: _RankSource,
    partition: Partition,
    report: TimedReport | None,
    kv_state: str,
    lag_s: float | None,
) -> _Row:
    slot, stream = rank_source.slot, rank_source.stream
    loads, keeper = partition.ledger.loads, partition.admission
    event_at_ms, gaps, lost = None, 0, 0
    if stream is not None:
        event_at_ms = _milliseconds(stream.last_batch_ts)
        gaps, lost = stream.tallies.gaps, stream.lost_batches
    reported = None if report is None or report.stale else report.metrics
    return (
        min(loads.prefill_left[slot], U64_MASK),  # a sum, and orjson writes no wider numbers
        int(loads.decode[slot]),
        int(loads.requests[slot]),
        kv_state,
        event_at_ms,
        None if lag_s is None else round(lag_s, 2),
        gaps,
        lost,
        max(sum(partition.index.blocks_of(rank_source.rank)), partition.estimate.blocks_of(slot)),
        None if reported is None else reported.kv_used_blocks,
        None if reported is None else reported.kv_total_blocks,
        None if reported is None else reported.num_requests_waiting,
        keeper is not None and slot in keeper.busy.slots,
        round(partition.trust.factor(slot), 4),
        partition.estimate.is_in_force(slot),
    )


def _milliseconds(stamp: float | None) -> int | None:
    """Convert an engine's timestamp, which may be any float."""
    return int(stamp * 1000) if stamp is not None and abs(stamp) < _STAMP_MAX else None


def _describe(worker: Worker) -> bytes:
    spec = worker.spec
    return orjson.dumps(
        {
            "worker_id": str(worker.worker_id),
            "model_name": worker.scope.model_name,
            "tenant_id": worker.scope.tenant_id,
            "endpoint": spec.endpoint,
            "lifecycle": worker.lifecycle,
            "reasons": worker.reasons,
            "drains": worker.operator_drain is not None,
            "role": spec.role or "aggregated",
            "source": worker.source,
            "block_size": spec.block_size,
            "total_kv_blocks": spec.total_kv_blocks,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "max_num_seqs": spec.max_num_seqs,
            "max_inflight": spec.max_inflight,
            "taints": sorted(worker.taints),
            "ranks": [worker.ranks.start, len(worker.ranks)],
            "kv_events": worker.kv_events,
            "replay": bool(worker.replay_sources),
        }
    )


def joined(rows: Iterable[bytes]) -> bytes:
    """Return rows as one JSON array."""
    return b"[" + b",".join(rows) + b"]"
