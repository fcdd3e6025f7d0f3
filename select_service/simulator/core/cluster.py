"""A cluster under a fake clock: requests arrive, a router chooses, engines work, caches report.

For its drivers (a run, the planner's closed loop, a test):

    cluster = Cluster(ClusterSettings(), router, workload)
    cluster.add_worker("workers", 0.0)                # now: startup_s = 0
    cluster.add_worker("workers", 0.0, startup_s=60)  # may be chosen from 60.0 on
    while not cluster.is_done:
        cluster.advance(cluster.now + 180.0)          # everything that happens until then
        seen = cluster.observe()                      # of the time since the last call
        ...                                           # seen.num_req, .isl, .osl, .ttft_s, .itl_s,
        cluster.remove_worker(7, cluster.now)         # .request_duration_s, .concurrency, .pools
    cluster.check()                                   # every request ended exactly once

Pools are named in the settings, each with a role and an engine: one of role `aggregated`, or one of
`prefill` and one of `decode`. `workload` may be None: `offer` adds requests one by one. Methods
that take `now` let everything before it happen first. Times are seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final

from select_service.simulator.core.engine_settings import ClusterSettings, SimulatedPool
from select_service.simulator.core.fleet import FleetWorker, SimulatedFleet
from select_service.simulator.core.kv_pool import CommonCache
from select_service.simulator.core.observation import Observation, Tally, bin_of
from select_service.simulator.core.requests import (
    LOST,
    OK,
    TOO_LARGE,
    ClientRequest,
    RequestOutcome,
)
from select_service.simulator.core.routers import Placed, Refused
from select_service.simulator.core.timeline import Timeline
from select_service.simulator.core.worker import EngineJob, EngineWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.simulator.core.kv_events import KvEvent
    from select_service.simulator.core.requests import Workload
    from select_service.simulator.core.routers import Verdict, WorkerRouter
    from select_service.simulator.core.worker import Happening

__all__ = ["Cluster", "ClusterSettings", "SimulatedPool"]

TICK_S: Final = 1.0
"""Between two turns of the router's housekeeping, as in the server."""


class _Flight:
    """A request on its way."""

    __slots__ = ("job", "key", "outcome", "placed", "worker_id")

    def __init__(self, outcome: RequestOutcome, key: str) -> None:
        self.outcome = outcome
        self.key = key
        self.worker_id: int | None = None  # its current worker
        self.job: EngineJob | None = None
        self.placed: Placed | None = None

    @property
    def workers(self) -> tuple[int | None, int | None]:
        """Its current worker, and the next one."""
        return self.worker_id, None if self.placed is None else self.placed.worker_id


class Cluster:
    """See the module.

    Attributes:
        outcomes: Outcomes of requests, in order of their end.
        gaps: Times between two tokens, in bins of 2 %, counted by token.
        reasons: Decisions by reason, refusals with their code.
        spread: (time, CoV of requests over the ready workers, CoV of tokens, requests), by sample.
    """

    def __init__(
        self, settings: ClusterSettings, router: WorkerRouter, workload: Workload | None = None
    ) -> None:
        self.settings = settings
        self.router = router
        self.outcomes: list[RequestOutcome] = []
        self.gaps: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self.spread: list[tuple[float, float, float, int]] = []
        self._workload = workload
        self._time = Timeline()
        self._at = self._time.at
        common = CommonCache() if settings.has_common_cache else None
        self._fleet = SimulatedFleet(settings.pools, settings.block_size, common)
        self._fleet_workers = self._fleet.fleet_workers
        self._flights: dict[str, _Flight] = {}  # by key of the attempt
        self._open = 0  # requests that arrived and have not ended
        self._arrived = self._scheduled = 0  # arrivals so far, and known future ones
        self._tally = Tally()
        self._observed_at = 0.0
        self._area = 0.0  # of open requests over time, since the last observation
        self._area_at = 0.0
        self._deadline = math.inf
        self._at(TICK_S, self._tick)
        self._at(settings.sample_s, self._sample)
        self._next_arrival()

    # -- driving ---------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The time until which everything has happened."""
        return self._time.now

    @property
    def is_done(self) -> bool:
        """Whether nothing is in progress, and no arrival is known."""
        return not self._open and not self._scheduled

    @property
    def workers(self) -> dict[int, EngineWorker]:
        """Every worker that is not gone."""
        return {one: of_fleet.worker for one, of_fleet in self._fleet_workers.items()}

    @property
    def evictions(self) -> int:
        """Blocks evicted for lack of room, including those of workers that are gone."""
        return self._fleet.evictions

    def worker_ids(self, pool: str) -> list[int]:
        """Return the workers of a pool that are starting or ready, oldest first."""
        return self._fleet.ids(pool)

    def offer(self, request: ClientRequest) -> None:
        """Schedule a request's arrival, not before `now`."""
        self._scheduled += 1
        self._at(max(request.arrival, self.now), self._arrive, request)

    def advance(self, until: float) -> None:
        """Let everything happen up to and including this time."""
        self._time.advance(until)

    def finish(self, limit_s: float = math.inf) -> None:
        """Advance until nothing is in progress, or the time limit."""
        while not self.is_done and self.now < limit_s:
            self.advance(min(limit_s, self._time.next))

    def add_worker(self, pool: str, now: float, startup_s: float = 0.0) -> int:
        """Start a worker, which may be chosen after `startup_s`. Returns its id."""
        self._time.come_to(now)
        worker_id = self._fleet.open(pool, self.now)
        if startup_s > 0.0:
            self._at(self.now + startup_s, self._ready, worker_id)
        else:
            self._ready(worker_id)
        return worker_id

    def remove_worker(self, worker_id: int, now: float) -> None:
        """Remove a worker after it has finished its work; `fail_worker` does so at once."""
        self._time.come_to(now)
        fleet_worker = self._fleet_workers[worker_id]
        if fleet_worker.state == "starting":
            self._fleet.leave(worker_id, self.now)
        elif fleet_worker.state == "ready":
            fleet_worker.state = "draining"
            self.router.drain(worker_id, self.now)
            self._follow_up()
            self._go_if_empty(fleet_worker)

    def fail_worker(self, worker_id: int, now: float, back_after_s: float | None = None) -> None:
        """Kill a worker; if requested, another one of its pool is ready after `back_after_s`."""
        self._time.come_to(now)
        pool = self._fleet_workers[worker_id].pool
        self._die(worker_id)
        if back_after_s is not None:
            self.add_worker(pool, self.now, back_after_s)

    def at(self, when: float, do: Callable[[], None]) -> None:
        """Call `do` at a time not before `now`; for schedules of scaling and faults."""
        self._at(max(when, self.now), do)

    def observe(self) -> Observation:
        """Return what happened since the last call."""
        self._count(0)
        start, end, seconds = self._observed_at, self.now, self.now - self._observed_at
        pools = self._fleet.close_books(end, seconds)
        concurrency = self._area / seconds if seconds else float(self._open)
        seen = self._tally.observe(start, end, concurrency, pools)
        self._tally, self._observed_at, self._area = Tally(), end, 0.0
        return seen

    def check(self) -> None:
        """Assert all invariants; once all is done, that nothing was lost and nothing is held."""
        for fleet_worker in self._fleet_workers.values():
            fleet_worker.worker.check()
        assert len(self.outcomes) + self._open == self._arrived, "each request ends exactly once"
        numbers = {outcome.request.number for outcome in self.outcomes}
        assert len(numbers) == len(self.outcomes), "no request ends twice"
        assert self._open == len(self._flights), "each open request is in one place"
        if self._open:
            return
        for fleet_worker in self._fleet_workers.values():
            worker = fleet_worker.worker
            assert not worker.pool.used, f"worker {worker.worker_id} holds blocks"
            assert fleet_worker.state != "draining", "a draining worker without work goes"
        # delayed messages to routers are still on their way
        self.advance(self.now + self.settings.load_lag_s + self.settings.event_lag_s + TICK_S)
        self.router.check()

    # -- time ------------------------------------------------------------------------------------

    def _count(self, requests: int) -> None:
        """Add to the open requests."""
        now = self._time.now
        self._area += self._open * (now - self._area_at)
        self._area_at = now
        self._open += requests

    def _tick(self) -> None:
        self.router.tick(self.now)
        self._follow_up()
        self._at(self.now + TICK_S, self._tick)

    def _wake(self, when: float) -> None:
        if when == self._deadline:
            self._deadline = math.inf
            self.router.tick(self.now)
            self._follow_up()
            self._mind_deadline()

    def _mind_deadline(self) -> None:
        """Schedule a wake-up when the first waiting request expires."""
        deadline = self.router.next_deadline()
        if self.now < deadline < self._deadline:  # past deadlines are for the next tick
            self._deadline = deadline
            self._at(deadline, self._wake, deadline)

    def _sample(self) -> None:
        spread = self._fleet.spread()
        if spread is not None:
            self.spread.append((self.now, *spread))
        self._at(self.now + self.settings.sample_s, self._sample)

    # -- workers ---------------------------------------------------------------------------------

    def _ready(self, worker_id: int) -> None:
        fleet_worker = self._fleet_workers.get(worker_id)
        if fleet_worker is None:  # it was removed before
            return
        fleet_worker.state = "ready"
        self.router.add(fleet_worker.worker, self.now)
        self._follow_up()

    def _go_if_empty(self, fleet_worker: FleetWorker) -> None:
        worker = fleet_worker.worker
        if fleet_worker.state != "draining" or worker.jobs:
            return
        if self._flights_of(worker.worker_id):
            return  # a prompt is computed elsewhere, or in transit
        self._fleet.leave(worker.worker_id, self.now)
        self.router.remove(worker.worker_id, self.now)
        self._follow_up()

    def _left(self, flight: _Flight) -> None:
        """Remove draining workers that a request has left, if it was their last."""
        for worker_id in flight.workers:
            fleet_worker = None if worker_id is None else self._fleet_workers.get(worker_id)
            if fleet_worker is not None:
                self._go_if_empty(fleet_worker)

    def _die(self, worker_id: int) -> None:
        fleet_worker = self._fleet_workers[worker_id]
        was_known = fleet_worker.state != "starting"
        self._fleet.leave(worker_id, self.now)
        fleet_worker.worker.kill()
        if was_known:
            self._at(self.now + self.settings.detect_s, self._bury, worker_id)
        for flight in self._flights_of(worker_id):
            self._again(flight)

    def _flights_of(self, worker_id: int) -> list[_Flight]:
        """Return the flights on a worker, or on their way there. O(open requests)."""
        return [one for one in self._flights.values() if worker_id in one.workers]

    def _bury(self, worker_id: int) -> None:
        self.router.remove(worker_id, self.now)
        self._follow_up()

    # -- requests --------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        request = None if self._workload is None else self._workload.next()
        if request is not None:
            self._scheduled += 1
            self._at(max(request.arrival, self.now), self._arrive_in_turn, request)

    def _arrive_in_turn(self, request: ClientRequest) -> None:
        self._next_arrival()
        self._arrive(request)

    def _arrive(self, request: ClientRequest) -> None:
        self._scheduled -= 1
        self._arrived += 1
        self._count(1)
        self._tally.arrived(request.isl)
        flight = _Flight(RequestOutcome(request, "", -1.0), str(request.number))
        self._flights[flight.key] = flight
        self._route(flight)

    def _route(self, flight: _Flight) -> None:
        verdict = self.router.route(flight.key, flight.outcome.request, self.now)
        if verdict is not None:
            self._settle(flight, verdict)
        else:
            self._mind_deadline()
        self._follow_up()

    def _follow_up(self) -> None:
        """Settle waiting requests that the last action answered."""
        for key, verdict in self.router.answered():
            flight = self._flights.get(key)
            if flight is None:
                self.router.finished(key, self.now)  # its request has ended
            else:
                self._settle(flight, verdict)

    def _settle(self, flight: _Flight, verdict: Verdict) -> None:
        outcome = flight.outcome
        if isinstance(verdict, Refused):
            self.reasons[f"refused: {verdict.code}"] += 1
            self._over(flight, f"refused: {verdict.code}")
            return
        self.reasons[verdict.reason] += 1
        outcome.placed, outcome.reason = self.now, verdict.reason
        flight.placed = verdict
        first = verdict.worker_id
        if verdict.prefill_worker_id is not None:
            first = verdict.prefill_worker_id
        outcome.prefill_worker_id, outcome.worker_id = first, verdict.worker_id
        source = verdict.source_worker_id
        if source is not None and source in self._fleet_workers:
            self._pull(flight, first, verdict, self._fleet_workers[source].worker)
        else:
            self._submit(flight, first, EngineJob(outcome.request))

    def _pull(self, flight: _Flight, first: int, placed: Placed, source: EngineWorker) -> None:
        """Move the first blocks of a prompt that another worker has, once read to its device."""
        blocks = flight.outcome.request.blocks
        there, _ = source.pool.match(blocks, placed.pulled_blocks)
        target = self._fleet_workers.get(first)
        here = 0 if target is None else target.worker.pool.match(blocks, there)[0]
        seconds = (there - here) * self.settings.block_size * self.settings.transfer_token_s
        seconds += source.pool.reading_s(blocks, here, there)
        job = EngineJob(flight.outcome.request, pulled=there)
        self._at(self.now + seconds, self._moved, flight, job, first)

    def _submit(self, flight: _Flight, worker_id: int, job: EngineJob) -> None:
        fleet_worker = self._fleet_workers.get(worker_id)
        if fleet_worker is None:  # it is dead, and the router does not know
            self._again(flight)
            return
        worker = fleet_worker.worker
        flight.worker_id, flight.job = worker_id, job
        job.key = flight.key
        due = worker.due
        worker.submit(job, self.now)
        for refused in worker.take_refused():
            self._ended_on_worker(refused, TOO_LARGE)
        self._publish_events(worker)
        if worker.due != due:
            self._at(worker.due, self._step, worker, worker.due)

    def _step(self, worker: EngineWorker, due: float) -> None:
        if worker.due != due:  # it was rescheduled, or died
            return
        happened = worker.step(self.now)
        for seconds, tokens in worker.gaps:
            self.gaps[bin_of(seconds)] += tokens
        worker.gaps.clear()
        if worker.pool.events:
            self._publish_events(worker)
        if worker.due < math.inf:
            self._at(worker.due, self._step, worker, worker.due)
        for one in happened:
            self._happened(worker, one)
        fleet_worker = self._fleet_workers.get(worker.worker_id)
        if fleet_worker is not None and fleet_worker.state == "draining":
            self._go_if_empty(fleet_worker)

    def _publish_events(self, worker: EngineWorker) -> None:
        events = worker.pool.events
        if events:
            worker.pool.events = []
            lag = self.settings.event_lag_s
            if lag > 0.0:
                self._at(self.now + lag, self._apply, worker.worker_id, events)
            else:
                self.router.apply(worker.worker_id, events, self.now)

    def _apply(self, worker_id: int, events: list[KvEvent]) -> None:
        self.router.apply(worker_id, events, self.now)

    def _happened(self, worker: EngineWorker, one: Happening) -> None:
        job = one.job
        if one.kind == "first_token":
            self._first_token(job)
        elif one.kind == "done":
            if worker.role == "prefill" and job.request.osl > 1:
                self._move(job)
            else:
                self._ended_on_worker(job, OK)
        else:
            self._ended_on_worker(job, TOO_LARGE)

    def _first_token(self, job: EngineJob) -> None:
        flight = self._flights.get(job.key)
        if flight is None or flight.job is not job:
            return
        outcome = flight.outcome
        if outcome.first_token < 0.0:  # after a death its client already has it
            outcome.first_token, outcome.cached_tokens = self.now, job.cached
            self._tally.first_token(outcome.ttft_s, job.request.isl, job.cached)
        self._later(self._report_prefilled, job.key, job.cached)

    def _report_prefilled(self, key: str, cached_tokens: int) -> None:
        self.router.prefilled(key, cached_tokens, self.now)
        self._follow_up()

    def _report_finished(self, key: str) -> None:
        self.router.finished(key, self.now)
        self._follow_up()

    def _later(self, do: Callable[..., None], *arguments: object) -> None:
        """Inform the router, with the delay of load information."""
        if self.settings.load_lag_s > 0.0:
            self._at(self.now + self.settings.load_lag_s, do, *arguments)
        else:
            do(*arguments)

    def _move(self, job: EngineJob) -> None:
        """Transfer the KV cache of a computed prompt to the worker that decodes."""
        flight = self._flights.get(job.key)
        if flight is None or flight.job is not job:
            return
        assert flight.placed is not None
        seconds = job.request.isl * self.settings.transfer_token_s
        job = EngineJob(job.request, prefilled=True, stopped_at=self.now)
        self._at(self.now + seconds, self._moved, flight, job, flight.placed.worker_id)

    def _moved(self, flight: _Flight, job: EngineJob, worker_id: int) -> None:
        if self._flights.get(flight.key) is flight:
            computed_on = (
                None if flight.worker_id is None else self._fleet_workers.get(flight.worker_id)
            )
            self._submit(flight, worker_id, job)
            if computed_on is not None:
                self._go_if_empty(computed_on)

    def _ended_on_worker(self, job: EngineJob, end: str) -> None:
        flight = self._flights.get(job.key)
        if flight is None or flight.job is not job:
            return
        flight.outcome.preemptions += job.preemptions
        self._later(self._report_finished, job.key)
        self._over(flight, end)

    def _again(self, flight: _Flight) -> None:
        """Retry a request whose worker died, or give it up."""
        outcome = flight.outcome
        self._later(self._report_finished, flight.key)
        if outcome.attempts >= self.settings.attempts_max:
            self._over(flight, LOST)
            return
        outcome.attempts += 1
        del self._flights[flight.key]
        self._left(flight)
        again = _Flight(outcome, f"{outcome.request.number}/{outcome.attempts}")
        self._flights[again.key] = again
        # with a delay: the router may not know of the death yet
        self._at(self.now + self.settings.detect_s / 2, self._route_if_open, again)

    def _route_if_open(self, flight: _Flight) -> None:
        if self._flights.get(flight.key) is flight:
            self._route(flight)

    def _over(self, flight: _Flight, end: str) -> None:
        del self._flights[flight.key]
        self._count(-1)
        outcome = flight.outcome
        outcome.end, outcome.finished = end, self.now
        self.outcomes.append(outcome)
        self._tally.ended(outcome)
        if self._workload is not None:
            for request in self._workload.after(outcome):
                self.offer(request)
        self._left(flight)
