"""What is asked and told of a worker that takes no more work."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

__all__ = [
    "HIT_RATE_LOSS_MAX",
    "DrainRequest",
    "DrainStatus",
    "ScaleDownCandidate",
    "ScaleDownCandidates",
]

HIT_RATE_LOSS_MAX: Final = 0.02
"""Of the hit rate, that may go with those who are advised to, unless another share is asked for."""


class DrainRequest(Struct, kw_only=True):
    """POST /workers/{id}/drain; the body may be empty."""

    reason: Annotated[str, Meta(max_length=256)] | None = None
    """Why, for the people who look at it; `GET /workers` shows it, e.g. `"upgrade"`."""


class DrainStatus(Struct, frozen=True, kw_only=True):
    """How far a worker is from being idle: what this process knows to be in flight on its ranks."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: Literal["incomplete", "schedulable", "draining"]
    drains: bool
    """Whether an operator wants it to take no requests; also while its record is incomplete."""
    reason: str | UnsetType = UNSET
    """Why, as it was said, e.g. `"upgrade"`."""
    reservations: int
    """Live reservations on it, ours and those of replicas, e.g. `3`."""
    prefill_tokens: int  # of them, yet to be computed
    decode_blocks: int  # held by them
    safe_to_terminate: bool
    """Whether it drains and nothing is in flight."""
    waiting_for: list[str] = []
    """What is in the way of that, in words, e.g. `["3 reservations"]`."""


class ScaleDownCandidate(Struct, frozen=True, kw_only=True):
    """One worker of the set, and what losing it costs once those before it are gone."""

    worker_id: int
    model_name: str
    tenant_id: str
    drains: bool
    """Whether it is leaving already."""
    cost_tokens: float
    """Tokens that losing it costs: work in flight, and hot blocks that nobody else has; lower is
    cheaper, e.g. `2048.0`."""
    cost_tokens_so_far: float  # of it and of all before it: the last one's is that of the set
    """The same of it and all before it, e.g. `2048.0`."""
    sole_blocks: int
    """Blocks that nobody else holds on any tier, those before it counting as gone, e.g. `120`."""
    blocks: int
    """Blocks that it holds, e.g. `400`."""
    room_so_far: float | UnsetType = UNSET
    """Share of the KV blocks of its scope, or of the role asked for there, that goes with it and
    those before; if all have named theirs. Where caches are full this is what is missed, whoever
    goes, e.g. `0.125`."""
    reused_tokens: float
    """Tokens found in its cache lately; half of it is forgotten every ten minutes, e.g. `51200.0`.
    """
    hit_rate_loss_so_far: float
    """What the hit rate of its scope will lose by it and those before it; 0.02 is two points. An
    estimate from what was asked for lately, 0 where nothing was, e.g. `0.004`."""
    advised: bool
    """Whether that is within the `hit_rate_loss_max` asked for (0.02): as far as caches go, it and
    those before it may leave. Whether the rest can carry the load is the planner's to say."""
    reservations: int
    prefill_tokens: int
    decode_blocks: int
    pod_deletion_cost: int
    """Value for the annotation controller.kubernetes.io/pod-deletion-cost; below 0 where it drains,
    e.g. `-10`."""


class ScaleDownCandidates(Struct, frozen=True, kw_only=True):
    """GET /scale_down_candidates: the set that is cheapest to lose, in the order to lose it."""

    candidates: list[ScaleDownCandidate]
    """The set that is cheapest to lose, in the order to lose it."""
