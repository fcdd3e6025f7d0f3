"""The calls that are one request and one answer, the same for both faces.

`asynchronous_calls.py` and its twin send them; bookings, which need more, are in `core/session.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from select_service.client.core.codec import packed, packed_prompt
from select_service.client.core.exchange import Ask
from select_service.client.hashing import chain
from select_service.types import (
    BatchAnswer,
    BatchRequest,
    LeaseList,
    LeaseRecord,
    LoadRow,
    OverlapScores,
    ScopeLoads,
    WorkerPatch,
    WorkerRecord,
    WorkerSpec,
)
from select_service.types.batches import WaveAnswer
from select_service.types.decisions import Decision
from select_service.types.drains import DrainStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.types import (
        Operation,
        PinnedWorker,
        RouterConfigOverride,
        RoutingConstraints,
    )
    from select_service.types.batches import SelectBatchRequest

__all__ = ["BookingOptions", "Readiness", "SelectOptions", "Verb"]

T = TypeVar("T")


class _Options(TypedDict, total=False):
    """Fields common to selections and bookings."""

    model_name: str
    tenant_id: str
    lora_name: str
    cache_salt: str
    is_eagle: bool
    mm_routing_info: Mapping[str, Any]
    block_mm_infos: Sequence[Mapping[str, Any] | None]
    selection_id: str
    expected_output_tokens: int
    ttl_s: float


class SelectOptions(_Options, total=False):
    """The fields of POST /select_and_reserve besides the prompt."""

    priority_jump: float
    strict_priority: int
    pinned_worker: PinnedWorker | Mapping[str, int]
    allowed_worker_ids: Sequence[int]
    routing_constraints: RoutingConstraints | Mapping[str, Any]
    router_config_override: RouterConfigOverride | Mapping[str, Any]
    slo_class: str
    priority: int
    slo_ttft_ms: float
    fairness_id: str
    cache_hit_threshold: float
    cache_hit_scope: str
    cache_hit_basis: str
    on_cache_threshold: str
    attempt: int
    session_id: str
    explain: bool


class BookingOptions(_Options, total=False):
    """The fields of POST /reservations besides rank and prompt."""

    effective_prefill_tokens: int
    track_prefill_tokens: bool


class Verb(NamedTuple, Generic[T]):
    """A request, and the type of its answer."""

    ask: Ask
    kind: type[T]


class Readiness(msgspec.Struct, frozen=True):
    """GET /ready, as far as the token may read it."""

    ready: bool
    schedulable_workers: int | None = None
    workers: list[WorkerRecord] = []
    waiting_for: list[str] = []


class _Decisions(msgspec.Struct):
    decisions: list[Decision]


def prompt_body(
    token_ids: Sequence[int] | bytes | None,
    block_hashes: Sequence[int] | bytes | None,
    sequence_hashes: Sequence[int] | bytes | None,
    isl_tokens: int | None,
    options: SelectOptions | BookingOptions,
) -> dict[str, Any]:
    """Return the body for a prompt route, its long lists packed.

    Raises:
        ValueError: a token or hash is invalid.
        MissingPackage: block hashes without sequence hashes, and no xxhash to chain them.
    """
    body: dict[str, Any] = packed(token_ids, block_hashes, sequence_hashes)
    if block_hashes is not None and sequence_hashes is None:
        body["sequence_hashes"] = chain(body["block_hashes"])
    if isl_tokens is not None:
        body["isl_tokens"] = isl_tokens
    if options:
        builtin = msgspec.to_builtins(options, builtin_types=(bytes,))
        body |= {name: one for name, one in builtin.items() if one is not None}
    return packed_prompt(body)


def ready() -> Verb[Readiness]:
    """GET /ready; 503 is an answer too."""
    return Verb(Ask("GET", "/ready", accepts=(503,)), Readiness)


def workers(model_name: str | None, tenant_id: str | None) -> Verb[list[WorkerRecord]]:
    """GET /workers."""
    return Verb(Ask("GET", "/workers" + _scope(model_name, tenant_id)), list[WorkerRecord])


def upsert_worker(spec: WorkerSpec) -> Verb[WorkerRecord]:
    """POST /workers."""
    return Verb(Ask("POST", "/workers", _given(spec)), WorkerRecord)


def patch_worker(worker_id: int, patch: WorkerPatch) -> Verb[WorkerRecord]:
    """PATCH /workers/{id}."""
    return Verb(Ask("PATCH", f"/workers/{worker_id}", _given(patch)), WorkerRecord)


def delete_worker(worker_id: int) -> Verb[WorkerRecord]:
    """DELETE /workers/{id}."""
    return Verb(Ask("DELETE", f"/workers/{worker_id}"), WorkerRecord)


def drain_worker(worker_id: int, reason: str | None) -> Verb[DrainStatus]:
    """POST /workers/{id}/drain."""
    body: dict[str, object] | None = None if reason is None else {"reason": reason}
    return Verb(Ask("POST", f"/workers/{worker_id}/drain", body), DrainStatus)


def drain_status(worker_id: int) -> Verb[DrainStatus]:
    """GET /workers/{id}/drain."""
    return Verb(Ask("GET", f"/workers/{worker_id}/drain"), DrainStatus)


def undrain_worker(worker_id: int) -> Verb[DrainStatus]:
    """DELETE /workers/{id}/drain."""
    return Verb(Ask("DELETE", f"/workers/{worker_id}/drain"), DrainStatus)


def loads(model_name: str | None, tenant_id: str | None) -> Verb[list[ScopeLoads]]:
    """GET /loads."""
    return Verb(Ask("GET", "/loads" + _scope(model_name, tenant_id)), list[ScopeLoads])


def potential_loads(body: dict[str, object]) -> Verb[list[LoadRow]]:
    """POST /potential_loads."""
    return Verb(Ask("POST", "/potential_loads", body), list[LoadRow])


def overlap_scores(body: dict[str, object]) -> Verb[OverlapScores]:
    """POST /overlap_scores."""
    return Verb(Ask("POST", "/overlap_scores", body), OverlapScores)


def decision(name: str) -> Verb[Decision]:
    """GET /decisions/{id}."""
    return Verb(Ask("GET", f"/decisions/{quote(name, safe='')}"), Decision)


def decisions(limit: int) -> Verb[_Decisions]:
    """GET /decisions."""
    return Verb(Ask("GET", f"/decisions?limit={limit}"), _Decisions)


def batch(operations: Sequence[Operation]) -> Verb[BatchAnswer]:
    """POST /reservations/batch."""
    told: dict[str, object] = msgspec.to_builtins(BatchRequest(operations=list(operations)))
    return Verb(Ask("POST", "/reservations/batch", told), BatchAnswer)


def select_batch(wave: SelectBatchRequest) -> Verb[WaveAnswer]:
    """POST /select_batch."""
    told: dict[str, Any] = msgspec.to_builtins(wave, builtin_types=(bytes,))
    told["requests"] = [packed_prompt(one) for one in told["requests"]]
    return Verb(Ask("POST", "/select_batch", told), WaveAnswer)


def open_lease(lease_id: str, owner: str, ttl_s: float) -> Verb[LeaseRecord]:
    """POST /leases."""
    body: dict[str, object] = {"lease_id": lease_id, "owner": owner, "ttl_s": ttl_s}
    return Verb(Ask("POST", "/leases", body), LeaseRecord)


def renew_lease(lease_id: str, ttl_s: float | None) -> Verb[LeaseRecord]:
    """POST /leases/{id}/renew."""
    body: dict[str, object] | None = None if ttl_s is None else {"ttl_s": ttl_s}
    return Verb(Ask("POST", f"/leases/{quote(lease_id, safe='')}/renew", body), LeaseRecord)


def close_lease(lease_id: str) -> Verb[Any]:
    """DELETE /leases/{id}."""
    return Verb(Ask("DELETE", f"/leases/{quote(lease_id, safe='')}"), Any)


def leases(owner: str | None, limit: int) -> Verb[LeaseList]:
    """GET /leases."""
    query = {"limit": str(limit)} if owner is None else {"limit": str(limit), "owner": owner}
    return Verb(Ask("GET", f"/leases?{urlencode(query)}"), LeaseList)


def _scope(model_name: str | None, tenant_id: str | None) -> str:
    query = {"model_name": model_name, "tenant_id": tenant_id}
    given = {name: value for name, value in query.items() if value is not None}
    return "?" + urlencode(given) if given else ""


def _given(body: WorkerSpec | WorkerPatch) -> dict[str, object]:
    """Return the fields that are not None; absent and null mean the same here."""
    members: dict[str, object] = msgspec.to_builtins(body)
    return {name: one for name, one in members.items() if one is not None}
