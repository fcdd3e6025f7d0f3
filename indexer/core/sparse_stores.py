"""What is remembered of the events of an engine without full attention: see `sparse_prefixes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from indexer.types import HASH_BYTES

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Sequence

    from indexer.types import Namespace, PackedHashes


class SparseStore(NamedTuple):
    """A store event: all blocks that it spans, and the names of some of them, in order."""

    batch: int | None  # number of its batch: one step of the engine
    group: int
    need: int  # blocks at its end that a match needs
    stride: int  # blocks of the partition in one block of the group
    parent: int | None
    local: PackedHashes
    names: Sequence[int]
    namespace: Namespace

    @property
    def span(self) -> int:
        """Blocks of the group that the event spans."""
        return len(self.local) // HASH_BYTES // self.stride

    def is_next(self, before: SparseStore) -> bool:
        """Say whether an event may go on with a prompt of the step before."""
        if self.batch is None or before.batch is None:
            return True
        return self.batch - before.batch <= 1


class SparsePrefixes:
    """What is known of one rank's prompts besides the blocks that its engine named."""

    __slots__ = ("chunks", "short", "unsure")

    def __init__(self) -> None:
        # per group: prompts of which the last steps computed a chunk without naming a block
        self.chunks: dict[int, deque[SparseStore]] = {}
        # per group: the last event with names that were taken for the first of its blocks
        self.short: dict[int, SparseStore] = {}
        # last name of an event → all its names, which may belong one block further up
        self.unsure: dict[int, Sequence[int]] = {}
