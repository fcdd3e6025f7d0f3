"""The size of an index: blocks by tier, and an estimate of total and per-rank bytes.

Read-only and in slices, because a fleet of ranks is not counted in one go; changes made meanwhile
may or may not be counted. It reads the data of `index.py`; the registry asks for the weight of each
rank, a scrape of the metrics for the total.
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

_NAMED_PER_STEP: Final = 8
"""Ranks whose names are counted in one step, which takes as long as weighing one rank."""

_COUNTED_PER_STEP: Final = 32
"""Ranks counted between two yields: some 2 µs each."""

_NODE_BYTES: Final = 420  # node, child dict and key, head of the edge; measured
_RUN_BYTES: Final = 40  # head of a run of names


class IndexStats(NamedTuple):
    """Counters of one index, read at scrape time."""

    nodes: int
    blocks: int  # distinct contents at their place in a prompt
    holdings: tuple[int, int, int, int]  # (rank, block) pairs per tier
    orphan_blocks: int  # waiting for their parent, part of `blocks`
    orphan_blocks_dropped: int  # dropped because too many waited
    events_refused: int  # a hash twice in one store, or equal to its parent
    unswept: int  # what `sweep` has left to do
    bytes: int  # estimate


def count(
    tree: RadixTree, ranks: Mapping[WorkerRank, Holder], retired: Iterable[Holder]
) -> Generator[None, None, tuple[tuple[int, int, int, int], int]]:
    """Return the blocks per tier and the estimated bytes, yielding after every few ranks.

    `retired` ranks have left but are not yet swept: they take memory and hold nothing.
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
    return (device, host, disk, external), size


def weights(
    tree: RadixTree, ranks: Mapping[WorkerRank, Holder]
) -> Iterator[tuple[WorkerRank, int, int] | None]:
    """Yield every rank with its blocks and an estimate of the bytes they take.

    First yields None for every few ranks while counting names, by which the tree's bytes are shared
    out.
    """
    names = 0
    for number, holder in enumerate(list(ranks.values()), 1):
        names += holder.size
        if not number % _NAMED_PER_STEP:
            yield None
    shared = _bytes_of_tree(tree)
    for holder in list(ranks.values()):
        held = holder.size
        size = _bytes_of(holder) + (shared * held // names if names else 0)
        yield holder.rank, held, size


def _bytes_of_tree(tree: RadixTree) -> int:
    return tree.nodes * _NODE_BYTES + tree.blocks * HASH_BYTES


def _bytes_of(holder: Holder) -> int:
    """Estimate the bytes of a rank apart from its share of the tree.

    Names that are kept once for several ranks (`Holder.runs`) count for each of them.
    """
    size = holder.where.nbytes + len(holder.where) * HASH_BYTES
    if holder.limiting is not None:
        size += holder.limiting.nbytes
    return size + getsizeof(holder.runs) + len(holder.runs) * _RUN_BYTES
