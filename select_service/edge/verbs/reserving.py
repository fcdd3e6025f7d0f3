"""The verbs of a reservation's life, single or batched, and of the leases above it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from select_service.core.effects import NOTHING
from select_service.edge.lifecycle_batches import LifecycleBatches

if TYPE_CHECKING:
    from select_service.core.ledger.reservation import Lease
    from select_service.edge.driver.call_context import CallContext
    from select_service.types import (
        BatchAnswer,
        BatchRequest,
        LeaseList,
        LeaseRecord,
        LeaseRenewal,
        LeaseRequest,
        Operation,
        OperationResult,
        ReservationAnswer,
        ReservationRequest,
    )

__all__ = ["Reserving"]


class Reserving:
    """Changes to reservations and leases."""

    def __init__(self, turn: CallContext, *, is_kept: bool) -> None:
        """Book for one driver.

        Args:
            turn: of the core to book in.
            is_kept: state is on disk, so the keeper must hear of calls without effects, too.
        """
        self._core, self._clock, self._carry_out = turn
        self._is_kept = is_kept
        self._batches = LifecycleBatches(self._operate, turn.clock)

    # -- reservations --------------------------------------------------------------------------

    def reserve(self, request: ReservationRequest, unknown: bytes = b"") -> ReservationAnswer:
        """POST /reservations."""
        answer, effects = self._core.reserve(request, self._clock(), unknown=unknown)
        self._carry_out(effects)
        return answer

    def prefill_complete(self, reservation_id: str, cached_tokens: int | None = None) -> None:
        """POST /reservations/{id}/prefill_complete."""
        effects = self._core.prefill_complete(reservation_id, self._clock(), cached_tokens)
        if effects is not NOTHING or self._is_kept:  # otherwise there is nothing to do
            self._carry_out(effects)

    def output_block(self, reservation_id: str, decay_fraction: float | None = None) -> None:
        """POST /reservations/{id}/output_block."""
        self._carry_out(self._core.output_block(reservation_id, decay_fraction, self._clock()))

    def free(self, reservation_id: str) -> None:
        """DELETE /reservations/{id}."""
        effects = self._core.free(reservation_id, self._clock())
        if effects is not NOTHING or self._is_kept:  # as above
            self._carry_out(effects)

    def take_back(self, reservation_id: str) -> None:
        """Free a reservation that its client never learned of, if it is still there."""
        if self._core.desk.bookings.live(reservation_id) is not None:
            self.free(reservation_id)

    def batch_now(self, request: BatchRequest) -> BatchAnswer | asyncio.Task[BatchAnswer]:
        """POST /reservations/batch, up to one slice; longer batches return a task with the answer.

        Raises:
            InvalidField: too many operations; none was carried out.
        """
        self._core.check_batch(request)
        return self._batches.begin(request.operations)

    def _operate(self, operation: Operation) -> OperationResult:
        result, effects = self._core.operate(operation, self._clock())
        self._carry_out(effects)
        return result

    async def close(self) -> None:
        """Finish the batches under way."""
        await self._batches.close()

    # -- leases --------------------------------------------------------------------------------

    def open_lease(self, request: LeaseRequest) -> LeaseRecord:
        """POST /leases."""
        record, effects = self._core.open_lease(request, self._clock())
        self._carry_out(effects)
        return record

    def renew_lease(self, lease_id: str, request: LeaseRenewal) -> LeaseRecord:
        """POST /leases/{id}/renew."""
        record, effects = self._core.renew_lease(lease_id, request, self._clock())
        self._carry_out(effects)
        return record

    def close_lease_now(self, lease_id: str) -> Lease | None:
        """DELETE /leases/{id}, up to one turn; pass a returned Lease to `clear_lease`."""
        lease, effects = self._core.close_lease(lease_id, self._clock())
        self._carry_out(effects)
        return lease if lease is not None and lease.reservations else None

    async def clear_lease(self, lease: Lease) -> None:
        """Free the rest under an ended lease; if the caller disconnects, housekeeping does it."""
        while lease.reservations:
            await asyncio.sleep(0)
            self._carry_out(self._core.clear_lease(lease, self._clock()))

    def leases(
        self, owner: str | None, limit: int, prefixes: tuple[str, ...] | None = None
    ) -> LeaseList:
        """GET /leases, optionally only those whose ids begin with one of `prefixes`."""
        return self._core.leases(self._clock(), owner, limit, prefixes)
