"""Notes of the event loop for a recording: references to immutable data, no copies.

`recorder.py` makes notes, the writer's thread packs them (`encoder.py`): a note costs the loop one
object with references, however long writing it takes. No note leads back to itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from select_service.core.recording.items import Gap, ReservationStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.types import Scope, WorkerRank
    from select_service.core.columns import Rows
    from select_service.core.decisions.record import UnusualFacts
    from select_service.core.pricing.pair import WorkerPair
    from select_service.core.pricing.placement import Seen
    from select_service.core.pricing.prompt import Prompt
    from select_service.core.pricing.weights import Weights
    from select_service.types import SelectRequest, WorkerSpec

Draws: TypeAlias = "Sequence[float | int]"
"""Random draws, in order."""

ThresholdsInForce: TypeAlias = "tuple[float, int, str, str]"
"""The process-wide cache-hit threshold, attempts, basis and scope."""

Attached: TypeAlias = "tuple[WorkerSpec, tuple[tuple[int, int], ...], str | None]"
"""A worker's record, its slots by rank, and the reason of its drain."""


class SlotsNote(Struct, frozen=True, gc=False):
    """The fleet of a partition from now on."""

    scope: Scope
    block_size: int
    workers: tuple[Attached, ...]


class DecisionNote(Struct, frozen=True, gc=False):
    """One decision with all its inputs."""

    at: float
    since: float  # when it began to wait; below 0: it did not wait
    scope: Scope
    rows: Rows | None
    seen: Seen
    prompt: Prompt
    weights: Weights
    slot: int  # -1: none
    request: SelectRequest
    reservation_id: str | None
    unusual: UnusualFacts | None
    couple: WorkerPair | None  # of a chosen pair
    thresholds: ThresholdsInForce | None
    draws: Draws
    in_batch: bool
    in_session: bool


class StepNote(Struct, frozen=True, gc=False):
    """The inputs of one step of a batch's plan, and its planned ranks."""

    columns: bytes
    requests: bytes
    looked: list[tuple[int, Seen]]  # by position in the batch: prompts that were looked up
    draws: Draws
    planned_ranks: list[tuple[int, int]]  # position in the batch, slot


class BatchNote(Struct, frozen=True, gc=False):
    """The plan of a batch in one partition."""

    at: float
    scope: Scope
    load_limit: float
    keep_together: int
    members: list[tuple[int, Prompt, SelectRequest, Weights, Rows]]
    steps: list[StepNote]
    planned_at: float  # loads counted as of then
    sequence_blocks: int


class BirthNote(Struct, frozen=True, gc=False):
    """The beginning of a reservation: `booked` here, or `learnt` from a replica."""

    at: float
    what: str
    reservation_id: str
    scope: Scope
    worker_id: int
    dp_rank: int
    prefill_tokens: int
    isl_tokens: int


class EventNote(Struct, frozen=True, gc=False):
    """A message of an engine, as received."""

    at: float
    scope: Scope
    rank: WorkerRank
    is_eagle: bool
    is_replay: bool
    frames: Sequence[bytes]


class ChangeNote(Struct, frozen=True, gc=False):
    """Settings put in force."""

    at: float
    what: str
    values: dict[str, object]


Note: TypeAlias = (
    SlotsNote
    | DecisionNote
    | BatchNote
    | BirthNote
    | ReservationStep
    | EventNote
    | ChangeNote
    | Gap
)
