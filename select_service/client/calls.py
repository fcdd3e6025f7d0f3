"""Bodies, queries and answers of calls, the same for asyncio and for threads.

`asynchronous_calls.py` and its twin send them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from select_service.client.core.codec import packed, packed_prompt
from select_service.client.hashing import chain
from select_service.types import (
    WorkerRecord,
)
from select_service.types.decisions import Decision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.types import (
        PinnedWorker,
        RouterConfigOverride,
        RoutingConstraints,
    )
    from select_service.types.batches import SelectBatchRequest

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


_OF_PROMPT: Final = frozenset({"token_ids", "block_hashes", "sequence_hashes", "isl_tokens"})
OF_SELECTION: Final = SelectOptions.__optional_keys__
OF_BOOKING: Final = BookingOptions.__optional_keys__
"""The names of the options."""


class Readiness(msgspec.Struct, frozen=True):
    """GET /ready, as far as the token may read it."""

    ready: bool
    schedulable_workers: int | None = None
    workers: list[WorkerRecord] = []
    waiting_for: list[str] = []


class Decisions(msgspec.Struct):
    """GET /decisions."""

    decisions: list[Decision]


def prompt_body(
    token_ids: Sequence[int] | bytes | None,
    block_hashes: Sequence[int] | bytes | None,
    sequence_hashes: Sequence[int] | bytes | None,
    isl_tokens: int | None,
    options: SelectOptions | BookingOptions,
    known: frozenset[str] = OF_SELECTION,
) -> dict[str, Any]:
    """Return the body for a prompt route, its long lists packed.

    Raises:
        TypeError: an option does not exist.
        ValueError: a token or hash is invalid.
        MissingPackage: block hashes without sequence hashes, and no xxhash to chain them.
    """
    _expect_known(options, known)
    body: dict[str, Any] = packed(token_ids, block_hashes, sequence_hashes)
    if block_hashes is not None and sequence_hashes is None:
        body["sequence_hashes"] = chain(body["block_hashes"])
    if isl_tokens is not None:
        body["isl_tokens"] = isl_tokens
    if options:
        builtin = msgspec.to_builtins(options, builtin_types=(bytes,))
        body |= {name: one for name, one in builtin.items() if one is not None}
    return packed_prompt(body)


def _expect_known(options: SelectOptions | BookingOptions, known: frozenset[str]) -> None:
    """Refuse what the service would only warn of: a misspelt option changed nothing."""
    for name in options:
        if name not in known:
            from difflib import get_close_matches  # calls that are right need none

            near = get_close_matches(name, known | _OF_PROMPT, n=1)
            meant = f" (is {near[0]} meant?)" if near else ""
            raise TypeError(f"unexpected keyword argument {name!r}{meant}")


def batch_body(wave: SelectBatchRequest) -> dict[str, Any]:
    """Return the body of POST /select_batch, its long lists packed.

    Raises:
        ValueError: a token or hash is invalid.
    """
    told: dict[str, Any] = msgspec.to_builtins(wave, builtin_types=(bytes,))
    told["requests"] = [packed_prompt(one) for one in told["requests"]]
    return told


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
