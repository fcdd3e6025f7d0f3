"""Tenant budgets around another policy: a tenant above its share has its sheddable work refused.

The budget is checked before the inner policy, so work it refuses costs the inner one nothing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import (
    AdmissionPolicy,
    AdmissionVerdict,
    is_finite_number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.admission.classes import SloClasses
    from select_service.core.admission.policy_api import AdmissionRequest, HeldAllowance
    from select_service.core.admission.pool_load import PoolLoad

_OVER: Final = AdmissionVerdict("refuse", "tenant-budget-shed", "tenant-budget-shed")


class TenantBudgets(AdmissionPolicy):
    """Wraps a policy; `budgets` are shares of the pool's room for requests.

    They are by tenant; other tenants have none. `inner` decides when the tenant is within its
    budget, `classes` which work is sheddable. `seats_per_instance` are the requests that one
    instance runs at once (its max_num_seqs).

    Raises:
        ValueError: a share that is no finite number of at least 0, or no seats.
    """

    def __init__(
        self,
        classes: SloClasses,
        inner: AdmissionPolicy,
        budgets: Mapping[str, float],
        *,
        seats_per_instance: int,
    ) -> None:
        if seats_per_instance < 1:
            raise ValueError("tenant budgets: seats_per_instance must be at least 1")
        for tenant_id, share in budgets.items():
            if not is_finite_number(share) or share < 0:
                raise ValueError(f"tenant budgets: the share of {tenant_id!r} must be at least 0")
        self._classes = classes
        self.inner = inner
        self.name, self.charges = inner.name, inner.charges  # budgets are an addition to it
        self._budgets = MappingProxyType(dict(budgets))
        self._seats_per_instance = seats_per_instance

    def is_over(self, tenant_id: str, in_flight: int, instances: int) -> bool:
        """Tell whether a tenant has strictly more in flight than its share of all seats."""
        share = self._budgets.get(tenant_id)
        if share is None:
            return False
        return in_flight > share * (instances * self._seats_per_instance)

    def judge(self, ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:
        """Refuse sheddable work of a tenant over budget; else ask the inner policy.

        What the inner policy never lets in is refused at once.
        """
        if ask.tenant_id in self._budgets and self._classes.priority(ask.slo_class) < 0:
            in_flight = pool.tenant_in_flight(ask.tenant_id)
            if self.is_over(ask.tenant_id, in_flight, pool.instances):
                # else it would come again until the inner policy's turn
                inner = self.inner.judge(ask, pool, now)
                if not inner.can_fit:
                    return _OVER._replace(code=inner.code, facts=inner.facts, can_fit=False)
                return _OVER
        return self.inner.judge(ask, pool, now)

    def charge(self, ask: AdmissionRequest, now: float) -> None:
        """Charge the inner policy."""
        self.inner.charge(ask, now)

    def hold(self, ask: AdmissionRequest, now: float) -> HeldAllowance | None:
        """Hold the inner policy's allowance."""
        return self.inner.hold(ask, now)

    def refill(self, ask: AdmissionRequest, pool: PoolLoad) -> tuple[str, float]:
        """Return the inner policy's line and rate, or else the tenant's share of the drain rate."""
        line, rate = self.inner.refill(ask, pool)
        share = self._budgets.get(ask.tenant_id)
        if rate > 0.0 or share is None:
            return line, rate
        return f"tenant {ask.tenant_id}", min(share, 1.0) * pool.prefill_rate * pool.instances
