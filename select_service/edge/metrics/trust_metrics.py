"""Metrics of the trust in indexes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.core.ledger.rank_speeds import SURE
from select_service.edge.metrics.scope_series import RANK, SCOPE, by_scope
from select_service.metric_rows import (
    SERIES_PER_STEP,
    MetricRow,
    MetricTable,
    Sum,
    paced,
    table,
    total,
    value,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.ledger.pull_speeds import PullPath, PullSpeeds
    from select_service.core.ledger.rank_speeds import MeasurementSums
    from select_service.core.partition import Partition
    from select_service.core.service import SelectionCore
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.scope_series import ScopeGroups, Sources
    from select_service.metric_rows import Collector
    from select_service.settings import Settings
    from select_service.types import RankTrustRow

_REASONS: Final = ("prediction", "lag", "gaps")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


_BY_RANK: Final[tuple[MetricRow[RankTrustRow], ...]] = (
    value("trust_factor", "Factor on a rank's overlap credit.", lambda row: row.trust),
    value(
        "trust_missing_share",
        "Share of recently predicted cached tokens that was not found.",
        lambda row: None if row.prediction_error is None else row.missing_share,
    ),
    value(
        "trust_prediction_error_tokens",
        "Predicted minus actual cached tokens, recent mean.",
        lambda row: row.prediction_error,
    ),
    value(
        "trust_event_lag_seconds",
        "How much later than its fastest batch a rank's last KV events came.",
        lambda row: row.index.lag_s,
    ),
    value(
        "rank_prefill_tokens_per_second",
        "Tokens per second of a rank's queue until first tokens, as measured.",
        lambda row: None if row.speed is None else row.speed.prefill_tokens_per_s,
    ),
    value(
        "rank_itl_seconds",
        "Time between tokens of a rank at its present load, as measured.",
        lambda row: None if row.speed is None else _seconds(row.speed.itl_ms),
    ),
    value(
        "rank_ttft_error_seconds",
        "Mean size of the difference of predicted and actual time to first tokens.",
        lambda row: None if row.speed is None else _seconds(row.speed.ttft_abs_error_ms),
    ),
    value(
        "rank_itl_error_seconds",
        "Mean size of the difference of predicted and actual time between tokens.",
        lambda row: None if row.speed is None else _seconds(row.speed.itl_abs_error_ms),
    ),
)

_PULLS: Final[tuple[MetricRow[PullSpeeds], ...]] = (
    total(
        "measured_pull_blocks",
        "KV blocks pulled by prompts that showed how long that took, by domain and tier.",
        lambda speeds: {_path(path): known.blocks for path, known in speeds.by_path.items()},
        "path",
    ),
    total(
        "measured_pull_seconds",
        "Seconds that those took.",
        lambda speeds: {_path(path): known.seconds for path, known in speeds.by_path.items()},
        "path",
    ),
)


def _path(path: PullPath) -> str:
    return f"{path.domain or 'any'}/{path.tier}"


_MOMENTS: Final[tuple[MetricRow[Partition], ...]] = (
    total(
        "measured_prefill_moments",
        "Sums over first tokens that were measured: seconds, over tokens to compute before them.",
        lambda one: _moments(one.ledger.loads.speeds.prefills),
        "moment",
    ),
    total(
        "measured_itl_moments",
        "Sums over times between tokens that were measured: seconds, over a rank's tokens of "
        "context.",
        lambda one: _moments(one.ledger.loads.speeds.blocks, one.index.block_size),
        "moment",
    ),
)


def _moments(sums: MeasurementSums, block_size: int = 1) -> dict[str, float]:
    """Return sums over tokens of sums over blocks."""
    return {
        "count": sums.count,
        "tokens": sums.x * block_size,
        "seconds": sums.y / block_size,
        "tokens_squared": sums.xx * block_size**2,
        "token_seconds": sums.xy,
    }


class _MeasuredRank(NamedTuple):
    """A rank of which first tokens, or times between tokens, were measured."""

    kv_tokens: int
    """That its worker registered; 0: none."""
    ranks: int
    """Of its worker."""
    computes: bool
    """Its first tokens were measured."""
    writes: bool
    """Its times between tokens were."""


_RANKS: Final[tuple[MetricRow[_MeasuredRank], ...]] = (
    value(
        "measured_rank_kv_tokens",
        "KV tokens of ranks whose times between tokens were measured, mean of those that reported.",
        lambda one: Sum(1, one.kv_tokens) if one.kv_tokens and one.writes else None,
    ),
    value(
        "measured_prefill_worker_ranks",
        "Ranks of the workers of ranks whose first tokens were measured, mean.",
        lambda one: Sum(1, one.ranks) if one.computes else None,
    ),
    value(
        "measured_decode_worker_ranks",
        "Ranks of the workers of ranks whose times between tokens were measured, mean.",
        lambda one: Sum(1, one.ranks) if one.writes else None,
    ),
)


def _ranks(groups: ScopeGroups) -> Sources[_MeasuredRank]:
    for group in groups.found:
        yield group.scope, (one for part in group.partitions for one in _measured_ranks(part))
        yield None


def _measured_ranks(partition: Partition) -> Iterator[_MeasuredRank | None]:
    occupants, block_size = partition.fleet_slots.occupants, partition.index.block_size
    for one in paced(list(partition.ledger.loads.speeds.by_slot.items())):
        if one is None:
            yield None
            continue
        slot, speed = one
        occupant = occupants[slot]  # None: it has left between two steps
        computes, writes = speed.ttft.samples >= SURE, speed.block.samples >= SURE
        if occupant is not None and (computes or writes):
            worker = occupant[0]
            kv_tokens = (worker.spec.total_kv_blocks or 0) * block_size
            yield _MeasuredRank(kv_tokens, len(worker.slots), computes, writes)


_SHRUNK: Final[tuple[MetricRow[Counter[str]], ...]] = (
    value(
        "trust_shrunk_ranks",
        "Ranks whose overlap credit is shrunk, by reason.",
        lambda shrunk_by: {reason: shrunk_by[reason] for reason in _REASONS},
        "reason",
    ),
)

_COUNTERS: Final[tuple[MetricRow[SelectionCore], ...]] = (
    total(
        "cached_tokens_told",
        "Completed prefills that reported their cached tokens, by what came of it.",
        lambda core: core.counters.cached_token_reports,
        "outcome",
    ),
    total(
        "index_rereads",
        "Indexes of distrusted ranks to be read again, by what came of it.",
        lambda core: core.counters.rereads,
        "outcome",
    ),
)


def trust_tables(driver: Driver, settings: Settings, groups: ScopeGroups) -> tuple[Collector, ...]:
    """Return the trust in ranks, which have series up to the limit of all series of ranks."""
    core = driver.core
    shrunk_by: Counter[str] = Counter()  # by the last look at the ranks, listed or not

    def by_rank() -> Sources[RankTrustRow]:
        shrunk_by.clear()
        ranks = yield from core.trust_monitor.ranks_in_steps()
        for number, rank in enumerate(ranks, 1):
            if not number % SERIES_PER_STEP:
                yield None
            row = driver.trust_row(rank)
            shrunk_by.update(row.reasons)
            if number <= settings.metrics_rank_series_max:
                labels = (str(row.worker_id), str(row.dp_rank), row.model_name, row.tenant_id)
                yield labels, (row,)

    return (
        MetricTable(_BY_RANK, by_rank, RANK),
        MetricTable(_PULLS, by_scope(groups, lambda one: one.ledger.loads.pull_speeds), SCOPE),
        MetricTable(_MOMENTS, by_scope(groups, lambda one: one), SCOPE),
        MetricTable(_RANKS, lambda: _ranks(groups), SCOPE),
        table(_SHRUNK, lambda: shrunk_by),
        table(_COUNTERS, lambda: core),
    )
