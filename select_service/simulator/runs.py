"""One simulated run from settings to measures: building, seeding and running it.

The same settings and seed give the same measures to the last bit; every policy sees the same
requests. `report.py` presents the results, `sweep.py` runs many.
"""

from __future__ import annotations

import dataclasses
import gc
import gzip
import random
import zlib
from collections import deque
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from select_service.simulator.core.baselines.dynamo_agentic import agentic_weights
from select_service.simulator.core.baselines.oracle import BoundRouter
from select_service.simulator.core.cluster import Cluster, ClusterSettings
from select_service.simulator.core.core_router import CoreRouter, CoreSettings
from select_service.simulator.core.engine_settings import SimulatedPool
from select_service.simulator.core.latency import SlowedLatency
from select_service.simulator.core.measures import Measures, measure
from select_service.simulator.core.replicated import Replicated
from select_service.simulator.core.requests import ClientRequest
from select_service.simulator.core.workloads import WorkloadSettings, workload_of
from select_service.simulator.recordings import requests_of
from select_service.simulator.settings import DEFAULTS, ROUTERS, peer_of
from select_service.simulator.traces import (
    READERS,
    RECORDING,
    BadTrace,
    TraceWorkload,
    in_order,
    read_mooncake,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from select_service.simulator.core.requests import RequestOutcome, Workload
    from select_service.simulator.core.routers import Counting, WorkerRouter
    from select_service.simulator.settings import FleetChange, SimulationSettings, Trace

_NEW_OBJECTS: Final = 100_000
"""Allocations between two garbage collections."""

STRIDE_S: Final = 10.0
"""Simulated seconds between two progress updates."""


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
        parts = [replace(one, **_targets(settings, one)) for one in settings.workloads]
        return workload_of(parts, settings.block_size, rngs)
    requests = _read(trace, settings.block_size)
    for one in requests:
        for name, value in _targets(settings, one).items():
            setattr(one, name, value)
    if not requests:
        raise BadTrace(f"{trace.path}: there is no request in it")
    if trace.users:
        rng = _rng(settings, "trace")
        return ClosedTraceWorkload(requests, settings.block_size, rng, trace.users, trace.limit)
    return TraceWorkload(
        requests,
        settings.block_size,
        _rng(settings, "trace"),
        speed=trace.speed,
        jitter_s=trace.jitter_s,
        limit=trace.limit,
    )


def _targets(
    settings: SimulationSettings, one: WorkloadSettings | ClientRequest
) -> dict[str, float]:
    """Return the targets of the run that requests do not have of their own."""
    return {
        name: value
        for name in ("slo_ttft_s", "slo_itl_s")
        if (value := getattr(settings, name)) is not None and getattr(one, name) is None
    }


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
    other = ROUTERS.get(settings.policy)
    if other is not None:
        return _counting(other, settings)
    weights = DEFAULTS.get(settings.policy)
    core = CoreSettings(
        agentic_weights(settings.block_size) if weights is None else weights,
        replicas=settings.replicas,
        sync_delay_s=settings.sync_delay_s,
        kv_events=settings.kv_events,
    )
    if settings.policy == settings.weights.policy:  # so it is of the two that take them
        core = dataclasses.replace(
            core,
            config=settings.weights,
            admission=settings.admission,
            session_ttl_s=settings.session_ttl_s,
        )
    return CoreRouter(core, [_rng(settings, "router", at) for at in range(settings.replicas)])


def _counting(kind: type[Counting], settings: SimulationSettings) -> WorkerRouter:
    if settings.replicas == 1:
        return kind(_rng(settings, "router"), settings.kv_events)
    replicas = [
        kind(_rng(settings, "router", at), settings.kv_events) for at in range(settings.replicas)
    ]
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
        has_common_cache=settings.policy == BoundRouter.name,
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
        total = _total(settings, requests)
        built = cluster(settings, requests)
        while not built.is_done:
            built.advance(built.now + STRIDE_S)
            if progress is not None:
                progress(min(1.0, len(built.outcomes) / total))
        if settings.check:
            built.check()
        return measure(built, settings.policy, settings.seed)


def _total(settings: SimulationSettings, requests: Workload) -> int:
    if isinstance(requests, TraceWorkload | ClosedTraceWorkload):
        return requests.total
    return sum(one.requests for one in settings.workloads)


_BACKLOG_SPEED: Final = 1e6
_BACKLOG_REQUESTS: Final = 4_000
_SHORTEST: Final = 20  # requests; fewer do not make a rate


def _paced(settings: SimulationSettings) -> Trace:
    trace = settings.trace
    if trace is None:
        raise ValueError("a share of capacity needs a trace; of workloads set the rate")
    if trace.users:
        raise ValueError("users of a trace set its pace: there is no share of capacity")
    return trace


def at_load(
    settings: SimulationSettings, load: float, capacity: float | None = None
) -> SimulationSettings:
    """Return the settings with the trace's speed set to this share of the fleet's capacity.

    Raises:
        ValueError: there is no trace whose speed could be set, or it is too short.
    """
    trace = _paced(settings)
    if capacity is None:
        capacity = capacity_of(settings)
    source = workload(replace(settings, trace=replace(trace, speed=1.0)))
    times = [request.arrival for request in iter(source.next, None)]
    if len(times) < _SHORTEST or times[-1] == times[0]:
        raise ValueError("the trace is too short to have a rate")
    rate = (len(times) - 1) / (times[-1] - times[0])
    return replace(settings, trace=replace(trace, speed=load * capacity / rate))


def capacity_of(
    settings: SimulationSettings, progress: Callable[[float], None] | None = None
) -> float:
    """Return the requests per second that the fleet answers with a backlog of thousands.

    This is the rate between the first and the last tenth of the answers, with the peer's formula
    and no delays; it includes the cache hits that such a backlog allows.

    Args:
        settings: of the fleet and its trace.
        progress: called occasionally with the share of requests that have ended.

    Raises:
        ValueError: there is no trace, or it is too short.
    """
    trace = _paced(settings)
    limit = min(trace.limit or _BACKLOG_REQUESTS, _BACKLOG_REQUESTS)
    drained = replace(
        peer_of(settings),
        replicas=1,
        changes=[],
        event_lag_s=0.0,
        load_lag_s=0.0,
        trace=replace(trace, speed=_BACKLOG_SPEED, limit=limit),
    )
    requests = workload(drained)
    total = _total(drained, requests)
    built = cluster(drained, requests)
    while not built.is_done:
        built.finish(built.now + STRIDE_S)
        if progress is not None:
            progress(len(built.outcomes) / total)
    ends = [one.finished for one in built.outcomes if one.is_ok]
    first, last = len(ends) // 10, len(ends) * 9 // 10
    if len(ends) < _SHORTEST or ends[last] == ends[first]:
        raise ValueError("the trace is too short to measure capacity with it")
    return (last - first) / (ends[last] - ends[first])


# A trace in a closed loop: so many users, each of which asks when the last answer has ended. The
# trace says what is asked, in which order, and perhaps how long a user thinks first; when is up to
# the fleet. Requests with the same session are asked by one user, one after another; without a
# session each is its own.


class ClosedTraceWorkload:
    """See the module; a Workload.

    Attributes:
        total: Requests that will come.
    """

    def __init__(
        self,
        requests: Sequence[ClientRequest],
        block_size: int,
        rng: random.Random,
        users: int,
        limit: int = 0,
    ) -> None:
        self.block_size = block_size
        self.total = min(limit or len(requests), len(requests))
        sessions: dict[object, deque[ClientRequest]] = {}
        for one in requests[: self.total]:
            sessions.setdefault(one.session or one.number, deque()).append(one)
        self._sessions = deque(sessions.values())  # that are not begun
        self._asking: dict[int, deque[ClientRequest]] = {}  # by request: the rest of its session
        # users come within a second, not all at once
        times = sorted((rng.random() for _ in range(min(users, len(sessions)))), reverse=True)
        self._first = [(now, self._sessions.popleft()) for now in reversed(times)][::-1]

    def next(self) -> ClientRequest | None:
        """See Workload."""
        return self._ask(*self._first.pop()) if self._first else None

    def after(self, outcome: RequestOutcome) -> tuple[ClientRequest, ...]:
        """See Workload: the next of the session, or of the trace."""
        rest = self._asking.pop(outcome.request.number)
        if rest:
            return (self._ask(outcome.finished + rest[0].think_s, rest),)
        return (self._ask(outcome.finished, self._sessions.popleft()),) if self._sessions else ()

    def _ask(self, now: float, session: deque[ClientRequest]) -> ClientRequest:
        request = session.popleft()
        request.arrival = now
        self._asking[request.number] = session
        return request
