"""A reservation in the hands of its user, the same in both faces.

What it is told is noted at once and sent together with what others are told (`core/outbox.py`): no
method waits, and none can fail because the service cannot be reached just now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from select_service.client.core.booking import Booking
    from select_service.client.core.session import Session
    from select_service.types import Overlap, Selection

__all__ = ["Reservation"]


class Reservation:
    """Where a request goes, and what its service is told of it."""

    def __init__(
        self,
        booking: Booking,
        session: Session,
        lock: threading.RLock,
        clock: Callable[[], float],
    ) -> None:
        self._booking = booking
        self._session = session
        self._lock = lock
        self._clock = clock

    @property
    def reservation_id(self) -> str:
        """The id it is booked under: the caller's, unless another selector had to be asked."""
        return self._booking.reservation_id

    @property
    def selection(self) -> Selection:
        """The whole answer."""
        return self._booking.selection

    @property
    def worker_id(self) -> int:
        """The chosen worker."""
        return self._booking.selection.worker_id

    @property
    def dp_rank(self) -> int:
        """The chosen data-parallel rank of it."""
        return self._booking.selection.dp_rank

    @property
    def endpoint(self) -> str | None:
        """Where to send the request, as the worker was registered."""
        return self._booking.selection.endpoint

    @property
    def overlap(self) -> Overlap:
        """Tokens of the prompt that the worker holds, by tier."""
        return self._booking.selection.overlap

    @property
    def effective_prefill_tokens(self) -> int:
        """Tokens that will have to be computed, as far as the service knows."""
        return self._booking.selection.effective_prefill_tokens

    @property
    def degraded(self) -> bool:
        """No selector could be asked: chosen from the last catalog, and nothing is booked."""
        return self._booking.is_degraded

    def prefill_complete(self, cached_tokens: int | None = None) -> None:
        """The prompt is computed: the first token has come.

        Args:
            cached_tokens: how much of it the engine had cached, where it says so.
        """
        with self._lock:
            self._session.prefill_complete(self._booking, cached_tokens, self._clock())

    def output_tokens(self, count: int = 1, decay_fraction: float | None = None) -> None:
        """So many more tokens have come out. Cheap: nothing is sent until they fill a block.

        Args:
            count: since the last call.
            decay_fraction: in [0, 1]; what its blocks count for, when the end is near.
        """
        with self._lock:
            self._session.output_tokens(self._booking, count, decay_fraction, self._clock())

    def free(self) -> None:
        """It is over. Leaving the `with` block does this; repeatable."""
        with self._lock:
            self._session.end(self._booking, self._clock())

    def __repr__(self) -> str:
        kind = "degraded choice" if self.degraded else "reservation"
        return f"<{kind} {self.reservation_id}: worker {self.worker_id} rank {self.dp_rank}>"
