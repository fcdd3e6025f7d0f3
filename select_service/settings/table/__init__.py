"""The table of settings: one class per section, one row per setting.

A new flag is one row in one of these files and its use; nothing else names it. For example

    drain_timeout_s: Annotated[
        float,
        seconds().live("drains_expired_total", env="DYN_DRAIN_TIMEOUT"),
        "a drain is given up after this long",
    ] = 30.0

makes `--drain-timeout-s S` with its help and default, the variable, `drain_timeout_s:` in the file
of `--config`, `PUT /config` (`live`; `static` waits for a restart), `select_service_limit`, the
row of deploy/reference/flags.md and the typed attribute `Settings.drain_timeout_s`. A default that
belongs to a component is taken from it: `= _CORE.leases_max`; `Settings` hands the value to the
component's field of that name.

The planner's rows are in `select_service.planner.settings`, a class per command: their words and
defaults are those of its components.

Each section inherits from the one before it, as msgspec's structs have one base.
"""

from typing import Final

from select_service.settings.row import flags_of
from select_service.settings.table.clients import (
    EndpointPickerSettings,
    ListeningSettings,
    SecuritySettings,
)
from select_service.settings.table.index import (
    KvIndexSettings,
    PeerRecoverySettings,
    ReplicationSettings,
)
from select_service.settings.table.operating import (
    DiscoverySettings,
    DurabilitySettings,
    ObservabilitySettings,
)
from select_service.settings.table.selection import (
    AdmissionControlSettings,
    BookingSettings,
    CostSettings,
)

__all__ = ["FLAGS", "SECTIONS", "SECTION_CLASSES", "ObservabilitySettings"]

SECTION_CLASSES: Final = {
    "listening": ListeningSettings,
    "endpoint_picker": EndpointPickerSettings,
    "security": SecuritySettings,
    "booking": BookingSettings,
    "cost": CostSettings,
    "admission": AdmissionControlSettings,
    "kv_index": KvIndexSettings,
    "peer_recovery": PeerRecoverySettings,
    "replication": ReplicationSettings,
    "discovery": DiscoverySettings,
    "durability": DurabilitySettings,
    "observability": ObservabilitySettings,
}
SECTIONS: Final = {name: flags_of(one) for name, one in SECTION_CLASSES.items()}
"""The rows by section, in the order of the reference."""
FLAGS: Final = tuple(flag for flags in SECTIONS.values() for flag in flags)
