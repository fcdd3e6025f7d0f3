"""The newest reservations, as rows for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from select_service.core.ledger.reservation_ids import LiveReservation
    from select_service.edge.driver.driver import Driver

__all__ = ["reservations"]


def reservations(service: Driver, limit: int) -> dict[str, Any]:
    """Return how many reservations there are, and the newest of them. O(limit)."""
    bookings, now = service.core.lifecycle.bookings, service.now()
    rows = [_row(one, now) for one in bookings.newest(limit)]
    return {"total": len(bookings), "reservations": rows}


def _row(booking: LiveReservation, now: float) -> dict[str, Any]:
    one, partition = booking.reservation, booking.partition
    worker, dp_rank = partition.fleet_slots.rank_at(one.slot)
    return {
        "reservation_id": one.reservation_id,
        "selection_id": one.selection_id,
        "model_name": partition.scope.model_name,
        "tenant_id": partition.scope.tenant_id,
        "worker_id": str(worker.worker_id),
        "dp_rank": dp_rank,
        "phase": "decode" if one.prefill_done else "prefill",
        "isl_tokens": one.isl_tokens,
        "prefill_tokens": one.prefill_tokens,
        "output_blocks": one.output_blocks,
        "age_s": round(now - one.created, 1),
        "idle_s": round(now - one.touched, 1),
        "ttl_s": one.ttl_s or None,
        "lease_id": None if one.lease is None else one.lease.lease_id,
        "origin": str(one.origin),
    }
