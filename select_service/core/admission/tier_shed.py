"""tier-shed: under load, admits only classes from a priority on; texts as in the field's simulator.

Its load counts running and waiting requests twice (in-flight contains both), and one hot instance
sheds for the whole pool. It exists for comparison; `slo_shed.py` does this differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import ADMIT, AdmissionPolicy, AdmissionVerdict

if TYPE_CHECKING:
    from select_service.core.admission.classes import SloClasses
    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.admission.pool_load import PoolLoad

DEFAULT_THRESHOLD: Final = 0
DEFAULT_MIN_PRIORITY: Final = 3
CODE: Final = "tier-shed"
NEVER_CODE: Final = "tier-shed-always"
"""Of a class that a threshold below 0 sheds under any load."""


class TierShed(AdmissionPolicy):
    """Sheds below a priority while the fullest instance carries more than the threshold."""

    name = "tier-shed"

    def __init__(
        self,
        classes: SloClasses,
        threshold: int = DEFAULT_THRESHOLD,
        min_priority: int = DEFAULT_MIN_PRIORITY,
    ) -> None:
        self._classes = classes
        self._threshold = threshold
        self._min_priority = min_priority

    def judge(self, ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:
        """Refuse low priorities under load; an empty pool has no load."""
        priority = self._classes.priority(ask.slo_class)
        if priority >= self._min_priority:
            return ADMIT
        if not pool.instances:
            return ADMIT
        load = pool.heaviest
        if load <= self._threshold:
            return ADMIT
        reason = (
            f"tier-shed: class={ask.slo_class} priority={priority}"
            f" < min={self._min_priority} load={load}"
        )
        can_fit = self._threshold >= 0  # below 0 even an idle pool is over the threshold
        return AdmissionVerdict(
            "refuse",
            reason,
            CODE if can_fit else NEVER_CODE,
            facts={"load": load, "limit": self._threshold},
            can_fit=can_fit,
        )
