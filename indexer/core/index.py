"""KvIndex: which rank holds which block of one partition, on which tier.

Stores, removals and clears get their meaning here: reference counts, names that move to other
content, runs with an unannounced parent. The tree below knows contents and positions only; the
registry above feeds decoded events in.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Final

from indexer.core import (
    holdings,
    index_size,
    irregular_stores,
    orphans,
    removal,
)
from indexer.core.audit import audit, audit_masks
from indexer.core.budget import BlockBudget, TenantBudget
from indexer.core.checkpoint import CheckpointRestore, CheckpointRun, RankChanged, freeze
from indexer.core.dump import dump_groups, dump_tier
from indexer.core.group_index import GroupIndex
from indexer.core.group_matches import match_by_group
from indexer.core.holder import UNDECIDED_GROUP, Holder
from indexer.core.index_size import IndexStats
from indexer.core.loss import HeldTogether, held_together
from indexer.core.radix_tree import RadixTree
from indexer.core.tiers import Matches, SlotTable, continue_below
from indexer.types import (
    BASE_NAMESPACE,
    HASH_BYTES,
    Namespace,
    StreamLimits,
    Tier,
    WorkerRank,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized

    from indexer.core.dump import DumpEvent
    from indexer.types import PackedHashes

_NAMES_PER_VISIT: Final = 64
"""Names a sweep forgets for the price of one node: about as long as one node visit takes."""


class KvIndex:
    """The blocks of all ranks of one partition.

    A rank must be attached before it stores. Engine hashes are names within one rank: a name stands
    for one content position, the latest announced. If a rank announces a name for another position,
    everything it held under that name at the old place is forgotten, on every tier, because there
    is no telling what the engine still has there.
    """

    def __init__(
        self,
        block_size: int,
        *,
        is_eagle: bool = False,
        limits: StreamLimits | None = None,
        budget: TenantBudget | None = None,
    ) -> None:
        self.block_size = block_size
        self.is_eagle = is_eagle
        limits = limits or StreamLimits()
        self.orphan_blocks_max = limits.orphan_blocks_max
        """Blocks of all ranks together that may wait for a parent."""
        self.budget = budget or BlockBudget(limits).of("")
        self.capacity = 0
        """Number of slots ever allocated: the length that columns by slot must have."""
        self.tree = RadixTree()
        self._ranks: dict[WorkerRank, Holder] = {}
        self._rank_of: dict[int, WorkerRank] = {}
        self.groups = GroupIndex(self._ranks)
        """Cache groups beside full attention."""
        self._table = SlotTable()
        self._no_matches = Matches(self._table, [], [], [])
        self._free_slots: list[int] = []
        self._free_ids: list[int] = []
        self._spent_ids: list[int] = []  # swept; no longer in any mask, unless a dump keeps one
        self._below = 0  # mask of holders that ever held a block below the device
        self._unproven = 0  # mask of holders that no answer and no dump may name yet
        self._retired: deque[Holder] = deque()
        self._dumps = 0  # dumps in progress; ids and nodes must keep their identity meanwhile
        self.orphan_blocks_dropped = 0
        self._events_refused = 0
        self.on_clear: Callable[[int], None] | None = None
        """Called with the slot of a rank whose cache is empty, also if the index had none of it.

        It must not lead back here, or an index that is let go stays until the collector
        comes."""

    # ---- room

    def tables(self) -> Iterator[Sized]:
        """Yield the dicts that grow with blocks, for rebuilding once they have shrunk.

        Yields nothing while a dump is in progress, because it iterates over these dicts.
        """
        if not self._dumps:
            yield self.tree.root.children
            for holder in list(self._ranks.values()):
                yield holder.runs

    def room(self, rank: WorkerRank) -> int:
        """Return how many more blocks a rank may hold; may be negative."""
        holder = self._ranks.get(rank)
        return 0 if holder is None else self.budget.room(holder.size)

    def weights(self) -> Iterator[tuple[WorkerRank, int, int] | None]:
        """Yield each rank with its blocks and their approximate bytes; see `index_size.py`."""
        return index_size.weights(self.tree, self._ranks)

    # ---- ranks

    def attach(self, rank: WorkerRank) -> int:
        """Give a rank a slot and return it; idempotent."""
        holder = self._ranks.get(rank)
        if holder is None:
            if self._free_slots:
                slot = heappop(self._free_slots)
            else:
                slot, self.capacity = self.capacity, self.capacity + 1
            holder = self._enter(rank, slot)
            self._rank_of[slot] = rank
        return holder.slot

    def detach(self, rank: WorkerRank) -> None:
        """Forget a rank. O(1): answers no longer name it; `sweep` frees the memory."""
        holder = self._ranks.pop(rank, None)
        if holder is not None:
            self._retire(holder)
            del self._rank_of[holder.slot]
            heappush(self._free_slots, holder.slot)

    def clear(self, rank: WorkerRank) -> None:
        """Forget all blocks, counts and orphans of a rank on every tier. O(1), see `detach`."""
        holder = self._ranks.get(rank)
        if holder is None:
            return
        if self.on_clear is not None:
            self.on_clear(holder.slot)
        is_unproven = self._unproven & holder.bit
        if holder.where or holder.waiting or holder.limiting is not None or is_unproven:
            self._retire(holder)
            self._enter(rank, holder.slot)

    def ranks(self) -> list[WorkerRank]:
        """Return every attached rank."""
        return list(self._ranks)

    def slot_of(self, rank: WorkerRank) -> int | None:
        """Return a rank's row in columns by slot."""
        holder = self._ranks.get(rank)
        return None if holder is None else holder.slot

    def rank_of(self, slot: int) -> WorkerRank | None:
        """Return the rank behind a slot."""
        return self._rank_of.get(slot)

    def _enter(self, rank: WorkerRank, slot: int) -> Holder:
        holders = self.tree.holders
        if not self._dumps:
            while self._spent_ids:
                heappush(self._free_ids, self._spent_ids.pop())
        if self._free_ids:
            holder_id = heappop(self._free_ids)
        else:
            holder_id = len(holders)
            holders.append(None)
        holder = holders[holder_id] = self._ranks[rank] = Holder(rank, slot, holder_id, holders)
        self._table.assign(holder_id, slot)
        self.tree.live |= holder.bit
        return holder

    def _retire(self, holder: Holder) -> None:
        self.tree.live &= ~holder.bit
        self._below &= ~holder.bit
        self.groups.limited &= ~holder.bit
        self._unproven &= ~holder.bit
        self._retired.append(holder)

    # ---- events

    def store(
        self,
        rank: WorkerRank,
        tier: Tier,
        parent: int | None,
        engine_hashes: Sequence[int],
        local_hashes: PackedHashes,
        *,
        namespace: Namespace = BASE_NAMESPACE,
        group: int = 0,
        heals: bool = True,
    ) -> int:
        """Hold consecutive blocks behind `parent` (None: at the root), adding one reference each.

        Blocks behind a parent that the rank never announced, or lost on every tier, wait for it and
        match nothing. `namespace` matters for blocks that do not inherit one. With `heals` false
        the caller calls `heal` until nothing waits. Returns the number of blocks accepted: all, or
        none if it is refused.

        Raises:
            KeyError: the rank is not attached.
            ValueError: the numbers of local hashes and engine hashes differ.
        """
        holder = self._ranks[rank]
        if len(local_hashes) != len(engine_hashes) * HASH_BYTES:
            raise ValueError("a block needs one engine hash and one local hash")
        live = group != UNDECIDED_GROUP
        if group != holder.home:
            group = holder.group_of_store(group)
        if tier:
            self._below |= holder.bit
        origin = self.tree.place_behind(holder, parent)
        accepted = None
        if origin is not None and group == holder.home:
            accepted = holdings.cover_new_branch(
                self.tree, holder, tier, origin, engine_hashes, local_hashes, namespace
            )
        if accepted is None:
            event = (parent, engine_hashes, local_hashes, namespace)
            accepted = irregular_stores.store_any(self.tree, holder, tier, group, event)
            self._events_refused += accepted is None
        if accepted and holder.waiting:
            orphans.note_late(holder, engine_hashes)
            # before any of them is dropped because too many wait
            if heals or self.tree.orphan_blocks > self.orphan_blocks_max:
                while self.heal(rank):
                    pass
        if live and self.tree.orphan_blocks > self.orphan_blocks_max:
            here, ranks = self.tree.live | self._unproven, len(self._ranks)
            dropped = orphans.drop_old(self.tree, holder, self.orphan_blocks_max, here, ranks)
            self.orphan_blocks_dropped += dropped
        return accepted or 0

    def heal(self, rank: WorkerRank) -> bool:
        """Place some of the blocks that waited for a parent; return whether more are left."""
        holder = self._ranks.get(rank)
        return holder is not None and orphans.heal(self.tree, holder)

    def remove(
        self, rank: WorkerRank, tier: Tier, engine_hashes: Sequence[int], *, group: int = 0
    ) -> int:
        """Drop one reference per block on one tier; return how many existed.

        A block goes with its last reference of all groups. Blocks behind it stay held and match
        again once it is stored again.
        """
        holder = self._ranks.get(rank)
        if holder is None:
            return 0
        if group != holder.home:
            group = holder.group_of_removal(group)
        if holder.hearsay is not None:
            holder.hearsay[tier].difference_update(engine_hashes)
        counts = holder.counts[tier]
        if group == holder.home and (counts is None or counts.are_plain(engine_hashes)):
            return removal.uncover_listed(self.tree, holder, tier, engine_hashes)
        return removal.drop_references(self.tree, holder, tier, group, engine_hashes)

    def mark_on_tier(
        self, rank: WorkerRank, tier: Tier, engine_hashes: Sequence[int], *, group: int = 0
    ) -> int:
        """Hold blocks that the rank already knows on `tier` as well; return how many it knew.

        An offload placeholder means this. It counts as a store, and needs its own removal.
        """
        holder = self._ranks[rank]
        if group != holder.home:
            group = holder.group_of_store(group)
        known = holdings.cover_named(holder, tier, group, engine_hashes)
        if tier and known:
            self._below |= holder.bit
        return known

    def expect_full_attention(self, rank: WorkerRank) -> None:
        """Forget the prefixes, not the groups, of a rank whose engine has full attention."""
        if self.groups.is_sparse(rank):
            before = self._ranks[rank]
            self._retire(before)
            holder = self._enter(rank, before.slot)
            holder.limiting, before.limiting = before.limiting, None
            if holder.limiting is not None:
                holder.limiting.prefixes, holder.limiting.is_in_force = None, False

    def holder(self, rank: WorkerRank) -> Holder:
        """Return what an attached rank holds; its home group needs no entry in its counts."""
        return self._ranks[rank]

    def namespace_of(self, rank: WorkerRank, engine_hash: int) -> Namespace | None:
        """Return the namespace that a child of this block inherits; None: unknown block."""
        holder = self._ranks.get(rank)
        node = None if holder is None else holder.where.get(engine_hash)
        return None if node is None else node.namespace

    # ---- answers

    def find_matches(self, hashes: PackedHashes, isl_tokens: int | None = None) -> Matches:
        """Return how far each rank holds a prompt, per tier.

        With the prompt's length, ranks whose cache groups limit their matches match at most what
        comes before the last token, because their engine computes that one itself and needs what
        is behind an earlier block then.

        O(nodes on the path) if everything is on the device; ranks with lower tiers continue in
        groups.
        """
        if hashes[:HASH_BYTES] not in self.tree.root.children:
            return self._no_matches
        groups, path, matched = self.tree.find(hashes, self.tree.live)
        below = self._below & self.tree.live
        grouped = self.groups.limited & self.tree.live
        if grouped and path:
            found = groups, path, matched
            most = matched if isl_tokens is None else (isl_tokens - 1) // self.block_size
            groups, host, disk, external = match_by_group(self.tree, found, (below, grouped), most)
            return Matches(self._table, groups, host, disk, external=external)
        if not below or not path:
            return Matches(self._table, groups, [], [])
        host, disk, external = continue_below(groups, path, matched, below)
        return Matches(self._table, groups, host, disk, external=external)

    # ---- upkeep

    def newest_namespaces(self, chains_max: int) -> set[Namespace]:
        """Return the namespaces of the newest sequences, looking at `chains_max` at most."""
        newest = islice(reversed(self.tree.root.children.values()), chains_max)
        return {node.namespace for node in newest}

    @property
    def is_swept(self) -> bool:
        """Whether `sweep` has nothing to do. O(1)."""
        return not (self._retired or self.tree.dust)

    def sweep(self, budget: int) -> int:
        """Free the memory of ranks that left and merge nodes; visit about `budget` nodes.

        Returns how much is left, 0 when clean. Call it between other work: nothing else frees what
        `clear` and `detach` put aside.
        """
        while budget > 0 and self._retired:
            budget -= self._sweep_retired(self._retired[0])
        if not self._dumps:
            while budget > 0 and self.tree.dust:
                budget -= self.tree.merge_dust()
        return self._unswept()

    def _sweep_retired(self, holder: Holder) -> int:
        if holder.runs:
            node, _ = holder.runs.popitem()
            self.tree.expel(holder, node)
        elif holder.where:
            holder.where.pop_some(_NAMES_PER_VISIT)
        else:
            self._retired.popleft()
            self.tree.holders[holder.holder_id] = None
            self._spent_ids.append(holder.holder_id)
        return 1

    def _unswept(self) -> int:
        left = sum(
            1 + len(holder.runs) + len(holder.where) // _NAMES_PER_VISIT for holder in self._retired
        )
        return left if self._dumps else left + len(self.tree.dust)

    def dump(self) -> Generator[DumpEvent | None, None, None]:
        """Yield the index as events, see `dump.py`, and None during long stretches without one.

        The index may change between two of them.
        """
        self._dumps += 1
        try:
            for tier in Tier:
                yield from dump_tier(self.tree, tier)
            yield from dump_groups(self.tree)
        finally:
            self._dumps -= 1

    # ---- a rank's blocks on disk

    def holds_anything(self, rank: WorkerRank) -> bool:
        """Say whether the rank has blocks, matchable or not."""
        holder = self._ranks.get(rank)
        return holder is not None and bool(holder.where or holder.waiting or holder.limiting)

    def blocks_of(self, rank: WorkerRank) -> list[int]:
        """Return how many blocks an attached rank holds, per tier."""
        return self._ranks[rank].blocks.copy()

    def holder_ids(self, ranks: Iterable[WorkerRank]) -> list[int]:
        """Return the holder ids (bit numbers in masks) of those ranks that are attached."""
        found = [self._ranks.get(rank) for rank in ranks]
        return [one.holder_id for one in found if one is not None]

    def held_together(self, most: int) -> Generator[None, None, HeldTogether]:
        """Count blocks by the set of holders, at most `most` each; yields between slices.

        See `loss.py`. Holder ids are not reused meanwhile.
        """
        self._dumps += 1
        try:
            return (yield from held_together(self._ranks.values(), self.tree.live, most))
        finally:
            self._dumps -= 1

    def freeze(self, rank: WorkerRank) -> Generator[CheckpointRun]:
        """Yield everything an attached rank has, see `checkpoint.py`.

        The rank itself must not change until the last run is yielded; others may.

        Raises:
            RankChanged: it was cleared or detached meanwhile.
        """
        holder = self._ranks[rank]
        self._dumps += 1
        try:
            for run in freeze(holder):
                yield run
                if self._ranks.get(rank) is not holder:
                    raise RankChanged
        finally:
            self._dumps -= 1

    def thaw(self, rank: WorkerRank, home: int | None) -> CheckpointRestore:
        """Begin to fill an empty rank with frozen runs; it stays invisible until `credit`.

        If the rank is cleared or detached before that, it is as if it had never been filled.
        """
        self.attach(rank)
        holder = self._ranks[rank]
        assert not self.holds_anything(rank)
        holder.home = home
        self._unproven |= holder.bit
        self.tree.live &= ~holder.bit
        return CheckpointRestore(self.tree, holder)

    def is_filled_by(self, thaw: CheckpointRestore) -> bool:
        """Say whether the thawed blocks would still belong to the rank."""
        return self._ranks.get(thaw.holder.rank) is thaw.holder

    def credit(self, rank: WorkerRank) -> None:
        """Make a thawed rank visible: its blocks are confirmed, so match and dump them."""
        holder = self._ranks.get(rank)
        if holder is not None and self._unproven & holder.bit:
            self._unproven ^= holder.bit
            self.tree.live |= holder.bit
            if any(holder.blocks[1:]):
                self._below |= holder.bit
            self.groups.note_restored(holder)

    @property
    def stats(self) -> IndexStats:
        """Counters; O(ranks)."""
        counting = self.count_in_steps()
        while True:
            try:
                next(counting)
            except StopIteration as end:
                stats: IndexStats = end.value
                return stats

    def count_in_steps(self) -> Generator[None, None, IndexStats]:
        """Return the counters, yielding after every few ranks; they may change in between."""
        tree = self.tree
        holdings, size = yield from index_size.count(tree, self._ranks, self._retired)
        return IndexStats(
            nodes=tree.nodes,
            blocks=tree.blocks,
            holdings=holdings,
            orphan_blocks=tree.orphan_blocks,
            orphan_blocks_dropped=self.orphan_blocks_dropped,
            events_refused=self._events_refused,
            unswept=self._unswept(),
            bytes=size,
        )

    def check(self) -> None:
        """Assert every invariant of the index. O(everything)."""
        holders = [*self._ranks.values()]
        audit(self.tree, holders, [*self._retired])
        audit_masks(self.tree, holders, below=self._below, unproven=self._unproven)
        slots = {holder.slot: rank for rank, holder in self._ranks.items()}
        assert slots == self._rank_of, "each rank has one slot and each slot one rank"
