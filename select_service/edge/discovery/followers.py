"""Makes the catalog and the replica plane match what sources publish.

Each source has one task that looks and one that follows: it takes the latest, lets `core/discovery`
plan the changes, and applies them in slices. A failing source changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from indexer.errors import IndexerError
from select_service.core.fleet.roster import Roster
from select_service.edge.cooperative import TimeSlices, ended
from select_service.edge.readiness import DISCOVERY
from select_service.errors import ServiceError
from select_service.types.doctor import SourceLink

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from indexer.core.stream import EventStream
    from indexer.types import LinkState
    from select_service.edge.discovery.source import DiscoverySource
    from select_service.edge.driver.core_calls import CallContext
    from select_service.edge.readiness import ReadinessGate
    from select_service.edge.replication.plane import ReplicaConnections
    from select_service.types import WorkerSpec

T = TypeVar("T")

_log = logging.getLogger("select_service")

AGAIN_S: Final = 0.5
"""How often workers in their grace, or registered by another source, are checked again."""


class WorkerCallbacks(NamedTuple):
    """What a follower does to the catalog, always in the name of its source."""

    put: Callable[[WorkerSpec, str], object]
    """Registers a worker; raises ServiceError."""

    remove: Callable[[int, str], object]
    """Deregisters one; likewise."""

    hold_back: Callable[[int, str, str | None], object]
    """Has one take no new work, and says why; None: it takes work again."""


class WorkerFollower:
    """Makes the catalog follow one source of workers.

    Attributes:
        source: what it follows.
        roster: which of the source's workers are in their grace.
        named: workers the source names at present, and that may be chosen.
        conflicts: how many of these another source has registered.
        refused: how many of these the catalog has refused.
        left_out: workers named beyond the limit.
        is_settled: whether everything seen at the first look is registered.
    """

    def __init__(
        self,
        source: DiscoverySource[dict[int, WorkerSpec]],
        turn: CallContext,
        operations: WorkerCallbacks,
        *,
        link_of: Callable[[EventStream], LinkState | None] = lambda _: None,
        grace_s: float,
        engine_grace_s: float = 0.0,
        lets_end: bool = False,
        workers_max: int,
    ) -> None:
        """Follow from `run` on.

        Args:
            source: names workers.
            turn: has the core and the clock.
            operations: change the catalog.
            link_of: how it stands with a stream's connection.
            grace_s: how long a worker's state stays once it is no longer named.
            engine_grace_s: how long, if its engine is still the same.
            lets_end: whether one that is no longer named may run on, so that its requests are
                waited for as long as that.
            workers_max: from this source; others are left out.
        """
        self.source = source
        self._core, self._link_of = turn.core, link_of
        self.roster = Roster(
            source.name,
            grace_s=grace_s,
            engine_grace_s=engine_grace_s,
            connection=self._connection,
            has_requests=self._has_requests if lets_end else lambda _: False,
        )
        source.keep_time(turn.clock)
        self.named = self.conflicts = self.refused = self.left_out = 0
        self.is_settled = False
        self._catalog, self._clock = turn.core.catalog, turn.clock
        self._operations = operations
        self._workers_max = workers_max
        self._complained: set[tuple[int, str]] = set()
        turn.core.workers.sources.add(source.name)

    @property
    def missed(self) -> int:
        """How many take no new work: they are not ready, leave, or are no longer named."""
        return self.roster.missed

    async def run(self) -> None:
        """Follow forever."""
        await _follow(
            self.source, self._agree, lambda: self.roster.is_waiting or self.conflicts > 0
        )

    def _connection(self, worker_id: int) -> object:
        """Return how often each stream of a worker was connected; None: one is not."""
        worker = self._core.catalog.find(worker_id)
        streams = [] if worker is None else self._core.membership.streams_of(worker)
        links = [self._link_of(stream) for stream in streams]
        if not links or not all(link is not None and link.is_connected for link in links):
            return None
        return tuple(link.connections for link in links if link is not None)

    def _has_requests(self, worker_id: int) -> bool:
        return self._core.drains.status(worker_id).reservations > 0

    async def _agree(self) -> None:
        everything = self.source.latest
        assert everything is not None
        named = everything
        if len(named) > self._workers_max:
            named = {key: named[key] for key in sorted(named)[: self._workers_max]}
        self.named, self.left_out = len(named), len(everything) - len(named)
        plan = self.roster.plan(named, self._catalog, self._clock(), self.source.unready)
        complaints = {
            (worker_id, f"registered by source {owner}, which keeps it")
            for worker_id, owner in plan.conflicts
        }
        self.conflicts = len(plan.conflicts)
        name = self.source.name
        slices = TimeSlices()  # one takes some 50 µs, and as much again per hundred in its scope
        for worker_id in plan.removed:
            self._try(worker_id, complaints, partial(self._operations.remove, worker_id, name))
            await slices.yield_if_due()
        for worker_id, why in plan.held_back:
            self._operations.hold_back(worker_id, name, why)
            await slices.yield_if_due()
        refused = len(complaints)
        for spec in plan.put:
            self._try(spec.worker_id, complaints, partial(self._operations.put, spec, name))
            await slices.yield_if_due()
        self.refused = len(complaints) - refused
        for worker_id, why in sorted(complaints - self._complained):
            _log.warning("worker %d from %s is left out: %s", worker_id, name, why)
        self._complained = complaints
        self.is_settled = True

    def _try(
        self, worker_id: int, complaints: set[tuple[int, str]], change: Callable[[], object]
    ) -> None:
        try:
            change()
        except ServiceError as error:
            complaints.add((worker_id, str(error)))


class ReplicaFollower:
    """Makes the replica plane follow one source of endpoints; other endpoints are left alone.

    Attributes: as of WorkerFollower.
    """

    def __init__(
        self,
        source: DiscoverySource[frozenset[str]],
        plane: Callable[[], ReplicaConnections],
        clock: Callable[[], float],
        *,
        grace_s: float,
    ) -> None:
        """Follow from `run` on.

        Args:
            source: names endpoints.
            plane: returns the replica plane; raises ServiceError if there is none.
            clock: monotonic seconds.
            grace_s: how long an endpoint is listened to once it is no longer named.
        """
        self.source = source
        source.keep_time(clock)
        self.named = self.conflicts = self.refused = self.left_out = 0
        self.is_settled = False
        self._plane = plane
        self._clock = clock
        self._grace_s = grace_s
        self._mine: set[str] = set()
        self._missing_since: dict[str, float] = {}

    @property
    def missed(self) -> int:
        """How many are in their grace."""
        return len(self._missing_since)

    async def run(self) -> None:
        """Follow forever."""
        await _follow(self.source, self._agree, lambda: self.missed + self.conflicts > 0)

    async def _agree(self) -> None:
        named = self.source.latest
        assert named is not None
        now = self._clock()
        plane = self._plane()
        self.named, self.refused, self.conflicts = len(named), 0, 0
        for endpoint in sorted(named - self._mine):
            try:
                if plane.register(endpoint):
                    self._mine.add(endpoint)
                else:
                    self.conflicts += 1  # registered by the command line or a client
            except (ServiceError, IndexerError) as error:
                self.refused += 1
                _log.warning("replica %s from %s: %s", endpoint, self.source.name, error)
        missing = self._mine - named
        self._missing_since = {e: self._missing_since.get(e, now) for e in missing}
        for endpoint, since in list(self._missing_since.items()):
            if now - since >= self._grace_s:
                del self._missing_since[endpoint]
                self._mine.discard(endpoint)
                try:
                    plane.deregister(endpoint)
                except (ServiceError, IndexerError):  # a client has deregistered it
                    _log.info("replica %s was gone already", endpoint)
        self.is_settled = True


Follower = WorkerFollower | ReplicaFollower


async def _follow(
    source: DiscoverySource[T],
    agree: Callable[[], Coroutine[object, object, None]],
    is_waiting: Callable[[], bool],
) -> None:
    while True:
        try:
            async with asyncio.timeout(AGAIN_S if is_waiting() else None):
                await source.changed.wait()
        except TimeoutError:
            pass
        source.changed.clear()
        try:
            await agree()
        except Exception as error:  # noqa: BLE001 - a bug must not end the following
            _log.exception("following %s failed through an error of ours", source.name)
            source.fail("internal", repr(error))
            await asyncio.sleep(AGAIN_S)


class Discovery:
    """All followers and their sources, started and stopped together."""

    def __init__(self, readiness: ReadinessGate, followers: Sequence[Follower]) -> None:
        """Start nothing yet; /ready waits for the first match."""
        self.followers = list(followers)
        self._tasks: list[asyncio.Task[None]] = []
        if followers:
            readiness.wait_for(DISCOVERY, lambda: self.is_settled)

    @property
    def is_settled(self) -> bool:
        """Whether everything seen at the first look of every source is registered."""
        return all(follower.is_settled for follower in self.followers)

    def links(self) -> list[SourceLink]:
        """Return how it stands with each source."""
        sources = [follower.source for follower in self.followers]
        return [
            SourceLink(one.name, one.age_s, one.every_s, one.trouble, one.shared) for one in sources
        ]

    def start(self) -> None:
        """Look and follow, on the running loop."""
        loop = asyncio.get_running_loop()
        for follower in self.followers:
            self._tasks.append(loop.create_task(follower.source.run()))
            self._tasks.append(loop.create_task(follower.run()))

    async def close(self) -> None:
        """Stop; what was registered stays. Idempotent."""
        await ended(*self._tasks)
        self._tasks.clear()
