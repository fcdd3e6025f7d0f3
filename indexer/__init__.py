"""Which worker holds which KV-cache block; usable alone."""

from indexer.core.hashing import block_hashes, pack_u64, sequence_hashes, unpack_i64, unpack_u64
from indexer.types import Namespace, Scope, Tier, WorkerRank

__all__ = [
    "Namespace",
    "Scope",
    "Tier",
    "WorkerRank",
    "block_hashes",
    "pack_u64",
    "sequence_hashes",
    "unpack_i64",
    "unpack_u64",
]
