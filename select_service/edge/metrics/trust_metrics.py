"""Metrics of the trust in indexes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from select_service.edge.metrics.scope_series import RANK, SCOPE, by_scope
from select_service.metric_rows import SERIES_PER_STEP, MetricRow, MetricTable, table, total, value

if TYPE_CHECKING:
    from select_service.core.ledger.pull_speeds import PullPath, PullSpeeds
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
        "KV blocks pulled by prompts that told how long that took, by domain and tier.",
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
        "Completed prefills that told their cached tokens, by what came of it.",
        lambda core: core.counters.cached_tokens_told,
        "outcome",
        in_order=True,
    ),
    total(
        "index_rereads",
        "Indexes of distrusted ranks to be read again, by what came of it.",
        lambda core: core.counters.rereads,
        "outcome",
        in_order=True,
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
        table(_SHRUNK, lambda: shrunk_by),
        table(_COUNTERS, lambda: core),
    )
