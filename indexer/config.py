"""Settings of the index, as its owners set them; the command line and the edge read them here."""

from indexer.types import (
    EventLossPolicy,
    ReachSettings,
    RecoveryLimits,
    SnapshotLimits,
    StreamLimits,
)

__all__ = ["EventLossPolicy", "ReachSettings", "RecoveryLimits", "SnapshotLimits", "StreamLimits"]
