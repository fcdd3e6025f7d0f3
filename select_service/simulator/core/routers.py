"""Who chooses a worker: what every policy can be told and asked, and the simple ones to compare.

The simple ones know how many requests they have sent where, as a proxy in front of a fleet does,
and nothing of caches. Given the same order of calls and the same random numbers they choose the
same. The real core is in `core_router.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from select_service.simulator.core.kv_events import KvEvent
    from select_service.simulator.core.requests import Request, Role

__all__ = [
    "Counting",
    "LeastLoaded",
    "Member",
    "Placed",
    "PowerOfTwo",
    "PrefixAffinity",
    "RandomChoice",
    "Refused",
    "RoundRobin",
    "Router",
    "Verdict",
]


class Placed(NamedTuple):
    """A request goes there."""

    worker_id: int
    prefill_worker_id: int | None = None  # its prompt is computed there first
    reason: str = ""


class Refused(NamedTuple):
    """A request goes nowhere."""

    code: str


Verdict = Placed | Refused


class Member(NamedTuple):
    """A worker as a router is told of it."""

    worker_id: int
    role: Role
    block_size: int
    step_tokens_max: int
    kv_blocks: int
    sequences_max: int


class Router(Protocol):
    """Chooses workers. Every verb takes the time; `key` names one attempt at one request."""

    def add(self, member: Member, now: float) -> None:
        """A worker may be chosen from now on."""

    def drain(self, worker_id: int, now: float) -> None:
        """A worker gets no more work, and finishes what it has."""

    def remove(self, worker_id: int, now: float) -> None:
        """A worker is gone, with everything on it."""

    def route(self, key: str, request: Request, now: float) -> Verdict | None:
        """Choose; None: the request waits, and `answered` will tell."""

    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        """The prompt is computed, so much of it was cached."""

    def finished(self, key: str, now: float) -> None:
        """The request is over, or its client is gone."""

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        """What a worker tells about its cache arrives."""

    def tick(self, now: float) -> None:
        """Do housekeeping; once a second, and at `next_deadline`."""

    def next_deadline(self) -> float:
        """Return when somebody will have waited too long; infinity: nobody."""

    def answered(self) -> list[tuple[str, Verdict]]:
        """Return what became of those who waited, since it was asked last."""

    def check(self) -> None:
        """State every promise; with nothing in flight, that nothing is held."""


class Counting:
    """A router that counts what it has in flight, and is told nothing else."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._in_flight: dict[int, int] = {}  # by worker, also those who drain
        self._open: dict[Role, list[int]] = {"prefill": [], "decode": [], "aggregated": []}
        self._placed: dict[str, list[int]] = {}  # by key, where it counts

    # -- workers -------------------------------------------------------------------------------

    def add(self, member: Member, now: float) -> None:
        """See Router."""
        self._in_flight[member.worker_id] = 0
        self._open[member.role].append(member.worker_id)

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

    def route(self, key: str, request: Request, now: float) -> Verdict | None:
        """Choose one that does both, where there is such a pool, else one for each part."""
        whole = self._open["aggregated"]
        if whole:
            chosen = self.choose(whole, request)
            return self._place(key, Placed(chosen, None, self.name_reason()), [chosen])
        first, second = self._open["prefill"], self._open["decode"]
        if not (first and second):
            return Refused("no_schedulable_worker")
        computing, decoding = self.choose(first, request), self.choose(second, request)
        return self._place(
            key, Placed(decoding, computing, self.name_reason()), [decoding, computing]
        )

    def _place(self, key: str, placed: Placed, ids: list[int]) -> Placed:
        for worker_id in ids:
            self._in_flight[worker_id] += 1
        self._placed[key] = ids
        return placed

    def choose(self, ids: list[int], request: Request) -> int:
        """Return one of these workers, of which there is one at least."""
        raise NotImplementedError

    def name_reason(self) -> str:
        """Return why it was chosen, in a word or two."""
        return ""

    def prefilled(self, key: str, cached_tokens: int, now: float) -> None:
        """Count a prefill worker's part as over."""
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
        """Return how many requests were sent there and are not over, as far as it was told."""
        return self._in_flight[worker_id]

    def apply(self, worker_id: int, events: Sequence[KvEvent], now: float) -> None:
        """Caches are not looked at."""

    def tick(self, now: float) -> None:
        """There is nothing to do."""

    def next_deadline(self) -> float:
        """Nobody waits."""
        return float("inf")

    def answered(self) -> list[tuple[str, Verdict]]:
        """Nobody waits."""
        return []

    def check(self) -> None:
        """See Router."""
        assert all(count >= 0 for count in self._in_flight.values())
        if not self._placed:
            assert not any(self._in_flight.values()), "nothing is in flight"


class RoundRobin(Counting):
    """One after the other."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._turn = 0

    def choose(self, ids: list[int], request: Request) -> int:
        """See Counting."""
        self._turn += 1
        return ids[self._turn % len(ids)]


class RandomChoice(Counting):
    """Any."""

    def choose(self, ids: list[int], request: Request) -> int:
        """See Counting."""
        return ids[int(self._rng.random() * len(ids))]


class LeastLoaded(Counting):
    """Who has the fewest requests; equals are drawn."""

    def choose(self, ids: list[int], request: Request) -> int:
        """See Counting."""
        loads = [self.load(worker_id) for worker_id in ids]
        least = min(loads)
        equals = [one for one, load in zip(ids, loads, strict=True) if load == least]
        return equals[int(self._rng.random() * len(equals))]


class PowerOfTwo(Counting):
    """The less loaded of two that are drawn."""

    def choose(self, ids: list[int], request: Request) -> int:
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
    """Each session has its worker (rendezvous hashing); without one, the first block decides.

    Of `blocks` names the first that tells prompts apart counts: the last of the first few.
    """

    def __init__(self, rng: random.Random, prefix_blocks: int = 4) -> None:
        super().__init__(rng)
        self._prefix_blocks = prefix_blocks

    def choose(self, ids: list[int], request: Request) -> int:
        """See Counting."""
        name = request.session
        if not name and request.blocks:
            name = str(request.blocks[min(self._prefix_blocks, len(request.blocks)) - 1])
        name = name or str(request.number)
        return max(ids, key=lambda one: (xxh3_64_intdigest(f"{name}/{one}".encode()), one))
