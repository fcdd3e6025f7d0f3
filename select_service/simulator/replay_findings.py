"""The results of a replay: `recording_replay.py` fills them; JSON, page and terminal show them."""

from __future__ import annotations

from msgspec import Struct

from select_service.simulator.time_series import Part
from select_service.types import RouterConfig


class ReplayPlace(Struct):
    """The outcome of a request: where it went, or would go."""

    outcome: str
    worker_id: int | None = None
    dp_rank: int | None = None
    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None
    code: str | None = None
    cost: float | None = None
    prefill_tokens: int | None = None


class ReplayDifference(Struct):
    """A decision that differs from the recorded one."""

    file: str
    decision: int  # from 1, over the whole recording
    at_s: float  # since its beginning
    model_name: str
    tenant_id: str
    selection_id: str | None
    reservation_id: str | None
    isl_tokens: int
    candidates: int
    recorded: ReplayPlace
    replayed: ReplayPlace
    batch_member: int | None = None  # of a batch whose plan differs


class RecordingGap(Struct):
    """A gap in a recording."""

    file: str
    why: str  # queue | disk | fault | workers | files before it; or why its file ends too early
    notes: int | None = None
    files: int | None = None


class Spread(Struct):
    """The evenness of work over ranks: all that ever existed in a scope with placements."""

    requests_cov: float
    requests_max_over_mean: float
    prefill_tokens_cov: float
    prefill_tokens_max_over_mean: float


class RankWork(Struct):
    """One rank's share of the compared requests; tokens are those it had to compute."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    requests_recorded: int = 0
    requests: int = 0
    prefill_tokens_recorded: int = 0
    prefill_tokens: int = 0


class WhatIf(Struct):
    """The choices of other weights, one decision at a time."""

    weights: dict[str, object]
    decisions: int = 0  # that were placed, without batches and refusals
    changed: int = 0
    agreement: float = 1.0
    prefill_tokens_recorded: int = 0
    prefill_tokens: int = 0
    cached_tokens_recorded: int = 0
    cached_tokens: int = 0
    spread_recorded: Spread | None = None
    spread: Spread | None = None
    # decisions that went to their session's rank, where no other was considered
    in_session: int = 0
    batch_members: int = 0
    batch_members_moved: int = 0
    examples: list[ReplayDifference] = []
    ranks: list[RankWork] = []  # all that ever existed in a scope with placements
    sizes: list[tuple[int, int, int]] = []  # tokens to prefill → decisions as recorded, and now


class ReplayResult(Struct):
    """The results of a replay."""

    files: list[str]
    service: list[str]  # versions of the recording service
    seconds: float
    decisions: int = 0
    placed: int = 0
    pairs: int = 0
    cache_thresholds: int = 0
    refused: dict[str, int] = {}  # by code; by admission or queues, which are not repeated
    batches: int = 0
    batch_members: int = 0
    reproduced: int = 0
    differing: int = 0
    first_difference: ReplayDifference | None = None
    life: dict[str, int] = {}
    events: dict[str, int] = {}
    changes: int = 0
    missing: list[RecordingGap] = []
    is_damaged: bool = False  # a file is not what was written; `missing` names it
    config: RouterConfig | None = None  # in force when the first file began
    course: list[Part] = []
    what_if: WhatIf | None = None

    @property
    def is_same(self) -> bool:
        """Whether every recorded decision was reproduced."""
        return not self.differing
