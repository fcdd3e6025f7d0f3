"""Bodies, queries and answers of calls; `verbs.py` sends them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict
from urllib.parse import quote, urlencode

import msgspec

from select_service.client.core.codec import LISTS, packed, packed_prompt
from select_service.client.hashing import chain
from select_service.types import WorkerRecord
from select_service.types.decisions import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.types import (
        PinnedWorker,
        RouterConfigOverride,
        RoutingConstraints,
    )
    from select_service.types.batches import SelectBatchRequest


class _Prompt(TypedDict, total=False):
    """The prompt, in one of its forms."""

    token_ids: Sequence[int] | bytes | None
    """As numbers, or packed little-endian (4 bytes each); or"""
    block_hashes: Sequence[int] | bytes | None
    """its hashes, as numbers or packed (8 bytes each), with"""
    sequence_hashes: Sequence[int] | bytes | None
    """the hashes of its prefixes, computed from the former unless given (needs xxhash), and"""
    isl_tokens: int | None
    """its length."""


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


class SelectFields(SelectOptions, _Prompt, total=False):
    """The fields of POST /select_and_reserve."""


class BookingFields(_Options, _Prompt, total=False):
    """The fields of POST /reservations besides the rank."""

    effective_prefill_tokens: int
    track_prefill_tokens: bool


class Readiness(msgspec.Struct, frozen=True):
    """GET /ready, as far as the token may read it."""

    ready: bool
    schedulable_workers: int | None = None
    workers: list[WorkerRecord] = []
    waiting_for: list[str] = []


class Decisions(msgspec.Struct):
    """GET /decisions."""

    decisions: list[Decision]


def prompt_body(fields: SelectFields) -> dict[str, Any]:
    """Return the body for a route that selects, its long lists packed.

    Raises:
        TypeError: a field does not exist.
        ValueError: a token or hash is invalid.
        MissingPackage: block hashes without sequence hashes, and no xxhash to chain them.
    """
    return _body(dict(fields), SelectFields.__optional_keys__)


def booking_body(worker_id: int, dp_rank: int, fields: BookingFields) -> dict[str, Any]:
    """Return the body for POST /reservations; otherwise as `prompt_body`."""
    body = _body(dict(fields), BookingFields.__optional_keys__)
    return body | {"worker_id": worker_id, "dp_rank": dp_rank}


def _body(fields: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    for name in fields:
        if name not in known:  # the service would only warn: a misspelt field changed nothing
            from difflib import get_close_matches  # calls that are right need none

            near = get_close_matches(name, known, n=1)
            meant = f" (is {near[0]} meant?)" if near else ""
            raise TypeError(f"unexpected keyword argument {name!r}{meant}")
    body: dict[str, Any] = packed(*(fields.pop(name, None) for name in LISTS))
    if "block_hashes" in body and "sequence_hashes" not in body:
        body["sequence_hashes"] = chain(body["block_hashes"])
    if fields:
        builtin = msgspec.to_builtins(fields, builtin_types=(bytes,))
        body |= {name: one for name, one in builtin.items() if one is not None}
    return packed_prompt(body)


def batch_body(batch: SelectBatchRequest) -> dict[str, Any]:
    """Return the body of POST /select_batch, its long lists packed.

    Raises:
        ValueError: a token or hash is invalid.
    """
    body: dict[str, Any] = msgspec.to_builtins(batch, builtin_types=(bytes,))
    body["requests"] = [packed_prompt(one) for one in body["requests"]]
    return body


def query(**parameters: object) -> str:
    """Return the query string of the parameters that are not None."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return "?" + urlencode(given) if given else ""


def quoted(name: str) -> str:
    """Return an id as a part of a path."""
    return quote(name, safe="")


def given(body: msgspec.Struct) -> dict[str, object]:
    """Return the fields that are not None; absent and null mean the same here."""
    members: dict[str, object] = msgspec.to_builtins(body)
    return {name: one for name, one in members.items() if one is not None}
