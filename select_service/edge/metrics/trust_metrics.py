"""Metrics of the trust in indexes, read from counters at scrape time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.edge.metrics.families import RANK, ROWS_PER_STEP, Collector, counters, gauge

if TYPE_CHECKING:
    from select_service.edge.driver.driver import Driver
    from select_service.edge.metrics.families import Steps
    from select_service.settings import Settings

_REASONS: Final = ("prediction", "lag", "gaps")


class TrustMetrics(Collector):
    """Ranks have series of their own up to the limit that holds for all series of ranks."""

    def __init__(self, service: Driver, settings: Settings) -> None:
        self._service = service
        self._rank_series_max = settings.metrics_rank_series_max

    @override
    def collect(self) -> Steps:
        yield from self._ranks()
        core = self._service.core.counters
        for name, text, counts in (
            (
                "cached_tokens_told",
                "Completed prefills that told their cached tokens, by what came of it.",
                core.cached_tokens_told,
            ),
            (
                "index_rereads",
                "Indexes of distrusted ranks to be read again, by what came of it.",
                core.rereads,
            ),
        ):
            yield counters(name, text, "outcome", dict(sorted(counts.items())))

    def _ranks(self) -> Steps:
        factor = gauge("trust_factor", "Factor on a rank's overlap credit.", RANK)
        missing = gauge(
            "trust_missing_share",
            "Share of recently predicted cached tokens that was not found.",
            RANK,
        )
        error = gauge(
            "trust_prediction_error_tokens",
            "Predicted minus actual cached tokens, recent mean.",
            RANK,
        )
        lag = gauge(
            "trust_event_lag_seconds",
            "How much later than its fastest batch a rank's last KV events came.",
            RANK,
        )
        shrunk = gauge(
            "trust_shrunk_ranks", "Ranks whose overlap credit is shrunk, by reason.", ("reason",)
        )
        shrunk_by: Counter[str] = Counter()
        seats = yield from self._service.core.trusting.seats_in_steps()
        for number, seat in enumerate(seats, 1):
            if not number % ROWS_PER_STEP:
                yield None
            row = self._service.trust_row(seat)
            shrunk_by.update(row.reasons)
            if number > self._rank_series_max:
                continue
            labels = (str(row.worker_id), str(row.dp_rank), row.model_name, row.tenant_id)
            factor.add_metric(labels, row.trust)
            if row.prediction_error is not None:
                missing.add_metric(labels, row.missing_share)
                error.add_metric(labels, row.prediction_error)
            if row.index.lag_s is not None:
                lag.add_metric(labels, row.index.lag_s)
        for reason in _REASONS:
            shrunk.add_metric([reason], shrunk_by[reason])
        yield from (factor, missing, error, lag, shrunk)
