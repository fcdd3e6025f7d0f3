"""Every partition's index and every open event stream, with their counters.

The entry point of the core: callers open an index per partition and a stream per worker rank, and
read counters. Sockets are in `edge/listener`, blocks in `index`.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from indexer.core.budget import BlockBudget
from indexer.core.index import KvIndex
from indexer.core.round_robin import RoundRobinNames
from indexer.core.stream import EventStream
from indexer.core.stream_counters import StreamCounters
from indexer.errors import ScopeConflict
from indexer.types import EventLossPolicy, Scope, StreamLimits, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.budget import Source

SWEPT_PER_TURN: Final = 64
"""Indexes checked per turn for something to sweep; 0.2 µs each if there is nothing."""


class StreamRegistry:
    """Partitions and streams; every verb is O(1) unless it says otherwise."""

    def __init__(
        self,
        *,
        on_event_loss: EventLossPolicy = EventLossPolicy.KEEP,
        limits: StreamLimits | None = None,
    ) -> None:
        self.on_event_loss = on_event_loss
        self.limits = limits or StreamLimits()
        self.budget = BlockBudget(self.limits)
        self._weights: Iterator[tuple[Source, int, int] | None] | None = None
        self._indexes: dict[Scope, KvIndex] = {}
        self._rounds: RoundRobinNames[Scope] = RoundRobinNames(SWEPT_PER_TURN)
        self._streams: dict[
            int, EventStream
        ] = {}  # by identity: two may serve one rank for a while
        self._retired: dict[Scope, StreamCounters] = {}
        self._orphans_dropped = 0  # by indexes that were dropped
        self._recalls: Counter[str] = Counter()  # of dropped scopes

    # -- partitions ------------------------------------------------------------------------------

    def open_index(self, scope: Scope, block_size: int, *, is_eagle: bool = False) -> KvIndex:
        """Return the partition's index, created on first use.

        Raises:
            ScopeConflict: it exists with another block size or the other kind of blocks.
        """
        index = self._indexes.get(scope)
        if index is None:
            index = self._indexes[scope] = KvIndex(
                block_size,
                is_eagle=is_eagle,
                limits=self.limits,
                budget=self.budget.of(scope.tenant_id),
            )
        elif (index.block_size, index.is_eagle) != (block_size, is_eagle):
            msg = f"{scope} has blocks of {index.block_size} tokens, is_eagle={index.is_eagle}"
            raise ScopeConflict(msg)
        return index

    def adopt_index(self, scope: Scope, index: KvIndex) -> None:
        """Add an index filled elsewhere for a partition that has none yet."""
        assert scope not in self._indexes
        self._indexes[scope] = index

    def index(self, scope: Scope) -> KvIndex | None:
        """Return the partition's index, if it has one."""
        return self._indexes.get(scope)

    def indexes(self) -> Iterator[tuple[Scope, KvIndex]]:
        """Iterate over all partitions and their indexes."""
        return iter(self._indexes.items())

    def drop_index(self, scope: Scope) -> None:
        """Forget a partition: close its streams, drop its counters. O(streams).

        Totals over all partitions are kept.
        """
        for stream in [s for s in self._streams.values() if s.scope == scope]:
            self.close_stream(stream)
        index = self._indexes.pop(scope, None)
        if index is not None:
            self._orphans_dropped += index.orphan_blocks_dropped
        gone = self._retired.pop(scope, None)
        if gone is not None:
            self._recalls.update(gone.recalls)

    # -- streams -----------------------------------------------------------------------------------

    def open_stream(
        self,
        scope: Scope,
        rank: WorkerRank,
        *,
        worker_ranks: range,
        has_replay: bool,
        reports_in_full: bool = False,
    ) -> EventStream:
        """Open a stream with an unset cursor for a rank of an open partition.

        An engine that reports in full also reports which blocks prompts find in its cache.
        """
        stream = EventStream(
            scope,
            rank,
            self._indexes[scope],
            worker_ranks=worker_ranks,
            has_replay=has_replay,
            on_event_loss=self.on_event_loss,
            limits=self.limits,
            reports_in_full=reports_in_full,
        )
        self._streams[id(stream)] = stream
        return stream

    def close_stream(self, stream: EventStream) -> None:
        """End a stream and forget the blocks it brought; late messages are ignored."""
        if self._streams.pop(id(stream), None) is not None:
            stream.close()
            self._retired.setdefault(stream.scope, StreamCounters()).add(stream.tallies)

    def streams(self) -> list[EventStream]:
        """Return every open stream, oldest first."""
        return list(self._streams.values())

    def weigh(self, steps: int) -> None:
        """Weigh up to `steps` more sources; at the end of a round, update the budget."""
        if self._weights is None:
            self._weights = self._weigh()
        if not self.budget.weigh(self._weights, steps):
            return
        self._weights = None
        heaviest = self.budget.conclude()
        if heaviest is None:
            return
        scope, rank = heaviest
        index = self._indexes.get(scope)
        if index is not None and index.slot_of(rank) is not None:
            index.clear(rank)

    def _weigh(self) -> Iterator[tuple[Source, int, int] | None]:
        for scope in list(self._indexes):
            yield None  # a scope without ranks is a step, too
            index = self._indexes.get(scope)
            for weight in () if index is None else index.weights():
                if weight is None:
                    yield None
                else:
                    rank, blocks, size = weight
                    yield (scope, rank), blocks, size

    # -- upkeep and counters -----------------------------------------------------------------------

    def sweep(self, budget: int) -> bool:
        """Do about `budget` nodes of the indexes' deferred removal.

        Returns:
            Whether another turn is due at once, because an index that was visited is not clean.
        """
        some = [(at, self._indexes.get(at)) for at in self._rounds.turn(lambda: self._indexes)]
        untidy = [(at, index) for at, index in some if index is not None and not index.is_swept]
        for at, index in untidy:
            if index.sweep(max(1, budget // len(untidy))):
                self._rounds.has_more(at)
        return self._rounds.is_busy

    @property
    def orphan_blocks_dropped(self) -> int:
        """Blocks dropped because too many waited, in all indexes that ever existed."""
        here = sum(index.orphan_blocks_dropped for index in self._indexes.values())
        return self._orphans_dropped + here

    def tallied(self) -> list[tuple[Scope, StreamCounters]]:
        """Return the counters of every open stream, and copies of those left by closed ones.

        A caller that adds them up over several turns counts none twice, even if a stream closes
        between.
        """
        left: list[tuple[Scope, StreamCounters]] = []
        for scope, retired in self._retired.items():
            copy = StreamCounters()
            copy.add(retired)
            left.append((scope, copy))
        return left + [(one.scope, one.tallies) for one in self._streams.values()]

    def recalls(self) -> Counter[str]:
        """Return restored ranks by outcome, over all scopes that ever existed."""
        total = self._recalls.copy()
        for tallies in (*self._retired.values(), *(one.tallies for one in self._streams.values())):
            total.update(tallies.recalls)
        return total

    def check(self) -> None:
        """Assert every invariant of every stream and index. O(everything)."""
        for stream in self._streams.values():
            assert not stream.closed
            assert stream.scope in self._indexes
            stream.check()
        for index in self._indexes.values():
            index.check()
