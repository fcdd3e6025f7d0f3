"""D2LPM (arXiv 2501.14312): the longest prefix among workers where the client has credit left.

Each client has a deficit counter per worker. A placement takes the tokens to compute off it, an
answer twice its tokens (prices of the paper). Workers whose counter is above 0 may be chosen, the
one with the longest cached prefix first; when there is none, all counters grow by a quantum. The
paper's second counter orders the queue inside an engine; these engines serve in order of arrival.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.simulator.core.baselines.cache_aware import CacheAware

if TYPE_CHECKING:
    import random

    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.routers import Placed
    from select_service.types import KvEvents

INPUT_PRICE: Final = 1.0
OUTPUT_PRICE: Final = 2.0
QUANTUM_TOKENS: Final = 50_000.0
"""Per client and worker; the paper leaves it to the operator: less is more even, more keeps more
of the prefixes."""


class D2Lpm(CacheAware):
    """See the module."""

    name = "d2lpm"
    meaning = "the longest cached prefix where the tenant has credit left"

    def __init__(self, rng: random.Random, kv_events: KvEvents = "engine") -> None:
        super().__init__(rng, kv_events)
        self._credit: dict[str, dict[int, float]] = {}  # by client and worker
        self._answers: dict[str, tuple[str, int, int]] = {}  # by key: client, worker, tokens

    def _credits(self, client: str) -> dict[int, float]:
        return self._credit.setdefault(client, {})

    @override
    def choose(self, ids: list[int], request: ClientRequest) -> int:
        credit = self._credits(request.tenant)
        while not (rich := [one for one in ids if credit.setdefault(one, 0.0) > 0.0]):
            for one in ids:
                credit[one] += QUANTUM_TOKENS
        cached = self.cached(rich, request)
        return self.lowest([((-tokens, self.load(one)), one) for one, tokens in cached.items()])

    @override
    def _place(self, key: str, request: ClientRequest, placed: Placed, ids: list[int]) -> Placed:
        placed = super()._place(key, request, placed, ids)
        computing, tokens = self._computing.get(key, (ids[-1], 0))
        credit = self._credits(request.tenant)
        credit[computing] = credit.get(computing, 0.0) - INPUT_PRICE * tokens
        self._answers[key] = request.tenant, ids[0], request.osl
        return placed

    @override
    def finished(self, key: str, now: float) -> None:
        super().finished(key, now)
        client, worker_id, tokens = self._answers.pop(key, ("", -1, 0))
        credit = self._credits(client)
        if worker_id in credit:
            credit[worker_id] -= OUTPUT_PRICE * tokens
