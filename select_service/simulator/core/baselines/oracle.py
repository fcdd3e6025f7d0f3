"""What no router can know: the true state of every engine, and how long each answer will be.

The oracle places each request where it and those already there lose the least, by the engines' own
latency model: the time to its first tokens, and a share of what it takes from others. It decides
one request at a time, like all of them: better plans for many together exist.

The bound is the oracle with one common cache for all workers, as large as theirs together: no
placement finds more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from typing_extensions import override

from select_service.simulator.core.routers import Counting

if TYPE_CHECKING:
    import random

    from select_service.simulator.core.requests import ClientRequest
    from select_service.simulator.core.worker import EngineWorker
    from select_service.types import KvEvents

HORIZON_TOKENS: Final = 30
"""Of its answer; later the batch is another one. Whole answers make worse choices: their sum counts
a load for minutes that is gone in seconds."""

OTHERS: Final = 0.1
"""What a second of another request counts. Both numbers are the best of some on Mooncake's
conversation trace."""


class OracleRouter(Counting):
    """See the module."""

    name = "oracle"
    meaning = "knows every engine and the length of answers, as no router can"

    def __init__(self, rng: random.Random, kv_events: KvEvents = "engine") -> None:
        super().__init__(rng, kv_events)
        self._engines: dict[int, EngineWorker] = {}

    @override
    def add(self, worker: EngineWorker, now: float) -> None:
        super().add(worker, now)
        self._engines[worker.worker_id] = worker

    @override
    def choose(self, ids: list[int], request: ClientRequest) -> int:
        return self.lowest([(self._cost(self._engines[one], request), one) for one in ids])

    def _cost(self, engine: EngineWorker, request: ClientRequest) -> float:
        latency, decoding, context = engine.settings.latency, engine.decoding, engine.context
        cached = engine.cached(request)
        own = latency.prefill_s(request.isl - cached, cached)
        tokens = engine.prefill_backlog + request.isl - cached
        chunks = -(-tokens // engine.settings.step_tokens_max)
        first = engine.prefill_ahead_s(self.now) + own
        first += chunks * latency.stretch_s(decoding, context, 1)
        steps = min(request.osl, HORIZON_TOKENS)
        answer = latency.stretch_s(decoding + 1, context + request.isl, steps)
        slower = answer - latency.stretch_s(decoding, context, steps)
        return first + answer + OTHERS * (own * engine.jobs + decoding * slower)


class BoundRouter(OracleRouter):
    """See the module; `runs.cluster` gives its engines the common cache."""

    name = "bound"
    meaning = "the same, with one common cache for all workers"
