"""Nobody can take this prompt, or not now."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from msgspec import UnsetType

from select_service.errors.refusal import ServiceError, scope_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from select_service.types import Scope
    from select_service.types.batches import SelectBatchResult

_NAMED_MAX: Final = 8
"""Workers a refusal names."""


class InvalidRequest(ServiceError):
    """Well-formed, but it means nothing we can serve."""

    status = 400
    code = "invalid_request"


class PinnedNotAllowed(InvalidRequest):
    """pinned_worker is outside allowed_worker_ids."""

    code = "pinned_worker_not_allowed"


class NoSchedulableWorker(ServiceError):
    """No schedulable worker, in the process or in the scope: ask again in a second.

    `details.reasons` says why, and `details.is_known` whether the scope has had a worker; null
    where nothing is known of any, as after a restart, or may not be shown.
    """

    status = 503
    code = "no_schedulable_worker"

    @classmethod
    def anywhere(cls, reasons: Sequence[str], *, is_known: bool | None) -> NoSchedulableWorker:
        """The whole process has none."""
        return cls(
            "no schedulable workers are available",
            details={"reasons": [*reasons], "is_known": is_known},
        )

    @classmethod
    def in_scope(
        cls, scope: Scope, reasons: Sequence[str] = (), *, is_known: bool | None = None
    ) -> NoSchedulableWorker:
        """The scope asked for has none; by default, because it has no worker at all."""
        return cls(
            f"no schedulable workers for {scope_text(scope)}",
            details={"reasons": [*reasons] or [none_registered(scope)], "is_known": is_known},
        )


class UnknownModel(NoSchedulableWorker):
    """Nobody has registered a worker for this model and tenant: clients raise it at once.

    The service answers 503 `no_schedulable_worker`, as the contract has it, and says `is_known`.
    """

    status = 404
    code = "unknown_model"


def none_registered(scope: Scope) -> str:
    """Return the reason of a scope without workers."""
    return f"no worker is registered for {scope_text(scope)}"


class NoEligibleWorker(ServiceError):
    """Workers exist, and none of them may take this prompt: time alone does not help."""

    status = 503
    code = "no_eligible_worker"

    def __init__(self) -> None:
        super().__init__("no endpoints available to route work")


class NoWorkerForRole(NoEligibleWorker):
    """Eligible workers exist, but none with the role that the request needs."""

    code = "no_worker_for_role"

    def __init__(self, role: str) -> None:
        text = f"no eligible {role} worker to route work to"
        if role == "aggregated":
            text += ": those there are only prefill or decode, which POST /select_pair books"
        ServiceError.__init__(self, text, details={"role": role})


class WorkerDraining(NoEligibleWorker):
    """Every worker that may take this prompt drains: it takes no new work."""

    code = "worker_draining"

    def __init__(self, worker_ids: Iterable[int]) -> None:
        ids = list(worker_ids)
        if len(ids) == 1:
            text = f"worker {ids[0]} is draining: it takes no new work"
        else:
            named = ", ".join(map(str, ids[:_NAMED_MAX]))
            more = f" and {len(ids) - _NAMED_MAX} more" if len(ids) > _NAMED_MAX else ""
            text = f"all workers that may take this are draining: {named}{more}"
        ServiceError.__init__(self, text, details={"worker_ids": ids[:_NAMED_MAX]})


class NoTransfer(NoEligibleWorker):
    """Prefill and decode workers exist, and KV blocks may not move between any two of them."""

    code = "no_kv_transfer"

    def __init__(self) -> None:
        ServiceError.__init__(
            self, "no prefill and decode worker share the KV transfer domain they require"
        )


class QueueFull(ServiceError):
    """A queue limit of the policy class is reached; ask again when a queued request is computed."""

    status = 503
    code = "queue_full"


class WouldWait(ServiceError):
    """A request of a batch would have to wait for a worker; in a batch none waits."""

    status = 503
    code = "would_wait"

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("every worker that could take it is busy, and a batch does not wait")
        self.retry_after_s = retry_after_s


class BatchNotPlaced(ServiceError):
    """A batch of all or none, of which one request cannot be placed."""

    code = "batch_not_placed"

    def __init__(self, result: SelectBatchResult, sample: int, exceeds: str | None = None) -> None:
        """Word it.

        Args:
            result: of the sample that cannot be placed.
            sample: its number in the batch.
            exceeds: code of the limit that the batch as a whole exceeds; it never fits.
        """
        placed = isinstance(result.error, UnsetType)
        details: dict[str, object] = {
            "request": result.request,
            "sample": sample,
            "code": "cache_threshold" if placed else result.code,
        }
        if exceeds is not None:
            details["never_fits"] = exceeds
        error = "nobody holds enough of it" if placed else result.error
        whole = "" if exceeds is None else "; the batch never fits as a whole, with these settings"
        super().__init__(
            f"sample {sample} of the batch (requests[{result.request}]) cannot be placed: "
            f"{error}{whole}",
            field=None if isinstance(result.field, UnsetType) else result.field,
            details=details,
        )
        self.status = 409 if placed else result.status
        if exceeds is None and not isinstance(result.retry_after_s, UnsetType):
            self.retry_after_s = result.retry_after_s
        else:
            self.retry_after_s = math.inf
