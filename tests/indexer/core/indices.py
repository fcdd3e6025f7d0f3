"""Names of ranks and tiers, and short words for what tests ask of an index."""

from __future__ import annotations

import struct

from indexer.core.index import KvIndex
from indexer.types import Tier, WorkerRank

A, B, C = WorkerRank(0, 0), WorkerRank(0, 1), WorkerRank(1, 0)
GPU, CPU, DISK, FAR = Tier


def pack(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def rows(index: KvIndex, *prompt: int) -> dict[WorkerRank | None, tuple[int, int, int]]:
    index.check()
    found = index.find_matches(pack(*prompt)).rows()
    return {index.rank_of(slot): row for slot, row in found.items()}


def swept(index: KvIndex) -> KvIndex:
    while index.sweep(10):
        index.check()
    index.check()
    return index
