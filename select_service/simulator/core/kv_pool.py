"""The KV cache of one simulated engine, compiled if it can be.

A run spends most of its time on blocks, some thousand for each request: the compiled pool looks at
one in a few nanoseconds, the plain one in a hundred. Which of the two it is, nobody needs to know.
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
