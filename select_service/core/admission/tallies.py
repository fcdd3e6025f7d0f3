"""Outcomes of all offered requests, as plain integers; metrics read them at scrape time.

One identity always holds, per class and in total: offered = admitted + refused + withdrawn +
waiting.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from select_service.core.admission.classes import SloClasses

TENANT_LABELS_MAX: Final = 32
"""Tenants with a series of their own; the others count under "other"."""
OTHER: Final = "other"
_CONTENDERS: Final = 4
"""Contenders for a label, as a multiple of the labels."""
_SAMPLED: Final = 16
"""One in this many requests without a label is sampled, as that costs some µs."""
RATE_BOUNDS: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_WAIT_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class TenantTally:
    """Counts by tenant for the busiest few; the sum over all labels is exact.

    Space-saving (Metwally et al.): an unknown tenant takes over the smallest count among the
    contenders. A label changes hands only when a contender has twice the label's count.
    """

    def __init__(self, labels_max: int = TENANT_LABELS_MAX) -> None:
        self._labels_max = labels_max
        self.counts: dict[str, int] = {OTHER: 0}
        self._contenders: dict[str, int] = {}

    def add(self, tenant_id: str) -> None:
        """Count one request; O(1), except for the sampled ones without a label."""
        counts = self.counts
        count = counts.get(tenant_id)
        if count is not None and tenant_id != OTHER:
            counts[tenant_id] = count + 1
            return
        if len(counts) <= self._labels_max:  # "other" is one of them
            counts[tenant_id] = counts.get(tenant_id, 0) + 1
            return
        counts[OTHER] += 1
        if counts[OTHER] % _SAMPLED == 0:
            self._contend(tenant_id)

    def _contend(self, tenant_id: str) -> None:
        some = self._contenders
        if tenant_id in some or len(some) < _CONTENDERS * self._labels_max:
            some[tenant_id] = some.get(tenant_id, 0) + _SAMPLED
        else:
            least = min(some, key=some.__getitem__)
            some[tenant_id] = some.pop(least) + _SAMPLED
        weakest = min((one for one in self.counts if one != OTHER), key=self.counts.__getitem__)
        if some[tenant_id] > 2 * self.counts[weakest] and tenant_id != OTHER:
            self.counts[OTHER] += self.counts.pop(weakest)
            self.counts[tenant_id] = 0
            del some[tenant_id]


class ByTenant:
    """Admitted and refused requests by tenant, of one gate or of a whole process."""

    def __init__(self, labels_max: int = TENANT_LABELS_MAX) -> None:
        self.admitted, self.refused = TenantTally(labels_max), TenantTally(labels_max)


class ClassTally(Struct):
    """Outcomes of the requests of one class."""

    offered: int = 0
    admitted: int = 0
    refused: int = 0
    withdrawn: int = 0  # their client left while they waited
    waiting: int = 0  # now
    waited: int = 0  # ever

    def check(self) -> None:
        """Assert the identity."""
        assert self.offered == self.admitted + self.refused + self.withdrawn + self.waiting
        assert self.waiting >= 0


class Tallies:
    """The counters of one gate; a class, once known, stays.

    `by_tenant` is shared with other gates; None: this gate counts alone.
    """

    def __init__(self, classes: SloClasses, by_tenant: ByTenant | None = None) -> None:
        self.of = {name: ClassTally() for name in classes.names}
        self._usual = classes.usual
        self.decisions: dict[tuple[str, str, str, str, str], int] = {}
        """By (policy, gate, outcome, code, class); codes are few and fixed."""
        self.at_capacity = 0
        """Decisions that refused at N + Q."""
        self.by_tenant = by_tenant or ByTenant()
        self._counts_alone = by_tenant is None

    def know(self, classes: SloClasses) -> None:
        """Add classes; those known before are kept, with their counts."""
        for name in classes.names:
            self.of.setdefault(name, ClassTally())
        self._usual = classes.usual

    def name_of(self, slo_class: str) -> str:
        """Return the class a request counts under: its own if ever known, else the usual one."""
        return slo_class if slo_class in self.of else self._usual

    def note(self, policy: str, gate: str, outcome: str, code: str, slo_class: str) -> None:
        """Count one decision."""
        key = (policy, gate, outcome, code, slo_class)
        self.decisions[key] = self.decisions.get(key, 0) + 1
        if gate == "capacity" and outcome == "refuse":
            self.at_capacity += 1

    def total(self) -> ClassTally:
        """Return the sum over classes."""
        every = self.of.values()
        return ClassTally(
            *(sum(getattr(one, name) for one in every) for name in ClassTally.__struct_fields__)
        )

    def check(self) -> None:
        """Assert the identity per class and, if the gate counts alone, by tenant.

        `Totals` does it for all.
        """
        for one in self.of.values():
            one.check()
        if self._counts_alone:
            total = self.total()
            assert sum(self.by_tenant.admitted.counts.values()) == total.admitted
            assert sum(self.by_tenant.refused.counts.values()) == total.refused


class WaitTimes:
    """A histogram of the wait times of one class."""

    bounds: Final = _WAIT_BUCKETS_S

    def __init__(self) -> None:
        self.counts = [0] * (len(_WAIT_BUCKETS_S) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count the wait of one request, whatever its outcome."""
        self.counts[bisect_left(_WAIT_BUCKETS_S, seconds)] += 1
        self.seconds += seconds


class HitTally:
    """Outcomes of cache-hit thresholds in one partition; `cache_hits.py` counts."""

    def __init__(self) -> None:
        self.rejections: dict[str, int] = {}  # by source of the threshold
        self.fallbacks = 0
        self.guarded = 0  # thresholds that a loop guard set to 0
        self.rates = [0] * (len(RATE_BOUNDS) + 1)  # best hit rates, by bucket
        self.rate_sum = 0.0

    def measure(self, rate: float) -> None:
        """Record the best hit rate of one request."""
        self.rates[bisect_left(RATE_BOUNDS, rate)] += 1
        self.rate_sum += rate
