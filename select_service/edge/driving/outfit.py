"""What a driver is given beside the settings of its core: its edge's limits, and who goes with it.

`construction.py` makes both out of settings; tests and embedders mostly do with what is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from indexer.types import StreamLimits
from select_service.types import DumpLimits, ReplicaLimits
from select_service.types.doctor import DoctorLimits

if TYPE_CHECKING:
    from indexer.types import RecoveryLimits, SnapshotLimits
    from select_service.edge.security.guards import Guards
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording import Recording
    from select_service.edge.tracing.spans import Tracing

__all__ = ["Companions", "EdgeLimits"]

READY_TIMEOUT_S: Final = 120.0
"""How long /ready waits for recoveries unless told otherwise."""


class EdgeLimits(Struct, frozen=True, kw_only=True):
    """Bounds of what stands around the core."""

    streams: StreamLimits = field(default_factory=StreamLimits)
    """Of the event listeners."""
    replicas: ReplicaLimits = field(default_factory=ReplicaLimits)
    """Of the replica plane."""
    dumps: DumpLimits = field(default_factory=DumpLimits)
    """Of GET /dump."""
    doctor: DoctorLimits = field(default_factory=DoctorLimits)
    """How often it is looked whether something is wired wrong."""
    snapshot: SnapshotLimits | None = None
    """Budgets of the index snapshot beside what the keeper keeps; None: there is none."""
    recovery: RecoveryLimits | None = None
    """Budgets of starting with a peer's index."""
    ready_timeout_s: float = READY_TIMEOUT_S
    """How long /ready waits for recoveries."""


class Companions(Struct, frozen=True, kw_only=True):
    """Who goes with a driver, opened by others; it closes them. None: there is none."""

    keeper: Keeper | None = None
    """Keeps the state on disk; without one it ends with the process."""
    security: Guards | None = None
    """Guards its door, and has its keys towards workers and replicas."""
    tracing: Tracing | None = None
    """Of some requests."""
    recording: Recording | None = None
    """Of all that happens."""
