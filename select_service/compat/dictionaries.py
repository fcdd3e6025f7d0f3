"""Dictionaries of the Dynamo binding to our structs, and our answers to its dictionaries.

Names and shapes are those of Dynamo 1.6. An unknown member is ignored, as there, but
logged the first time. Members that only this service knows are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from indexer.types import HASH_BYTES
from select_service.compat.dynamo_errors import dynamo_error
from select_service.edge.arguments import taken
from select_service.errors import ServiceError
from select_service.types import (
    ReservationRequest,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
    WorkerSpec,
)

if TYPE_CHECKING:
    from indexer.types import Scope
    from select_service.types import (
        Answer,
        OverlapScores,
        Ready,
        ReservationAnswer,
        ScopeLoads,
        WorkerRecord,
    )

_log = logging.getLogger("select_service")

T = TypeVar("T", bound=msgspec.Struct)
Dictionary = dict[str, Any]

_WORKER_MEMBERS: Final = frozenset(WorkerSpec.__struct_fields__) - {
    "curve_public_key",
    "kv_cache_report_mode",
    "kv_events",
    "max_inflight",
    "max_num_seqs",
    "max_queued",
    "replay_endpoints",
    "role",
} | {"lifecycle", "not_schedulable_reasons"}
_TOKEN_BYTES: Final = 4
_logged: set[tuple[str, str]] = set()


# -- requests ------------------------------------------------------------------------------------


def read(name: str, value: object, kind: type[T]) -> T:
    """Read a dictionary. Raises ValueError, as all of these do: a member is missing or wrong."""
    values = _mapping(name, value)
    if "routing_group" in values:
        values.pop("tenant_id", None)  # the name before 1.4, ignored since
    for unknown in values.keys() - set(kind.__struct_fields__):
        del values[unknown]
        if unknown not in _IGNORED and (kind.__name__, unknown) not in _logged:
            _logged.add((kind.__name__, unknown))
            _log.warning("unknown member of a %s ignored: %.64r", kind.__name__, unknown)
    try:
        return taken(name, values, kind)
    except ServiceError as error:
        raise dynamo_error(error) from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def select_request(request: object) -> SelectRequest:
    """Read a request of `select`."""
    return read("request", _session_named(_mapping("request", request)), SelectRequest)


def reserving_request(request: object) -> SelectAndReserveRequest:
    """Read a request of `select_and_reserve`; its `selection_id` names the reservation."""
    values = _session_named(_mapping("request", request))
    return read("request", _named(values), SelectAndReserveRequest)


def pending_selection(request: object) -> tuple[Scope, str] | None:
    """Return what a request of `create_reservation` refers to; None: it has a `worker_id`."""
    values = _mapping("request", request)
    if values.get("worker_id") is not None:
        return None
    one = read("request", {"selection_id": None, **values}, SelectRequest)
    if one.selection_id is None:
        raise ValueError("missing field `selection_id`")
    return one.scope, one.selection_id


def reservation_request(request: object) -> ReservationRequest:
    """Read a request of `create_reservation` that has a `worker_id`."""
    values = _named(_mapping("request", request))
    if values.get("reservation_id") is None:
        raise ValueError("missing field `selection_id`")
    return read("request", values, ReservationRequest)


def _mapping(name: str, value: object) -> Dictionary:
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` must be a dictionary, not {type(value).__name__}")  # noqa: TRY004
    return dict(value)


def _named(values: Dictionary) -> Dictionary:
    """Return the request with one name of its reservation: `selection_id`, if it has that."""
    name = values.pop("selection_id", None)
    if name is not None:
        values["reservation_id"] = name
    return values


def _session_named(values: Dictionary) -> Dictionary:
    """Return the request with its session as `session_id`; a context says it in another place."""
    context = values.pop("session_context", None)
    if isinstance(context, Mapping):
        if "session_id" not in context:
            raise ValueError("session_context: missing field `session_id`")
        values.setdefault("session_id", context["session_id"])
    elif context is not None:
        raise ValueError("session_context must be a dictionary")
    return values


_IGNORED: Final = frozenset({"advisory"})
"""Members that the caller of these functions reads."""


# -- answers -------------------------------------------------------------------------------------


def worker_dict(record: WorkerRecord) -> Dictionary:
    """Return a worker's record; endpoints are by number of the rank."""
    fields: Dictionary = {}
    for member, value in msgspec.to_builtins(record).items():
        if member == "tenant_id":
            fields["routing_group"] = value
        elif member == "kv_events_endpoints":
            fields[member] = {int(rank): endpoint for rank, endpoint in value.items()}
        elif member in _WORKER_MEMBERS:
            fields[member] = value
    return fields


def ready_dict(ready: Ready, *, is_shut_down: bool) -> Dictionary:
    """Return whether anything can be scheduled, and every worker."""
    return {
        "ready": ready.ready and not is_shut_down,
        "schedulable_workers": ready.schedulable_workers,
        "workers": [worker_dict(one) for one in ready.workers],
    }


def selection_dict(answer: Answer) -> Dictionary:
    """Return a selection; of one that is reserved, with the id and the facts of the booking.

    `potential_decode_blocks` counts the prompt's last block even if it is not full.
    """
    fields: Dictionary = msgspec.to_builtins(answer)
    if not isinstance(answer, Selection):
        return fields
    name = fields.pop("reservation_id", fields.pop("selection_id", None))
    first = {} if name is None else {"selection_id": name}
    for member in ("sequence_hashes", "isl_tokens", "track_prefill_tokens"):
        if member in fields:
            first[member] = fields.pop(member)
    if "sequence_hashes" in first:
        blocks = -(-first["isl_tokens"] // answer.block_size)
        fields["potential_decode_blocks"] += blocks - len(first["sequence_hashes"])
    first["model_name"] = fields.pop("model_name")
    first["routing_group"] = fields.pop("tenant_id")
    return first | fields


def begun_blocks(request: SelectRequest, block_size: int) -> int:
    """Return by how many blocks a prompt is longer than its whole blocks: mostly 0 or 1."""
    info = request.mm_routing_info
    tokens: Any = request.token_ids
    if info is not None and info.routing_token_ids:
        tokens = info.routing_token_ids
    if tokens is not None:
        length = len(tokens) // _TOKEN_BYTES if isinstance(tokens, bytes) else len(tokens)
        return int(length % block_size > 0)
    hashes: Any = request.sequence_hashes or b""
    whole = len(hashes) // HASH_BYTES if isinstance(hashes, bytes) else len(hashes)
    return -(-(request.isl_tokens or 0) // block_size) - whole


def reservation_dict(answer: ReservationAnswer) -> Dictionary:
    """Return what was booked where."""
    fields: Dictionary = msgspec.to_builtins(answer)
    name, model, group = (fields.pop(one) for one in ("reservation_id", "model_name", "tenant_id"))
    return {"selection_id": name, "model_name": model, "routing_group": group, **fields}


def loads_dict(scope: ScopeLoads) -> Dictionary:
    """Return the load of a model's ranks."""
    fields: Dictionary = msgspec.to_builtins(scope)
    model, group = fields.pop("model_name"), fields.pop("tenant_id")
    return {"model_name": model, "routing_group": group, **fields}


def overlap_dict(scores: OverlapScores) -> Dictionary:
    """Return what every rank has of a prompt."""
    fields: Dictionary = msgspec.to_builtins(scores)
    for row in fields["workers"]:
        del row["router_credit_blocks"]  # gone since 1.6
    return fields
