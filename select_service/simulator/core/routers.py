"""The protocol of routers, which choose workers, and simple policies to compare with.

Like a proxy in front of a fleet, the simple ones count the requests they have sent to each worker,
and know nothing of caches. Given the same calls and the same random numbers they choose the same.
The real core is in `core_router.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from select_service.simulator.core.kv_events import KvEvent
    from select_service.simulator.core.requests import ClientRequest, Role
    from select_service.simulator.core.worker import EngineWorker
    from select_service.types import KvEvents


class Placed(NamedTuple):
    """A request goes to this worker."""

    worker_id: int
    prefill_worker_id: int | None = None  # computes its prompt first
    reason: str = ""
    source_worker_id: int | None = None  # has blocks of the prompt to be pulled from it
    pulled_blocks: int = 0  # first blocks of the prompt that the worker then has


class Refused(NamedTuple):
    """A request is refused."""

    code: str


Verdict = Placed | Refused


class WorkerRouter(Protocol):
    """Chooses workers. Every method takes the time; `key` names one attempt of a request."""

    def add(self, worker: EngineWorker, now: float) -> None:
        """Add a worker that may be chosen from now on.

        The engine itself is for policies that read its metrics, and for those that cannot exist.
        """

    def drain(self, worker_id: int, now: float) -> None:
        """Give a worker no more work; it finishes what it has."""

    def remove(self, worker_id: int, now: float) -> None:
        """Remove a worker that is gone, with everything on it."""

    def route(self, key: str, request: ClientRequest, now: float) -> Verdict | None:
        """Choose a worker; None: the request waits, and `answered` will return it."""

    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        """The prompt is computed; this many of its tokens were cached."""

    def finished(self, key: str, now: float) -> None:
        """The request has ended, or its client is gone."""

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        """Apply a worker's cache events."""

    def tick(self, now: float) -> None:
        """Do housekeeping; called once a second, and at `next_deadline`."""

    def next_deadline(self) -> float:
        """Return when the first waiting request expires; infinity if none will."""

    def answered(self) -> list[tuple[str, Verdict]]:
        """Return the verdicts on waiting requests since the last call."""

    def check(self) -> None:
        """Assert all invariants; with nothing in flight, that nothing is held."""


class Counting:
    """A router that counts its requests in flight, and has no other information.

    Attributes:
        name: The policy's, in `--policy` and in results.
        meaning: What it decides by, in short.
        now: The time of the request that is placed.
    """

    name: ClassVar[str] = ""
    meaning: ClassVar[str] = ""

    def __init__(self, rng: random.Random, kv_events: KvEvents = "engine") -> None:
        """Know no workers yet.

        Args:
            rng: of its own.
            kv_events: where what workers hold is known from; these routers do not ask.
        """
        self._rng = rng
        self.now = 0.0
        self._in_flight: dict[int, int] = {}  # by worker, including draining ones
        self._open: dict[Role, list[int]] = {"prefill": [], "decode": [], "aggregated": []}
        self._placed: dict[str, list[int]] = {}  # by key: the workers where it counts

    # -- workers -------------------------------------------------------------------------------

    def add(self, worker: EngineWorker, now: float) -> None:
        """See Router."""
        self._in_flight[worker.worker_id] = 0
        self._open[worker.role].append(worker.worker_id)

    def drain(self, worker_id: int, now: float) -> None:
        """See Router."""
        for ids in self._open.values():
            if worker_id in ids:
                ids.remove(worker_id)

    def remove(self, worker_id: int, now: float) -> None:
        """See Router."""
        self.drain(worker_id, now)
        self._in_flight.pop(worker_id, None)

    # -- requests ------------------------------------------------------------------------------

    def route(self, key: str, request: ClientRequest, now: float) -> Verdict | None:
        """Choose an aggregated worker if there are any, else one for each leg."""
        self.now = now
        whole = self._open["aggregated"]
        if whole:
            chosen = self.choose(whole, request)
            return self._place(key, request, Placed(chosen), [chosen])
        first, second = self._open["prefill"], self._open["decode"]
        if not (first and second):
            return Refused("no_schedulable_worker")
        computing, decoding = self.choose(first, request), self.choose(second, request)
        return self._place(key, request, Placed(decoding, computing), [decoding, computing])

    def _place(self, key: str, request: ClientRequest, placed: Placed, ids: list[int]) -> Placed:
        """Count a request at the workers that decode it and that compute its prompt, in order."""
        for worker_id in ids:
            if worker_id in self._in_flight:  # when this arrives, it may be gone
                self._in_flight[worker_id] += 1
        self._placed[key] = ids
        return placed

    def apply_booking(self, key: str, request: ClientRequest, placed: Placed, now: float) -> None:
        """Count a request that another replica has placed."""
        ids = (placed.worker_id, placed.prefill_worker_id)
        self.now = now
        self._place(key, request, placed, [one for one in ids if one is not None])

    def begin_anywhere(self) -> None:
        """Become one of several replicas, which have not begun together."""

    def choose(self, ids: list[int], request: ClientRequest) -> int:
        """Return one of these workers; there is at least one."""
        raise NotImplementedError

    def lowest(self, costs: Sequence[tuple[Any, int]]) -> int:
        """Return the worker of the lowest cost, given as (cost, worker); ties are random."""
        least = min(cost for cost, _ in costs)
        equals = [one for cost, one in costs if cost == least]
        return equals[int(self._rng.random() * len(equals))]

    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        """End the prefill worker's part."""
        ids = self._placed.get(key)
        if ids is not None and len(ids) > 1:
            self._give_back(ids.pop())

    def finished(self, key: str, now: float) -> None:
        """See Router."""
        for worker_id in self._placed.pop(key, ()):
            self._give_back(worker_id)

    def _give_back(self, worker_id: int) -> None:
        if worker_id in self._in_flight:  # it may have gone meanwhile
            self._in_flight[worker_id] -= 1

    def load(self, worker_id: int) -> int:
        """Return the requests sent there that have not ended, as far as known."""
        return self._in_flight[worker_id]

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        """Ignore caches."""

    def tick(self, now: float) -> None:
        """Do nothing."""

    def next_deadline(self) -> float:
        """Return infinity: none waits."""
        return float("inf")

    def answered(self) -> list[tuple[str, Verdict]]:
        """Return nothing: none waits."""
        return []

    def check(self) -> None:
        """See Router."""
        assert all(count >= 0 for count in self._in_flight.values())
        if not self._placed:
            assert not any(self._in_flight.values()), "nothing is in flight"


class RoundRobinRouter(Counting):
    """Chooses workers in turn."""

    name = "round-robin"
    meaning = "the workers in turn"

    def __init__(self, rng: random.Random, kv_events: KvEvents = "engine") -> None:
        super().__init__(rng, kv_events)
        self._turn = 0

    def begin_anywhere(self) -> None:
        """See Counting: in step they would all send to the same worker."""
        self._turn = self._rng.randrange(1 << 16)

    def choose(self, ids: list[int], request: ClientRequest) -> int:
        """See Counting."""
        self._turn += 1
        return ids[self._turn % len(ids)]


class RandomChoice(Counting):
    """Chooses a random worker."""

    name = "random"
    meaning = "any worker"

    def choose(self, ids: list[int], request: ClientRequest) -> int:
        """See Counting."""
        return ids[int(self._rng.random() * len(ids))]


class LeastLoaded(Counting):
    """Chooses the worker with the fewest requests; ties are random."""

    name = "least-loaded"
    meaning = "the worker with the fewest requests"

    def choose(self, ids: list[int], request: ClientRequest) -> int:
        """See Counting."""
        return self.lowest([(self.load(worker_id), worker_id) for worker_id in ids])


class PowerOfTwo(Counting):
    """Chooses the less loaded of two random workers."""

    name = "power-of-two"
    meaning = "the less loaded of two random workers"

    def choose(self, ids: list[int], request: ClientRequest) -> int:
        """See Counting."""
        draw = self._rng.random
        first = int(draw() * len(ids))
        if len(ids) == 1:
            return ids[first]
        second = int(draw() * (len(ids) - 1))
        second += second >= first
        one, other = ids[first], ids[second]
        return one if self.load(one) <= self.load(other) else other


class PrefixAffinity(Counting):
    """Keeps each session on its worker (rendezvous hashing); without one, a prompt block decides.

    That is the last of the first few blocks, to distinguish prompts with a common beginning.
    """

    name = "prefix-affinity"
    meaning = "always the same worker for a session, or for the first blocks"

    def choose(self, ids: list[int], request: ClientRequest) -> int:
        """See Counting."""
        name = request.session
        if not name and request.blocks:
            name = str(request.blocks[min(_PREFIX_BLOCKS, len(request.blocks)) - 1])
        name = name or str(request.number)
        return max(ids, key=lambda one: (xxh3_64_intdigest(f"{name}/{one}".encode()), one))


_PREFIX_BLOCKS: Final = 4

SIMPLE_ROUTERS: Final = (RoundRobinRouter, RandomChoice, LeastLoaded, PowerOfTwo, PrefixAffinity)
"""Those that know only what they count themselves."""
