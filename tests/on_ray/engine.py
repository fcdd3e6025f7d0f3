"""A deployment that pretends to be an engine: it keeps the blocks of every prompt, and says so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from select_service.client.ray.serve_worker import ServeWorker
from select_service.demo.encoding import StoredBlocks, encode_batch
from select_service.demo.worker import EventPublisher

BLOCK = 16


class Engine:
    """One replica; what it is asked ends at `finish`."""

    async def __init__(self, namespace: str) -> None:  # type: ignore[misc] # Serve awaits it
        self._publisher = EventPublisher()
        self._worker = ServeWorker(
            namespace=namespace,
            block_size=BLOCK,
            kv_events_endpoint=self._publisher.endpoint,
            replay_endpoint=self._publisher.replay_endpoint,
        )
        await self._worker.start()
        self._replaying = asyncio.get_running_loop().create_task(self._serve_replays())
        self._hashes = itertools.count(self._worker.worker_id % 2**40 << 20)
        self._held: dict[tuple[int, ...], int] = {}  # prefixes in whole blocks, with their hash

    async def __del__(self) -> None:
        self._replaying.cancel()
        await self._worker.aclose()
        self._publisher.close()

    async def __call__(
        self, token_ids: Sequence[int], seconds: float = 0.0, selection: Any = None
    ) -> tuple[int, int, Any]:
        """Compute a prompt; returns who has, how much of it was there, and what the router said."""
        cached = self._compute(tuple(token_ids))
        self._worker.prefill_complete(cached)
        await asyncio.sleep(seconds)
        return self._worker.worker_id, cached, selection

    async def stream(self, token_ids: Sequence[int], count: int) -> AsyncIterator[int]:
        self._worker.prefill_complete(self._compute(tuple(token_ids)))
        for _ in range(count):
            await asyncio.sleep(0.02)
            yield self._worker.worker_id

    def _compute(self, prompt: tuple[int, ...]) -> int:
        cached, parent = 0, None
        new: list[int] = []
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            known = self._held.get(prompt[:end])
            if known is not None and not new:
                cached, parent = end, known
                continue
            new.append(next(self._hashes))
            self._held[prompt[:end]] = new[-1]
        if new:
            tokens = prompt[cached : cached + len(new) * BLOCK]
            stored = StoredBlocks(hashes=tuple(new), parent=parent, token_ids=tokens)
            self._publisher.publish(encode_batch(0.0, [stored], block_size=BLOCK))
        return cached

    async def _serve_replays(self) -> None:
        while True:
            self._publisher.serve_replay()
            await asyncio.sleep(0.05)
