"""SGLang's cache-aware routing, with the router's defaults.

Where requests per worker differ by more than 64 and by half, the shortest queue takes the request.
Else the worker whose tree matches the most, if that is more than 0.3 of the prompt; else the one
with the smallest tree. Trees are built from the router's own placements, not from KV events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.simulator.core.baselines.cache_aware import CacheAware

if TYPE_CHECKING:
    from select_service.simulator.core.requests import ClientRequest

CACHE_THRESHOLD: Final = 0.3
BALANCE_ABS: Final = 64
BALANCE_REL: Final = 1.5
TREE_TOKENS_MAX: Final = 1 << 24
"""2^26 characters, four to a token."""


class SglangCacheAware(CacheAware):
    """See the module."""

    name = "sglang-cache-aware"
    meaning = "its own tree of placements, or the shortest queue"
    always_estimates = True

    @override
    def blocks_max(self, worker_id: int) -> int:
        return TREE_TOKENS_MAX // self.workers[worker_id].block_size

    @override
    def choose(self, ids: list[int], request: ClientRequest) -> int:
        loads = [(self.load(one), one) for one in ids]
        most, least = max(loads)[0], min(loads)[0]
        if most - least > BALANCE_ABS and most > BALANCE_REL * least:
            return self.lowest(loads)
        cached = self.cached(ids, request)
        if max(cached.values()) > CACHE_THRESHOLD * request.isl:
            return self.lowest([(-tokens, one) for one, tokens in cached.items()])
        return self.lowest([(len(self.held[one]), one) for one in ids])
