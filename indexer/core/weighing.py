"""What an index weighs: blocks by tier, and an estimate of the bytes that all and each take.

Read-only and in slices: a fleet of ranks is not counted in one go. What comes or goes meanwhile is
counted or not. `index.py` has what is weighed; its registry asks for the weight of each rank, who
scrapes the metrics for all of it.
"""

from __future__ import annotations

from sys import getsizeof
from typing import TYPE_CHECKING, Final, NamedTuple

from indexer.types import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from indexer.core.holder import Holder
    from indexer.core.radix_tree import RadixTree
    from indexer.types import WorkerRank

__all__ = ["Count", "IndexStats", "count", "weights"]

_NAMED_PER_STEP: Final = 8
"""Ranks whose names are counted in one step of weighing, for as much time as one is weighed."""

_COUNTED_PER_STEP: Final = 32
"""Ranks counted in a row: some 2 µs each."""

_NODE_BYTES: Final = 420  # node, child dict and key, head of the edge; measured
_RUN_BYTES: Final = 40  # head of a run of names


class IndexStats(NamedTuple):
    """Counters of one index, read at scrape time."""

    nodes: int
    blocks: int  # distinct contents with their place in a prompt
    holdings: tuple[int, int, int, int]  # (rank, block) pairs per tier
    orphan_blocks: int  # waiting for their parent, part of `blocks`
    orphan_blocks_dropped: int  # gave way because too many waited
    events_refused: int  # a hash twice in one store, or equal to its parent
    unswept: int  # what `sweep` has left to do
    bytes: int  # estimate


class Count(NamedTuple):
    """What ranks have together."""

    holdings: tuple[int, int, int, int]  # blocks per tier
    bytes: int  # estimate, with the tree


def count(
    tree: RadixTree, ranks: Mapping[WorkerRank, Holder], retired: Iterable[Holder]
) -> Generator[None, None, Count]:
    """Return what is held, stopping after so many ranks.

    Args:
        tree: the blocks.
        ranks: those that are attached.
        retired: those that are gone, and not swept yet: they take room and hold nothing.
    """
    size = device = host = disk = external = 0
    for number, holder in enumerate(list(ranks.values()), 1):
        blocks = holder.blocks
        device, host = device + blocks[0], host + blocks[1]
        disk, external = disk + blocks[2], external + blocks[3]
        size += _bytes_of(holder)
        if not number % _COUNTED_PER_STEP:
            yield None
    size += sum(map(_bytes_of, retired)) + _bytes_of_tree(tree)
    return Count((device, host, disk, external), size)


def weights(
    tree: RadixTree, ranks: Mapping[WorkerRank, Holder]
) -> Iterator[tuple[WorkerRank, int, int] | None]:
    """Yield every rank with its blocks and an estimate of the bytes they take.

    Before that None for every few whose names are counted: what all share is theirs by these.
    """
    names = 0
    for number, holder in enumerate(list(ranks.values()), 1):
        names += len(holder.where)
        if not number % _NAMED_PER_STEP:
            yield None
    shared = _bytes_of_tree(tree)
    for holder in list(ranks.values()):
        held = len(holder.where)
        size = _bytes_of(holder) + (shared * held // names if names else 0)
        yield holder.rank, held, size


def _bytes_of_tree(tree: RadixTree) -> int:
    return tree.nodes * _NODE_BYTES + tree.blocks * HASH_BYTES


def _bytes_of(holder: Holder) -> int:
    """Estimate what a rank takes beside its part of the tree."""
    size = holder.where.nbytes + len(holder.where) * HASH_BYTES
    return size + getsizeof(holder.runs) + len(holder.runs) * _RUN_BYTES
