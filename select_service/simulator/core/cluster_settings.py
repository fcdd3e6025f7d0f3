"""The settings of a simulated cluster: its pools, and the delays of information."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from select_service.simulator.core.engine_settings import EngineSettings

if TYPE_CHECKING:
    from select_service.simulator.core.requests import Role


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
