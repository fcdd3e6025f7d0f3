"""What a stream must remember to go on in another process where it stopped in this one.

A plain value that is written beside the blocks of its rank; what it takes to believe it again is
`repair`'s business.
"""

from __future__ import annotations

from msgspec import Struct


class StreamMemory(Struct, frozen=True, array_like=True):
    """The position of one stream between two batches."""

    last: int  # sequence of the last batch that the blocks contain
    digests: list[int]  # of the batches up to it, the newest last, never empty
    zero: int | None  # digest of batch 0
    lost_batches: int
    names: list[int]  # what the engine has called its rank
    groups: dict[int, bool]  # cache groups: whether their blocks count
    last_batch_ts: float | None
