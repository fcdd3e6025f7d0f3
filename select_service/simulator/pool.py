"""Pools to try a policy on: one the arrivals describe, and one that computes what it is given.

Both keep the very books the live service keeps; neither reads a clock.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from typing_extensions import override

from select_service.core.admission.pool_load import SaturationLimits
from select_service.simulator.told_loads import RankLoad, ToldPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.core.admission.asks import Ask, InstanceSnapshot
    from select_service.core.columns import Floats

__all__ = ["ComputingPool", "PoolSettings", "SnapshotPool"]


class SnapshotPool(ToldPool):
    """A pool as arrivals tell it; what they do not tell stays as it was."""

    queue_depth: Floats = np.zeros(0)
    batch_size: Floats = np.zeros(0)
    in_flight: Floats = np.zeros(0)
    kv_utilization: Floats = np.zeros(0)

    def __init__(self) -> None:
        super().__init__()
        self.in_flight_told: dict[str, int] = {}
        self._told_saturation = 1.0

    def tell(self, snapshots: Sequence[InstanceSnapshot]) -> None:
        """Replace what is known of the instances."""
        self.instances = len(snapshots)
        columns = np.array(snapshots, dtype=np.float64).reshape(len(snapshots), 4)
        self.queue_depth, self.batch_size, self.in_flight, self.kv_utilization = columns.T
        limits = self.limits
        worse = np.maximum(
            self.queue_depth / limits.waiting, self.kv_utilization / limits.kv_utilization
        )
        self._told_saturation = float(worse.mean()) if len(worse) else 1.0

    @property
    def heaviest(self) -> int:
        """The most of one instance, as told."""
        return int((self.queue_depth + self.batch_size + self.in_flight).max())

    def utilization_most(self, queue_depth: float, kv_utilization: float) -> float:
        """No bound: exactly what was told counts."""
        return math.inf

    @property
    def saturation(self) -> float:
        """Mean over instances of max(queue, KV use), each against its limit."""
        return self._told_saturation

    @property
    def prefill_rate(self) -> float:
        """Nobody has told."""
        return 0.0

    @override
    def outlook(self) -> tuple[float, float, float, float]:
        """As told; nobody has told how fast prompts are computed."""
        return 0.0, 0.0, self.prefill_backlog, self._told_saturation

    def tenant_in_flight(self, tenant_id: str) -> int:
        """As told last."""
        return self.in_flight_told.get(tenant_id, 0)


class PoolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool that computes; `check` it before use."""

    ranks: int = 4
    prefill_tokens_per_s: float = 20_000.0
    output_token_s: float = 0.0  # time per output token while decoding
    kv_total_blocks: int = 8_192
    block_size: int = 16
    target_ttft_s: float = 1.0

    def check(self) -> None:
        """Refuse what cannot compute.

        Raises:
            ValueError: naming it.
        """
        for name in ("ranks", "prefill_tokens_per_s", "kv_total_blocks", "block_size"):
            if not getattr(self, name) > 0:
                raise ValueError(f"pool: {name} must be above 0")
        if not (self.output_token_s >= 0 and self.target_ttft_s > 0):
            raise ValueError("pool: output_token_s must be at least 0, target_ttft_s above 0")


class _Running:
    __slots__ = ("ask", "blocks", "prefilled", "rank", "started")

    def __init__(self, ask: Ask, rank: int, blocks: int, started: float) -> None:
        self.ask = ask
        self.rank = rank
        self.blocks = blocks
        self.started = started
        self.prefilled = False


class _Rank:
    __slots__ = ("blocks", "free_at", "prefill", "prefilling", "requests")

    def __init__(self) -> None:
        self.free_at = 0.0  # when everything booked so far is computed
        self.prefill = 0
        self.blocks = 0
        self.requests = 0
        self.prefilling = 0


class ComputingPool(ToldPool):
    """Ranks that compute prompts one after another and decode without limit of batch.

    A fluid model: good enough to see whether a policy keeps its word, no prediction of latency.
    """

    def __init__(self, settings: PoolSettings) -> None:
        settings.check()
        limits = SaturationLimits(target_ttft_s=settings.target_ttft_s)
        super().__init__(limits, prior_tokens_per_s=settings.prefill_tokens_per_s)
        self.settings = settings
        self._ranks = [_Rank() for _ in range(settings.ranks)]
        self._events: list[tuple[float, int, _Running]] = []
        self._order = 0
        for slot in range(settings.ranks):
            self.seat(slot, settings.kv_total_blocks)

    def place(self, ask: Ask, now: float) -> float:
        """Give a request to the least loaded rank; returns when its first token will come."""
        settings = self.settings
        number = min(range(len(self._ranks)), key=lambda one: self._ranks[one].free_at)
        rank = self._ranks[number]
        blocks = -(-(ask.tokens + ask.output_tokens) // settings.block_size)
        running = _Running(ask, number, blocks, now)
        rank.free_at = max(rank.free_at, now) + ask.work / settings.prefill_tokens_per_s
        rank.prefill += ask.work
        rank.blocks += blocks
        rank.requests += 1
        rank.prefilling += 1
        self.began(ask.tenant_id)
        self._tell(number, now)
        self._at(rank.free_at, running)
        return rank.free_at

    def _at(self, when: float, running: _Running) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, running))

    def next_event(self) -> float | None:
        """When something will be computed."""
        return self._events[0][0] if self._events else None

    def step(self) -> float:
        """Do the next event; returns its time."""
        now, _, running = heappop(self._events)
        rank = self._ranks[running.rank]
        if not running.prefilled:
            running.prefilled = True
            rank.prefill -= running.ask.work
            rank.prefilling -= 1
            self.prefilled(running.rank, running.ask.work, running.started, now)
            self._tell(running.rank, now)
            self._at(now + running.ask.output_tokens * self.settings.output_token_s, running)
            return now
        rank.blocks -= running.blocks
        rank.requests -= 1
        self._tell(running.rank, now)
        self.ended(running.ask.tenant_id)
        return now

    def _tell(self, number: int, now: float) -> None:
        rank = self._ranks[number]
        load = RankLoad(rank.prefill, rank.blocks, rank.requests, rank.prefilling)
        self.note(number, load, now)
