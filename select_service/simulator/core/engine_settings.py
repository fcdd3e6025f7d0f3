"""The properties of a simulated engine: its times, its memories, its limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from indexer.types import Tier
from select_service.simulator.core.kv_pool import CommonCache, LowerTier
from select_service.simulator.core.latency import AnalyticLatency, Latency

if TYPE_CHECKING:
    from select_service.simulator.core.requests import Role

KV_TOKENS: Final = 400_000


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The properties of one engine; the defaults are near an 8B model on one 80 GB device."""

    latency: Latency = field(default_factory=AnalyticLatency)
    kv_tokens: int = KV_TOKENS  # capacity of its KV cache
    step_tokens_max: int = 8_192  # max_num_batched_tokens
    sequences_max: int = 256  # max_num_seqs
    host_tokens: int = 0  # of KV cache in the host's memory below the device's
    host_token_s: float = 3e-6  # to load one of them
    disk_tokens: int = 0
    disk_token_s: float = 20e-6

    def lower_tiers(self, block_size: int) -> list[LowerTier]:
        """Return the memories below the device's that there are, empty, the fastest first."""
        return [
            LowerTier(tier, CommonCache(tokens // block_size), token_s * block_size)
            for tier, tokens, token_s in (
                (Tier.HOST_PINNED, self.host_tokens, self.host_token_s),
                (Tier.DISK, self.disk_tokens, self.disk_token_s),
            )
            if tokens >= block_size
        ]

    def check(self) -> None:
        """Refuse settings with which an engine cannot compute.

        Raises:
            ValueError: naming it.
        """
        for name in ("kv_tokens", "step_tokens_max", "sequences_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0")
        for name in ("host_tokens", "host_token_s", "disk_tokens", "disk_token_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, and finite")


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """A pool of identical engines."""

    role: Role = "aggregated"
    engine: EngineSettings = field(default_factory=EngineSettings)


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The environment of the engines."""

    pools: dict[str, SimulatedPool] = field(default_factory=lambda: {"workers": SimulatedPool()})
    block_size: int = 512
    event_lag_s: float = 0.0  # from a cache change until routers know
    load_lag_s: float = 0.0  # from a first or last token until the router knows
    transfer_token_s: float = 0.0  # per token of the KV cache, from a prefill to a decode worker
    detect_s: float = 1.0  # from a worker's death until the router knows
    has_common_cache: bool = False  # every engine finds what any has computed
    attempts_max: int = 3  # per request, if its workers die
    sample_s: float = 5.0  # between two samples of the spread of load
