"""From which rank another one may pull KV blocks of a prompt, and what that costs.

A rank that holds more of the prompt than the candidate is a source, if blocks may move between the
two; so is the shared store, to which every rank has access, once any rank has reported a block
there. `pricing/cost.py` decides whether pulling pays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from indexer.types import WorkerRank
from select_service.core.ledger.pull_speeds import ANYWHERE, PullPath
from select_service.core.pricing.cost import Pulls
from select_service.types import KvSource

if TYPE_CHECKING:
    from collections.abc import Collection

    from select_service.core.columns import Floats, Slots
    from select_service.core.fleet.roles import Roles, TransferCosts
    from select_service.core.fleet.slots import FleetSlots
    from select_service.core.ledger.pull_speeds import PullSpeeds
    from select_service.core.pricing.cost import TierMatches
    from select_service.core.pricing.weights import Weights
    from select_service.types import KvTier, PulledBlocks

TIERS: Final[tuple[KvTier, ...]] = ("device", "host_pinned", "disk", "external")
_EXTERNAL: Final = 3

_PROFILES_MAX: Final = 16
"""Different holdings of a prompt that are compared: those that reach farthest. Ranks that hold
equally much count once."""


def kv_source(fleet_slots: FleetSlots, pulls: Pulls, slot: int) -> KvSource:
    """Return what a rank pulls, and from which, as the fleet is now."""
    worker, dp_rank = fleet_slots.rank_at(int(pulls.source[slot]))
    return told_source(pulls, slot, worker.worker_id, dp_rank, worker.spec.endpoint)


def told_source(
    pulls: Pulls, slot: int, worker_id: int, dp_rank: int, endpoint: str | None
) -> KvSource:
    """Return what a rank pulls, and from which."""
    return KvSource(
        worker_id=worker_id,
        dp_rank=dp_rank,
        endpoint=endpoint or "",
        tier=TIERS[pulls.tier[slot]],
        blocks=int(pulls.blocks[slot]),
    )


def _path(domain: str, tier: int) -> PullPath:
    """Return the path; a shared store is the same for all."""
    return PullPath(ANYWHERE if tier == _EXTERNAL else domain, TIERS[tier])


class _Level(NamedTuple):
    """Ranks between which blocks may move at one cost."""

    domain: str
    cost: float
    places: Slots  # by slot: ranks with the same number may; -1: with none
    numbers: int  # of places


class KvSources:
    """The sources in one partition. The levels are kept until workers come, go or change."""

    def __init__(
        self, fleet_slots: FleetSlots, costs: TransferCosts, speeds: PullSpeeds, block_size: int
    ) -> None:
        self._fleet_slots = fleet_slots
        self._costs = costs
        self._speeds = speeds
        self._block_size = block_size
        self._roles: Roles | None = None  # as of which the levels are
        self._levels: list[_Level] = []
        self._open = np.zeros(0, dtype=np.bool_)  # by slot

    def pulls(
        self,
        found: TierMatches,
        booked: Floats | None,
        weights: Weights,
        barred: Collection[int],
        prefill: Floats,
        worth: Floats,
    ) -> Pulls | None:
        """Return what each rank could pull; None: nothing.

        O(ranks) for each topology domain with a cost of its own.

        Args:
            found: what ranks hold of the prompt.
            booked: blocks of it that each rank is to compute for others; None: do not count.
            weights: of the tiers.
            barred: slots whose index is not to be relied on.
            prefill: queued tokens by slot; of equal sources the least busy one is taken.
            worth: what each slot saves with a block that it does not compute.
        """
        slots = len(prefill)
        if self._fleet_slots.roles is not self._roles or len(self._open) != slots:
            self._look(slots)
        held, external = found.by_slot(slots), found.external_by_slot(slots)
        ends = np.cumsum([held.device, held.host, held.disk - external, external], axis=0)
        is_source = (ends[-1] > 0.0) & self._open
        is_source[list(barred)] = False
        if not is_source.any():
            return None
        best = _Best(ends, booked, weights, worth)
        holders = np.flatnonzero(is_source)
        holders = holders[np.argsort(-prefill[holders], kind="stable")]  # the least busy one last
        profiles, of = np.unique(ends[::-1, holders], axis=1, return_inverse=True)
        for profile in range(profiles.shape[1])[-_PROFILES_MAX:]:
            some = holders[of.reshape(-1) == profile]
            reached = 0.0
            for tier in range(len(TIERS)):
                reach = ends[tier, some[0]]
                if reach > reached:
                    self._offer(best, some, tier, reached)
                reached = reach
        pulls = best.pulls
        return pulls if (pulls.source >= 0).any() else None

    def _offer(self, best: _Best, holders: Slots, tier: int, begin: float) -> None:
        """Offer what some ranks all hold up to a tier, which begins at this block."""
        for at, level in enumerate(self._levels):
            by_place = np.full(level.numbers + 1, -1)  # the last one is of those without a place
            by_place[level.places[holders]] = holders
            by_place[-1] = -1
            source = by_place[level.places]
            for nearer in self._levels[:at]:  # whatever was learnt, blocks move by the nearest one
                near = (nearer.places >= 0) & (nearer.places == nearer.places[source])
                source = np.where(near & (source >= 0), -1, source)
            best.offer(tier, source, level.cost, self._learnt(level.domain, tier))
        if tier == _EXTERNAL:  # what comes before is in the ranks themselves
            reads = self._open & (best.base >= begin)
            learnt = self._learnt(ANYWHERE, tier)
            best.offer(tier, np.where(reads, holders[-1], -1), 0.0, learnt)

    def _learnt(self, domain: str, tier: int) -> tuple[float, float] | None:
        """Return what was measured, if that is to be used; see `PullSpeeds.cost`."""
        if not self._costs.are_learnt:
            return None
        return self._speeds.cost(_path(domain, tier), self._block_size)

    def path(self, slot: int, pulled: PulledBlocks) -> PullPath | None:
        """Return what the blocks of a booked prompt move through; None: it is not known here."""
        source = self._fleet_slots.slot_of(WorkerRank(pulled.worker_id, pulled.dp_rank))
        if pulled.tier not in TIERS or source is None:
            return None
        tier = TIERS.index(pulled.tier)
        if tier == _EXTERNAL:
            return _path(ANYWHERE, tier)
        if self._fleet_slots.roles is not self._roles or max(slot, source) >= len(self._open):
            known = [at for one in self._fleet_slots.workers.values() for at in one.slots.values()]
            self._look(max(len(self._open), slot + 1, *(at + 1 for at in known)))
        for level in self._levels:
            if level.places[slot] == level.places[source] >= 0:
                return _path(level.domain, tier)
        return None

    def _look(self, slots: int) -> None:
        """Sort the ranks into levels, the cheapest first."""
        fleet_slots, costs = self._fleet_slots, self._costs
        self._roles = fleet_slots.roles
        self._open = np.zeros(slots, dtype=np.bool_)
        workers = list(fleet_slots.workers.values())  # those that drain will be gone
        bound = {
            one.spec.kv_transfer_domain
            for one in workers
            if one.spec.kv_transfer_enforcement == "required"
        }
        # in one order at every replica: of equal ones the first is the nearest
        domains = sorted({*costs.by_domain, *filter(None, bound)})
        by_domain, anywhere = costs.by_domain, costs.anywhere
        levels = {
            domain: (by_domain.get(domain, anywhere), np.full(slots, -1), dict[str, int]())
            for domain in domains
        }
        free = np.full(slots, -1)
        for worker in workers:
            held, spec = list(worker.slots.values()), worker.spec
            self._open[held] = True
            within = spec.kv_transfer_domain
            if spec.kv_transfer_enforcement != "required" or within is None:
                within = None
                free[held] = 0
            for domain, place in spec.topology_domains.items():
                if domain in levels and within in {None, domain}:
                    _, places, numbers = levels[domain]
                    places[held] = numbers.setdefault(place, len(numbers))
        found = [
            _Level(domain, cost, places, len(numbers))
            for domain, (cost, places, numbers) in levels.items()
        ]
        found.append(_Level(ANYWHERE, anywhere, free, 1))
        self._levels = sorted(found, key=lambda level: level.cost)


class _Best:
    """The best offer to each rank so far."""

    def __init__(
        self, ends: Floats, booked: Floats | None, weights: Weights, worth: Floats
    ) -> None:
        self._ends = ends  # by tier, then by slot
        self.base: Floats = ends[-1] if booked is None else np.maximum(ends[-1], booked)
        slots = len(self.base)
        self.pulls = Pulls(
            np.zeros(slots), np.zeros(slots), np.full(slots, -1), np.zeros(slots, dtype=np.int64)
        )
        self._saved, self._worth = np.zeros(slots), worth
        host, disk = weights.host_cache_hit_weight, weights.disk_cache_hit_weight
        # of a block on each tier
        self._reading = [0.0, max(0.0, 1.0 - host), max(0.0, 1.0 - disk), max(0.0, 1.0 - disk)]

    def offer(
        self, tier: int, source: Slots, cost: float, learnt: tuple[float, float] | None
    ) -> None:
        """Offer each rank what its source has up to a tier; -1: nothing.

        `tier` is that of the last block. `cost` is that of moving a block that has been
        read; instead, `learnt` is what any pull costs and each block adds, read and moved.
        """
        ends, base = self._ends, self.base
        blocks = np.where(source >= 0, ends[tier][source] - base, 0.0)
        costs = cost * blocks if learnt is None else learnt[0] + learnt[1] * blocks
        for at in range(1, tier + 1) if learnt is None else ():
            low = np.maximum(base, ends[at - 1][source])
            costs += self._reading[at] * np.maximum(ends[at][source] - low, 0.0)
        saved = blocks * self._worth - costs
        better = (blocks > 0.0) & (saved > self._saved)
        self._saved[better] = saved[better]
        for column, values in zip(self.pulls, (blocks, costs, source), strict=False):
            column[better] = values[better]
        self.pulls.tier[better] = tier
