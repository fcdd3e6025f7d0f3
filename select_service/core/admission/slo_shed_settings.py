"""The settings of `slo_shed.py`, with their defaults and bounds."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from select_service.core.admission.policy_api import TENANTS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

OUTPUT_WEIGHT_MAX: Final = 1e6
"""Far beyond any sensible value, yet its product is still a finite number."""
DEFAULT_TARGETS_S: Final[Mapping[str, float]] = MappingProxyType(
    {"critical": 2.0, "standard": 5.0, "batch": 20.0, "sheddable": 20.0, "background": 60.0}
)
DEFAULT_QUOTAS: Final[Mapping[str, int]] = MappingProxyType(
    {"critical": 1024, "standard": 1024, "batch": 512, "sheddable": 256, "background": 256}
)


class SloShedSettings(Struct, frozen=True):
    """The settings of the policy; `bench/admission/README.md` reports what they achieve.

    Raises:
        ValueError: a value that makes no sense.
    """

    usage_limit: float = 0.6  # the lowest band's ceiling
    hysteresis: float = 0.05  # a closed band reopens this far below its ceiling
    feasibility_slack: float = 1.2  # factor on the target; 0: no early refusal
    feasibility_critical: bool = False  # whether the highest band is refused early, too
    output_weight: float = 2.0  # weight of one expected output token, against one prefill token
    targets_s: Mapping[str, float] = DEFAULT_TARGETS_S
    quotas: Mapping[str, int] = DEFAULT_QUOTAS
    default_target_s: float = 20.0  # of classes without a target
    default_quota: int = 256
    budget_tokens: float | None = None  # allowance per tenant and class; None: none
    budget_tokens_per_s: float = 1_000.0
    tenants_max: int = TENANTS_MAX

    def __post_init__(self) -> None:
        """Validate every setting."""
        if not 0.0 < self.usage_limit <= 1.0:
            raise ValueError("slo-shed: usage_limit must be above 0 and at most 1")
        if not 0.0 <= self.hysteresis < self.usage_limit:
            raise ValueError("slo-shed: hysteresis must be at least 0 and below usage_limit")
        if not (math.isfinite(self.feasibility_slack) and self.feasibility_slack >= 0.0):
            raise ValueError("slo-shed: feasibility_slack must be at least 0")
        if not 0.0 <= self.output_weight <= OUTPUT_WEIGHT_MAX:
            raise ValueError(f"slo-shed: output_weight must be in 0..{OUTPUT_WEIGHT_MAX:g}")
        for name, target_s in (*self.targets_s.items(), ("default", self.default_target_s)):
            if not target_s > 0.0:
                raise ValueError(f"slo-shed: the target of {name} must be above 0")
        for name, quota in (*self.quotas.items(), ("default", self.default_quota)):
            if quota < 0:
                raise ValueError(f"slo-shed: the quota of {name} must be at least 0")
        if self.tenants_max < 1:
            raise ValueError("slo-shed: tenants_max must be at least 1")
