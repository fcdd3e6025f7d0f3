"""What the process is given reaches the component it is for: no flag ends nowhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer.limits import RecoveryLimits, SnapshotLimits, StreamLimits
from indexer.types import EgressSettings
from select_service.edge.metrics.limit_metrics import TURN_BUDGETS
from select_service.settings import Settings
from select_service.types import BodyLimits, CoreLimits, DumpLimits, ReplicaLimits, TrustSettings
from select_service.types.admission import AdmissionSettings
from select_service.types.doctor import DoctorLimits
from select_service.types.shadow import ShadowSettings

COMPONENTS: dict[str, type[msgspec.Struct]] = {
    "core_limits": CoreLimits,
    "admission": AdmissionSettings,
    "egress": EgressSettings,
    "doctor_limits": DoctorLimits,
    "trust": TrustSettings,
    "shadow": ShadowSettings,
    "recovery_limits": RecoveryLimits,
    "snapshot_limits": SnapshotLimits,
    "stream_limits": StreamLimits,
    "replica_limits": ReplicaLimits,
    "body_limits": BodyLimits,
    "dump_limits": DumpLimits,
}
LOOKED_ON: dict[str, Any] = {"shadow_weights": {"temperature": 1.0}}  # else there is no shadow


def other(value: object) -> object:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1 if value else 0.5
        case tuple():
            return (*value, "other")
        case _:
            return "other"


def changed_by(setting: str, component: str) -> set[str]:
    """Fields of a component that another value of a setting changes."""
    before = Settings(**LOOKED_ON)
    changed = other(getattr(before, setting))
    if setting.startswith("shadow_"):  # shares
        changed = getattr(before, setting) / 2
    after = Settings(**LOOKED_ON | {setting: changed})
    old, new = getattr(before, component), getattr(after, component)
    return {name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)}


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_field_of_a_component_is_a_setting_or_nobodys(component: str) -> None:
    settings = {*Settings.__struct_fields__} - {"shadow_weights", "admission_config"}
    reached = {name for setting in settings for name in changed_by(setting, component)}
    fields = {*COMPONENTS[component].__struct_fields__} - {"weights", "policy_config"}
    assert fields - reached <= {*TURN_BUDGETS}
