"""The policies that are compared, each configured as well as its knobs allow for this pool.

Whatever has a number in tokens or requests gets it from the measured capacity; the others run with
the defaults of the field. Times are the service's own, hence scaled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.admission.contender import Contender
from bench.admission.workload import TARGETS_S

if TYPE_CHECKING:
    from bench.admission.capacity import Capacity
    from bench.admission.play import Script

__all__ = ["contenders"]


def contenders(script: Script, capacity: Capacity, time_scale: float = 1.0) -> list[Contender]:
    """All of them, in the order of the table."""
    tokens_per_s = capacity.tokens_per_s / time_scale
    tenants = sorted({source.tenant_id for source in script.workload.sources})
    return [
        Contender("always-admit", "always-admit", {}),
        # One second's worth may come at once.
        Contender(
            "token-bucket",
            "token-bucket",
            {"capacity": capacity.tokens_per_s, "refill_rate": tokens_per_s},
        ),
        # Its load counts what runs or waits twice.
        Contender("tier-shed", "tier-shed", {"threshold": 2 * capacity.in_flight_max}),
        Contender("gaie-legacy", "gaie-legacy", {}),
        # Equal shares of what was in flight at capacity.
        Contender(
            "tenant-budgets",
            "always-admit",
            {
                "tenant_budgets": {name: 1.0 / len(tenants) for name in tenants},
                "seats_per_instance": capacity.in_flight_max,
            },
        ),
        Contender("reject-all", "reject-all", {}),
        Contender(
            "slo-shed",
            "slo-shed",
            {"targets_ms": {name: s * time_scale * 1e3 for name, s in TARGETS_S.items()}},
        ),
    ]
