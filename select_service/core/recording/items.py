"""The items of a recording: one Struct each, written as MessagePack arrays.

A file is `MAGIC` with the format number and an end of line, then frames: length and CRC-32 of what
follows as big-endian u32, then a zlib stream of items, each preceded by its length as a big-endian
u32. The first item of a file is a Header; no file refers to another one. New members are appended,
with a default; a change that older readers would misread needs a new `VERSION`.

Slots are little-endian u32, columns little-endian doubles (requests: i64), hashes u64.

Format 3 has in `load` all columns that `first-token` uses (2 had no context).
"""

from __future__ import annotations

import re
from struct import Struct as Layout
from typing import Final, TypeAlias

from msgspec import Struct

from select_service.types import RouterConfig, RouterConfigOverride, WorkerSpec

VERSION: Final = 3
MAGIC: Final = b"select-service recording "
OPENING: Final = MAGIC + b"%d\n" % VERSION
FRAME: Final = Layout(">II")
LENGTH: Final = Layout(">I")

FRAME_RAW_MAX: Final = 64 << 20
"""Maximum bytes of a decompressed frame, to protect readers. A writer ends a frame at 256 KiB plus
one item."""

CHUNK_BYTES: Final = 512
"""Bytes of block hashes that are written once and then referred to: 64 blocks. Prompts with a
common beginning share them."""

CHUNKS_MAX: Final = 32_768
"""Chunks remembered on both sides, 16 MiB; at the limit both forget all of them."""


_DIGITS: Final = 6


def numbered(name: str, number: int) -> str:
    """Return the name of a file once it is full."""
    return f"{name}.{number:0{_DIGITS}d}"


def number_of(name: str, file: str) -> int | None:
    """Return the number of a full file of that name; None: it is none."""
    found = re.fullmatch(re.escape(name) + rf"\.(\d{{{_DIGITS},}})", file)
    return None if found is None else int(found[1])


class Header(Struct, array_like=True, tag="H"):
    """The first item of a file."""

    service: str  # its version
    recording: str  # the same in all files of one recording
    file: int  # from 1
    wall_s: float  # unix time of this file's beginning
    at: float  # the monotonic time then; all other times are monotonic
    config: RouterConfig
    note: str = ""


class AttachedWorker(Struct, array_like=True):
    """A worker and its slots."""

    spec: WorkerSpec
    slots: list[tuple[int, int]]  # dp_rank, slot
    drain: str | None = None


class SlotsChange(Struct, array_like=True, tag="S"):
    """The fleet of a scope, or its changes."""

    scope: int  # the number of this scope in later items
    model_name: str
    tenant_id: str
    block_size: int
    workers: list[AttachedWorker]
    gone: list[int]
    is_whole: bool


class Column(Struct, array_like=True):
    """A column by slot: whole, or its differences from the last one of its kind and scope."""

    whole: bytes | None = None
    at: bytes = b""  # positions, u32
    values: bytes = b""  # 8 bytes each


class RecordedMatches(Struct, array_like=True):
    """A prompt's matches as (blocks, slots): on the device, and beyond on host and disk."""

    device: list[tuple[int, bytes]]
    host: list[tuple[int, bytes]] = []
    disk: list[tuple[int, bytes]] = []
    pulls: bytes | None = None  # what each rank could pull: blocks, cost, source, tier; doubles


class Prompted(Struct, array_like=True):
    """A prompt: hashes in chunks, earlier ones by number; never tokens."""

    hashes: list[int | bytes]
    isl_tokens: int


class Asked(Struct, array_like=True):
    """Options that few requests use."""

    pinned: tuple[int, int] | None = None
    allowed: list[int] | None = None
    required_taints: list[str] = []
    preferred_taints: dict[str, float] = {}
    has_constraints: bool = False
    override: RouterConfigOverride | None = None
    cache_hit_threshold: float | None = None
    cache_hit_scope: str | None = None
    cache_hit_basis: str | None = None
    on_cache_threshold: str = "reject"
    attempt: int = 0
    expected_output_tokens: int | None = None
    slo_class: str | None = None
    slo_ttft_ms: float | None = None
    priority: int | None = None
    fairness_id: str | None = None
    session_id: str | None = None


class Pair(Struct, array_like=True):
    """A request that may take a pair: the candidates, and the choice."""

    whole: bytes
    prefill: bytes
    decode: bytes
    mode: str
    couple: tuple[int, int] | None  # slots: prefill, decode


class Decided(Struct, array_like=True, tag="D"):
    """A decision and its inputs."""

    at: float
    since: float
    scope: int
    rows: int | bytes | None  # the first so many slots, or these; None: refused before that
    load: Column  # `ledger/loads.py`: prefill tokens by slot, decode blocks, churn, context; totals
    # and, where queues were included: since when each is known, tokens ahead, and the pace
    found: RecordedMatches | None
    shared: list[tuple[int, bytes]] | None
    trust: Column | None
    prompt: Prompted
    weights: list[float | bool]  # members of `Weights`, in order
    slot: int
    selection_id: str | None = None
    reservation_id: str | None = None
    asked: Asked | None = None
    draws: list[int | float] = []
    pair: Pair | None = None
    thresholds: tuple[float, int, str, str] | None = None
    refused: str | None = None  # the code of the refusal
    is_threshold: bool = False
    in_batch: bool = False
    is_pair: bool = False  # whether the request could take a pair
    in_session: bool = False  # the candidate is its session's rank


class RecordedMember(Struct, array_like=True):
    """One request of a batch."""

    number: int
    prompt: int  # index among the batch's prompts
    weights: list[float | bool]  # members of `Weights`, in order
    rows: int | bytes
    asked: Asked | None = None


class Step(Struct, array_like=True):
    """One step of a batch's plan."""

    load: Column
    requests: Column
    looked: list[tuple[int, RecordedMatches | None, list[tuple[int, bytes]] | None, Column | None]]
    draws: list[int | float]
    planned_ranks: list[tuple[int, int]]


class PlannedBatch(Struct, array_like=True, tag="W"):
    """The plan of a batch in one scope; each of its requests follows as a decision of its own."""

    at: float
    scope: int
    load_limit: float
    keep_together: int
    prompts: list[Prompted]
    members: list[RecordedMember]
    steps: list[Step]
    planned_at: float = 0.0  # queues counted as of then; 0: queues were unknown
    sequence_blocks: int = 0  # added to the context by each request, besides its prompt


class ReservationStep(Struct, array_like=True, tag="L"):
    """One step in the life of a reservation; the core makes the note in its written form.

    `booked` or `learnt` (from a replica), with rank and tokens to prefill; then `prefill_complete`,
    `output_block` (the count, and the decay fraction); in the end, with all its output blocks,
    `freed`, `expired`, `lease_ended` or `told` (by a replica), or `dropped` with its worker.
    """

    at: float
    what: str
    reservation_id: str
    scope: int | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    amount: int = 0
    isl_tokens: int = 0
    fraction: float | None = None


class Events(Struct, array_like=True, tag="E"):
    """KV events of one message. Block names are the engine's own, u64.

    Each event is (what, names, parent, tier, group): `stored`, `removed`, `cleared`, or the reason
    why it is unreadable.
    """

    at: float
    scope: int
    worker_id: int
    dp_rank: int
    seq: int
    is_replay: bool
    events: list[tuple[str, bytes, int | None, int | None, int]]


class SettingsChange(Struct, array_like=True, tag="C"):
    """Settings put in force."""

    at: float
    what: str
    values: dict[str, object]


class Gap(Struct, array_like=True, tag="G"):
    """Missing notes; if it `resets`, later items refer to nothing before it.

    For `workers` the plan of a batch is missing, during which workers came or went; its decisions
    are here.
    """

    notes: int
    why: str  # queue | disk | fault | workers (early files: seats)
    resets: bool = False


class End(Struct, array_like=True, tag="Z"):
    """The regular end of a file; another file follows unless the service ended."""

    at: float
    items: int
    is_last: bool


Item: TypeAlias = (
    Header
    | SlotsChange
    | Decided
    | PlannedBatch
    | ReservationStep
    | Events
    | SettingsChange
    | Gap
    | End
)
