"""Counters of all gates together, which outlive policies and removed scopes.

A gate's own counters go with its scope, as the scope's metric series do. Process-wide counters must
not decrease then, so they are kept here, or handed over here when a gate goes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from select_service.core.admission.retry_after import PromiseCounts
from select_service.core.admission.tallies import TENANT_LABELS_MAX, ByTenant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from select_service.core.admission.gate import Gate
    from select_service.core.admission.slo_shed import SloShed

T = TypeVar("T")


def bands_closed_by(gate: Gate[T]) -> dict[int, int]:
    """Return how often a gate's current queue has closed each band."""
    return {} if gate.queue is None else dict(enumerate(gate.queue.flaps))


class Totals:
    """Counters of all gates, past and present."""

    def __init__(self, tenant_labels_max: int = TENANT_LABELS_MAX) -> None:
        self.by_tenant = ByTenant(tenant_labels_max)
        self.promises = PromiseCounts()
        self._at_capacity = 0  # refused by gates that are gone
        self._bands_closed: Counter[int] = Counter()  # by queues that are gone
        # by model and endpoint, of gates that are gone
        self._rejections: dict[str, Counter[str]] = {}
        self._admitted = self._refused = 0  # likewise, for `check`

    # -- handed over by what goes --------------------------------------------------------------

    def left_by_gate(
        self, gate: Gate[T], rejections: Mapping[str, int], model_name: str, *, is_last: bool
    ) -> None:
        """Keep the counts of a gate whose scope is removed.

        `is_last`: no other scope of that model has a gate, so its series end.
        """
        tallies = gate.tallies
        total = tallies.total()
        self._admitted += total.admitted
        self._refused += total.refused
        self._at_capacity += tallies.at_capacity
        self.left_by_queue(gate.queue)
        if is_last:
            self._rejections.pop(model_name, None)
        elif rejections:
            self._rejections.setdefault(model_name, Counter()).update(rejections)

    def left_by_queue(self, queue: SloShed[T] | None) -> None:
        """Keep the counts of a queue that another policy replaces."""
        if queue is not None:
            self._bands_closed.update(dict(enumerate(queue.flaps)))

    # -- sums over past and present ------------------------------------------------------------

    def at_capacity(self, gates: Iterable[Gate[T]]) -> int:
        """Return how many requests were refused at N + Q, by these gates and past ones."""
        return self._at_capacity + sum(one.tallies.at_capacity for one in gates)

    def bands_closed(self, gates: Iterable[Gate[T]]) -> dict[int, int]:
        """Return how often slo-shed closed each band, in order of bands."""
        counts = Counter(self._bands_closed)
        for gate in gates:
            counts.update(bands_closed_by(gate))
        return dict(sorted(counts.items()))

    def rejections(self, model_name: str) -> Counter[str]:
        """Return refusals by endpoint from removed scopes of a model that still has others."""
        return self._rejections.get(model_name, Counter())

    def check(self, gates: Iterable[Gate[T]]) -> None:
        """Assert that the counts by tenant and by class agree."""
        totals = [gate.tallies.total() for gate in gates]
        admitted = self._admitted + sum(one.admitted for one in totals)
        refused = self._refused + sum(one.refused for one in totals)
        assert sum(self.by_tenant.admitted.counts.values()) == admitted
        assert sum(self.by_tenant.refused.counts.values()) == refused
