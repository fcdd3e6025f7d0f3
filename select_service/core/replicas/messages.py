"""What replicas of this service tell each other beyond the reference's plane, and their snapshots.

Shapes only. `wire.py` turns them into bytes, `plane.py` and `hearing.py` say and understand them.

A *claim* is "publisher P says id X is booked on rank R with this load". Its name is (owner, born):
the router id of P and the number P's statement had. What becomes of a claim only ever grows, so
whoever has heard all statements, in whatever order and however often, knows the same.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from select_service.core.replicas.events import (
    U32,
    U64,
    EpochNumber,
    ReplicaEnvelope,
    Text,
)
from select_service.types import LeaseState

OWN_TOPIC: Final = b"select-service.replica.v1"

OUTPUT_BLOCKS_MAX: Final = 1 << 24
"""Output blocks that a claim counts with, whatever is told: some 200 million tokens. As many claims
as are remembered of as many replicas as are, each with that, still are a sum that a double holds to
the last block; a larger one would take what others have booked with it when it goes."""

OUTPUT_TELLERS_MAX: Final = 1024
"""Routers whose output blocks of one claim are counted: four times as many as are remembered."""

ANCESTORS_MAX: Final = 8
"""Owners in a row that may go while a reservation lives on, each adopted by the next."""

ITEMS_MAX: Final = 64
"""Statements heard under one number: twice as many as are ever said. They are taken in without a
pause, some 20 µs each."""

Key: TypeAlias = tuple[int, int]
"""(owner, born): names one claim for ever."""

Fraction: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]  # which leaves NaN out, too

Outputs: TypeAlias = Annotated[
    dict[U64, Annotated[int, Meta(ge=0, le=OUTPUT_BLOCKS_MAX)]], Meta(max_length=OUTPUT_TELLERS_MAX)
]


class Growth(Struct, frozen=True, omit_defaults=True):
    """What became of a claim so far; joined with `max`, so that order and repeats do not matter.

    Attributes:
        prefill_done: the prompt is computed.
        outputs: output blocks by the router that was told of them.
        faded_at: how many there were when the last decay fraction came.
        fraction: that fraction.
    """

    prefill_done: bool = False
    outputs: Outputs = {}
    faded_at: U64 = 0
    fraction: Fraction = 1.0


class ClaimRecord(Struct, frozen=True, omit_defaults=True, tag="claim"):
    """A claim as its owner states it; `hashes` are packed u64, little-endian.

    `adopts` names the claims of gone owners that it took over: whoever frees those means this.
    `lease` is what it lives under; without, `ttl_s` is its own time to live, None the default.
    """

    reservation_id: Text
    born: U64
    model_name: Text
    tenant_id: Text
    block_size: U32
    worker_id: U64
    dp_rank: U32
    hashes: bytes = b""
    prefill_tokens: U64 = 0
    isl_tokens: U64 = 0
    track_prefill_tokens: bool = True
    expected_output_tokens: U64 | None = None
    lora_name: Text | None = None
    selection_id: Text | None = None
    growth: Growth = Growth()
    adopts: Annotated[list[tuple[U64, U64]], Meta(max_length=ANCESTORS_MAX)] = []
    ttl_s: float | None = None
    lease: LeaseState | None = None
    fairness_id: Text = ""  # whose share of the pool it is, unless the tenant's
    pair: Text | None = None  # the id of the pair it is a leg of


class Grown(Struct, frozen=True, tag="grown"):
    """News about a claim of anybody's."""

    reservation_id: Text
    owner: U64
    born: U64
    growth: Growth


class Ended(Struct, frozen=True, omit_defaults=True, tag="ended"):
    """This claim is over, for good.

    `heir` names the claim that took it over, if one did and is not known to be over itself: who has
    not heard of that one yet still knows that the reservation lives. `freed`: somebody has freed
    the reservation, and with it whatever took this claim over.
    """

    reservation_id: Text
    owner: U64
    born: U64
    heir: tuple[U64, U64] | None = None
    freed: bool = False


class Renewed(Struct, frozen=True, omit_defaults=True, tag="renewed"):
    """The owner of a lease has shown itself to me: whoever has it open renews it.

    `ttl_s` is a new time to live, `age_s` how long ago that was (in a snapshot).
    """

    lease_id: Text
    ttl_s: float | None = None
    age_s: float = 0.0


class Closed(Struct, frozen=True, tag="closed"):
    """The owner of a lease has closed it at mine: these replicas end theirs.

    They are named, as the same id may have been opened anew meanwhile, elsewhere.
    """

    lease_id: Text
    router_ids: Annotated[list[U64], Meta(max_length=OUTPUT_TELLERS_MAX)]


class Heartbeat(Struct, frozen=True, omit_defaults=True, tag="heartbeat"):
    """I live, have stated this much, and own so many claims with this digest.

    `leaving`: I shall go soon, and am asked by fewer and fewer. `left`: this is my last word: what
    is mine is whose it is told of. `number` counts the heartbeats of this epoch from 1: one that
    comes again, or late, says nothing about now.
    """

    router_id: U64
    epoch: EpochNumber
    seq: U64
    live: U64
    digest: U64
    http_port: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    url: Text | None = None
    leaving: bool = False
    left: bool = False
    number: U64 = 0  # 0: not counted


Statement: TypeAlias = ClaimRecord | Grown | Ended | Renewed | Closed


class Said(Struct, frozen=True, tag="said"):
    """Statements under one number."""

    router_id: U64
    epoch: EpochNumber
    seq: U64
    items: Annotated[list[Statement], Meta(max_length=ITEMS_MAX)]


class SnapshotHead(Struct, frozen=True, tag="head"):
    """Who speaks, and up to which statement this is certainly complete."""

    router_id: U64
    epoch: EpochNumber
    seq: U64


class Hearsay(Struct, frozen=True, tag="hearsay"):
    """A claim of somebody the speaker does not hear any more."""

    owner: U64
    claim: ClaimRecord


class SnapshotEnd(Struct, frozen=True, tag="end"):
    """Nothing was cut off; `claims` of the speaker's own were sent."""

    claims: U64


OwnMessage: TypeAlias = Heartbeat | Said
ReplicaMessage: TypeAlias = ReplicaEnvelope | Heartbeat | Said
SnapshotPart: TypeAlias = (
    SnapshotHead | ClaimRecord | Grown | Ended | Renewed | Hearsay | SnapshotEnd
)
