"""What is asked and told of a worker that takes no more work."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

__all__ = ["DrainRequest", "DrainStatus", "ScaleDownCandidate", "ScaleDownCandidates"]


class DrainRequest(Struct, kw_only=True):
    """POST /workers/{id}/drain, where anything is said at all."""

    reason: Annotated[str, Meta(max_length=256)] | None = None  # for people; GET /workers tells it


class DrainStatus(Struct, frozen=True, kw_only=True):
    """How far a worker is from being idle: what this process knows to be in flight on its ranks."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: Literal["incomplete", "schedulable", "draining"]
    drains: bool  # also while its record is incomplete
    reason: str | UnsetType = UNSET
    reservations: int  # live, ours and those of replicas
    prefill_tokens: int  # of them, yet to be computed
    decode_blocks: int  # held by them
    safe_to_terminate: bool  # it drains, and nothing is in flight
    waiting_for: list[str] = []  # what is in the way of that, in words


class ScaleDownCandidate(Struct, frozen=True, kw_only=True):
    """A worker, and what its loss would cost."""

    worker_id: int
    model_name: str
    tenant_id: str
    drains: bool  # it is leaving already
    cost_tokens: float  # lower is cheaper: work in flight, and hot blocks that nobody else has
    sole_blocks: int  # that nobody else holds, on any tier
    blocks: int  # it holds
    reused_tokens: float  # found in its cache lately; half of it is forgotten every ten minutes
    reservations: int
    prefill_tokens: int
    decode_blocks: int
    pod_deletion_cost: int  # for controller.kubernetes.io/pod-deletion-cost


class ScaleDownCandidates(Struct, frozen=True, kw_only=True):
    """GET /scale_down_candidates, the cheapest first."""

    candidates: list[ScaleDownCandidate]
