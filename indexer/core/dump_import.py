"""Events of a dump become what an index holds; `dump.py` has their shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from indexer.core.dump import TIER_OF
from indexer.core.hashing import pack_u64
from indexer.core.holder import UNDECIDED_GROUP
from indexer.types import U64_MASK, Namespace, WorkerRank

if TYPE_CHECKING:
    from indexer.core.dump import DumpEvent
    from indexer.core.index import KvIndex


def load_event(index: KvIndex, event: DumpEvent) -> int:
    """Apply an event of a dump, ours or the reference's; return how many blocks it changed.

    Ranks are attached as needed. Events may come in any order: early ones wait as orphans, and the
    limit on orphans applies again only with the next live store. Blocks told twice, by dumps or by
    a dump and then the engine, are held once.
    """
    rank = WorkerRank(event.worker_id, event.event.dp_rank)
    tier = TIER_OF[event.storage_tier]
    index.attach(rank)
    change = event.event.data
    if change == "cleared":
        index.clear(rank)
        return 0
    if change.removed:
        names = [name & U64_MASK for name in change.removed.block_hashes]
        return index.remove(rank, tier, names, group=UNDECIDED_GROUP)
    if not change.stored:
        return 0
    stored = change.stored
    if stored.cache_groups:
        return index.groups.load(rank, tier, stored.cache_groups)
    names = [block.block_hash & U64_MASK for block in stored.blocks]
    accepted = index.store(
        rank,
        tier,
        None if stored.parent_hash is None else stored.parent_hash & U64_MASK,
        names,
        pack_u64([block.tokens_hash & U64_MASK for block in stored.blocks]),
        namespace=Namespace(stored.lora_name or "", stored.cache_salt or ""),
        group=UNDECIDED_GROUP,
    )
    if accepted:
        index.holder(rank).note_hearsay(tier, names)
    return accepted
