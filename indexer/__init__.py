"""Which worker holds which KV-cache block; usable alone.

Names are imported on first access, so that a caller that only needs the types loads no hashing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from indexer.core.hashing import block_hashes, sequence_hashes
    from indexer.core.packing import pack_u64, unpack_i64, unpack_u64
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

_ROOMS: Final = {
    "block_hashes": "indexer.core.hashing",
    "sequence_hashes": "indexer.core.hashing",
    "pack_u64": "indexer.core.packing",
    "unpack_i64": "indexer.core.packing",
    "unpack_u64": "indexer.core.packing",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_ROOMS.get(name, "indexer.types")), name)
    globals()[name] = found
    return found
