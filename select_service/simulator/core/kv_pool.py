"""The KV cache of one simulated engine, compiled if possible.

A run spends most of its time on blocks, about a thousand per request: the compiled pool takes a few
nanoseconds per block, the plain one a hundred. Callers need not know which one it is.
"""

from __future__ import annotations

from indexer.compiled import usable

if usable("select_service.simulator.core._kv_pool", 1):
    from select_service.simulator.core._kv_pool import BlockSet, KvPool
else:
    from select_service.simulator.core.plain_kv_pool import (  # type: ignore[assignment]
        BlockSet,
        KvPool,
    )

__all__ = ["BlockSet", "KvPool"]
