"""Scale-down advice: which workers are cheapest to lose together.

Losing a worker loses the work in flight on it and the blocks no other worker holds. The first is
its active load, in tokens. The second is weighted by use: the tokens that requests recently found
on the worker, spread evenly over its blocks. A block held by several workers, and the hits on it,
are lost only with the last of them, so the answer is a set. Where caches are full, the room itself
is missed, whichever worker goes; it is worth the hits found in it.
"""

from __future__ import annotations

from heapq import nlargest, nsmallest
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from indexer.core.node import bits
from indexer.types import WorkerRank
from select_service.types.workers import HIT_RATE_LOSS_MAX, ScaleDownCandidate

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Mapping, Sequence

    from indexer.core.loss import HeldTogether
    from indexer.types import Scope
    from select_service.core.fleet.catalog import Worker
    from select_service.core.partition import Partition
    from select_service.types import Role

DELETION_COST_MAX: Final = 2**31 - 1
"""Maximum of `controller.kubernetes.io/pod-deletion-cost`, an int32."""

COLD: Final = 1e-3
"""Weight of a cached token without recent hits, relative to a computed token; it breaks ties."""

MASKS_PER_SLICE: Final = 32
WORKERS_PER_SLICE: Final = 8


class _Seen(NamedTuple):
    """A partition's holders, and the blocks they held when they were counted."""

    partition: Partition
    owners: dict[int, int]  # holder id → worker_id
    held: HeldTogether


class _CandidateWorker(NamedTuple):
    """A worker that may go: what the answer says of it, and what its loss would cost."""

    answer: ScaleDownCandidate
    load: float
    block_worth: float  # tokens lost with one of its blocks
    # its share of the KV blocks of the scope's workers in question, if all report theirs
    room: float | None
    found: float  # hits on it, as a share of the scope's recent prompt tokens
    displaced: float  # hits elsewhere that its share of the computed tokens would evict


class _Lost(NamedTuple):
    """Losses by set of places: each entry is lost once all places in the set are gone."""

    blocks: dict[int, float]
    tokens: dict[int, float]


class ScaleDown:
    """Ranks workers by the cost of losing them."""

    def __init__(self, partitions: Mapping[Scope, Partition]) -> None:
        self._partitions = partitions

    def candidates(
        self,
        count: int,
        model_name: str | None,
        tenant_ids: Collection[str] | None,
        role: Role | None = None,
        hit_rate_loss_max: float = HIT_RATE_LOSS_MAX,
    ) -> Generator[None, None, list[ScaleDownCandidate]]:
        """Return up to `count` workers that are cheap to lose together, in order of removal.

        Draining workers come first: they are leaving anyway. None as a filter means all models,
        tenants or roles. Blocks that other workers hold too are not lost. A worker is advised while
        the loss of hit rate so far stays within `hit_rate_loss_max`. Yields between slices of work,
        O(nodes of all ranks) in all.
        """
        partitions = [
            one
            for one in self._partitions.values()
            if model_name in (None, one.scope.model_name)
            and (tenant_ids is None or one.scope.tenant_id in tenant_ids)
        ]
        seen, candidate_workers = list[_Seen](), list[_CandidateWorker]()
        for partition in partitions:
            owners: dict[int, int] = {}
            for number, worker in enumerate(_asked_for(partition, role)):
                if not number % WORKERS_PER_SLICE:
                    yield
                for holder in partition.index.holder_ids(_ranks(worker)):
                    owners[holder] = worker.worker_id
            held = yield from partition.index.held_together(_ranks_of_most(partition, count))
            seen.append(_Seen(partition, owners, held))
        for one in seen:
            yield from _sit(one, role, candidate_workers)
        candidate_workers.sort(key=lambda candidate_worker: candidate_worker.answer.worker_id)
        lost = yield from _lost(candidate_workers, seen, count)
        drains = [
            place
            for place, candidate_worker in enumerate(candidate_workers)
            if candidate_worker.answer.drains
        ]
        loads = [candidate_worker.load for candidate_worker in candidate_workers]
        order = yield from cheapest_set(loads, lost.tokens, drains, count)
        costs = yield from marginals(order, loads, lost.tokens)
        sole = yield from marginals(order, [0.0] * len(candidate_workers), lost.blocks)
        return _answers(
            [candidate_workers[place] for place in order], costs, sole, hit_rate_loss_max
        )


def _asked_for(partition: Partition, role: Role | None) -> list[Worker]:
    """Return the workers with this role (no role is aggregated), or all workers for None."""
    present = partition.fleet_slots.present.values()
    return [one for one in present if role in (None, one.spec.role or "aggregated")]


def _ranks(worker: Worker) -> list[WorkerRank]:
    return [WorkerRank(worker.worker_id, rank) for rank in worker.slots]


def _ranks_of_most(partition: Partition, count: int) -> int:
    """Return the most ranks that `count` workers can have."""
    present = partition.fleet_slots.present.values()
    return sum(nlargest(count, (len(worker.slots) for worker in present)))


def _sit(
    seen: _Seen, role: Role | None, candidate_workers: list[_CandidateWorker]
) -> Generator[None, None, None]:
    """Add a candidate for each worker still present; its numbers are read without a break."""
    partition, copies = seen.partition, seen.held.copies
    index, loads = partition.index, partition.ledger.loads
    present = _asked_for(partition, role)
    rooms = [(one.spec.total_kv_blocks or 0) * len(one.slots) for one in present]
    room_of_all = sum(rooms) if all(rooms) else 0
    demand = partition.demand
    asked = max(1.0, demand.asked_lately)
    hit_rate = demand.found_lately / asked
    extra: dict[int, int] = {}
    for holder, worker_id in seen.owners.items():
        extra[worker_id] = extra.get(worker_id, 0) + copies.get(holder, 0)
    for number, (worker, room) in enumerate(zip(present, rooms, strict=True)):
        if not number % WORKERS_PER_SLICE:
            yield
        if partition.fleet_slots.present.get(worker.worker_id) is not worker:
            continue
        attached = [rank for rank in _ranks(worker) if index.slot_of(rank) is not None]
        slots = list(worker.slots.values())
        answer = ScaleDownCandidate(
            worker_id=worker.worker_id,
            model_name=partition.scope.model_name,
            tenant_id=partition.scope.tenant_id,
            drains=worker.drain is not None,
            cost_tokens=0.0,
            cost_tokens_so_far=0.0,
            sole_blocks=0,
            blocks=sum(sum(index.blocks_of(rank)) for rank in attached),
            reused_tokens=demand.reused.get(worker.worker_id, 0.0),
            hit_rate_loss_so_far=0.0,
            advised=False,
            reservations=sum(int(loads.requests[slot]) for slot in slots),
            prefill_tokens=sum(loads.prefill_left[slot] for slot in slots),
            decode_blocks=sum(int(loads.decode[slot]) for slot in slots),
            pod_deletion_cost=0,
        )
        # a block on two tiers counts once
        distinct = max(1, answer.blocks - extra.get(worker.worker_id, 0))
        decode_blocks = sum(float(loads.decode[slot]) for slot in slots)
        load = answer.prefill_tokens + decode_blocks * index.block_size
        worth = answer.reused_tokens / distinct + COLD * index.block_size
        share = room / room_of_all if room_of_all else None
        churned = loads.recent.churned
        churn = sum(float(loads.churn[slot]) for slot in slots)
        computed = churn / churned if churned > 0 else 0.0
        found, displaced = answer.reused_tokens / asked, computed * hit_rate
        candidate_workers.append(_CandidateWorker(answer, load, worth, share, found, displaced))


def _lost(
    candidate_workers: Sequence[_CandidateWorker], seen: Sequence[_Seen], count: int
) -> Generator[None, None, _Lost]:
    """Translate the losses of the partitions from holders to places."""
    place_of = {
        candidate_worker.answer.worker_id: place
        for place, candidate_worker in enumerate(candidate_workers)
    }
    found = _Lost({}, {})
    for one in seen:
        # a holder that left has nothing to lose; one that came in the meantime keeps its blocks: ~0
        # stands for more holders than may go
        bit_of = {
            holder: 1 << place_of[worker_id] if worker_id in place_of else 0
            for holder, worker_id in one.owners.items()
        }
        for number, (mask, blocks) in enumerate(one.held.blocks.items()):
            if not number % MASKS_PER_SLICE:
                yield
            places = 0
            for holder in bits(mask):
                places |= bit_of.get(holder, ~0)
            if places <= 0 or places.bit_count() > count:
                continue
            worth = sum(candidate_workers[place].block_worth for place in bits(places))
            found.blocks[places] = found.blocks.get(places, 0.0) + blocks
            found.tokens[places] = found.tokens.get(places, 0.0) + blocks * worth
    return found


def _answers(
    candidate_workers: Sequence[_CandidateWorker],
    costs: Sequence[float],
    sole: Sequence[float],
    hit_rate_loss_max: float,
) -> list[ScaleDownCandidate]:
    rows: list[ScaleDownCandidate] = []
    so_far = 0.0
    rooms: dict[tuple[str, str], float] = {}
    hits: dict[tuple[str, str], tuple[float, float]] = {}
    for candidate_worker, cost, blocks in zip(candidate_workers, costs, sole, strict=True):
        so_far += cost
        scope = candidate_worker.answer.model_name, candidate_worker.answer.tenant_id
        rooms[scope] = rooms.get(scope, 0.0) + (candidate_worker.room or 0.0)
        found, displaced = hits.get(scope, (0.0, 0.0))
        hits[scope] = found + candidate_worker.found, displaced + candidate_worker.displaced
        loss = _hit_rate_loss(*hits[scope])
        rows.append(
            replace(
                candidate_worker.answer,
                cost_tokens=cost,
                cost_tokens_so_far=so_far,
                sole_blocks=int(blocks),
                room_so_far=UNSET if candidate_worker.room is None else rooms[scope],
                hit_rate_loss_so_far=loss,
                advised=loss <= hit_rate_loss_max,
                pod_deletion_cost=_deletion_cost(cost, drains=candidate_worker.answer.drains),
            )
        )
    return rows


def _hit_rate_loss(found: float, displaced: float) -> float:
    """Return by how much the hit rate falls without the workers that had `found` of the hits.

    At first the hits on these workers are missing: `found`. Then the remaining workers compute
    those prompts, hit them again, and evict as much as these workers did: in the long run hits
    shrink with the room, by `displaced`. The cheapest workers have been unlucky lately, so `found`
    alone understates their loss; the mean of both is within 0.6 percentage points of what a
    recorded trace lost (`bench/planner/README.md`).
    """
    return max(found, (found + displaced) / 2)


def _deletion_cost(cost: float, *, drains: bool) -> int:
    """Return the int32 that Kubernetes sorts pods by; draining workers rank below all others."""
    capped = min(int(cost), DELETION_COST_MAX)
    return capped - DELETION_COST_MAX - 1 if drains else capped


# Which set of `count` workers is the cheapest to lose together. Losing a worker costs what only it
# holds, and losing the last of several costs what they share. So the cost of one only grows with
# those lost before it, and the cheapest pair need not include the cheapest one.

SETS_MAX: Final = 2_000
"""Partial sets examined: a tenth of a second of work, in slices, for 64 workers. If little is
shared, a few dozen are enough to be sure."""

GROUPS_PER_SLICE: Final = 32

_BETTER: Final = 1.0 - 1e-9
"""A set must beat another by more than the rounding errors of float sums."""


class _Account:
    """The current cost of each place, given those already taken."""

    def __init__(self, alone: Sequence[float], shared: Mapping[int, float]) -> None:
        self.marginal = list(alone)
        self._left = list(shared)  # for each group: mask of its places that are still there
        self._weight = list(shared.values())
        self._groups: list[list[int]] = [[] for _ in alone]

    def fill(self) -> Generator[None, None, None]:
        """Record the groups of every place, and add unshared costs; yields in between."""
        for number, mask in enumerate(self._left):
            if not number % GROUPS_PER_SLICE:
                yield
            if not mask & mask - 1:
                self.marginal[mask.bit_length() - 1] += self._weight[number]
                continue
            for place in bits(mask):
                self._groups[place].append(number)

    def take(self, place: int) -> None:
        """Remove a place; the last one left of a group then bears its whole weight."""
        left = self._left
        for group in self._groups[place]:
            rest = left[group] = left[group] ^ 1 << place
            if rest and not rest & rest - 1:
                self.marginal[rest.bit_length() - 1] += self._weight[group]

    def put_back(self, place: int) -> None:
        """Undo the most recent `take`."""
        left = self._left
        for group in self._groups[place]:
            rest = left[group]
            if rest and not rest & rest - 1:
                self.marginal[rest.bit_length() - 1] -= self._weight[group]
            left[group] = rest ^ 1 << place

    def cheapest(self, places: Collection[int]) -> int:
        """Return the place that costs least now, the first of equals."""
        return min(places, key=lambda place: (self.marginal[place], place))


def cheapest_set(
    alone: Sequence[float], shared: Mapping[int, float], firsts: Sequence[int], count: int
) -> Generator[None, None, list[int]]:
    """Choose up to `count` places, in the order to lose them; yields between slices of work.

    Those in `firsts` come first. The rest is found by repeatedly taking the cheapest, unless one of
    `SETS_MAX` other sets costs less together. Either way each next place in the answer is the
    cheapest of the set once those before it are gone.

    `alone` is the cost of losing each place, whatever else goes; `shared`, by the mask of
    places, that of losing all of them. No cost is negative.
    """
    account = _Account(alone, shared)
    yield from account.fill()
    before = yield from _one_by_one(account, firsts, count)
    others = set(range(len(alone))).difference(before)
    wanted = min(count - len(before), len(others))
    if wanted < 1:
        return before
    search = _Search(account, others, wanted)
    yield from search.run()
    return before + (yield from _one_by_one(account, search.best, wanted))


def marginals(
    order: Sequence[int], alone: Sequence[float], shared: Mapping[int, float]
) -> Generator[None, None, list[float]]:
    """Return what each of `order` costs once those before it are gone; in slices."""
    turn = {place: number for number, place in enumerate(order)}
    lost = [alone[place] for place in order]
    for number, (mask, weight) in enumerate(shared.items()):
        if not number % GROUPS_PER_SLICE:
            yield
        last = max(turn.get(place, len(order)) for place in bits(mask))
        if last < len(order):
            lost[last] += weight
    return lost


def _one_by_one(
    account: _Account, places: Collection[int], count: int
) -> Generator[None, None, list[int]]:
    """Repeatedly take the cheapest place; `account` is left without them."""
    left, taken = set(places), list[int]()
    while left and len(taken) < count:
        place = account.cheapest(left)
        account.take(place)
        left.remove(place)
        taken.append(place)
        yield
    return taken


class _Search:
    """Branch and bound over sets of `wanted` places: costs only grow as others go."""

    def __init__(self, account: _Account, places: Collection[int], wanted: int) -> None:
        self._account = account
        self._order = sorted(places, key=lambda place: (account.marginal[place], place))
        self._wanted = wanted
        self._left = SETS_MAX
        self._cost = 0.0
        self._picked: list[int] = []
        self.best: list[int] = []

    def run(self) -> Generator[None, None, None]:
        """Find the best set; `account` is restored."""
        account = self._account
        before = account.marginal.copy()
        for _ in range(self._wanted):
            place = account.cheapest(set(self._order).difference(self.best))
            self._cost += account.marginal[place]
            account.take(place)
            self.best.append(place)
            yield
        for place in reversed(self.best):
            account.put_back(place)
            yield
        account.marginal[:] = before  # float sums are not exactly reversible
        if self._wanted < len(self._order):
            yield from self._branch(0, 0.0)
        account.marginal[:] = before

    def _branch(self, start: int, cost: float) -> Generator[None, None, None]:
        need = self._wanted - len(self._picked)
        if not need:
            if cost < self._cost * _BETTER:
                self._cost, self.best = cost, self._picked.copy()
            return
        marginal = self._account.marginal
        for number in range(start, len(self._order) - need + 1):
            rest = self._order[number:]
            least = cost + sum(nsmallest(need, map(marginal.__getitem__, rest)))
            if self._left <= 0 or least >= self._cost * _BETTER:
                return
            self._left -= 1
            yield
            place = rest[0]
            price = marginal[place]
            self._account.take(place)
            self._picked.append(place)
            yield from self._branch(number + 1, cost + price)
            self._picked.pop()
            self._account.put_back(place)
            yield
