"""The whole service the slow and obvious way: dicts, lists and the formula as it is written.

One scope. Loads are recomputed from the live reservations at every question, nothing is kept up to
date. Shares no code with the service; sections named are those of the contract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.models.engine_truth import RankTruth

REMEMBERED_S = 600.0

Rank = tuple[int, int]
Hashable = Any


@dataclass(frozen=True)
class TwinPrompt:
    """A prompt: what identifies its blocks for the ledger, and the question for the index."""

    chain: tuple[Hashable, ...]  # one id per whole block; equal prefix ⇔ equal leading ids
    isl_tokens: int
    query: Mapping[str, Any]  # for RankTruth.row; empty token_ids: nothing can match


@dataclass
class TwinReservation:
    """A live booking."""

    name: str
    rank: Rank
    prompt: TwinPrompt
    prefill_tokens: int
    touched_at: float
    outputs: int = 0
    prefill_done: bool = False
    lease: str | None = None
    ttl_s: float | None = None  # None: the default, unless there is a lease

    def blocks(self) -> set[Hashable]:
        """Prompt blocks, distinct by hash, and private output blocks."""
        return set(self.prompt.chain) | {("output", self.name, i) for i in range(self.outputs)}


@dataclass
class TwinLease:
    """An open lease."""

    owner: str
    ttl_s: float
    renewed_at: float


@dataclass
class TwinTicket:
    """A request that waits."""

    wish: Wish
    prompt: TwinPrompt
    name: str | None  # None: a plain selection
    term: Mapping[str, Any] = field(default_factory=dict)  # how long it is to live


@dataclass(frozen=True)
class Wish:
    """Which ranks a request may use, and which it likes."""

    allowed: frozenset[int] | None = None
    pinned: Rank | None = None
    required: frozenset[str] = frozenset()
    preferred: tuple[tuple[str, float], ...] = ()


@dataclass
class TwinWorker:
    """A registered worker; one event source per rank."""

    taints: frozenset[str]
    max_num_batched_tokens: int | None
    sources: dict[int, str]


@dataclass(frozen=True)
class TwinConfig:
    """The settings in force."""

    block_size: int
    credit: float = 1.0
    credit_decay: float = 0.0
    scale: float = 1.0
    track: bool = True
    queue_threshold: float = 16.0
    ttl_s: float = 300.0


@dataclass
class ServiceTwin:
    """Workers, what they hold, what they carry, who waits."""

    config: TwinConfig
    workers: dict[int, TwinWorker] = field(default_factory=dict)
    truths: dict[Rank, RankTruth] = field(default_factory=dict)
    live: dict[str, TwinReservation] = field(default_factory=dict)
    fractions: dict[tuple[Rank, Hashable], float] = field(default_factory=dict)
    freed: dict[str, float] = field(default_factory=dict)  # name → when
    now: float = 0.0
    leases: dict[str, TwinLease] = field(default_factory=dict)
    queue: list[TwinTicket] = field(default_factory=list)
    drained: set[int] = field(default_factory=set)  # workers that an operator lets take nothing
    held_back: set[int] = field(default_factory=set)  # and those whose source says so

    @property
    def closed(self) -> set[int]:
        """Workers that take nothing more."""
        return self.drained | self.held_back

    # -- workers (1.5) -------------------------------------------------------------------------

    def put_worker(self, worker_id: int, worker: TwinWorker) -> None:
        """Register or change: surviving ranks keep load, unchanged sources keep their index."""
        old = self.workers.get(worker_id)
        for rank in list(old.sources if old else ()):
            if rank not in worker.sources:
                self._drop_rank((worker_id, rank))
        for rank, source in worker.sources.items():
            if old is None or old.sources.get(rank) != source:
                self.truths[worker_id, rank] = RankTruth(self.config.block_size)
        self.workers[worker_id] = worker
        self.held_back.discard(worker_id)

    def delete_worker(self, worker_id: int) -> None:
        """Remove: load and index go with it."""
        self.drained.discard(worker_id)
        self.held_back.discard(worker_id)
        for rank in self.workers.pop(worker_id).sources:
            self._drop_rank((worker_id, rank))

    def _drop_rank(self, rank: Rank) -> None:
        del self.truths[rank]
        for name in [r.name for r in self.live.values() if r.rank == rank]:
            self.release(name)

    def ranks(self) -> list[Rank]:
        """Every rank of every worker."""
        return [(w, r) for w, worker in self.workers.items() for r in worker.sources]

    def open_ranks(self) -> list[Rank]:
        """Those of workers that do not drain."""
        return [(w, r) for w, r in self.ranks() if w not in self.closed]

    # -- load (4) ------------------------------------------------------------------------------

    def on_rank(self, rank: Rank) -> list[TwinReservation]:
        """Live reservations of a rank."""
        return [r for r in self.live.values() if r.rank == rank]

    def prefill(self, rank: Rank) -> int:
        """P: prefill tokens not computed yet."""
        return sum(r.prefill_tokens for r in self.on_rank(rank) if not r.prefill_done)

    def decode(self, rank: Rank) -> int:
        """D: distinct live blocks, weighted, rounded half up."""
        blocks = set().union(*(r.blocks() for r in self.on_rank(rank)))
        return math.floor(sum(self.fractions.get((rank, b), 1.0) for b in blocks) + 0.5)

    def new_blocks(self, rank: Rank, chain: Sequence[Hashable]) -> int:
        """N: blocks beyond the longest prefix shared with an active prompt (3.2)."""
        shared = 0
        for reservation in self.on_rank(rank):
            common = 0
            for one, other in zip(chain, reservation.prompt.chain, strict=False):
                if one != other:
                    break
                common += 1
            shared = max(shared, common)
        return len(chain) - shared

    def book(self, reservation: TwinReservation) -> None:
        """A reservation begins."""
        assert reservation.name not in self.live
        self.live[reservation.name] = reservation
        self.alive(reservation.name)

    def alive(self, name: str) -> None:
        """Somebody cares for a reservation, and so for all under the same lease."""
        mine = self.live[name]
        mine.touched_at = self.now
        if mine.lease is not None:
            self.leases[mine.lease].renewed_at = self.now

    def end_lease(self, lease_id: str) -> None:
        """A lease ends, with everything under it."""
        del self.leases[lease_id]
        for one in list(self.live.values()):
            if one.lease == lease_id:
                self.release(one.name)

    def output_block(self, name: str, fraction: float | None) -> None:
        """One more private block; a fraction applies to all that only this one references."""
        mine = self.live[name]
        mine.outputs += 1
        self.alive(name)
        if fraction is None:
            return
        others = (r.blocks() for r in self.on_rank(mine.rank) if r is not mine)
        for block in mine.blocks() - set().union(*others):
            self.fractions[mine.rank, block] = fraction

    def release(self, name: str) -> None:
        """A reservation ends; fractions die with their block."""
        gone = self.live.pop(name)
        self.freed[name] = self.now
        still: set[Hashable] = set().union(*(r.blocks() for r in self.on_rank(gone.rank)))
        for block in gone.blocks() - still:
            self.fractions.pop((gone.rank, block), None)

    def must_remember(self, name: str) -> bool:
        """Whether an id counts as recently freed: for ten minutes at least (4.3)."""
        return name in self.freed and self.now - self.freed[name] < REMEMBERED_S

    def expire(self) -> None:
        """End what nobody has touched for its TTL, and missed leases (D15)."""
        for lease_id, lease in list(self.leases.items()):
            if self.now - lease.renewed_at >= lease.ttl_s:
                self.end_lease(lease_id)
        for one in list(self.live.values()):
            ttl_s = self.config.ttl_s if one.ttl_s is None else one.ttl_s
            if one.lease is None and self.now - one.touched_at >= ttl_s:
                self.release(one.name)

    # -- choice (3) ----------------------------------------------------------------------------

    def overlap(self, rank: Rank, prompt: TwinPrompt) -> tuple[int, int, int]:
        """Blocks on the device, then the extensions on host and disk."""
        if not prompt.query["token_ids"]:
            return 0, 0, 0
        device, host, disk = self.truths[rank].row(prompt.query)
        return device, host - device, disk - host

    def cached_tokens(self, rank: Rank, prompt: TwinPrompt) -> int:
        """Tier-weighted tokens that need no prefill."""
        device, host, disk = self.overlap(rank, prompt)
        blocks = device + 0.75 * host + 0.25 * disk
        return math.floor(blocks * self.config.block_size + 0.5)

    def eligible(self, wish: Wish) -> list[Rank]:
        """Candidates of a request (3.1)."""
        return [rank for rank in self.wished(wish) if rank[0] not in self.closed]

    def wished(self, wish: Wish) -> list[Rank]:
        """With them those of workers that drain."""
        return [
            (worker_id, rank)
            for worker_id, rank in self.ranks()
            if (wish.allowed is None or worker_id in wish.allowed)
            and (wish.pinned is None or wish.pinned == (worker_id, rank))
            and wish.required <= self.workers[worker_id].taints
        ]

    def cost(self, rank: Rank, prompt: TwinPrompt, wish: Wish, among: Sequence[Rank]) -> float:
        """The formula of 3.2, line by line."""
        config, size = self.config, self.config.block_size
        device, host, disk = self.overlap(rank, prompt)
        cached, active = self.cached_tokens(rank, prompt), self.prefill(rank)
        raw = decay = 0.0
        if config.track:
            raw = (active + max(0, prompt.isl_tokens - cached) + cached) / size
        decay = 1.0
        if config.track and config.credit_decay > 0:
            excess = (active - min(map(self.prefill, among))) / size
            decay = 1 / (1 + config.credit_decay * excess / math.ceil(prompt.isl_tokens / size))
        credit = config.credit * decay * device + 0.75 * host + 0.25 * disk
        price = config.scale * max(0.0, raw - credit)
        price += self.decode(rank) + self.new_blocks(rank, prompt.chain)
        if wish.preferred and wish.pinned is None:
            taints = self.workers[rank[0]].taints
            price *= math.exp(-math.tanh(sum(w for taint, w in wish.preferred if taint in taints)))
        return price

    # -- waiting (3.6) -------------------------------------------------------------------------

    def is_busy(self, rank: Rank) -> bool:
        """Strictly above the threshold; never without a capacity (D1)."""
        capacity = self.workers[rank[0]].max_num_batched_tokens
        return capacity is not None and self.prefill(rank) > self.config.queue_threshold * capacity

    def must_wait(self, wish: Wish) -> bool:
        """No overtaking; else only when every eligible rank is busy."""
        if self.queue:
            return True
        ranks = self.eligible(wish)
        return bool(ranks) and all(map(self.is_busy, ranks))

    def head_may_go(self) -> bool:
        """Whether the first in the queue has a free rank, or none that could ever serve it."""
        ranks = self.eligible(self.queue[0].wish) if self.queue else []
        return bool(self.queue) and not (ranks and all(map(self.is_busy, ranks)))
