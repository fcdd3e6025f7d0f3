"""What a driver takes besides its core's settings: limits of the edge, and optional companions.

`construction.py` builds both from settings; tests and embedders mostly use the defaults here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from indexer.types import StreamLimits
from select_service.types import DumpLimits, ReplicaLimits
from select_service.types.doctor import DoctorLimits

if TYPE_CHECKING:
    from indexer.types import RecoveryLimits, SnapshotLimits
    from select_service.edge.security.security_files import SecurityFiles
    from select_service.edge.state.keeper import Keeper
    from select_service.edge.state.recording_file import Recording
    from select_service.edge.tracing.spans import Tracing

READY_TIMEOUT_S: Final = 120.0
"""Default time that /ready waits for recoveries."""

READY_PAST_EVENTS_S: Final = 5.0
"""Default time that it waits for the engines' past."""


class EdgeLimits(Struct, frozen=True, kw_only=True):
    """Bounds of the parts around the core."""

    streams: StreamLimits = field(default_factory=StreamLimits)
    """Of the event listeners."""
    replicas: ReplicaLimits = field(default_factory=ReplicaLimits)
    """Of the replica plane."""
    dumps: DumpLimits = field(default_factory=DumpLimits)
    """Of GET /dump."""
    doctor: DoctorLimits = field(default_factory=DoctorLimits)
    """How often and how closely to look for misconfiguration."""
    snapshot: SnapshotLimits | None = None
    """Budgets of the index snapshot, which needs a keeper; None: no snapshot."""
    recovery: RecoveryLimits | None = None
    """Budgets of recovering the index from a peer."""
    ready_timeout_s: float = READY_TIMEOUT_S
    """How long /ready waits for recoveries."""
    ready_past_events_s: float = READY_PAST_EVENTS_S
    """How long it waits for what engines replay of their past; 0: not at all."""


class DriverOptions(Struct, frozen=True, kw_only=True):
    """Optional parts that the caller opens and the driver closes. None: absent."""

    keeper: Keeper | None = None
    """Keeps the state on disk; without it the state ends with the process."""
    security: SecurityFiles | None = None
    """Authorizes requests, and has our keys towards workers and replicas."""
    tracing: Tracing | None = None
    """Traces some requests."""
    recording: Recording | None = None
    """Records everything."""
