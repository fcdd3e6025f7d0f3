"""A router that also knows what workers have cached, and how much they still have to compute.

What is cached it learns from the same KV events as the service, as late; without them it estimates
from its own placements. What the other policies of this folder decide with comes from here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from indexer.types import Tier
from select_service.simulator.core.kv_events import Stored
from select_service.simulator.core.routers import Counting, Placed

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Sequence

    from select_service.simulator.core.kv_events import KvEvent
    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.worker import EngineWorker
    from select_service.types import KvEvents


class CacheAware(Counting):
    """See the module.

    Attributes:
        workers: Those that are not gone, by id.
        held: By worker: the blocks it is known to hold; in an estimate the least recently used
            come first.
        queued: By worker: prompt tokens placed there that are not reported as computed.
    """

    always_estimates: ClassVar[bool] = False

    def __init__(self, rng: random.Random, kv_events: KvEvents = "engine") -> None:
        super().__init__(rng, kv_events)
        self._kv_events = "predicted" if self.always_estimates else kv_events
        self.workers: dict[int, EngineWorker] = {}
        self.held: dict[int, OrderedDict[int, None]] = {}
        self.queued: Counter[int] = Counter()
        self._holders: dict[int, set[int]] = {}  # by block
        self._computing: dict[str, tuple[int, int]] = {}  # by key: the worker, and its tokens

    # -- workers -------------------------------------------------------------------------------

    @override
    def add(self, worker: EngineWorker, now: float) -> None:
        super().add(worker, now)
        self.workers[worker.worker_id] = worker
        self.held[worker.worker_id] = OrderedDict()

    @override
    def remove(self, worker_id: int, now: float) -> None:
        super().remove(worker_id, now)
        self._forget(worker_id, list(self.held.get(worker_id, ())))
        self.held.pop(worker_id, None)
        self.workers.pop(worker_id, None)
        del self.queued[worker_id]

    # -- caches --------------------------------------------------------------------------------

    @override
    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        if self._kv_events != "engine" or worker_id not in self.held:
            return
        for event in events:
            if event.tier is not Tier.DEVICE:
                continue  # what is below is known to none of them
            if isinstance(event, Stored):
                self._learn(worker_id, event.blocks)
            else:
                self._forget(worker_id, event.blocks)

    def _learn(self, worker_id: int, blocks: Iterable[int]) -> None:
        held = self.held[worker_id]
        for block in blocks:
            held[block] = None
            held.move_to_end(block)
            self._holders.setdefault(block, set()).add(worker_id)

    def _forget(self, worker_id: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.held[worker_id].pop(block, self) is None:
                holders = self._holders[block]
                holders.discard(worker_id)
                if not holders:
                    del self._holders[block]

    def blocks_max(self, worker_id: int) -> int:
        """Return how many blocks an estimate believes a worker to hold at most."""
        return self.workers[worker_id].pool.capacity

    def cached(self, ids: Iterable[int], request: ClientRequest) -> dict[int, int]:
        """Return the prompt tokens each of these workers has cached; the last one is computed."""
        found = dict.fromkeys(ids, 0)
        left = set(found)
        size = self.workers[next(iter(found))].block_size
        at = 0
        for block in islice(request.blocks, (request.isl - 1) // size):
            left &= self._holders.get(block, _NOBODY)
            if not left:
                break
            at += size
            for one in left:
                found[one] = at
        return found

    # -- requests ------------------------------------------------------------------------------

    @override
    def _place(self, key: str, request: ClientRequest, placed: Placed, ids: list[int]) -> Placed:
        computing = ids[-1]
        if computing in self.workers:  # when this arrives, it may be gone
            tokens = request.isl - self.cached([computing], request)[computing]
            self._computing[key] = computing, tokens
            self.queued[computing] += tokens
            if self._kv_events == "predicted":
                self._estimate(computing, request)
        return super()._place(key, request, placed, ids)

    def _estimate(self, worker_id: int, request: ClientRequest) -> None:
        """Take it that a worker will hold this prompt, and nothing beyond its room."""
        full = request.isl // self.workers[worker_id].block_size
        self._learn(worker_id, reversed(request.blocks[:full]))  # ends of prompts are dropped first
        held = self.held[worker_id]
        surplus = len(held) - self.blocks_max(worker_id)
        if surplus > 0:
            self._forget(worker_id, list(islice(held, surplus)))

    @override
    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        self._computed(key)
        super().prefilled(key, cached_tokens, now)

    @override
    def finished(self, key: str, now: float) -> None:
        self._computed(key)
        super().finished(key, now)

    def _computed(self, key: str) -> None:
        worker_id, tokens = self._computing.pop(key, (-1, 0))
        if worker_id in self.workers:
            self.queued[worker_id] -= tokens

    @override
    def check(self) -> None:
        super().check()
        assert self._placed or not any(self.queued.values()), "nothing is to be computed"
        pairs = sum(map(len, self.held.values()))
        assert pairs == sum(map(len, self._holders.values())), "blocks and holders are one relation"


_NOBODY: frozenset[int] = frozenset()
