"""The protocol of policies that keep their waiting requests themselves, like `slo_shed.py`.

`gate.py` calls it; the protocol of policies without a queue is in `policy_api.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from select_service.core.admission.policy_api import AdmissionPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.admission.fair_queue import Waiting
    from select_service.core.admission.policy_api import AdmissionPool, AdmissionRequest

T = TypeVar("T")


class QueueingPolicy(AdmissionPolicy, Protocol[T]):
    """A policy that lets requests wait and keeps them itself."""

    @property
    def target_ttft_s(self) -> float:
        """Within what time the prefill tokens booked on a rank should be computed."""
        ...

    def protected_per_s(self, now: float) -> float:
        """Return how many requests per second it admits that it never refuses for load."""
        ...

    @property
    def judged_line(self) -> int:
        """The line in which the request that was judged last is charged if it goes at once."""
        ...

    def charge_of_replica(self, ask: AdmissionRequest, now: float) -> int:
        """Charge a request that another replica has admitted; return its line."""
        ...

    def answered(self, line: int, tenant_id: str, expected: int, reported: int) -> None:
        """Charge for an answer of `reported` tokens instead of the expected ones."""
        ...

    def enqueue(
        self, ask: AdmissionRequest, item: T, now: float, *, is_promised: bool = False
    ) -> Waiting[T]:
        """Queue a request that `judge` says must wait, or that returns in time."""
        ...

    def may_go(self, pool: AdmissionPool, limit: int) -> Iterator[Waiting[T]]:
        """Yield up to `limit` requests that may go now; `serve` one, then ask again."""
        ...

    def clear(self, now: float) -> list[Waiting[T]]:
        """Remove all requests; charged to nobody."""
        ...

    def outranked(self, ask: AdmissionRequest, now: float) -> Iterator[Waiting[T]]:
        """Yield the waiting requests that must give way to this one, first to go first."""

    def serve(self, one: Waiting[T], now: float) -> None:
        """Remove and charge a request that goes."""
        ...

    def withdraw(self, one: Waiting[T], now: float) -> bool:
        """Remove a request that does not go; False if it no longer waits."""
        ...

    def work_ahead(self, band: int) -> int:
        """Return the prefill tokens waiting in this band and those above it."""
        ...

    def above(self, band: int, now: float) -> tuple[float, float]:
        """Return the work and the requests per second that were admitted above this band."""
        ...

    def next_expiry(self) -> float:
        """Return when the first waiting request expires; infinity while none waits."""
        ...

    def expired(self, now: float, limit: int) -> list[Waiting[T]]:
        """Remove up to `limit` expired requests."""
        ...
