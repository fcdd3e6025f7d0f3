"""Metrics of ranks that are passed over, and of how reservations ended."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from select_service.metric_rows import MetricRow, table, total, value

if TYPE_CHECKING:
    from select_service.core.service import SelectionCore
    from select_service.edge.driver.driver import Driver
    from select_service.metric_rows import Collector


def _ranks(core: SelectionCore) -> dict[str, int]:
    tally = core.membership.outlier_tally
    found: Counter[str] = Counter(dict.fromkeys(tally.ejections, 0))
    if tally.ranks:
        for partition in core.partitions.values():
            found.update(partition.outliers.ejected.values())
    return dict(found)


_ROWS: Final[tuple[MetricRow[SelectionCore], ...]] = (
    value("outlier_ranks", "Ranks that are passed over now, by reason.", _ranks, "reason"),
    total(
        "outlier_ejections",
        "Times a rank began to be passed over, by reason.",
        lambda core: dict(core.membership.outlier_tally.ejections),
        "reason",
    ),
    total(
        "reservation_outcomes",
        "Reservations of which callers said how they ended.",
        lambda core: core.counters.outcomes,
        "outcome",
    ),
)


def outlier_table(driver: Driver) -> Collector:
    """Return the outliers of all scopes together."""
    return table(_ROWS, lambda: driver.core)
