"""A reservation in the hands of its user, the same in both faces.

What it is told is noted at once and sent together with what others are told (`core/outbox.py`): no
method waits, and none can fail because the service cannot be reached just now. In a fork of the
process it was booked in it is the other's: nobody there would tell, and the lock may be held for
ever by a thread that is not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from select_service.client.core.problems import ForkedClient
from select_service.types import PairSelection

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from select_service.client.core.booking import Booking
    from select_service.client.core.session import Session
    from select_service.types import Overlap, PairLeg, Selection

__all__ = ["Held", "PairReservation", "Reservation"]


class Held:
    """What is booked, and told of; freed at the end of a `with` block."""

    def __init__(
        self,
        booking: Booking,
        session: Session,
        lock: threading.RLock,
        clock: Callable[[], float],
        refuse_forked: Callable[[], None],
    ) -> None:
        self._booking = booking
        self._session = session
        self._lock = lock
        self._clock = clock
        self._refuse_forked = refuse_forked

    @property
    def reservation_id(self) -> str:
        """The id it is booked under: the caller's, unless another selector had to be asked."""
        return self._booking.reservation_id

    @property
    def degraded(self) -> bool:
        """No selector could be asked: chosen from the last catalog, and nothing is booked."""
        return self._booking.is_degraded

    def prefill_complete(self, cached_tokens: int | None = None) -> None:
        """The prompt is computed: the first token has come.

        Args:
            cached_tokens: how much of it the engine had cached, where it says so.

        Raises:
            ForkedClient: it was booked in a process of which this one is a fork.
        """
        self._refuse_forked()
        with self._lock:
            self._session.prefill_complete(self._booking, cached_tokens, self._clock())

    def output_tokens(self, count: int = 1, decay_fraction: float | None = None) -> None:
        """So many more tokens have come out. Cheap: nothing is sent until they fill a block.

        Args:
            count: since the last call.
            decay_fraction: in [0, 1]; what its blocks count for, when the end is near.

        Raises:
            ForkedClient: it was booked in a process of which this one is a fork.
        """
        self._refuse_forked()
        with self._lock:
            self._session.output_tokens(self._booking, count, decay_fraction, self._clock())

    def free(self) -> None:
        """It is over. Leaving the `with` block does this; repeatable. In a fork, nothing."""
        try:
            self._refuse_forked()
        except ForkedClient:
            return
        with self._lock:
            self._session.end(self._booking, self._clock())

    def __repr__(self) -> str:
        kind = "degraded choice" if self.degraded else "reservation"
        ranks = ", ".join(f"worker {worker} rank {rank}" for worker, rank in self._booking.ranks)
        return f"<{kind} {self.reservation_id}: {ranks}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()


class Reservation(Held):
    """Where a request goes, and what its service is told of it."""

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


class PairReservation(Held):
    """The same of a request that one worker begins and another ends, or one alone does.

    `prefill_complete` is told of the former, `output_tokens` of the latter; the end ends both. What
    a selector has forgotten of a pair is not booked again elsewhere (`stats()["lost_bookings"]`).
    """

    @property
    def pair(self) -> PairSelection:
        """The whole answer."""
        assert isinstance(self._booking.answer, PairSelection)
        return self._booking.answer

    @property
    def prefill(self) -> PairLeg | None:
        """Where to send it first; None: `decode` does both."""
        return self.pair.prefill

    @property
    def decode(self) -> PairLeg:
        """Where it is answered."""
        return self.pair.decode
