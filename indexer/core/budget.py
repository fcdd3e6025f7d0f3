"""How much of the index one source may fill: so many blocks, and its share of the bytes of all.

A source is one rank of one partition. What it stores beyond is left out, so it is credited with
less than it has and never with more, and nobody else loses anything. Only when all together take
much more than they may is something forgotten: what the largest source has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.types import Scope, StreamLimits, WorkerRank

    Source: TypeAlias = tuple[Scope, WorkerRank]

UNLIMITED: Final = (1 << 62) - 1
TOLERATED: Final = 9 / 8
"""Of the bytes allowed: small sources may grow so far before the largest is forgotten."""


class Budget:
    """What sources may hold; one for all indexes of a registry.

    Attributes:
        share: Blocks of a source while all indexes together are full, else as good as unlimited.
        bytes: Estimate for all indexes, of the last round of `weigh`.
        forgotten: Sources that were forgotten.
        refused: Stores left out.
    """

    __slots__ = ("_heaviest", "_limits", "_sums", "bytes", "forgotten", "refused", "share")

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.share = UNLIMITED
        self.bytes = 0
        self.forgotten = 0
        self.refused = 0
        self._sums = [0, 0, 0]  # sources, blocks and bytes of the round that is going on
        self._heaviest: tuple[int, Source | None] = (0, None)

    def room(self, held: int) -> int:
        """Return how many more blocks a source may store that holds so many; may be below 0."""
        most = self._limits.source_blocks_max
        return (min(self.share, most)) - held

    def weigh(self, weights: Iterator[tuple[Source, int, int] | None], steps: int) -> bool:
        """Take in the next sources of a round; True when there are no more, see `conclude`.

        Args:
            weights: what they are known by, their blocks, their bytes; None: a step for nothing.
            steps: so many at most.
        """
        sums = self._sums
        for _ in range(steps):
            try:
                found = next(weights)
            except StopIteration:
                return True
            if found is None:
                continue
            source, blocks, size = found
            sums[0] += blocks > 0
            sums[1] += blocks
            sums[2] += size
            if blocks > self._heaviest[0]:
                self._heaviest = blocks, source
        return False

    def conclude(self) -> Source | None:
        """End a round: say what sources may hold; return the one to forget, if there is one."""
        (sources, blocks, self.bytes), self._sums = self._sums, [0, 0, 0]
        (most, heaviest), self._heaviest = self._heaviest, (0, None)
        limit = self._limits.index_bytes_max
        if self.bytes < limit or not blocks:
            self.share = UNLIMITED
            return None
        self.share = max(1, int(limit * blocks / self.bytes / sources))
        if self.bytes <= limit * TOLERATED or most <= self.share:
            return None
        self.forgotten += 1
        return heaviest
