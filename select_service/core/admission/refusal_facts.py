"""The key that recognises a returning request, and the facts that explain a refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import xxhash
from msgspec.structs import replace

if TYPE_CHECKING:
    from select_service.core.admission.capacity import WorkerCap
    from select_service.core.admission.gate import AdmissionDecision
    from select_service.core.admission.policy_api import AdmissionRequest
    from select_service.core.admission.queue import Ticket

_LAST_HASH: Final = 8
_KNOBS: Final = {
    "tier-shed": ("threshold", "load"),
    "tier-shed-always": ("threshold", "load"),
    "gaie-saturated": ("kv_utilization", "saturation"),
    "band-full": ("quotas", "waiting"),
    "saturated": ("usage_limit", "saturation"),
    "infeasible-deadline": ("targets_ms", "predicted_ttft_s"),
    "insufficient-tokens": ("capacity", "tokens"),
    "exceeds-capacity": ("capacity", "tokens"),
}
"""By refusal code: the configuration key behind it, and the fact compared with it."""


def busy_facts(found: tuple[str, float, float] | None) -> dict[str, object]:
    """Return the threshold that is exceeded, and the value."""
    return dict(zip(("knob", "value", "limit"), found, strict=True)) if found else {}


def cap_facts(cap: WorkerCap) -> dict[str, object]:
    """Return how full a worker is."""
    return {
        "knob": "max_inflight",
        "value": cap.inflight,
        "limit": cap.max_inflight,
        "queued": cap.queued,
        "max_queued": cap.max_queued,
    }


def policy_facts(decision: AdmissionDecision) -> dict[str, object]:
    """Return the facts a policy gave, and the configuration key they are compared with."""
    facts: dict[str, object] = dict(decision.details or {})
    knob, value = _KNOBS.get(decision.code, (None, None))
    if knob is None or value not in facts:
        return facts
    return {**facts, "knob": knob, "value": facts[value]}


def recognisable(ask: AdmissionRequest, ticket: Ticket) -> AdmissionRequest:
    """Return the same with the key that recognises its return; computing that costs a µs."""
    if ask.key:
        return ask
    request = ticket.request
    is_unique = request.selection_id is not None or request.reservation_id is not None
    return replace(ask, key=_key_of(ticket), is_unique=is_unique)


def _key_of(ticket: Ticket) -> bytes:
    request, prompt = ticket.request, ticket.prompt
    route = "r" if ticket.reservation_id is not None else "s"
    described = (
        f"{route}\0{request.fairness_id}\0{request.slo_class}\0{request.priority}"
        f"\0{prompt.isl_tokens}\0{request.selection_id}\0{request.reservation_id}\0"
    )
    return xxhash.xxh3_64_digest(
        described.encode("utf-8", "surrogatepass") + bytes(prompt.sequence_hashes[-_LAST_HASH:])
    )
