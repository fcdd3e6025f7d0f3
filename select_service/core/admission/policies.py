"""Policies by name and configuration: the one table behind flags, HTTP and the simulator.

It reads plain mappings, as JSON gives them, and refuses unknown keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from select_service.core.admission.classes import SloClasses
from select_service.core.admission.constant_policy import CONSTANT, ConstantPolicy
from select_service.core.admission.gaie_legacy import (
    DEFAULT_KV_UTILIZATION,
    DEFAULT_QUEUE_DEPTH,
    GaieLegacy,
)
from select_service.core.admission.policy_api import TENANTS_MAX, checked, is_finite_number
from select_service.core.admission.slo_shed import SloShed
from select_service.core.admission.slo_shed_settings import (
    DEFAULT_QUOTAS,
    DEFAULT_TARGETS_S,
    SloShedSettings,
)
from select_service.core.admission.tenant_budgets import TenantBudgets
from select_service.core.admission.tier_shed import (
    DEFAULT_MIN_PRIORITY,
    DEFAULT_THRESHOLD,
    TierShed,
)
from select_service.core.admission.token_bucket import (
    DEFAULT_CAPACITY,
    DEFAULT_REFILL_RATE,
    TokenBucketPolicy,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.admission.policy_api import AdmissionPolicy

T = TypeVar("T")

MEANINGS: Final[Mapping[str, str]] = {
    "always-admit": "refuses nothing",
    "token-bucket": "refuses prompts that are longer than what is left of an allowance, which "
    "refills by the second",
    "reject-all": "refuses everything",
    "tier-shed": "refuses classes of low priority while an instance has more work than a threshold",
    "gaie-legacy": "refuses sheddable classes while queues or KV caches are full on average",
    "slo-shed": "lets requests wait by class and tenant, and refuses early what would be late",
}
"""What each policy does, by its name."""
NAMES: Final = tuple(MEANINGS)
DEFAULT_SEATS_PER_INSTANCE: Final = 256

KEYS_OF_ALL: Final = frozenset({"slo_priorities", "tenant_budgets", "seats_per_instance"})
_SLO_SHED: Final = frozenset(SloShedSettings.__struct_fields__) - {
    "targets_s",
    "default_target_s",
} | {"targets_ms", "default_target_ms"}
KEYS: Final[Mapping[str, frozenset[str]]] = {
    "always-admit": frozenset(),
    "token-bucket": frozenset({"capacity", "refill_rate", "per_tenant", "tenants_max"}),
    "reject-all": frozenset(),
    "tier-shed": frozenset({"threshold", "min_priority"}),
    "gaie-legacy": frozenset({"queue_depth", "kv_utilization"}),
    "slo-shed": _SLO_SHED,
}
"""The keys of each policy, beside KEYS_OF_ALL."""
_ALIASES: Final = {
    "tier_shed_threshold": "threshold",
    "tier_shed_min_priority": "min_priority",
    "qd_threshold": "queue_depth",
    "kv_threshold": "kv_utilization",
    "max_num_seqs": "seats_per_instance",
}
"""The field's names for the same keys."""


class Built(NamedTuple, Generic[T]):
    """A policy ready to judge."""

    policy: AdmissionPolicy
    queue: SloShed[T] | None  # where its requests wait, if it has a queue
    classes: SloClasses
    name: str
    config: dict[str, object]  # as given, under our names: enough to rebuild it


class _Reader:
    """Reads typed values from a configuration.

    Raises:
        ValueError: from any method, naming policy and key.
    """

    def __init__(self, policy: str, values: Mapping[str, object]) -> None:
        self._policy = policy
        self._values = values

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key, default)
        if not is_finite_number(value):
            raise self.wrong(key, "must be a finite number")
        assert isinstance(value, int | float)
        return value

    def whole(self, key: str, default: int) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise self.wrong(key, "must be a whole number")
        return int(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def numbers(self, key: str) -> dict[str, float]:
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, "must be an object of numbers")
        for name, one in value.items():
            if not isinstance(name, str) or not is_finite_number(one):
                raise self.wrong(key, f"{name!r} must be a finite number")
        return dict(value)

    def wholes(self, key: str, classes: SloClasses | None = None) -> dict[str, int]:
        values = self.numbers(key) if classes is None else self.by_class(key, classes)
        for name, one in values.items():
            if one != int(one):
                raise self.wrong(key, f"{name!r} must be a whole number")
        return {name: int(one) for name, one in values.items()}

    def by_class(self, key: str, classes: SloClasses) -> dict[str, float]:
        values = self.numbers(key)
        strange = next((name for name in values if name not in classes.names), None)
        if strange is not None:
            known = ", ".join(sorted(classes.names))
            raise self.wrong(key, f"no class {strange!r}; known are {known}")
        return values

    def wrong(self, key: str, why: str) -> ValueError:
        return ValueError(f"{self._policy}: {key}: {why}")


def read_config(name: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration under our own key names.

    Raises:
        ValueError: no such policy, or keys it does not know.
    """
    if name not in KEYS:
        raise ValueError(f"unknown policy {name!r}; known are {', '.join(NAMES)}")
    own = {
        _ALIASES[key] if key not in KEYS[name] and key in _ALIASES else key: value
        for key, value in config.items()
    }
    if len(own) < len(config):
        raise ValueError(f"{name}: the same key under two names")
    checked(own, KEYS[name] | KEYS_OF_ALL, name)
    return own


def build(name: str, config: Mapping[str, object] | None = None) -> Built[T]:
    """Build a policy.

    `config` has the keys of the policy (KEYS), and for every one `slo_priorities` (class →
    priority), `tenant_budgets` (tenant → share of all seats) and `seats_per_instance`.

    Raises:
        ValueError: naming what is wrong.
    """
    own = read_config(name, config or {})
    read = _Reader(name, own)
    classes = SloClasses(read.wholes("slo_priorities"))
    queue: SloShed[T] | None = None
    policy: AdmissionPolicy
    if name == "slo-shed":
        policy = queue = SloShed(classes, _slo_shed(read, classes))
    else:
        policy = _plain(name, read, classes)
    budgets = read.numbers("tenant_budgets")
    if budgets:
        seats = read.whole("seats_per_instance", DEFAULT_SEATS_PER_INSTANCE)
        policy = TenantBudgets(classes, policy, budgets, seats_per_instance=seats)
    return Built(policy, queue, classes, name, own)


def _plain(name: str, read: _Reader, classes: SloClasses) -> AdmissionPolicy:
    if name in CONSTANT:
        return ConstantPolicy(name)
    if name == "token-bucket":
        tenants_max = read.whole("tenants_max", TENANTS_MAX)
        if tenants_max < 1:
            raise read.wrong("tenants_max", "must be at least 1")
        return TokenBucketPolicy(
            read.number("capacity", DEFAULT_CAPACITY),
            read.number("refill_rate", DEFAULT_REFILL_RATE),
            per_tenant=read.flag("per_tenant", default=False),
            tenants_max=tenants_max,
        )
    if name == "tier-shed":
        return TierShed(
            classes,
            read.whole("threshold", DEFAULT_THRESHOLD),
            read.whole("min_priority", DEFAULT_MIN_PRIORITY),
        )
    assert name == "gaie-legacy"
    return GaieLegacy(
        classes,
        read.number("queue_depth", DEFAULT_QUEUE_DEPTH),
        read.number("kv_utilization", DEFAULT_KV_UTILIZATION),
    )


def _slo_shed(read: _Reader, classes: SloClasses) -> SloShedSettings:
    usual = SloShedSettings()
    targets_ms = read.by_class("targets_ms", classes)
    budget = read.number("budget_tokens", 0.0)
    return SloShedSettings(
        usage_limit=read.number("usage_limit", usual.usage_limit),
        hysteresis=read.number("hysteresis", usual.hysteresis),
        feasibility_slack=read.number("feasibility_slack", usual.feasibility_slack),
        feasibility_critical=read.flag("feasibility_critical", default=usual.feasibility_critical),
        output_weight=read.number("output_weight", usual.output_weight),
        targets_s={**DEFAULT_TARGETS_S, **{name: ms / 1e3 for name, ms in targets_ms.items()}},
        quotas={**DEFAULT_QUOTAS, **read.wholes("quotas", classes)},
        default_target_s=read.number("default_target_ms", usual.default_target_s * 1e3) / 1e3,
        default_quota=read.whole("default_quota", usual.default_quota),
        budget_tokens=budget or None,
        budget_tokens_per_s=read.number("budget_tokens_per_s", usual.budget_tokens_per_s),
        tenants_max=read.whole("tenants_max", usual.tenants_max),
    )
