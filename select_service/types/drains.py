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

    reason: Annotated[str, Meta(max_length=256)] | None = None  # for people; GET /workers tells it


class DrainStatus(Struct, frozen=True, kw_only=True):
    """How far a worker is from being idle: what this process knows to be in flight on its ranks."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: Literal["incomplete", "schedulable", "draining"]
    drains: bool  # an operator wants it; also while its record is incomplete
    reason: str | UnsetType = UNSET
    reservations: int  # live, ours and those of replicas
    prefill_tokens: int  # of them, yet to be computed
    decode_blocks: int  # held by them
    safe_to_terminate: bool  # it drains, and nothing is in flight
    waiting_for: list[str] = []  # what is in the way of that, in words


class ScaleDownCandidate(Struct, frozen=True, kw_only=True):
    """One worker of the set, and what losing it costs once those before it are gone."""

    worker_id: int
    model_name: str
    tenant_id: str
    drains: bool  # it is leaving already
    cost_tokens: float  # lower is cheaper: work in flight, and hot blocks that nobody else has
    cost_tokens_so_far: float  # of it and of all before it: the last one's is that of the set
    sole_blocks: int  # that nobody else holds on any tier, those before it counting as gone
    blocks: int  # it holds
    room_so_far: float | UnsetType = UNSET
    """Share of the KV blocks of its scope, or of the role asked for there, that goes with it and
    those before; if all have named theirs.

    Where caches are full this is what is missed, whoever goes."""
    reused_tokens: float  # found in its cache lately; half of it is forgotten every ten minutes
    hit_rate_loss_so_far: float
    """What the hit rate of its scope will lose by it and those before it; 0.02 is two points.

    An estimate from what was asked for lately (`advising.py` has the formula and what it was held
    against), 0 where nothing was."""
    advised: bool
    """Whether that is within the `hit_rate_loss_max` asked for (0.02): as far as caches go, it and
    those before it may leave. Whether the rest can carry the load is the planner's to say."""
    reservations: int
    prefill_tokens: int
    decode_blocks: int
    pod_deletion_cost: int  # for controller.kubernetes.io/pod-deletion-cost; drains: below 0


class ScaleDownCandidates(Struct, frozen=True, kw_only=True):
    """GET /scale_down_candidates: the set that is cheapest to lose, in the order to lose it."""

    candidates: list[ScaleDownCandidate]
