"""LMetric (arXiv 2603.15202): the product of what is to compute and how many requests are there.

Prompt tokens that the worker would have to compute before the first token, the queue's included,
times its batch. A product needs no weight. Where a batch is empty, less to compute decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from select_service.simulator.core.baselines.cache_aware import CacheAware

if TYPE_CHECKING:
    from select_service.simulator.core.requests import ClientRequest


class LMetric(CacheAware):
    """See the module."""

    name = "lmetric"
    meaning = "prompt tokens to compute, times the requests there"

    @override
    def choose(self, ids: list[int], request: ClientRequest) -> int:
        costs = []
        for one, cached in self.cached(ids, request).items():
            tokens = self.queued[one] + request.isl - cached
            costs.append(((tokens * self.load(one), tokens), one))
        return self.lowest(costs)
