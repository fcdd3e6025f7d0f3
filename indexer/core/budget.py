"""How much of the index one source may fill: a block limit, and its share of the total bytes.

A source is one rank of one partition. Stores beyond its budget are dropped, so it is credited with
less than it has, never with more, and no other source loses anything. Only when all sources
together far exceed the total is something forgotten: the blocks of the largest source. `registry`
weighs the sources and sets the shares; `index` asks for room before a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.types import Scope, StreamLimits, WorkerRank

    Source: TypeAlias = tuple[Scope, WorkerRank]

UNLIMITED: Final = (1 << 62) - 1
TOLERATED: Final = 9 / 8
"""Multiple of the byte limit that small sources may reach before the largest is forgotten."""


class Budget:
    """Block budgets of all sources; one instance for all indexes of a registry.

    Attributes:
        share: Blocks per source while all indexes together are full, otherwise `UNLIMITED`.
        bytes: Estimated size of all indexes, from the last complete round of `weigh`.
        forgotten: Sources forgotten so far.
        refused: Stores dropped so far.
    """

    __slots__ = ("_heaviest", "_limits", "_sums", "bytes", "forgotten", "refused", "share")

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.share = UNLIMITED
        self.bytes = 0
        self.forgotten = 0
        self.refused = 0
        self._sums = [0, 0, 0]  # sources, blocks and bytes of the current round
        self._heaviest: tuple[int, Source | None] = (0, None)

    def room(self, held: int) -> int:
        """Return how many more blocks a source that holds `held` may store; may be negative."""
        most = self._limits.source_blocks_max
        return (min(self.share, most)) - held

    def weigh(self, weights: Iterator[tuple[Source, int, int] | None], steps: int) -> bool:
        """Add the next sources to a round; True when there are none left, see `conclude`.

        Args:
            weights: (source, blocks, bytes) each; None is a step without a source.
            steps: upper bound on the steps taken.
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
        """End a round: set the share, and return the source to forget, if any."""
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
