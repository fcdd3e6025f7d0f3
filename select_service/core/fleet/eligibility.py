"""The filter: which ranks may take this prompt at all.

It knows workers and the request's constraints, but no loads and no costs. `partition.py` calls it
before pricing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from select_service.errors import PinnedNotAllowed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from select_service.core.fleet.catalog import Worker
    from select_service.types import SelectRequest


def check_wishes(request: SelectRequest) -> None:
    """Refuse contradictory constraints.

    Raises:
        PinnedNotAllowed: the pinned worker is not in allowed_worker_ids.
    """
    pinned, allowed = request.pinned_worker, request.allowed_worker_ids
    if pinned is not None and allowed is not None and pinned.worker_id not in allowed:
        raise PinnedNotAllowed(
            f"pinned worker {pinned.worker_id} is not in allowed worker set", field="pinned_worker"
        )


def wants_everyone(request: SelectRequest) -> bool:
    """Tell whether every rank of the scope is eligible, without looking at any of them."""
    return (
        request.allowed_worker_ids is None
        and request.pinned_worker is None
        and (
            request.routing_constraints is UNSET or not request.routing_constraints.required_taints
        )
    )


def eligible_slots(request: SelectRequest, workers: Mapping[int, Worker]) -> list[int]:
    """Return the slots of all ranks that meet the request's constraints, ascending.

    A rank is eligible if its worker is allowed and has every required taint; if a rank is pinned,
    only that one, under the same conditions.
    """
    constraints = request.routing_constraints
    required = frozenset(() if constraints is UNSET else constraints.required_taints)
    pinned = request.pinned_worker
    if pinned is not None:
        worker = workers.get(pinned.worker_id)
        if worker is None or not required <= worker.taints:
            return []
        slot = worker.slots.get(pinned.dp_rank)
        return [] if slot is None else [slot]
    slots: list[int] = []
    for worker in _allowed(request, workers):
        if required <= worker.taints:
            slots += worker.slots.values()
    return sorted(slots)


def _allowed(request: SelectRequest, workers: Mapping[int, Worker]) -> Iterable[Worker]:
    if request.allowed_worker_ids is None:
        return workers.values()
    allowed = dict.fromkeys(request.allowed_worker_ids)
    return [worker for one in allowed if (worker := workers.get(one)) is not None]
