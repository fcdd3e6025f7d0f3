"""One stream's events into the index: what an event means, and when it means nothing.

It has the rules about events that need no tree: which cache groups count, which adapter, salt and
media belong to a block, which media are credited where. `stream` hands over events in order;
`index` keeps the blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core import sparse_prefixes
from indexer.core.cache_groups import GroupRule, rule_of
from indexer.core.event_hashes import (
    CHECK_COST_BLOCKS,
    COLOURED_SLICE_BLOCKS,
    SLICE_BLOCKS,
    has_extra_keys,
    hashes_in_steps,
    local_hashes,
    slices_of,
)
from indexer.core.events import AllBlocksCleared, BadEvent, BlockRemoved, BlockStored
from indexer.core.full_reports import FullReports, store_lacking
from indexer.core.name_map import NameMap
from indexer.types import BASE_NAMESPACE, Namespace, Tier, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.events import Event, EventBatch, Names
    from indexer.core.index import KvIndex
    from indexer.core.stream_counters import StreamCounters
    from indexer.types import PackedHashes

MAIN_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Attention kinds of cache groups whose blocks a prompt can reuse."""

GROUPS_REMEMBERED: Final = 64
"""Groups per stream whose kind is remembered for removals; hybrid models have a handful."""

EVENT_COST_BLOCKS: Final = 8
"""Cost of an event besides its blocks, in blocks."""

HEAL_COST_BLOCKS: Final = SLICE_BLOCKS // 2
"""Cost of one step of healing."""

APPLIED: Final = "applied"


class IndexWriter:
    """Writes one stream's batches; remembers which ranks it wrote to and which groups count.

    Attributes:
        is_busy: Whether a batch is not completely written yet.
        is_whole: Whether the last call of `work` ended with the stream's only rank cleared.
        are_of_one_model: Whether one batch reported full attention and of groups that limit it, as
            engines do: only then is it known that a match needs the latter.
        reports_in_full: Whether the engine also reports which blocks prompts find in its cache.
        clearings: Times all blocks of a rank went at once, for whatever reason.
        ranks: Every rank this stream wrote to since it was last cleared.
    """

    def __init__(self, index: KvIndex, rank: WorkerRank, tallies: StreamCounters) -> None:
        self._index = index
        self._own_rank = rank
        self._tallies = tallies
        self._groups: dict[int, bool] = {}
        self._limiting: dict[int, GroupRule] = {}  # groups that limit what a prompt can reuse
        self._reports = FullReports(index, self._groups, self._limiting)
        self._number: int | None = None  # of the batch being written
        self._main_batch: int | None = None  # the last batch that named a group of full attention
        self._limiting_batch: int | None = None  # and one that limits it
        self.are_of_one_model = self.reports_in_full = False
        self.ranks = {rank}
        self._batch: EventBatch | None = None
        self._rank, self._next = rank, 0  # of the batch being written
        self._slices: Iterator[int] | None = None  # writes a long event; yields costs in blocks
        self.is_busy = False
        self.is_whole = False
        self.clearings = 0

    def begin(self, batch: EventBatch, worker_ranks: range, number: int | None) -> None:
        """Accept the next batch, or a part of one; `work` writes it."""
        assert self._batch is None
        rank, name = self._own_rank, batch.dp_rank
        if name is not None and name != rank.dp_rank:
            if name in worker_ranks:
                rank = WorkerRank(rank.worker_id, name)
                self.ranks.add(rank)
            else:  # for example a global rank: trust the listener instead
                self._tallies.foreign_ranks += 1
        self._index.attach(rank)  # costs nothing, and a detached rank may still have a listener
        self._batch, self._rank, self._next, self._number = batch, rank, 0, number
        self.is_busy = True

    def work(self, budget: int) -> int:
        """Write events while the budget, in blocks, lasts; return what is left of it."""
        batch, tallies = self._batch, self._tallies
        assert batch is not None
        self.is_whole = False
        if self._index.slot_of(self._rank) is None:  # the rank left between two turns
            self.drop_batch()
        while budget > 0 and self.is_busy:
            done = tallies.blocks_stored + tallies.blocks_removed
            if self._slices is not None:
                slices = self._slices
                cost = next(slices, None)
                if cost is not None:
                    budget -= cost
                elif self._slices is slices:  # nothing else followed
                    self._slices = None
                continue
            if self._next == len(batch.events):
                self._batch, self.is_busy = None, False
                break
            event = batch.events[self._next]
            self._next += 1
            self._write(event, batch.form)
            budget -= EVENT_COST_BLOCKS + tallies.blocks_stored + tallies.blocks_removed - done
        return budget

    def finish(self) -> None:
        """Write the rest of the batch in one go."""
        while self.is_busy:
            self.work(SLICE_BLOCKS)

    def drop_batch(self) -> None:
        """Discard the rest of the batch."""
        self._batch = self._slices = None
        self.is_busy = False

    @property
    def groups(self) -> dict[int, bool]:
        """Cache groups announced by the engine, and whether a match consists of their blocks."""
        return self._groups

    @property
    def limiting(self) -> dict[int, GroupRule]:
        """Those of the other groups whose blocks limit how much of a match can be reused."""
        return self._limiting

    def is_strange(self, batch: EventBatch) -> bool:
        """Whether a batch builds on or removes blocks that its engine should not have.

        It should have what we have. Blocks that we would not have filed are no evidence.
        """
        stored: set[int] = set()
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                return False
            if not isinstance(event, BlockStored | BlockRemoved) or not self._is_filed(event):
                continue
            names = event.block_hashes
            if isinstance(event, BlockStored):
                stored.update(names)
                names = [] if event.parent is None else [event.parent]
            namespace_of = self._index.namespace_of
            if any(name not in stored and not namespace_of(self._own_rank, name) for name in names):
                return True
        return False

    def _is_filed(self, event: BlockStored | BlockRemoved) -> bool:
        is_main = self._groups.get(event.group, event.group == 0)
        if isinstance(event, BlockStored) and event.attention is not None:
            is_main = event.attention in MAIN_ATTENTION
        return is_main and not event.is_remote and event.tier is not None

    def forget_blocks(self) -> None:
        """Clear every rank this stream wrote to."""
        self.clearings += 1
        for rank in self.ranks:
            if self._index.slot_of(rank) is not None:
                self._index.clear(rank)
        self.ranks = {self._own_rank}

    def forget(self) -> None:
        """Forget everything: another engine, with other groups, follows."""
        self._groups.clear()
        self._limiting.clear()
        self._main_batch = self._limiting_batch = None
        self.are_of_one_model = False
        self.forget_blocks()
        self.drop_batch()

    def _write(self, event: Event, form: str) -> None:
        """Apply one event, or begin to apply a long one."""
        outcome: str | None
        if isinstance(event, BlockStored):
            outcome = self._store(event, form)
            if outcome is None:  # the outcome is counted once the event has been validated
                return
        elif isinstance(event, BlockRemoved):
            outcome = self._remove(event)
        elif isinstance(event, AllBlocksCleared):
            self._index.clear(self._rank)
            self.clearings += 1
            self.is_whole = self.ranks == {self._rank}
            outcome = APPLIED
        else:
            outcome = event.reason if isinstance(event, BadEvent) else "no_op"
        number = event.events if isinstance(event, BlockRemoved) else 1
        self._tallies.count_event(event.kind, form, outcome, number)

    def _store_in_slices(
        self, event: BlockStored, namespace: Namespace, form: str
    ) -> Iterator[int]:
        """Store a long event: all of it is validated before the first block is written.

        Each slice continues the one before it, so that the index is correct at any time.
        """
        local: list[PackedHashes] = []
        outcome = APPLIED
        seen: NameMap[None] = NameMap()
        for at, names in slices_of(event.block_hashes):
            unique, end = set(names), at + len(names)
            if len(unique) < len(names) or event.parent in unique or not seen.knows_none(names):
                outcome = "duplicate_hash"  # the index only notices duplicates within a slice
                break
            seen.file(names, None)
            try:
                if has_extra_keys(event):
                    hashes = yield from hashes_in_steps(self._index, event, namespace, at, end)
                else:
                    hashes = local_hashes(self._index, event, namespace, at, end)
            except ValueError:  # a token beyond 32 bits
                outcome = "malformed"
                break
            local.append(hashes)
            yield CHECK_COST_BLOCKS
        del seen  # freeing it costs as much as one slice may
        self._tallies.count_event(event.kind, form, outcome)
        if outcome is not APPLIED:
            return
        assert event.tier is not None
        parent = event.parent
        for number, (_, names) in enumerate(slices_of(event.block_hashes)):
            self._tallies.blocks_stored += self._index.store(
                self._rank,
                event.tier,
                parent,
                names,
                local[number],
                namespace=namespace,
                group=event.group,
                heals=False,
            )
            parent = names[-1]
            yield len(names)
            yield from self._heal_in_slices()

    def _heal_in_slices(self) -> Iterator[int]:
        """Place children that waited for the blocks just stored."""
        while self._index.heal(self._rank):
            yield HEAL_COST_BLOCKS

    def _remove_in_slices(self, event: BlockRemoved) -> Iterator[int]:
        assert event.tier is not None
        for _, names in slices_of(event.block_hashes):
            self._remove_some(event.tier, names, event.group)
            yield len(names)
            if self._is_sparse(event.group):
                index = self._index
                yield from sparse_prefixes.drop_unneeded(
                    index.tree, index.holder(self._rank), names
                )

    def _remove_some(self, tier: Tier, names: Names, group: int) -> None:
        if group in self._limiting:
            self._index.groups.remove(self._rank, tier, group, names)
        else:
            self._index.remove(self._rank, tier, names, group=group)
        self._tallies.blocks_removed += len(names)

    def _store_in_group(self, event: BlockStored, names: Names) -> Iterator[int]:
        """Store blocks of a group that limits matches, of any block size and with any gaps."""
        assert event.tier is not None
        groups, rule = self._index.groups, self._limiting[event.group]
        for _, some in slices_of(names):
            self._tallies.blocks_stored += groups.store(
                self._rank, event.tier, event.group, some, rule=rule
            )
            self._limit()
            yield len(some)
        if self._is_sparse(event.group):
            yield from self._store_prefix(event, rule)

    def _store_unless_report(self, event: BlockStored, tier: Tier, form: str) -> Iterator[int]:
        """Store what a prompt had computed; of what it found, only what was not known."""
        namespace = self._namespace(event)
        is_report = yield from self._reports.judge(event, self._rank, self._number, namespace)
        outcome: str | None = APPLIED
        if not is_report:
            yield min(len(event.block_hashes), SLICE_BLOCKS)  # what is written at once
            outcome = self._store_blocks(event, tier, form)
        elif event.group in self._limiting:
            lacking = self._reports.lacking(event, self._rank)
            if lacking:
                yield from self._store_in_group(event, lacking)
        else:
            try:
                stored = yield from store_lacking(self._index, self._rank, event, namespace)
            except ValueError:  # a token beyond 32 bits
                stored, outcome = 0, "malformed"
            self._tallies.blocks_stored += stored
            yield from self._heal_in_slices()
        if outcome is not None:
            self._tallies.count_event(event.kind, form, outcome)

    def _is_sparse(self, group: int) -> bool:
        """Whether a group is one of an engine that has no group of full attention.

        Group 0, which every engine has, is named together with the first events of the others.
        """
        is_alone = {0, group} <= self._limiting.keys() and not any(self._groups.values())
        return is_alone and self._index.groups.expect_sparse(self._rank)

    def _store_prefix(self, event: BlockStored, rule: GroupRule) -> Iterator[int]:
        """Store what comes before the blocks that an event of such an engine names."""
        namespace = self._namespace(event)
        store = yield from sparse_prefixes.read(
            self._index, self._rank, event, rule, self._number, namespace
        )
        if store is not None:
            yield from sparse_prefixes.store(self._index, self._index.holder(self._rank), store)

    def note_main(self, number: int) -> None:
        """Note that batch `number` names a group of full attention."""
        self._main_batch = number

    def _limit(self) -> None:
        if self._main_batch is not None and self._main_batch == self._limiting_batch:
            self.are_of_one_model = True
        if self.are_of_one_model:
            self._index.groups.limit(self._rank)

    def _mark_in_slices(self, event: BlockStored) -> Iterator[int]:
        assert event.tier is not None
        for _, names in slices_of(event.block_hashes):
            self._index.mark_on_tier(self._rank, event.tier, names, group=event.group)
            yield len(names)

    def _store(self, event: BlockStored, form: str) -> str | None:
        """Return the outcome of a store; None if it is only known after validation."""
        refusal = self._why_elsewhere(event)
        if refusal is not None or event.tier is None:
            return refusal or "unknown_medium"
        if event.group in self._limiting:
            refusal = self._why_no_room(event)
        elif event.is_placeholder:
            self._slices = self._mark_in_slices(event)
            return "placeholder"
        else:
            refusal = self._why_not_whole(event)
        if refusal is None and self.reports_in_full and event.parent is None and event.token_ids:
            self._slices = self._store_unless_report(event, event.tier, form)
            return None
        return refusal or self._store_blocks(event, event.tier, form)

    def _store_blocks(self, event: BlockStored, tier: Tier, form: str) -> str | None:
        """Store blocks that were computed; return the outcome, None if it is not known yet."""
        if event.group in self._limiting:
            self._slices = self._store_in_group(event, event.block_hashes)
            return APPLIED
        namespace = self._namespace(event)
        blocks = len(event.block_hashes)
        if blocks > (COLOURED_SLICE_BLOCKS if has_extra_keys(event) else SLICE_BLOCKS):
            self._slices = self._store_in_slices(event, namespace, form)
            return None
        try:
            hashes = local_hashes(self._index, event, namespace, 0, blocks)
        except ValueError:  # a token beyond 32 bits
            return "malformed"
        accepted = self._index.store(
            self._rank,
            tier,
            event.parent,
            event.block_hashes,
            hashes,
            namespace=namespace,
            group=event.group,
            heals=False,
        )
        if self._index.heal(self._rank):
            self._slices = self._heal_in_slices()
        self._tallies.blocks_stored += accepted
        return APPLIED if accepted else "duplicate_hash"

    def _remove(self, event: BlockRemoved) -> str:
        refusal = self._why_elsewhere(event)
        if refusal is not None or event.tier is None:
            return refusal or "unknown_medium"
        if len(event.block_hashes) > SLICE_BLOCKS or self._is_sparse(event.group):
            self._slices = self._remove_in_slices(event)
            return APPLIED
        self._remove_some(event.tier, event.block_hashes, event.group)
        return APPLIED

    def _why_elsewhere(self, event: BlockStored | BlockRemoved) -> str | None:
        """Return why a prompt on this worker cannot reuse these blocks; None if it can."""
        group = event.group
        if isinstance(event, BlockStored) and event.attention is not None:
            # learned from remote blocks as well
            is_main = self._learn_group(event, event.attention)
        else:
            rules = None if group in self._groups else self._index.groups.rules(self._rank)
            if rules and group in rules:  # by a dump: the engine has not named it yet
                self._groups[group], self._limiting[group] = False, rules[group]
            # removals and old engines do not name the kind: use what is remembered, or group 0
            is_main = self._groups.get(group, group == 0)
        if event.is_remote:
            return "remote"
        if event.tier is None:
            return "unknown_medium"
        if not is_main and group not in self._limiting:
            return "other_group"
        return None if event.block_hashes or self._is_sparse(group) else "empty"

    def _learn_group(self, event: BlockStored, attention: str) -> bool:
        group, is_main = event.group, attention in MAIN_ATTENTION
        if group not in self._groups and len(self._groups) >= GROUPS_REMEMBERED:
            return is_main
        self._groups[group] = is_main
        if is_main:
            self._index.expect_full_attention(self._rank)
        if is_main and self._number is not None:
            self.note_main(self._number)
            self._limit()
        if event.is_placeholder and group in self._limiting:
            return is_main  # it has no block size
        own = self._index.block_size
        rule = None if is_main else rule_of(attention, event.window, event.block_size or own, own)
        if rule is not None:
            self._limiting[group] = rule
            self._limiting_batch = self._number
            self._limit()
        elif self._limiting.pop(group, None) is not None:
            self._index.groups.forget(self._rank, group)
        return is_main

    def _why_not_whole(self, event: BlockStored) -> str | None:
        """Return why the event has no blocks to keep in this scope; None if it has."""
        blocks = len(event.block_hashes)
        if event.has_nameless_adapter:
            return "nameless_adapter"
        if event.block_size != self._index.block_size:
            self._tallies.other_block_size = event.block_size
            return "other_block_size"
        if len(event.token_ids) != blocks * event.block_size:
            return "token_count"
        return self._why_no_room(event)

    def _why_no_room(self, event: BlockStored) -> str | None:
        if len(event.block_hashes) <= self._index.room(self._rank):
            return None
        self._index.budget.whole.refused += 1
        return "no_room"

    def _namespace(self, event: BlockStored) -> Namespace:
        """Return adapter and salt of the blocks; later events inherit them from their parent."""
        inherited = BASE_NAMESPACE
        if event.parent is not None:
            inherited = self._index.namespace_of(self._rank, event.parent) or BASE_NAMESPACE
        if not event.lora_name and not event.cache_salt:
            return inherited
        return Namespace(
            event.lora_name or inherited.lora_name, event.cache_salt or inherited.cache_salt
        )
