"""A dumb twin of KvIndex: dictionaries and loops, what events mean word by word."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from indexer.core.cache_groups import GroupRule
from indexer.types import BASE_NAMESPACE, Namespace, Tier, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

Chain = tuple[bytes, ...]  # local hashes from the root on: what a block is


class NaiveGroups:
    """Cache groups beside full attention: `GroupIndex`, slowly."""

    def __init__(self) -> None:
        self.by_rank: dict[WorkerRank, dict[int, GroupRule]] = {}
        self.limited: set[WorkerRank] = set()
        self.grouped: dict[WorkerRank, Counter[tuple[Tier, int, int]]] = {}  # tier, group, name

    def clear(self, rank: WorkerRank) -> None:
        self.by_rank[rank] = {}
        self.grouped[rank] = Counter()
        self.limited.discard(rank)

    def recall(self, rank: WorkerRank, other: NaiveGroups) -> None:
        self.by_rank[rank] = other.by_rank[rank].copy()
        self.grouped[rank] = other.grouped[rank].copy()
        self.limited |= {rank} & other.limited

    def limit(self, rank: WorkerRank) -> None:
        if self.by_rank[rank]:
            self.limited.add(rank)

    def is_sparse(self, rank: WorkerRank) -> bool:
        """It knows engines with full attention only."""
        return False

    expect_sparse = is_sparse

    def rules(self, rank: WorkerRank) -> dict[int, GroupRule]:
        return self.by_rank.get(rank, {})

    def forget(self, rank: WorkerRank, group: int) -> None:
        """Blocks of groups with the same rule go as well: there is no telling them apart."""
        rule = self.by_rank[rank].pop(group, None)
        for key in list(self.grouped[rank]):
            if key[1] == group or self.by_rank[rank].get(key[1]) == rule:
                del self.grouped[rank][key]

    def store(
        self,
        rank: WorkerRank,
        tier: Tier,
        group: int,
        engine_hashes: Sequence[int],
        *,
        rule: GroupRule,
    ) -> int:
        if self.by_rank[rank].get(group, rule) != rule:
            self.forget(rank, group)
        self.by_rank[rank][group] = rule
        for name in engine_hashes:
            self.grouped[rank][tier, group, name] += 1
        return len(engine_hashes)

    def lacking(self, rank: WorkerRank, tier: Tier, group: int, names: Sequence[int]) -> list[int]:
        return [name for name in names if not self.grouped[rank][tier, group, name]]

    def longest(
        self, rank: WorkerRank, tier: Tier, names: Sequence[int], reach: int
    ) -> Generator[int, None, int]:
        if rank not in self.limited:
            return reach
        told = {group for (t, group, _), count in self.grouped[rank].items() if t is tier and count}
        places = [{name} for name in names]
        while reach and not (
            told >= self.by_rank[rank].keys() and self.allows(rank, tier, places, 0, reach)
        ):
            reach -= 1
            yield 1
        return reach

    def is_whole_prompt(self, hashes: bytes, rank: WorkerRank, batch: int | None) -> bool:
        """It is told of no prompts."""
        return False

    def remove(self, rank: WorkerRank, tier: Tier, group: int, engine_hashes: Sequence[int]) -> int:
        found = 0
        for name in engine_hashes:
            if self.grouped[rank][tier, group, name] > 0:
                self.grouped[rank][tier, group, name] -= 1
                found += 1
        return found

    def allows(
        self, rank: WorkerRank, tier: Tier, names: Sequence[set[int]], low: int, n: int
    ) -> bool:
        """Whether every group has what it needs of the first `n` blocks, on one tier.

        `names` are the engine hashes of each block; the tiers before have the first `low`.
        """
        grouped = self.grouped[rank]
        for group, (count, stride) in self.by_rank[rank].items():
            held_here = [key for key, number in grouped.items() if number > 0]
            if not any((t, g) == (tier, group) for t, g, _ in held_here):
                continue  # what holds nothing does not limit
            ends = range(stride, n + 1, stride)  # of the group's blocks
            if n % stride:
                return False
            for end in [*ends][-count:]:
                held = {name for name in names[end - 1] if grouped[tier, group, name] > 0}
                if end > low and not held:
                    return False
        return True


class NaiveHolder:
    """What one rank holds: a `Holder`, as far as reports are told by it."""

    def __init__(self, counts: Counter[tuple[Tier, int, int]]) -> None:
        self.counts = counts

    def held(self, tier: Tier, group: int, names: Sequence[int]) -> int:
        held = [self.is_sure(tier, group, name) for name in names]
        return [*held, False].index(False)

    def is_sure(self, tier: Tier, group: int, name: int) -> bool:
        return self.counts[tier, group, name] > 0


class NaiveIndex:
    """Answers what `KvIndex` answers, slowly."""

    def __init__(self, block_size: int, *, is_eagle: bool = False) -> None:
        self.block_size = block_size
        self.is_eagle = is_eagle
        self.slots: dict[WorkerRank, int] = {}
        self.chains: dict[WorkerRank, dict[int, Chain]] = {}
        self.namespaces: dict[WorkerRank, dict[int, Namespace]] = {}
        self.counts: dict[WorkerRank, Counter[tuple[Tier, int, int]]] = {}
        self.unproven: set[WorkerRank] = set()
        self.groups = NaiveGroups()

    def room(self, rank: WorkerRank) -> int:
        """It has room for whatever comes: what bounds do is tested of the index alone."""
        return 1 << 62

    def attach(self, rank: WorkerRank) -> int:
        if rank not in self.slots:
            self.slots[rank] = len(self.slots)
            self.clear(rank)
        return self.slots[rank]

    def slot_of(self, rank: WorkerRank) -> int | None:
        return self.slots.get(rank)

    def clear(self, rank: WorkerRank) -> None:
        self.chains[rank] = {}
        self.namespaces[rank] = {}
        self.counts[rank] = Counter()
        self.groups.clear(rank)
        self.unproven.discard(rank)

    def recall(self, rank: WorkerRank, other: NaiveIndex) -> None:
        """Take over what another index had of a rank; nobody sees it before `credit`."""
        self.attach(rank)
        self.chains[rank] = other.chains[rank].copy()
        self.namespaces[rank] = other.namespaces[rank].copy()
        self.counts[rank] = other.counts[rank].copy()
        self.groups.recall(rank, other.groups)
        self.unproven.add(rank)

    def credit(self, rank: WorkerRank) -> None:
        self.unproven.discard(rank)

    def heal(self, rank: WorkerRank) -> bool:
        """Nothing waits here: who is whose child is looked up when it is asked."""
        return False

    def namespace_of(self, rank: WorkerRank, engine_hash: int) -> Namespace | None:
        return self.namespaces[rank].get(engine_hash)

    def store(
        self,
        rank: WorkerRank,
        tier: Tier,
        parent: int | None,
        engine_hashes: Sequence[int],
        local_hashes: bytes,
        *,
        namespace: Namespace = BASE_NAMESPACE,
        group: int = 0,
        heals: bool = True,
    ) -> int:
        names = set(engine_hashes)
        if len(names) < len(engine_hashes) or parent in names:
            return 0
        chain = () if parent is None else self.chains[rank].get(parent)
        if chain is None:
            return len(engine_hashes)  # an orphan: left out
        for at, name in enumerate(engine_hashes):
            chain = (*chain, local_hashes[8 * at : 8 * at + 8])
            self.chains[rank][name] = chain
            self.namespaces[rank][name] = namespace
            self.counts[rank][tier, group, name] += 1
        return len(engine_hashes)

    def remove(
        self, rank: WorkerRank, tier: Tier, engine_hashes: Sequence[int], *, group: int = 0
    ) -> int:
        found = 0
        for name in engine_hashes:
            if self.counts[rank][tier, group, name] > 0:
                self.counts[rank][tier, group, name] -= 1
                found += 1
        return found

    def mark_on_tier(
        self, rank: WorkerRank, tier: Tier, engine_hashes: Sequence[int], *, group: int = 0
    ) -> int:
        known = [name for name in engine_hashes if name in self.chains[rank]]
        for name in known:
            self.counts[rank][tier, group, name] += 1
        return len(known)

    def holder(self, rank: WorkerRank) -> NaiveHolder:
        return NaiveHolder(self.counts[rank])

    def expect_full_attention(self, rank: WorkerRank) -> None:
        pass

    def held(self, rank: WorkerRank, tier: Tier) -> set[Chain]:
        if rank in self.unproven:
            return set()
        return {
            self.chains[rank][name]
            for (t, _, name), count in self.counts.get(rank, Counter()).items()
            if count > 0 and t is tier
        }

    def blocks_of(self, rank: WorkerRank) -> list[int]:
        return [len(self.held(rank, tier)) for tier in Tier]

    def row(self, rank: WorkerRank, local_hashes: bytes) -> tuple[int, int, int]:
        """device, host and disk blocks, cumulative, as /overlap_scores prints them."""
        blocks = [local_hashes[at : at + 8] for at in range(0, len(local_hashes), 8)]
        depth, depths = 0, []
        for tier in Tier:
            held = self.held(rank, tier)
            low = depth
            while depth < len(blocks) and tuple(blocks[: depth + 1]) in held:
                depth += 1
            limited = rank in self.groups.limited
            held_to = depth if limited else 0
            names = [self.names_of(rank, tuple(blocks[: at + 1])) for at in range(held_to)]
            while limited and depth > low and not self.groups.allows(rank, tier, names, low, depth):
                depth -= 1
            depths.append(depth)
        device, host, _, external = depths
        return device, host, external

    def names_of(self, rank: WorkerRank, chain: Chain) -> set[int]:
        """The engine hashes of a block that the rank holds somewhere."""
        known = self.chains[rank]
        return {
            name
            for (_, _, name), count in self.counts[rank].items()
            if count > 0 and known.get(name) == chain
        }

    def sweep(self, budget: int) -> int:
        return 0

    def check(self) -> None:
        assert all(count >= 0 for counts in self.counts.values() for count in counts.values())
