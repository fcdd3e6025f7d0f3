"""What a replay finds: `replaying.py` writes it; JSON, a page and lines for a terminal tell it."""

from __future__ import annotations

from msgspec import Struct

from select_service.simulator.course import Part
from select_service.types import RouterConfig

__all__ = ["Difference", "Missing", "Place", "RankWork", "Replay", "Spread", "WhatIf"]


class Place(Struct):
    """Where a request went, or goes."""

    outcome: str
    worker_id: int | None = None
    dp_rank: int | None = None
    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None
    code: str | None = None
    cost: float | None = None
    prefill_tokens: int | None = None


class Difference(Struct):
    """A decision that is another one now."""

    file: str
    decision: int  # from 1, in the whole recording
    at_s: float  # since its beginning
    model_name: str
    tenant_id: str
    selection_id: str | None
    reservation_id: str | None
    isl_tokens: int
    candidates: int
    recorded: Place
    replayed: Place
    wave_member: int | None = None  # of a wave that was planned otherwise


class Missing(Struct):
    """What a recording lacks."""

    file: str
    why: str  # queue | disk | fault | cut off | files before it
    notes: int | None = None
    files: int | None = None


class Spread(Struct):
    """How evenly work went to ranks: of all that ever sat in a scope where something was placed."""

    requests_cov: float
    requests_max_over_mean: float
    prefill_tokens_cov: float
    prefill_tokens_max_over_mean: float


class RankWork(Struct):
    """What one rank was given, of what was compared; tokens are those it had to compute."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    requests_recorded: int = 0
    requests: int = 0
    prefill_tokens_recorded: int = 0
    prefill_tokens: int = 0


class WhatIf(Struct):
    """What other weights would have chosen, one decision at a time."""

    weights: dict[str, object]
    decisions: int  # placed then, waves and refusals left out
    changed: int
    agreement: float
    prefill_tokens_recorded: int
    prefill_tokens: int
    cached_tokens_recorded: int
    cached_tokens: int
    spread_recorded: Spread | None
    spread: Spread | None
    in_session: int = 0  # of the decisions, those that went to their session's rank: none other
    wave_members: int = 0
    wave_members_moved: int = 0
    examples: list[Difference] = []
    ranks: list[RankWork] = []  # all that ever sat in a scope where something was placed
    sizes: list[tuple[int, int, int]] = []  # tokens to prefill: so many; decisions then, and now


class Replay(Struct):
    """What a replay tells."""

    files: list[str]
    service: list[str]  # versions that recorded
    seconds: float
    decisions: int = 0
    placed: int = 0
    pairs: int = 0
    cache_thresholds: int = 0
    refused: dict[str, int] = {}  # by code; by admission or queues, which are not asked again
    waves: int = 0
    wave_members: int = 0
    reproduced: int = 0
    differing: int = 0
    first_difference: Difference | None = None
    life: dict[str, int] = {}
    events: dict[str, int] = {}
    changes: int = 0
    missing: list[Missing] = []
    config: RouterConfig | None = None  # in force when the first file began
    course: list[Part] = []
    what_if: WhatIf | None = None

    @property
    def is_same(self) -> bool:
        """Whether every decision that is there was made again."""
        return not self.differing
