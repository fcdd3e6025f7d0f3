"""How much of the index one source may fill: a block limit, and its share of the total bytes.

A source is one rank of one partition. Stores beyond its budget are dropped, so it is credited with
less than it has, never with more, and no other source loses anything. Only when all sources
together far exceed the total is something forgotten: the blocks of the largest source. `registry`
weighs the sources and sets the shares; `index` asks for room before a store.

Where tenants are promised parts of the total, the sources of each share its part, and all sources
share the rest; the tenant furthest above its part has a source forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from indexer.types import Scope, StreamLimits, WorkerRank

    Source: TypeAlias = tuple[Scope, WorkerRank]

UNLIMITED: Final = (1 << 62) - 1
TOLERATED: Final = 9 / 8
"""Multiple of the byte limit that small sources may reach before the largest is forgotten."""


class Parts(Protocol):
    """What a part of the total is promised to: tenants, and maybe None for all others together."""

    @property
    def parties(self) -> Mapping[str | None, None]:
        """All of them."""

    @property
    def by_tenant(self) -> Mapping[str | None, str]:
        """Those that are tenants, by their name."""

    def part(self, most: int) -> int:
        """Return what is promised to each, of so much."""


class _Weight:
    """What a party's sources hold, as far as they are weighed in this round."""

    __slots__ = ("blocks", "bytes", "heaviest", "most", "sources")

    def __init__(self) -> None:
        self.sources = self.blocks = self.bytes = self.most = 0
        self.heaviest: Source | None = None  # which holds `most`


class BlockBudget:
    """Block budgets of all sources; one instance for all indexes of a registry.

    Attributes:
        share: Blocks per source while all indexes together are full, otherwise `UNLIMITED`; of
            those to which nothing is promised.
        bytes: Estimated size of all indexes, from the last complete round of `weigh`.
        forgotten: Sources forgotten so far.
        refused: Stores dropped so far.
        parts: Those that are promised a part; None: none.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self.share = UNLIMITED
        self.bytes = 0
        self.forgotten = 0
        self.refused = 0
        self.parts: Parts | None = None
        self.shares: dict[str | None, int] = {}  # like `share`, of those that are promised a part
        self._weights: dict[str | None, _Weight] = {}  # by party

    def of(self, tenant_id: str) -> TenantBudget:
        """Return the budget of a tenant's sources."""
        return TenantBudget(self, tenant_id)

    def party(self, tenant_id: str) -> str | None:
        """Return the party whose part a tenant's sources share; None: all others."""
        return None if self.parts is None else self.parts.by_tenant.get(tenant_id)

    def weigh(self, weights: Iterator[tuple[Source, int, int] | None], steps: int) -> bool:
        """Add the next sources, or steps without one, to a round; True when none are left.

        `weights` are (source, blocks, bytes) each; see `conclude`.
        """
        for _ in range(steps):
            try:
                found = next(weights)
            except StopIteration:
                return True
            if found is None:
                continue
            source, blocks, size = found
            party = self.party(source[0].tenant_id)
            weight = self._weights.get(party)
            if weight is None:
                weight = self._weights[party] = _Weight()
            weight.sources += blocks > 0
            weight.blocks += blocks
            weight.bytes += size
            if blocks > weight.most:
                weight.most, weight.heaviest = blocks, source
        return False

    def conclude(self) -> Source | None:
        """End a round: set the shares, and return the source to forget, if any. O(parties)."""
        weights, self._weights, self.shares = self._weights, {}, {}
        sources = sum(one.sources for one in weights.values())
        blocks = sum(one.blocks for one in weights.values())
        self.bytes = sum(one.bytes for one in weights.values())
        limit = self.limits.index_bytes_max
        if self.bytes < limit or not blocks:
            self.share = UNLIMITED
            return None
        parties: Mapping[str | None, None] = {} if self.parts is None else self.parts.parties
        part = 0 if self.parts is None else self.parts.part(limit)
        rest = max(0, limit - part * len(parties))
        self.share = max(1, int(rest * blocks / self.bytes / sources))
        for party in parties if part else ():
            own = weights.get(party)
            among = 1 if own is None else max(1, own.sources)
            self.shares[party] = self.share + int(part * blocks / self.bytes / among)
        if self.bytes <= limit * TOLERATED:
            return None
        found: tuple[int, Source | None] = (0, None)
        for party, own in weights.items():
            beyond = own.bytes - (part if party in parties else 0)
            if beyond > found[0] and own.most > self.shares.get(party, self.share):
                found = beyond, own.heaviest
        self.forgotten += found[1] is not None
        return found[1]


class TenantBudget:
    """The budget of the sources of one tenant's index.

    Attributes:
        whole: Of all sources.
    """

    __slots__ = ("_tenant_id", "whole")

    def __init__(self, whole: BlockBudget, tenant_id: str) -> None:
        self.whole = whole
        self._tenant_id = tenant_id

    def room(self, held: int) -> int:
        """Return how many more blocks a source that holds `held` may store; may be negative."""
        whole, share = self.whole, self.whole.share
        if whole.shares:
            share = whole.shares.get(whole.party(self._tenant_id), share)
        return min(share, whole.limits.source_blocks_max) - held
