"""The record of one decision: references and cheap copies, evaluated only if it is asked for.

A record must stay true while ranks come and go and load changes: columns are copied as bytes, slot
lists are never written to, and the ranks are in a `RankStates` that is replaced, not changed.
`plain_record_ring.py` and its kernel make and keep records for `decision_log.py`; `explain.py`
reads them.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from indexer.types import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from indexer.types import PackedHashes, Scope
    from select_service.core.admission.gate import AdmissionDecision as GateDecision
    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.columns import Rows, Slots
    from select_service.core.decisions.shadow_regret import Sighting
    from select_service.core.fleet.outliers import EjectionReason
    from select_service.core.fleet.roles import Legs, Roles
    from select_service.core.pricing.pair import PairPlan
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.weights import Weights
    from select_service.types import CacheHit, PinnedWorker, RoutingConstraints
    from select_service.types.decisions import DecisionRefusal

HASHES_KEPT: Final = 512
HASH_BYTES_KEPT: Final = HASHES_KEPT * HASH_BYTES


class RankState(NamedTuple):
    """A rank and its worker at the time of a decision."""

    slot: int
    worker_id: int
    dp_rank: int
    endpoint: str | None
    taints: frozenset[str]
    role: str


class Absent(NamedTuple):
    """A rank of a worker that cannot be scheduled, or takes no new work because it drains."""

    worker_id: int
    dp_rank: int
    endpoint: str | None
    drains: bool


class RankStates:
    """The ranks of a partition between two changes of its workers. Never written to."""

    def __init__(
        self,
        scope: Scope,
        block_size: int,
        rank_states: tuple[RankState, ...],
        absent: tuple[Absent, ...],
    ) -> None:
        self.scope = scope
        self.block_size = block_size
        self.rank_states = rank_states  # by worker and rank
        self.absent = absent

    # computed on demand; selections do not pay for these

    @cached_property
    def slots(self) -> Slots:
        """The slot of each rank."""
        return np.array([rank.slot for rank in self.rank_states], dtype=np.int64)

    @cached_property
    def at(self) -> dict[int, int]:
        """The position of each slot's rank."""
        return {rank.slot: position for position, rank in enumerate(self.rank_states)}


STREAM_STATES: Final = ("none", "silent", "current", "uncertain", "replaying")
"""The possible states of a rank's event stream; `none` means it has no source."""

REPLAYING: Final = STREAM_STATES.index("replaying")

ESTIMATED: Final = 8
"""Added to the state of a rank whose matches an estimate made."""


class UnusualFacts(Struct, gc=False):
    """The facts that few decisions have."""

    pinned: PinnedWorker | None = None
    allowed: list[int] | None = None
    constraints: RoutingConstraints | None = None
    busy: frozenset[int] = frozenset()  # slots
    full: frozenset[int] = frozenset()
    ejected: Mapping[int, EjectionReason] | None = None  # by slot; None: none
    refusal: DecisionRefusal | None = None
    is_threshold: bool = False  # no candidate held enough
    is_pair: bool = False  # whether the request could take a pair
    in_batch: bool = False  # its rank was planned for the whole batch
    in_session: bool = False  # its rank is its session's
    plan: PairPlan | None = None  # of a pair
    legs: Legs | None = None
    roles: Roles | None = None
    shadow: Sighting | None = None  # the choice of the shadow weights, if it was scored


Look: TypeAlias = "tuple[RankStates, bytes, bytes, bytes]"
"""The fleet; by rank, states of event streams, wall times of their last batches (doubles), and
speeds (`SpeedRow`s of doubles; empty: none was measured)."""


class DecisionRecord(NamedTuple):
    """One decision. The ring makes and holds plain tuples of these members, in a third of the time.

    Nothing it references leads back to it, so it is freed with its last reference.
    """

    number: int
    at: float  # monotonic seconds
    since: float  # when it began to wait; below 0: it did not wait
    fleet_snapshot: Look
    rows: Rows | None  # the candidates; None: refused before that
    seen: Seen
    block_hashes: PackedHashes  # the first HASHES_KEPT
    blocks: int
    isl_tokens: int
    weights: Weights
    slot: int  # chosen; -1: none
    selection_id: str | None
    reservation_id: str | None
    unusual: UnusualFacts | None
    ask: AdmissionRequest | None  # the request as a gate saw it, if there was one
    gate_decision: GateDecision | None
    cache_hit: CacheHit | None  # its hit rate and threshold, if one was in force
    size: int  # the bytes it is charged with, without its columns

    @property
    def fleet_slots(self) -> RankStates:
        """The fleet."""
        return self.fleet_snapshot[0]


SELECTION_ID: Final = 11
RESERVATION_ID: Final = 12
SIZE: Final = 17
SEEN: Final = 5
"""Positions of members that are read across many records."""
