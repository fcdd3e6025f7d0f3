"""Metrics of what tenants hold of the bounds that they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.edge.metrics.families import Collector, counter, gauge, paced

if TYPE_CHECKING:
    from select_service.core.tenancy.shares import Party, Shares
    from select_service.edge.metrics.families import Steps

__all__ = ["TenantMetrics"]

REST: Final = "other"
"""Label of callers of no tenant of the token file, and of tenants beyond `--tenant-labels-max`."""


class TenantMetrics(Collector):
    """A row for each bound and tenant of the token file; without such tenants there are none."""

    def __init__(self, shares: Shares, labels_max: int) -> None:
        self._shares = shares
        self._labels_max = labels_max
        self._labels: dict[Party, str] = {}  # a tenant keeps its own: counters must not fall

    @override
    def collect(self) -> Steps:
        held = gauge("tenant_bound_held", "What a tenant holds of a bound.", ("bound", "tenant_id"))
        share = gauge("tenant_bound_share", "What is kept for each tenant of a bound.", ("bound",))
        refused = counter(
            "tenant_bound_refused",
            "Times a tenant got no more of a bound.",
            ("bound", "tenant_id"),
        )
        for bound in list(self._shares.bounds.values()):
            if self._shares.parties:
                share.add_metric([bound.name], bound.kept)
            for family, rows in ((held, bound.rows()), (refused, bound.refused.items())):
                sums: dict[str, int] = {}
                for row in paced(list(rows)):
                    if row is None:
                        yield None
                        continue
                    label = self._label(row[0])
                    sums[label] = sums.get(label, 0) + row[1]
                for label, count in sums.items():
                    family.add_metric([bound.name, label], count)
        yield from (held, share, refused)

    def _label(self, party: Party) -> str:
        label = self._labels.get(party)
        if label is None:
            is_listed = party is not None and len(self._labels) < self._labels_max
            label = party if party is not None and is_listed else REST
            if is_listed:
                self._labels[party] = label
        return label
