"""Metrics of what tenants hold of the bounds that they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from select_service.metric_rows import MetricRow, MetricTable, paced, total, value

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from select_service.core.tenancy.shares import Party, Shares
    from select_service.edge.metrics.scope_series import Sources
    from select_service.metric_rows import Collector

_REST: Final = "other"
"""Label of callers of no tenant of the token file, and of tenants beyond `--tenant-labels-max`."""


class _Bound(NamedTuple):
    held: dict[str, int]
    share: float | None
    refused: dict[str, int]


_BOUNDS: Final[tuple[MetricRow[_Bound], ...]] = (
    value(
        "tenant_bound_held",
        "What a tenant holds of a bound.",
        lambda bound: bound.held,
        "tenant_id",
    ),
    value(
        "tenant_bound_share", "What is kept for each tenant of a bound.", lambda bound: bound.share
    ),
    total(
        "tenant_bound_refused",
        "Times a tenant got no more of a bound.",
        lambda bound: bound.refused,
        "tenant_id",
    ),
)


def tenant_table(shares: Shares, labels_max: int) -> Collector:
    """Return a series for each bound and tenant of the token file; without such there are none."""
    labels = _TenantLabels(labels_max)

    def bounds() -> Sources[_Bound]:
        for bound in list(shares.bounds.values()):
            share = bound.kept if shares.parties else None
            held = yield from labels.sums(bound.rows())
            refused = yield from labels.sums(bound.refused.items())
            yield (bound.name,), (_Bound(held, share, refused),)

    return MetricTable(_BOUNDS, bounds, ("bound",))


class _TenantLabels:
    """A tenant keeps its own label: counters must not fall."""

    def __init__(self, labels_max: int) -> None:
        self._labels_max = labels_max
        self._labels: dict[Party, str] = {}

    def sums(self, rows: Iterable[tuple[Party, int]]) -> Generator[None, None, dict[str, int]]:
        """Return numbers of tenants by label."""
        sums: dict[str, int] = {}
        for row in paced(list(rows)):
            if row is None:
                yield None
                continue
            label = self._label(row[0])
            sums[label] = sums.get(label, 0) + row[1]
        return sums

    def _label(self, party: Party) -> str:
        label = self._labels.get(party)
        if label is None:
            is_listed = party is not None and len(self._labels) < self._labels_max
            label = party if party is not None and is_listed else _REST
            if is_listed:
                self._labels[party] = label
        return label
