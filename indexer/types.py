"""The nouns of the index: tiers, ranks, scopes, namespaces.

Plain values only; nothing here computes. Everything else in `indexer` and in `select_service`
may import this file, and this file imports nothing of the project.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple

U64_MASK: Final = (1 << 64) - 1

PackedHashes = bytes
"""A run of 64-bit hashes, 8 bytes each, little-endian, in prompt order."""

HASH_BYTES: Final = 8


class Tier(IntEnum):
    """Where a worker keeps a block; cumulative in this order when a prompt is matched."""

    DEVICE = 0
    HOST_PINNED = 1
    DISK = 2
    EXTERNAL = 3  # reported together with disk

    @property
    def wire_name(self) -> str:
        """Name in /dump: device, host_pinned, disk or external."""
        return self.name.lower()


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: what load and blocks belong to."""

    worker_id: int  # u64
    dp_rank: int  # u32


class Scope(NamedTuple):
    """Key of a partition."""

    model_name: str
    tenant_id: str


class Namespace(NamedTuple):
    """What colours every block hash of a prompt besides its tokens; "" means none."""

    lora_name: str = ""
    cache_salt: str = ""


BASE_NAMESPACE: Final = Namespace()


class EventLossPolicy(Enum):
    """What becomes of a rank's blocks when lost events cannot be recovered (`--on-event-loss`)."""

    KEEP = "keep"  # keep crediting what is known, mark the rank uncertain
    DROP = "drop"  # strict truth: forget the rank's blocks
