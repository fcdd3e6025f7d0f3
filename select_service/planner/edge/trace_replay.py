"""Replays a trace through a simulated cluster scaled by a policy, to measure the value of planning.

The loop is closed: the policy's decisions start and stop simulated engines, which take time to
start, and their measurements are its next inputs. Engines are as fast as the profile says.
`baselines.py` has the policies to compare.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from select_service.planner.core.lengths import from_buckets
from select_service.planner.edge.replay_router import LeastWork, Measuring
from select_service.planner.types import (
    IDLE,
    Load,
    Missing,
    ModelKey,
    PoolKey,
    PoolState,
    Value,
    Window,
)
from select_service.simulator.core.cluster import Cluster, ClusterSettings, SimulatedPool
from select_service.simulator.core.engine_settings import EngineSettings
from select_service.simulator.core.latency import ProfileLatency
from select_service.simulator.core.observation import ISL_EDGES
from select_service.simulator.core.requests import ClientRequest, chain_of
from select_service.simulator.traces import TraceWorkload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    from select_service.planner.core.demand import Interval
    from select_service.planner.core.engine_speed import SpeedSource
    from select_service.planner.core.profile import Profile
    from select_service.planner.core.warm_up import TracedRequest
    from select_service.planner.types import Reading
    from select_service.simulator.core.observation import Observation
    from select_service.simulator.core.requests import RequestOutcome

    Fleet: TypeAlias = tuple[int, int]
    """Prefill and decode engines."""
    States: TypeAlias = dict[PoolKey, PoolState]

__all__ = ["DECODE", "KEY", "PREFILL", "ReplaySettings", "Result", "ScalingPolicy", "TraceReplay"]

KEY: Final = ModelKey("trace")
PREFILL, DECODE = PoolKey(KEY, "prefill"), PoolKey(KEY, "decode")
_POOLS: Final = {PREFILL: "prefill", DECODE: "decode"}
_BLOCK: Final = 64
_STEP_TOKENS: Final = 2048
"""Tokens a prefill engine computes per step: the first prompt is done first."""
_DRAIN_S: Final = 600.0
_SAME_S: Final = 1e-6  # rounding error of times


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """The environment of a policy."""

    interval_s: float = 60.0
    fast_s: float = 5.0
    startup_s: float = 60.0
    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    attainment: float | None = 0.99
    """Share of requests that our policy and the oracle size for; None: on average."""
    prefill_gpus: int = 1
    decode_gpus: int = 1
    start: Fleet = (1, 1)
    seed: int = 1
    search_requests: int = 5_000_000
    """As many requests may be simulated to find what is found by trying."""
    engine_speed: SpeedSource = "profile"
    """How our policy knows how fast engines are."""
    likens: bool = True
    """Whether similar times in the past may decide, in our policy."""
    warmup: tuple[Interval, ...] = ()
    """The past that predictors have learnt."""


class ScalingPolicy(Protocol):
    """Decides about both pools."""

    name: str

    def slow(self, window: Window, states: States, now: float) -> dict[PoolKey, int]:
        """Return replicas after an interval; an omitted pool keeps its count."""

    def fast(self, load: Load, states: States, now: float) -> dict[PoolKey, int]:
        """Return replicas for the current load; most policies act once per interval only."""
        return {}


@dataclass(slots=True)
class Result:
    """The results of one policy."""

    name: str
    requests: int = 0
    in_time: int = 0
    gpu_hours: float = 0.0
    changes: int = 0
    turns: int = 0
    """Changes of a pool against the direction of its last change, within ten minutes."""
    replicas: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    load: list[tuple[float, float]] = field(default_factory=list)
    """Requests per second of each interval, by its start."""
    attained: list[tuple[float, float]] = field(default_factory=list)
    """Share in time of the requests of each interval, by its start."""
    late: dict[str, list[float]] = field(default_factory=dict)
    """By pool, when those requests came that it made late; lost ones came to both too late."""

    @property
    def attainment(self) -> float:
        """Share of all requests that met both targets; refused or lost ones did not.

        Each request's own TTFT and own mean time between tokens count.
        """
        return self.in_time / self.requests if self.requests else 1.0


class TraceReplay:
    """One policy on one trace.

    Args:
        profile: of the engines; policies also plan with it.
        requests: sorted by time, from 0.
        settings: the environment.
    """

    def __init__(
        self, profile: Profile, requests: Sequence[TracedRequest], settings: ReplaySettings
    ) -> None:
        self._requests = requests
        self._settings = settings
        self.requests = len(requests)
        latency = _latency(profile)
        kv_tokens = int(profile.decode.max_kv_tokens)
        self._engines = {
            "prefill": EngineSettings(latency, kv_tokens, _STEP_TOKENS, 64),
            "decode": EngineSettings(latency, kv_tokens, 8192, 1024),
        }

    def run(
        self,
        policy: ScalingPolicy,
        progress: Callable[[float], None] = lambda _: None,
        start: Fleet | None = None,
    ) -> Result:
        """Let the policy scale; returns the results over all requests.

        Args:
            policy: decides.
            progress: called with the share of the trace that is over.
            start: engines that are there at the beginning; None: those of the settings.
        """
        settings = self._settings
        measures = settings.engine_speed != "profile"
        router = (Measuring if measures else LeastWork)(random.Random(settings.seed))
        cluster = Cluster(
            ClusterSettings(
                pools={
                    "prefill": SimulatedPool("prefill", self._engines["prefill"]),
                    "decode": SimulatedPool("decode", self._engines["decode"]),
                },
                block_size=_BLOCK,
                sample_s=1e9,
            ),
            router,
            self._workload(),
        )
        for pool, count in zip(_POOLS.values(), start or settings.start, strict=True):
            for _ in range(count):
                cluster.add_worker(pool, 0.0)
        turn = _Turn(cluster, policy, settings)
        end = (self._requests[-1].at_s if self._requests else 0.0) + settings.interval_s
        while cluster.now < end:
            turn.go_on()
            progress(min(1.0, cluster.now / end))
        cluster.finish(end + _DRAIN_S)
        cluster.check()
        return _judged(turn.result, cluster.outcomes, settings)

    def _workload(self) -> TraceWorkload:
        requests = [
            ClientRequest(
                number=number,
                arrival=one.at_s,
                isl=max(1, round(one.isl)),
                osl=max(1, round(one.osl)),
                blocks=chain_of(),
            )
            for number, one in enumerate(self._requests)
        ]
        return TraceWorkload(requests, _BLOCK, random.Random(0))


class _Turn:
    """One run in progress."""

    def __init__(self, cluster: Cluster, policy: ScalingPolicy, settings: ReplaySettings) -> None:
        self._cluster = cluster
        self._policy = policy
        self._settings = settings
        self._seen: list[Observation] = []
        self._last: dict[PoolKey, tuple[float, int]] = {}  # last change: when, and its direction
        self.result = Result(policy.name, replicas={name: [] for name in _POOLS.values()})

    def go_on(self) -> None:
        """Advance to the next look, and act."""
        cluster, settings = self._cluster, self._settings
        cluster.advance(cluster.now + settings.fast_s)
        seen = cluster.observe()
        self._seen.append(seen)
        router = cluster.router
        if isinstance(router, Measuring):
            router.look(cluster.workers, cluster.now)
        self._account(seen)
        states = self._states(seen)
        if sum(one.interval_s for one in self._seen) >= settings.interval_s - _SAME_S:
            window = _window(self._seen)
            if isinstance(router, Measuring):
                prefills, itls = router.measured(_BLOCK)
                window = replace(window, prefill_moments=prefills, itl_moments=itls)
            self._seen = []
            self._act(self._policy.slow(window, states, cluster.now), states)
            rate = (
                window.requests.value / window.seconds if isinstance(window.requests, Value) else 0
            )
            self.result.load.append((cluster.now - window.seconds, rate))
        else:
            self._act(self._policy.fast(_load(seen), states, cluster.now), states)

    def _states(self, seen: Observation) -> dict[PoolKey, PoolState]:
        return {
            pool: PoolState(len(self._cluster.worker_ids(name)), seen.pools[name].ready)
            for pool, name in _POOLS.items()
        }

    def _account(self, seen: Observation) -> None:
        gpus = {"prefill": self._settings.prefill_gpus, "decode": self._settings.decode_gpus}
        for name, count in gpus.items():
            there = len(self._cluster.worker_ids(name))
            # starting and draining engines are paid for, too
            self.result.gpu_hours += seen.pools[name].worker_seconds * count / 3600
            self.result.replicas[name].append((self._cluster.now, float(there)))

    def _act(self, counts: dict[PoolKey, int], states: dict[PoolKey, PoolState]) -> None:
        now = self._cluster.now
        for pool, count in counts.items():
            name, more = _POOLS[pool], count - states[pool].desired
            if not more:
                continue
            self.result.changes += 1
            before, way = self._last.get(pool, (-1e9, 0))
            self.result.turns += way * more < 0 and now - before < 600.0  # noqa: PLR2004
            self._last[pool] = (now, more)
            for _ in range(more):
                self._cluster.add_worker(name, now, self._settings.startup_s)
            for worker_id in reversed(self._cluster.worker_ids(name)[more:] if more < 0 else []):
                self._cluster.remove_worker(worker_id, now)


def _latency(profile: Profile) -> ProfileLatency:
    return ProfileLatency(
        {
            "prefill_isl": profile.prefill.isl.tolist(),
            "prefill_ttft": profile.prefill.ttft_ms.tolist(),
        },
        {
            "x_kv_usage": profile.decode.kv_usage.tolist(),
            "y_context_length": profile.decode.context_length.tolist(),
            "z_itl": profile.decode.itl_ms.tolist(),
            "max_kv_tokens": [profile.decode.max_kv_tokens],
        },
    )


def _mean(pairs: Iterable[tuple[float | None, int]], scale: float = 1.0) -> Reading:
    known = [(value, weight) for value, weight in pairs if value is not None and weight]
    total = sum(weight for _, weight in known)
    if not total:
        return Missing("nothing ended in this interval")
    return Value(scale * sum(value * weight for value, weight in known) / total)


def _window(seen: Sequence[Observation]) -> Window:
    seconds = sum(one.interval_s for one in seen)
    requests = sum(one.num_req for one in seen)
    decode = [(one.pools["decode"].concurrency, one.interval_s) for one in seen]
    return Window(
        seconds=seconds,
        requests=Value(float(requests)) if requests else IDLE,
        isl=_mean((one.isl, one.num_req) for one in seen),
        osl=_mean((one.osl, one.finished) for one in seen),
        ttft_ms=_mean(((one.ttft_s, one.num_req) for one in seen), 1e3),
        itl_ms=_mean(((one.itl_s, one.finished) for one in seen), 1e3),
        request_s=_mean((one.request_duration_s, one.finished) for one in seen),
        concurrency=Value(sum(live * span for live, span in decode) / seconds),
        isl_mix=_mix(seen),
        arrived=_arrived(seen[-1]),
        arrived_s=seen[-1].interval_s,
    )


def _mix(seen: Sequence[Observation]) -> tuple[tuple[float, float], ...]:
    counts = np.sum([one.isl_histogram for one in seen], axis=0)
    return from_buckets(list(zip((*ISL_EDGES, math.inf), np.cumsum(counts), strict=True)))


def _load(seen: Observation) -> Load:
    return Load(
        prefill_backlog_tokens=Value(float(seen.pools["prefill"].prefill_backlog_tokens)),
        concurrency=Value(seen.pools["decode"].concurrency),
        arrived=_arrived(seen),
        seconds=seen.interval_s,
    )


def _arrived(seen: Observation) -> Reading:
    return Value(float(seen.num_req)) if seen.num_req else IDLE


def _judged(result: Result, outcomes: Sequence[RequestOutcome], settings: ReplaySettings) -> Result:
    by_interval: Counter[int] = Counter()
    all_of: Counter[int] = Counter()
    result.late = {name: [] for name in _POOLS.values()}
    for one in outcomes:
        index = int(one.request.arrival / settings.interval_s)
        all_of[index] += 1
        late = {
            "prefill": not one.is_ok or 1e3 * one.ttft_s > settings.ttft_ms,
            "decode": not one.is_ok or 1e3 * one.itl_s > settings.itl_ms,
        }
        for name, is_late in late.items():
            if is_late:
                result.late[name].append(one.request.arrival)
        by_interval[index] += not any(late.values())
    result.requests, result.in_time = all_of.total(), by_interval.total()
    result.attained = [
        (index * settings.interval_s, by_interval[index] / count)
        for index, count in sorted(all_of.items())
    ]
    return result
