"""Messages between replicas of this service, beyond the reference's plane, and their snapshots.

Shapes only. `message_codec.py` encodes them; `plane.py` and `apply_messages.py` send and handle
them.

A *claim* is "publisher P says id X is booked on rank R with this load". Its name is (owner, born):
the router id of P and the number of P's statement. The state of a claim only ever grows, so all who
have heard the same statements, in any order and any number of times, agree.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from select_service.core.replication.dynamo_events import (
    U32,
    U64,
    EpochNumber,
    Fingerprint,
    PackedAnswer,
    ReplicaEnvelope,
    Stamp,
    Text,
)
from select_service.types import LeaseState, PulledBlocks
from select_service.types.admission import ChargedRequest

OWN_TOPIC: Final = b"select-service.replica.v1"
LOADS_TOPIC: Final = b"select-service.loads.v1"
CACHED_TOKENS_TOPIC: Final = b"select-service.cached-tokens.v1"
SESSIONS_TOPIC: Final = b"select-service.sessions.v1"
"""Older versions subscribe to none of the three, nor to a prefix: they need not read them."""

RANK_LOADS_MAX: Final = 512
"""Ranks in one message of load reports: 20 kB at most, and applied without a pause."""

CACHED_TOKENS_MAX: Final = 32
"""Reports of cached tokens in one message; applied without a pause, ten µs each, or more
where a report voids much of an estimate."""

SESSION_RANKS_MAX: Final = 32
"""Sessions in one message; applied without a pause, some ten µs each."""

OUTPUT_BLOCKS_MAX: Final = 1 << 24
"""Output blocks a claim counts at most, whatever is stated: some 200 million tokens. Even if all
claims remembered of all replicas have that many, a double holds their sum to the last block; a
larger sum would take other bookings' load with it when it is removed."""

OUTPUT_TELLERS_MAX: Final = 1024
"""Routers whose output blocks of one claim are counted: four times as many as are remembered."""

ANCESTORS_MAX: Final = 8
"""Successive owners that may vanish while a reservation lives on, each adopted by the next."""

ITEMS_MAX: Final = 64
"""Statements accepted under one number: twice as many as are ever sent. They are applied without a
pause, some 20 µs each."""

Key: TypeAlias = tuple[int, int]
"""(owner, born): the permanent name of a claim."""

Fraction: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]  # excludes NaN, too

Outputs: TypeAlias = Annotated[
    dict[U64, Annotated[int, Meta(ge=0, le=OUTPUT_BLOCKS_MAX)]], Meta(max_length=OUTPUT_TELLERS_MAX)
]


class ClaimGrowth(Struct, frozen=True, omit_defaults=True):
    """The state of a claim so far; joined with `max`, so order and repeats do not matter.

    Attributes:
        prefill_done: the prompt is computed.
        outputs: output blocks by the router they were reported to.
        faded_at: their number when the last decay fraction came.
        fraction: that fraction.
        kept: the batch that booked it is done, and will not take it back; see `ClaimRecord.held`.
    """

    prefill_done: bool = False
    outputs: Outputs = {}
    faded_at: U64 = 0
    fraction: Fraction = 1.0
    kept: bool = False


NO_GROWTH: Final = ClaimGrowth()


class ClaimRecord(Struct, frozen=True, omit_defaults=True, tag="claim"):
    """A claim as its owner states it; `hashes` are packed u64, little-endian.

    `adopts` names the claims of lost owners that it took over: freeing those frees this. `lease` is
    the lease it lives under; without one, `ttl_s` is its own time to live, None the default.
    `fingerprint` is of the request that booked it, `answer` what that was told beyond these facts
    (`first_answers.py`): a repeated request gets it. Empty: no request can be a repeat.
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
    growth: ClaimGrowth = NO_GROWTH
    adopts: Annotated[list[tuple[U64, U64]], Meta(max_length=ANCESTORS_MAX)] = []
    ttl_s: float | None = None
    lease: LeaseState | None = None
    fairness_id: Text = ""  # whose share of the pool it uses; empty: its tenant's
    charged: ChargedRequest | None = None  # to the account of its tenant
    pair: Text | None = None  # the id of the pair it is a leg of
    fingerprint: Fingerprint = b""
    answer: PackedAnswer = b""
    batch: tuple[U64, U64] | None = None  # made by a batch: its group there, shared tokens
    held: bool = False  # a batch that is not done yet booked it, and may take it back
    session_id: Text | None = None  # the session it belongs to
    session_version: U32 = 0  # of that session's rank, see `SessionRank`
    pulled: PulledBlocks | None = None  # blocks of its prompt that come from another rank


STAMPED: Final = tuple(
    name for name in Stamp.__struct_fields__ if name in ClaimRecord.__struct_fields__
)
"""What a stamp tells of a claim, under the same names, beyond the reference's event."""


class Grown(Struct, frozen=True, tag="grown"):
    """News about the state of a claim of any owner."""

    reservation_id: Text
    owner: U64
    born: U64
    growth: ClaimGrowth


class Ended(Struct, frozen=True, omit_defaults=True, tag="ended"):
    """This claim is over, for good.

    `heir` names the claim that took it over, if one did and is not known to be over itself: a
    replica that has not heard of the heir yet still knows that the reservation lives. `freed`: the
    reservation was freed, and with it every claim that took this one over.
    """

    reservation_id: Text
    owner: U64
    born: U64
    heir: tuple[U64, U64] | None = None
    freed: bool = False


class Renewed(Struct, frozen=True, omit_defaults=True, tag="renewed"):
    """A client renewed a lease at the sender: the replica that has it open renews it.

    `ttl_s` is a new time to live, `age_s` how long ago that was (in a snapshot), `revision` as in
    `LeaseState`: of two times to live the one with the higher one counts, however late it comes.
    Older versions do not tell it, and theirs counts if it was said last.
    """

    lease_id: Text
    ttl_s: float | None = None
    age_s: float = 0.0
    revision: U64 = 0


CLOSED_REVISION: Final = 0
"""No router id; see `Closed`."""


class Closed(Struct, frozen=True, omit_defaults=True, tag="closed"):
    """A client closed a lease at the sender: the named replicas end theirs.

    They are named because the same id may have been opened anew elsewhere in the meantime. `up_to`
    has for each the last of its claims that is over with that, and with it all that took over one
    of those; older versions do not say, and close the lease as it is. Under `CLOSED_REVISION` it
    has the revision of the lease's time to live.
    """

    lease_id: Text
    router_ids: Annotated[list[U64], Meta(max_length=OUTPUT_TELLERS_MAX)]
    up_to: Annotated[list[U64], Meta(max_length=OUTPUT_TELLERS_MAX)] = []


class Heartbeat(Struct, frozen=True, omit_defaults=True, tag="heartbeat"):
    """The sender lives, has stated this much, and owns this many claims with this digest.

    `leaving`: it will go soon, and gets fewer and fewer requests. `left`: this is its last message;
    its claims go to the replica that gets calls for them. `number` counts the heartbeats of this
    epoch from 1: a repeated or late one says nothing about the present.
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
    """The sender, and the statement up to which the snapshot is certainly complete."""

    router_id: U64
    epoch: EpochNumber
    seq: U64


class RelayedClaim(Struct, frozen=True, tag="hearsay"):
    """A claim of an owner the sender no longer hears."""

    owner: U64
    claim: ClaimRecord


class SnapshotEnd(Struct, frozen=True, omit_defaults=True, tag="end"):
    """Nothing was cut off; `claims` of the sender's own were sent.

    It comes once for every few closed leases: older versions would refuse a part of another kind.
    """

    claims: U64
    closed: Annotated[list[Closed], Meta(max_length=ITEMS_MAX)] = []


class RankLoad(Struct, frozen=True, array_like=True):
    """What a worker has reported of one rank, `age_s` seconds before the message was sent."""

    worker_id: U64
    dp_rank: U32
    age_s: Annotated[float, Meta(ge=0.0)]
    kv_used_blocks: Annotated[float, Meta(ge=0.0)] | None = None
    kv_total_blocks: U64 | None = None
    num_requests_waiting: U32 | None = None
    num_requests_running: U32 | None = None


class RankLoads(Struct, frozen=True, tag="loads"):
    """Load reports that the sender itself received; such messages are numbered from 1 in each life.

    A lost one is not repeated: the next report replaces it.
    """

    router_id: U64
    epoch: EpochNumber
    number: U64
    ranks: Annotated[list[RankLoad], Meta(max_length=RANK_LOADS_MAX)]


class CachedTokens(Struct, frozen=True, tag="cached_tokens"):
    """What engines found cached of their prompts, as the sender's callers reported it.

    `reports` are pairs of a reservation_id (or another name of an ended reservation) and tokens.
    Numbered together with `RankLoads`, and a lost one is not repeated either: only some comparisons
    are missed. It is not passed on.
    """

    router_id: U64
    epoch: EpochNumber
    number: U64
    reports: Annotated[list[tuple[Text, U64]], Meta(max_length=CACHED_TOKENS_MAX)]


class SessionRank(Struct, frozen=True, array_like=True):
    """The rank that a session's last request went to, which no reservation carries.

    `version` counts what was sent of the session before, as far as its sender knew: of two ranks,
    the one with the larger counts everywhere. 0: sent by an older version of ours, which has none.
    `is_new`: a request of it came just now; else its receiver seemed to know an earlier
    rank, or has just started.
    """

    model_name: Text
    tenant_id: Text
    session_id: Text
    worker_id: U64
    dp_rank: U32
    version: U32 = 0
    is_new: bool = True


class SessionRanks(Struct, frozen=True, tag="sessions"):
    """Where sessions are that the sender chose a rank for, and booked nothing.

    Numbered together with `RankLoads`, and a lost one is not repeated: the session's next requests
    send it again. What others sent is passed on to those that send an earlier rank, and for a
    replica that is gone to one that starts.
    """

    router_id: U64
    epoch: EpochNumber
    number: U64
    sessions: Annotated[list[SessionRank], Meta(max_length=SESSION_RANKS_MAX)]


OwnMessage: TypeAlias = Heartbeat | Said
ReportMessage: TypeAlias = RankLoads | CachedTokens | SessionRanks
"""Messages that state nothing of claims: without a statement's number, and never repeated."""
ReplicaMessage: TypeAlias = ReplicaEnvelope | Heartbeat | Said | ReportMessage
SnapshotPart: TypeAlias = (
    SnapshotHead | ClaimRecord | Grown | Ended | Renewed | RelayedClaim | SnapshotEnd
)
