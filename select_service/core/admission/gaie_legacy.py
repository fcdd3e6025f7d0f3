"""gaie-legacy: refuses sheddable work while the pool is saturated, with the field's exact texts.

The saturation is a mean over instances of the worse of queue depth and KV use, each against its own
limit; an empty pool counts as saturated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from select_service.core.admission.policy_api import ADMIT, AdmissionPolicy, AdmissionVerdict

if TYPE_CHECKING:
    from select_service.core.admission.classes import SloClasses
    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.admission.pool_load import PoolLoad

DEFAULT_QUEUE_DEPTH: Final = 5.0
DEFAULT_KV_UTILIZATION: Final = 0.8
_SURELY_BELOW: Final = 1.0 - 1e-6
"""An upper bound below this is conclusive in whatever order the sum is taken."""


def utilization(
    pool: PoolLoad,
    queue_depth: float = DEFAULT_QUEUE_DEPTH,
    kv_utilization: float = DEFAULT_KV_UTILIZATION,
) -> float:
    """Return the mean over instances of max(queue / limit, kv / limit); 1 for an empty pool."""
    if not pool.instances:
        return 1.0
    worse = np.maximum(pool.queue_depth / queue_depth, pool.kv_utilization / kv_utilization)
    # cumsum adds one by one, as the reference implementation does; sum() adds in pairs and may end
    # on the other side of 1.
    return float(worse.cumsum()[-1]) / pool.instances


class GaieLegacy(AdmissionPolicy):
    """Refuses sheddable requests while the pool's utilization reaches 1."""

    name = "gaie-legacy"

    def __init__(
        self,
        classes: SloClasses,
        queue_depth: float = DEFAULT_QUEUE_DEPTH,
        kv_utilization: float = DEFAULT_KV_UTILIZATION,
    ) -> None:
        if not (queue_depth > 0 and kv_utilization > 0):
            raise ValueError("gaie-legacy: queue_depth and kv_utilization must be above 0")
        self._classes = classes
        self._queue_depth = queue_depth
        self._kv_utilization = kv_utilization

    def judge(self, ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:
        """Refuse sheddable requests of a saturated pool."""
        if self._classes.priority(ask.slo_class) >= 0:
            return ADMIT
        if pool.utilization_most(self._queue_depth, self._kv_utilization) < _SURELY_BELOW:
            return ADMIT
        saturation = utilization(pool, self._queue_depth, self._kv_utilization)
        if saturation < 1.0:
            return ADMIT
        reason = f"gaie-saturated: class={ask.slo_class} saturation={saturation:.2f}"
        return AdmissionVerdict(
            "refuse", reason, "gaie-saturated", facts={"saturation": saturation, "limit": 1.0}
        )
