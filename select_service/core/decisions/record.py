"""What is kept of one decision: references and cheap copies, to be read only if somebody asks.

A record must stay true while ranks come and go and load changes: columns are copied as bytes,
slot lists are never written to by anybody, and who sat on which slot is in a `Seating` that is
replaced, not changed. `plain_record_ring.py` and its kernel make and keep records for
`keeping.py`, `explaining.py` reads them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from indexer.types import HASH_BYTES

if TYPE_CHECKING:
    from indexer.types import PackedHashes, Scope
    from select_service.core.admission.asks import Ask
    from select_service.core.admission.gate import Decision as GateDecision
    from select_service.core.columns import Rows, Slots
    from select_service.core.fleet.roles import Legs, Roles
    from select_service.core.pricing.pairing import Plan
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.regrets import Sighting
    from select_service.core.pricing.weights import Weights
    from select_service.types import CacheHit, PinnedWorker, RoutingConstraints
    from select_service.types.decisions import DecisionRefusal

HASHES_KEPT: Final = 512
HASH_BYTES_KEPT: Final = HASHES_KEPT * HASH_BYTES


class Seat(NamedTuple):
    """A rank and its worker as they were."""

    slot: int
    worker_id: int
    dp_rank: int
    endpoint: str | None
    taints: frozenset[str]
    role: str


class Absent(NamedTuple):
    """A rank of a worker that cannot be scheduled."""

    worker_id: int
    dp_rank: int
    endpoint: str | None


class Seating:
    """Who sat where in a partition, for as long as no worker changed. Never written to."""

    def __init__(
        self, scope: Scope, block_size: int, seats: tuple[Seat, ...], absent: tuple[Absent, ...]
    ) -> None:
        self.scope = scope
        self.block_size = block_size
        self.seats = seats  # by worker and rank
        self.absent = absent

    # who asks pays for these, no selection does

    @cached_property
    def slots(self) -> Slots:
        """The slot of each seat."""
        return np.array([seat.slot for seat in self.seats], dtype=np.int64)

    @cached_property
    def at(self) -> dict[int, int]:
        """The position of each slot's seat."""
        return {seat.slot: position for position, seat in enumerate(self.seats)}


STREAM_STATES: Final = ("none", "silent", "current", "uncertain", "replaying")
"""What may be known of a rank's events: of none there is no source."""

REPLAYING: Final = STREAM_STATES.index("replaying")


class Odds(Struct, gc=False):
    """What few decisions have."""

    pinned: PinnedWorker | None = None
    allowed: list[int] | None = None
    constraints: RoutingConstraints | None = None
    busy: frozenset[int] = frozenset()  # slots
    full: frozenset[int] = frozenset()
    refusal: DecisionRefusal | None = None
    is_threshold: bool = False  # nobody held enough
    is_pair: bool = False  # whether it might have been one
    in_wave: bool = False  # its rank was chosen together with others'
    in_session: bool = False  # its rank is that of its session
    plan: Plan | None = None  # of a pair
    legs: Legs | None = None
    roles: Roles | None = None
    shadow: Sighting | None = None  # what other weights would have chosen, if it was scored


Look: TypeAlias = "tuple[Seating, bytes, bytes]"
"""Who sat where; by seat, states of event streams, and wall times of their last batches as
doubles."""


class Record(NamedTuple):
    """One decision. The ring makes and holds plain tuples of these members, in a third of the time.

    Nothing in it leads back to it, so that it ends with its last reference.
    """

    number: int
    at: float  # monotonic seconds
    since: float  # when it began to wait; below 0: it did not
    lookout: Look
    rows: Rows | None  # who could be chosen; None: it did not come to that
    seen: Seen
    block_hashes: PackedHashes  # the first HASHES_KEPT
    blocks: int
    isl_tokens: int
    weights: Weights
    slot: int  # chosen; -1: none
    selection_id: str | None
    reservation_id: str | None
    odds: Odds | None
    ask: Ask | None  # what a gate was asked, if one was
    said: GateDecision | None  # and what it said
    cache_hit: CacheHit | None  # how it stood to a cache-hit threshold, if one was in force
    size: int  # bytes it is charged with, its columns aside

    @property
    def seating(self) -> Seating:
        """Who sat where."""
        return self.lookout[0]


SELECTION_ID: Final = 11
RESERVATION_ID: Final = 12
SIZE: Final = 17
SEEN: Final = 5
"""Members by position, where they are looked at in every one of many."""
