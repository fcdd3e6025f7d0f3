"""What a stream must remember to continue in another process where it stopped in this one.

A plain value written beside the blocks of its rank; `repair` decides what it takes to trust it
again.
"""

from __future__ import annotations

from msgspec import Struct

from indexer.core.cache_groups import GroupRule


class StreamMemory(Struct, frozen=True, array_like=True):
    """The position of one stream between two batches."""

    last: int  # sequence of the last batch that the blocks contain
    digests: list[int]  # of the batches up to it, newest last, never empty
    zero: int | None  # digest of batch 0
    lost_batches: int
    names: list[int]  # ranks the engine has reported for itself
    groups: dict[int, bool]  # cache groups: whether their blocks count
    last_batch_ts: float | None
    unknown_batches: int = 0  # of the lost ones; missing in what earlier versions wrote
    limiting: dict[int, GroupRule] = {}  # of the other groups: what a match needs of them
    are_of_one_model: bool = False  # whether one batch told of both
