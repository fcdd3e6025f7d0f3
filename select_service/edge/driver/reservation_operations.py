"""The driver's operations on reservations, single or batched, and on the leases above them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from select_service.core.effects import NOTHING
from select_service.edge.driver.core_calls import CoreCalls
from select_service.errors import InvalidQuery
from select_service.types import BatchAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from select_service.core.ledger.reservation import Lease
    from select_service.types import (
        BatchRequest,
        LeaseList,
        LeaseRecord,
        LeaseRenewal,
        LeaseRequest,
        Operation,
        OperationResult,
        Outcome,
        ReservationAnswer,
        ReservationRequest,
    )


# Long batches of lifecycle calls, run in slices so that they do not hold the event loop. A batch
# that has begun is finished even if its client disconnects: most of its operations free load.

BATCH_SLICE_S: Final = 0.0003
"""How long a batch may hold the loop before it lets other requests through."""


class LifecycleBatches:
    """The batches under way, including those whose clients have disconnected."""

    def __init__(
        self, operate: Callable[[Operation], OperationResult], clock: Callable[[], float]
    ) -> None:
        self._operate = operate
        self._clock = clock
        self._under_way: set[asyncio.Task[BatchAnswer]] = set()

    def begin(self, operations: Sequence[Operation]) -> BatchAnswer | asyncio.Task[BatchAnswer]:
        """Run the first slice; return the answer if that was all, else a task that will have it."""
        results: list[OperationResult] = []
        rest = iter(operations)
        if self._slice(rest, results):
            return BatchAnswer(results)
        task = asyncio.get_running_loop().create_task(self._finish(rest, results))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def close(self) -> None:
        """Finish the batches under way."""
        await asyncio.gather(*self._under_way, return_exceptions=True)

    def _slice(self, rest: Iterator[Operation], results: list[OperationResult]) -> bool:
        """Run one slice; return True when nothing is left."""
        until = self._clock() + BATCH_SLICE_S
        for operation in rest:
            results.append(self._operate(operation))
            if self._clock() >= until:
                return False
        return True

    async def _finish(
        self, rest: Iterator[Operation], results: list[OperationResult]
    ) -> BatchAnswer:
        while True:
            await asyncio.sleep(0)
            if self._slice(rest, results):
                return BatchAnswer(results)


LEASES_LISTED = 100


class ReservationOperations(CoreCalls):
    """Changes to reservations and leases."""

    _batches: LifecycleBatches

    # -- reservations --------------------------------------------------------------------------

    def reserve(self, request: ReservationRequest, unknown: bytes = b"") -> ReservationAnswer:
        """POST /reservations."""
        answer, effects = self.core.reservations.reserve(request, self._clock(), unknown=unknown)
        self._carry_out(effects)
        return answer

    def prefill_complete(self, reservation_id: str, cached_tokens: int | None = None) -> None:
        """POST /reservations/{id}/prefill_complete."""
        effects = self.core.reservations.prefill_complete(
            reservation_id, self._clock(), cached_tokens
        )
        if effects is not NOTHING or self.keeper is not None:  # otherwise there is nothing to do
            self._carry_out(effects)

    def output_block(self, reservation_id: str, decay_fraction: float | None = None) -> None:
        """POST /reservations/{id}/output_block."""
        self._carry_out(
            self.core.reservations.output_block(reservation_id, decay_fraction, self._clock())
        )

    def free(
        self,
        reservation_id: str,
        cached_tokens: int | None = None,
        outcome: Outcome | None = None,
    ) -> None:
        """DELETE /reservations/{id}."""
        effects = self.core.reservations.free(reservation_id, self._clock(), cached_tokens, outcome)
        if effects is not NOTHING or self.keeper is not None:  # as above
            self._carry_out(effects)

    def take_back(self, reservation_id: str, outcome: Outcome | None = "cancelled") -> None:
        """Free a reservation of which its client knows nothing, if it is still there."""
        if self.core.lifecycle.bookings.live(reservation_id) is not None:
            self.free(reservation_id, outcome=outcome)

    def batch_now(self, request: BatchRequest) -> BatchAnswer | asyncio.Task[BatchAnswer]:
        """POST /reservations/batch, up to one slice; longer batches return a task with the answer.

        Raises:
            InvalidField: too many operations; none was carried out.
        """
        self.core.reservations.check_batch(request)
        return self._batches.begin(request.operations)

    def _operate(self, operation: Operation) -> OperationResult:
        result, effects = self.core.reservations.operate(operation, self._clock())
        self._carry_out(effects)
        return result

    # -- leases --------------------------------------------------------------------------------

    def open_lease(self, request: LeaseRequest) -> LeaseRecord:
        """Open a lease, or renew one's own under the same id."""
        record, effects = self.core.reservations.open_lease(request, self._clock())
        self._carry_out(effects)
        return record

    def renew_lease(self, lease_id: str, request: LeaseRenewal) -> LeaseRecord:
        """Renew everything that lives under a lease. The body may be empty."""
        record, effects = self.core.reservations.renew_lease(lease_id, request, self._clock())
        self._carry_out(effects)
        return record

    def close_lease_now(self, lease_id: str) -> Lease | None:
        """DELETE /leases/{id}, up to one turn; pass a returned Lease to `clear_lease`."""
        lease, effects = self.core.reservations.close_lease(lease_id, self._clock())
        self._carry_out(effects)
        return lease if lease is not None and lease.reservations else None

    async def clear_lease(self, lease: Lease) -> None:
        """Free the rest under an ended lease; if the caller disconnects, housekeeping does it."""
        while lease.reservations:
            await asyncio.sleep(0)
            self._carry_out(self.core.reservations.clear_lease(lease, self._clock()))

    def leases(
        self,
        owner: str | None = None,
        limit: int = LEASES_LISTED,
        *,
        prefixes: tuple[str, ...] | None = None,
    ) -> LeaseList:
        """List open leases, oldest first (100 unless given), and how many there are."""
        if limit < 1:  # embedding calls without a query
            raise InvalidQuery("`limit` must be a whole number above 0", field="limit")
        return self.core.reservations.leases(self._clock(), owner, limit, prefixes)
