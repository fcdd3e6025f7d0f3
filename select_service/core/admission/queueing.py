"""What a policy does that keeps its waiting requests itself, as `slo_shed.py`; `gate.py` asks it.

A policy that keeps none is in `asks.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from select_service.core.admission.asks import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.admission.asks import Ask, Pool
    from select_service.core.admission.fair_queue import Waiting

T = TypeVar("T")


class QueueingPolicy(Policy, Protocol[T]):
    """A policy that lets requests wait and keeps them itself."""

    def enqueue(self, ask: Ask, item: T, now: float, *, is_promised: bool = False) -> Waiting[T]:
        """Let one wait of which `judge` said so, or which was told to come about now."""
        ...

    def may_go(self, pool: Pool, limit: int) -> Iterator[Waiting[T]]:
        """Yield up to `limit` of those who may go now; `serve` one, then ask again."""
        ...

    def clear(self, now: float) -> list[Waiting[T]]:
        """Take everybody out; charged to nobody."""
        ...

    def outranked(self, ask: Ask, now: float) -> Iterator[Waiting[T]]:
        """Yield who waits and has to give way to a request, who goes first first."""

    def serve(self, one: Waiting[T], now: float) -> None:
        """It goes: charge it."""
        ...

    def withdraw(self, one: Waiting[T], now: float) -> bool:
        """It does not go; False when it does not wait any more."""
        ...

    def work_ahead(self, band: int) -> int:
        """Return the prefill tokens that wait in this band and those above it."""
        ...

    def above(self, band: int, now: float) -> float:
        """Return the work per second let in before that of a band."""
        ...

    def next_expiry(self) -> float:
        """When `expired` will have something to do; infinity while nobody waits."""
        ...

    def expired(self, now: float, limit: int) -> list[Waiting[T]]:
        """Take out up to `limit` that have waited too long."""
        ...
