"""One simulated run from settings to measures: building, seeding and running it.

The same settings and seed give the same measures to the last bit; every policy sees the same
requests. `report.py` presents the results, `sweep.py` runs many.
"""

from __future__ import annotations

import dataclasses
import gc
import gzip
import math
import random
import zlib
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec.structs import replace

from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.cluster_settings import SimulatedPool
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.latency import AnalyticLatency, Latency, SlowedLatency
from select_service.simulator.core.measures import Measures, measure
from select_service.simulator.core.replicated import Replicated
from select_service.simulator.core.requests import ClientRequest
from select_service.simulator.core.routers import (
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    RandomChoice,
    RoundRobinRouter,
)
from select_service.simulator.core.worker import EngineSettings
from select_service.simulator.core.workloads import WorkloadSettings, workload_of
from select_service.simulator.profiles import read_profile
from select_service.simulator.recordings import requests_of
from select_service.simulator.traces import (
    MOONCAKE_BLOCK,
    READERS,
    RECORDING,
    SPAN_MAX_S,
    BadTrace,
    TraceWorkload,
    in_order,
    read_mooncake,
)
from select_service.types import RouterConfig
from select_service.types.admission import AdmissionSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from select_service.simulator.core.requests import Workload
    from select_service.simulator.core.routers import Counting, WorkerRouter

__all__ = [
    "POLICIES",
    "EngineSpec",
    "FleetChange",
    "SimulationSettings",
    "Slow",
    "Trace",
    "at_load",
    "capacity_of",
    "expect_weights",
    "run",
]

_SIMPLE: Final = {
    "round-robin": RoundRobinRouter,
    "random": RandomChoice,
    "least-loaded": LeastLoaded,
    "power-of-two": PowerOfTwo,
    "prefix-affinity": PrefixAffinity,
}
OURS: Final = "ours"
PEER: Final = "kv-cost"
POLICIES: Final = (OURS, PEER, *_SIMPLE)
"""`ours`: the core with the given settings, `first-token` by default; `kv-cost`: the core with the
peer's formula and defaults."""

WORKERS_MAX: Final = 10_000
"""Per run: ten thousand take minutes before the first request, and exceed what a service is for."""

REPLICAS_MAX: Final = 64
"""Each hears all bookings of the others."""

DELAY_MAX_S: Final = 86_400.0
"""For every delay: a run ends when the last delayed event has happened."""

_NEW_OBJECTS: Final = 100_000
"""Allocations between two garbage collections."""

STRIDE_S: Final = 10.0
"""Simulated seconds between two progress updates."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of a run.

    `profile` is a directory of the planner's profiles, instead of times.
    """

    kv_tokens: int = 400_000
    step_tokens_max: int = 8_192
    sequences_max: int = 256
    base_s: float = 6e-3
    prefill_token_s: float = 30e-6
    prefill_pair_s: float = 2e-10
    sequence_s: float = 0.1e-3
    kv_token_s: float = 75e-9
    profile: str | None = None

    def build(self) -> EngineSettings:
        """Return the settings of a simulated engine.

        Raises:
            ValueError: an engine cannot compute with them.
            OSError: the profile cannot be read.
        """
        latency: Latency
        if self.profile is None:
            latency = AnalyticLatency(
                base_s=self.base_s,
                prefill_token_s=self.prefill_token_s,
                prefill_pair_s=self.prefill_pair_s,
                sequence_s=self.sequence_s,
                kv_token_s=self.kv_token_s,
            )
        else:
            latency = read_profile(Path(self.profile))
        settings = EngineSettings(latency, self.kv_tokens, self.step_tokens_max, self.sequences_max)
        settings.check()
        return settings


class Trace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recorded requests, `speed` times as fast as they came."""

    path: str
    format: str = "mooncake"
    speed: float = 1.0
    jitter_s: float = 0.0  # maximum delay of each request, before speed
    limit: int = 0  # requests; 0: all
    block_size: int = MOONCAKE_BLOCK  # tokens per hash id of Mooncake

    def check(self) -> None:
        """Refuse settings that cannot be read.

        Raises:
            ValueError: naming it.
        """
        if self.format not in READERS:
            raise ValueError(f"format must be one of {', '.join(READERS)}")
        if not (0.0 < self.speed < math.inf and 0.0 <= self.jitter_s < math.inf):
            raise ValueError("speed must be above 0 and jitter_s at least 0, both finite")
        if self.jitter_s > SPAN_MAX_S:
            raise ValueError(f"jitter_s must be at most {SPAN_MAX_S:.0f}")
        if self.limit < 0 or self.block_size < 1:
            raise ValueError("limit must be at least 0, block_size of a trace at least 1")
        if self.block_size != MOONCAKE_BLOCK and self.format != "mooncake":
            raise ValueError(f"block_size of a trace is of the format mooncake, not {self.format}")


class FleetChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scheduled change of the fleet; the oldest worker of the pool goes."""

    at: float
    do: Literal["add", "remove", "fail"]
    count: int = 1
    pool: str = ""
    startup_s: float = 0.0  # of added workers; for failed ones: until a replacement, 0: none

    def check(self) -> None:
        """Refuse impossible changes.

        Raises:
            ValueError: naming it.
        """
        if not (0.0 <= self.at < math.inf and 0.0 <= self.startup_s < math.inf):
            raise ValueError("a change's at and startup_s must be at least 0, and finite")
        if not 1 <= self.count <= WORKERS_MAX:
            raise ValueError(f"a change's count must be from 1 to {WORKERS_MAX:,}")


class Slow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Makes this many workers slower: they have the common engine at a fraction of its speed."""

    count: int
    speed: float

    def check(self) -> None:
        """Refuse invalid values.

        Raises:
            ValueError: naming it.
        """
        if self.count < 1:
            raise ValueError("slow workers must be at least 1")
        if not 0.0 < self.speed < math.inf:
            raise ValueError("the speed of slow workers must be above 0, and finite")


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings that determine a run."""

    policy: str = OURS
    seed: int = 1
    workers: int = 8
    prefill_workers: int = 0  # above 0: two pools, and `workers` is the number of decode workers
    engine: EngineSpec = EngineSpec()
    slow: list[Slow] = []  # the last of `workers`; their pools are slow-1, slow-2, ...
    block_size: int = 512
    trace: Trace | None = None
    workloads: list[WorkloadSettings] = []
    weights: RouterConfig = RouterConfig(policy="first-token")
    admission: AdmissionSettings | None = None
    session_ttl_s: float = 0.0  # of `ours`; 0: sessions have no worker of their own
    replicas: int = 1
    sync_delay_s: float = 0.005
    event_lag_s: float = 0.01
    load_lag_s: float = 0.001
    transfer_token_s: float = 1e-6
    detect_s: float = 1.0
    changes: list[FleetChange] = []
    check: bool = True  # assert conservation at the end

    def validate(self) -> None:
        """Refuse settings that cannot be run.

        Raises:
            ValueError: naming it.
        """
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}")
        if (self.trace is None) == (not self.workloads):
            raise ValueError("a trace or workloads, one of them")
        self._expect_sizes()
        for name in ("sync_delay_s", "event_lag_s", "load_lag_s", "transfer_token_s", "detect_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, and finite")
            if getattr(self, name) > DELAY_MAX_S:
                raise ValueError(f"{name} must be at most {DELAY_MAX_S:.0f}")
        if not self.session_ttl_s >= 0.0:
            raise ValueError("session_ttl_s must be at least 0")
        for change in self.changes:
            change.check()
        if self.trace is not None:
            self.trace.check()
        for one in self.workloads:
            one.check()

    def _expect_sizes(self) -> None:
        if self.workers < 1 or self.replicas < 1 or self.block_size < 1:
            raise ValueError("workers, replicas and block_size must be at least 1")
        for slow in self.slow:
            slow.check()
        if sum(slow.count for slow in self.slow) > self.workers:
            raise ValueError(f"more slow workers than the {self.workers} there are")
        if self.prefill_workers < 0:
            raise ValueError("prefill_workers must be at least 0")
        expect_weights(self.weights)
        if self.workers + self.prefill_workers > WORKERS_MAX:
            raise ValueError(f"there may be {WORKERS_MAX:,} workers at most")
        if self.replicas > REPLICAS_MAX:
            raise ValueError(f"there may be {REPLICAS_MAX} replicas at most")


def expect_weights(weights: RouterConfig) -> None:
    """Refuse weights that the server would refuse.

    Raises:
        ValueError: naming the first of them.
    """
    for name in weights.__struct_fields__:
        value = getattr(weights, name)
        if isinstance(value, float) and not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be a number at least 0")


def _rng(settings: SimulationSettings, *names: object) -> random.Random:
    """Return an independent generator for each purpose."""
    text = "/".join(str(name) for name in (settings.seed, *names))
    return random.Random(text)


def workload(settings: SimulationSettings) -> Workload:
    """Open the requests of a run; they do not depend on the policy.

    Raises:
        ValueError, BadTrace, OSError: they cannot be read.
    """
    trace = settings.trace
    if trace is None:
        rngs = [_rng(settings, "workload", at) for at in range(len(settings.workloads))]
        return workload_of(settings.workloads, settings.block_size, rngs)
    requests = _read(trace, settings.block_size)
    if not requests:
        raise BadTrace(f"{trace.path}: there is no request in it")
    return TraceWorkload(
        requests,
        settings.block_size,
        _rng(settings, "trace"),
        speed=trace.speed,
        jitter_s=trace.jitter_s,
        limit=trace.limit,
    )


def _read(trace: Trace, block_size: int) -> list[ClientRequest]:
    if trace.format == RECORDING:
        return list(requests_of(Path(trace.path), block_size))
    reader = READERS[trace.format]
    if trace.format == "mooncake":
        reader = partial(read_mooncake, trace_block_size=trace.block_size)
    try:
        with Path(trace.path).open("rb") as file:
            is_packed = file.peek(2).startswith(b"\x1f\x8b")
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if is_packed else file
            return in_order(reader(lines, block_size))
    except (BadTrace, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadTrace(f"{trace.path}: {error}") from None


def router(settings: SimulationSettings) -> WorkerRouter:
    """Build the policy's router."""
    simple = _SIMPLE.get(settings.policy)
    if simple is not None:
        return _counting(simple, settings)
    core = CoreSettings(replicas=settings.replicas, sync_delay_s=settings.sync_delay_s)
    if settings.policy == OURS:
        core = CoreSettings(
            settings.weights,
            settings.admission,
            replicas=settings.replicas,
            sync_delay_s=settings.sync_delay_s,
            session_ttl_s=settings.session_ttl_s,
        )
    return CoreRouter(core, [_rng(settings, "router", at) for at in range(settings.replicas)])


def _counting(
    kind: Callable[[random.Random], Counting], settings: SimulationSettings
) -> WorkerRouter:
    if settings.replicas == 1:
        return kind(_rng(settings, "router"))
    replicas = [kind(_rng(settings, "router", at)) for at in range(settings.replicas)]
    for one in replicas:
        one.begin_anywhere()
    return Replicated(replicas, settings.sync_delay_s)


def cluster(settings: SimulationSettings, requests: Workload | None = None) -> Cluster:
    """Build everything; so far only workers have been added.

    Args:
        settings: of the run.
        requests: as from `workload`; None: opened here.

    Raises:
        ValueError, OSError: it cannot be built.
    """
    settings.validate()
    engine = settings.engine.build()
    pools = {"workers": SimulatedPool("aggregated", engine)}
    sizes = {"workers": settings.workers}
    if settings.prefill_workers:
        pools = {
            "prefill": SimulatedPool("prefill", engine),
            "decode": SimulatedPool("decode", engine),
        }
        sizes = {"prefill": settings.prefill_workers, "decode": settings.workers}
    usual = "decode" if settings.prefill_workers else "workers"
    for number, slow in enumerate(settings.slow, 1):
        name, latency = f"slow-{number}", SlowedLatency(engine.latency, slow.speed)
        slowed = dataclasses.replace(engine, latency=latency)
        pools[name] = dataclasses.replace(pools[usual], engine=slowed)
        sizes[name] = slow.count
        sizes[usual] -= slow.count
    surroundings = ClusterSettings(
        pools,
        block_size=settings.block_size,
        event_lag_s=settings.event_lag_s,
        load_lag_s=settings.load_lag_s,
        transfer_token_s=settings.transfer_token_s,
        detect_s=settings.detect_s,
    )
    built = Cluster(surroundings, router(settings), requests or workload(settings))
    for pool, size in sizes.items():
        for _ in range(size):
            built.add_worker(pool, 0.0)
    for change in settings.changes:
        pool = change.pool or next(iter(pools))
        if pool not in pools:
            raise ValueError(f"there is no pool {pool}; there are {', '.join(pools)}")
        built.at(change.at, partial(_carry_out, built, change, pool))
    return built


def _carry_out(built: Cluster, change: FleetChange, pool: str) -> None:
    for _ in range(change.count):
        if change.do == "add":
            built.add_worker(pool, built.now, change.startup_s)
            continue
        ids = built.worker_ids(pool)
        if not ids:
            return
        if change.do == "remove":
            built.remove_worker(ids[0], built.now)
        else:
            built.fail_worker(ids[0], built.now, change.startup_s or None)


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    """Collect garbage rarely.

    Almost nothing in a run is cyclic, and scanning all objects evicts from the processor's caches
    what the next request needs: a seventh of the time, without saving memory.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def run(settings: SimulationSettings, progress: Callable[[float], None] | None = None) -> Measures:
    """Run to the end, assert that nothing was lost, and measure.

    Args:
        settings: of the run.
        progress: called occasionally with the share of requests that have ended.

    Raises:
        ValueError, BadTrace, OSError: it cannot be run.
        AssertionError: something was lost or is left, which is a bug.
    """
    with _seldom_collecting():
        settings.validate()
        requests = workload(settings)
        total = sum(one.requests for one in settings.workloads)
        if isinstance(requests, TraceWorkload):
            total = requests.total
        built = cluster(settings, requests)
        while not built.is_done:
            built.advance(built.now + STRIDE_S)
            if progress is not None:
                progress(min(1.0, len(built.outcomes) / total))
        if settings.check:
            built.check()
        return measure(built, settings.policy, settings.seed)


_BACKLOG_SPEED: Final = 1e6
_BACKLOG_REQUESTS: Final = 4_000
_SHORTEST: Final = 20  # requests; fewer do not make a rate


def expect_load(load: float) -> None:
    """Refuse an invalid share of capacity.

    Raises:
        ValueError: it is not above 0, or not finite.
    """
    if not 0.0 < load < math.inf:
        raise ValueError("the share of capacity (--load) must be above 0, and finite")


def at_load(
    settings: SimulationSettings, load: float, capacity: float | None = None
) -> SimulationSettings:
    """Return the settings with the trace's speed set to this share of the fleet's capacity.

    Raises:
        ValueError: there is no trace whose speed could be set, or it is too short.
    """
    trace = settings.trace
    if trace is None:
        raise ValueError("a share of capacity needs a trace; of workloads set the rate")
    expect_load(load)
    if capacity is None:
        capacity = capacity_of(settings)
    source = workload(replace(settings, trace=replace(trace, speed=1.0)))
    times = [request.arrival for request in iter(source.next, None)]
    if len(times) < _SHORTEST or times[-1] == times[0]:
        raise ValueError("the trace is too short to have a rate")
    rate = (len(times) - 1) / (times[-1] - times[0])
    return replace(settings, trace=replace(trace, speed=load * capacity / rate))


def capacity_of(settings: SimulationSettings) -> float:
    """Return the requests per second that the fleet answers with a backlog of thousands.

    This is the rate between the first and the last tenth of the answers, with the peer's formula
    and no delays; it includes the cache hits that such a backlog allows.

    Raises:
        ValueError: there is no trace, or it is too short.
    """
    trace = settings.trace
    if trace is None:
        raise ValueError("a share of capacity needs a trace; of workloads set the rate")
    limit = min(trace.limit or _BACKLOG_REQUESTS, _BACKLOG_REQUESTS)
    door = replace(
        settings,
        policy=PEER,
        replicas=1,
        changes=[],
        event_lag_s=0.0,
        load_lag_s=0.0,
        trace=replace(trace, speed=_BACKLOG_SPEED, limit=limit),
    )
    built = cluster(door)
    built.finish()
    ends = [one.finished for one in built.outcomes if one.is_ok]
    first, last = len(ends) // 10, len(ends) * 9 // 10
    if len(ends) < _SHORTEST or ends[last] == ends[first]:
        raise ValueError("the trace is too short to measure capacity with it")
    return (last - first) / (ends[last] - ends[first])
