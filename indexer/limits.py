"""Settings of the index, as its owners set them; the command line and the edge read them here."""

from indexer.types import (
    EgressSettings,
    EventLossPolicy,
    RecoveryLimits,
    SnapshotLimits,
    StreamLimits,
)

__all__ = ["EgressSettings", "EventLossPolicy", "RecoveryLimits", "SnapshotLimits", "StreamLimits"]
