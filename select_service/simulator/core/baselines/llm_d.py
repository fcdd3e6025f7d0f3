"""The mix of scorers that llm-d documents for inference scheduling: prefix 3, queue 2, KV use 2.

Each scorer gives 0 to 1: the prompt's share that is cached; the place of the worker's queue between
the longest (0) and the shortest (1); the free share of its KV cache. Queue and use are scraped from
the engines' metrics and are as old as the last scrape.

The prefix is scored like llm-d's `prefix-cache-scorer` does, but known from KV events. Its precise
scorer spreads the workers that have any of the prompt between 0 and 1 instead, so that the best of
them has 1 for however little: on agents near capacity its answers come later than with the share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.simulator.core.baselines.cache_aware import CacheAware

if TYPE_CHECKING:
    import random

    from select_service.simulator.core.requests import ClientRequest
    from select_service.types import KvEvents

PREFIX, QUEUE, KV_USE = 3.0, 2.0, 2.0
SCRAPE_S: Final = 0.05


class LlmD(CacheAware):
    """See the module."""

    name = "llm-d"
    meaning = "llm-d's scorers: cached prefix 3, queue 2, KV use 2"

    def __init__(self, rng: random.Random, kv_events: KvEvents = "engine") -> None:
        super().__init__(rng, kv_events)
        self._scraped_at = -math.inf
        self._scraped: dict[int, tuple[int, float]] = {}  # requests waiting, share of KV in use

    def _scrape(self) -> None:
        if self.now - self._scraped_at < SCRAPE_S and self._scraped.keys() >= self.workers.keys():
            return
        self._scraped_at = self.now
        for one, engine in self.workers.items():
            self._scraped[one] = len(engine.waiting), engine.pool.used / engine.pool.capacity

    @override
    def choose(self, ids: list[int], request: ClientRequest) -> int:
        self._scrape()
        queues = [self._scraped[one][0] for one in ids]
        longest, shortest = max(queues), min(queues)
        costs = []
        for one, cached in self.cached(ids, request).items():
            waiting, used = self._scraped[one]
            spread = longest - shortest
            queue = (longest - waiting) / spread if spread else 1.0
            score = PREFIX * cached / request.isl + QUEUE * queue + KV_USE * (1.0 - used)
            costs.append((-score, one))
        return self.lowest(costs)
