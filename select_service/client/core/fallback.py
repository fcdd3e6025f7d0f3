"""The choice of last resort: of two random workers, the one we have sent less to.

Used by `session.py` while no selector answers; the workers come from the last catalog read.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET

from select_service.types import Overlap, Scope, Selection

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping

    from select_service.client.core.codec import CatalogWorker

_DEFAULT = "default"


class Rank(NamedTuple):
    """One rank of a worker."""

    worker: CatalogWorker
    dp_rank: int

    @property
    def key(self) -> tuple[int, int]:
        """The key for counting bookings."""
        return self.worker.worker_id, self.dp_rank


class FallbackCatalog:
    """The schedulable workers last read, by scope, and our requests in flight at each rank."""

    def __init__(self, workers_max: int) -> None:
        self._workers_max = workers_max
        self._scopes: dict[Scope, list[Rank]] = {}
        self.under_way: Counter[tuple[int, int]] = Counter()
        self.is_known = False

    def learn(self, workers: Iterable[CatalogWorker]) -> None:
        """Replace what is known; O(ranks)."""
        self._scopes = {}
        self.is_known = True
        for number, worker in enumerate(workers):
            if number >= self._workers_max:
                break
            if worker.lifecycle == "schedulable":
                first = worker.data_parallel_start_rank or 0
                ranks = self._scopes.setdefault(Scope(worker.model_name, worker.tenant_id), [])
                ranks += [Rank(worker, first + at) for at in range(worker.data_parallel_size or 1)]

    def any_worker(self, scope: Scope) -> CatalogWorker | None:
        """Return any worker of a scope: block size and window are the same for all."""
        ranks = self._scopes.get(scope)
        return ranks[0].worker if ranks else None

    def endpoint_of(self, scope: Scope, worker_id: int) -> str:
        """Return where a worker is reached, "" if it is not known."""
        found = (one.worker for one in self._scopes.get(scope, ()))
        return next((one.endpoint or "" for one in found if one.worker_id == worker_id), "")

    def begin(self, ranks: Iterable[tuple[int, int]]) -> None:
        """Count a request that goes to these ranks."""
        self.under_way.update(ranks)

    def end(self, ranks: Iterable[tuple[int, int]]) -> None:
        """Count a request that has ended."""
        for key in ranks:
            self.under_way[key] -= 1
            if self.under_way[key] <= 0:
                del self.under_way[key]

    def choose(self, prompt: Mapping[str, Any], rng: random.Random) -> Selection | None:
        """Choose a rank for a request of /select; None if no rank is eligible."""
        scope = scope_of(prompt)
        ranks = self._eligible(self._scopes.get(scope, []), prompt)
        if not ranks:
            return None
        two = rng.sample(ranks, 2) if len(ranks) > 1 else ranks
        rank = min(two, key=lambda one: self.under_way[one.key])
        worker, length = rank.worker, length_of(prompt)
        return Selection(
            model_name=scope.model_name,
            tenant_id=scope.tenant_id,
            worker_id=worker.worker_id,
            dp_rank=rank.dp_rank,
            endpoint=worker.endpoint or "",
            block_size=worker.block_size or 1,
            overlap=no_overlap(),
            effective_prefill_tokens=length,
            isl_tokens=length,
        )

    @staticmethod
    def _eligible(ranks: list[Rank], prompt: Mapping[str, Any]) -> list[Rank]:
        allowed, pinned = prompt.get("allowed_worker_ids"), prompt.get("pinned_worker")
        needed = set((prompt.get("routing_constraints") or {}).get("required_taints", ()))
        if allowed is not None:
            wanted = set(allowed)
            ranks = [one for one in ranks if one.worker.worker_id in wanted]
        if pinned is not None:
            key = (pinned["worker_id"], pinned["dp_rank"])
            ranks = [one for one in ranks if one.key == key]
        if needed:
            ranks = [one for one in ranks if needed.issubset(one.worker.taints)]
        if any(one.worker.role not in (UNSET, "aggregated") for one in ranks):
            ranks = [one for one in ranks if one.worker.role in (UNSET, "aggregated")]
        return ranks


def scope_of(prompt: Mapping[str, Any]) -> Scope:
    """Return the scope a request names."""
    tenant = prompt.get("tenant_id", prompt.get("routing_group", _DEFAULT))
    return Scope(str(prompt.get("model_name", _DEFAULT)), str(tenant))


def no_overlap() -> Overlap:
    """Return the overlap of a choice made without the service: none is known."""
    return Overlap(longest_matched=0, gpu=0, dp={}, cpu=0, disk=0)


def length_of(prompt: Mapping[str, Any]) -> int:
    """Return the number of tokens of a prompt."""
    tokens = prompt.get("token_ids")
    return len(tokens) // 4 if isinstance(tokens, bytes) else int(prompt.get("isl_tokens") or 0)
