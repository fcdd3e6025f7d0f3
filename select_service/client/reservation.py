"""A reservation in the hands of its user, the same in both clients.

Reports are noted at once and sent together with others (`core/report_outbox.py`): no method blocks,
and none can fail because the service is unreachable. In a fork of the process that booked it, it
still belongs to that process: the fork would send no reports, and its lock may be held for
ever by a thread that does not exist there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from select_service.client.core.problems import ForkedClient
from select_service.types import PairSelection
from select_service.types.selections import RANK_HEADER

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from select_service.client.core.booking import ClientBooking
    from select_service.client.core.session import ClientSession
    from select_service.types import Outcome, Overlap, PairLeg, Selection


def rank_headers(chosen: Selection | PairLeg) -> dict[str, str]:
    """Return the headers to send to the worker, so that the chosen rank computes the request.

    Without them, an engine with several ranks behind one address balances them by itself, and
    other ranks cache the prompt than the one that was reserved. A worker with one rank needs none;
    of a choice that was made without the service it is not known.
    """
    ranks = sorted(map(int, chosen.overlap.dp))
    if len(ranks) < 2:  # noqa: PLR2004
        return {}
    return {RANK_HEADER: str(ranks.index(chosen.dp_rank))}


def _outcome_of(kind: type[BaseException] | None) -> Outcome:
    if kind is None:
        return "completed"
    return "failed" if issubclass(kind, Exception) else "cancelled"  # those are no errors


class ReservationHandle:
    """A booking to report on; freed at the end of a `with` block."""

    def __init__(
        self,
        booking: ClientBooking,
        session: ClientSession,
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
        """Whether no selector could be asked: chosen from the last catalog, with nothing booked."""
        return self._booking.is_degraded

    def prefill_complete(self, cached_tokens: int | None = None) -> None:
        """Report that the prompt is computed: the first token has come.

        Args:
            cached_tokens: how much of it the engine had cached, if it reports that; engines that
                stream report in their last chunk, which may come after the end as well.

        Raises:
            ForkedClient: it was booked in a process of which this one is a fork.
        """
        self._refuse_forked()
        with self._lock:
            self._session.prefill_complete(self._booking, cached_tokens, self._clock())

    def output_tokens(self, count: int = 1, decay_fraction: float | None = None) -> None:
        """Report output tokens. Cheap: nothing is sent until they fill a block.

        Args:
            count: since the last call.
            decay_fraction: in [0, 1]; the weight of its blocks when the end is near.

        Raises:
            ForkedClient: it was booked in a process of which this one is a fork.
        """
        self._refuse_forked()
        with self._lock:
            self._session.output_tokens(self._booking, count, decay_fraction, self._clock())

    def free(self, outcome: Outcome | None = None) -> None:
        """End the reservation, as leaving the `with` block does. Idempotent; a no-op in a fork.

        Args:
            outcome: `completed`, `failed` (its engine raised, did not answer or could not be
                reached) or `cancelled` (it was wanted no longer). Ranks whose reservations fail one
                after another are passed over for a while. A `with` block reports by how it is left:
                an exception means `failed`, cancellation `cancelled`; call this in the block where
                that is wrong.

        Raises:
            ValueError: no such outcome.
        """
        try:
            self._refuse_forked()
        except ForkedClient:
            return
        with self._lock:
            self._session.end(self._booking, self._clock(), outcome)

    def __repr__(self) -> str:
        kind = "degraded choice" if self.degraded else "reservation"
        ranks = ", ".join(f"worker {worker} rank {rank}" for worker, rank in self._booking.ranks)
        return f"<{kind} {self.reservation_id}: {ranks}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self.end_block(kind)

    def end_block(self, kind: type[BaseException] | None) -> None:
        """Free it at the end of a block that was left by an exception of this type, or by none."""
        if not self._booking.is_over:  # else its user knows better
            self.free(_outcome_of(kind))


class Reservation(ReservationHandle):
    """Where a request goes; the service is kept informed through it."""

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
        """The chosen data-parallel rank."""
        return self._booking.selection.dp_rank

    @property
    def endpoint(self) -> str:
        """Where to send the request, as the worker was registered."""
        return self._booking.selection.endpoint

    @property
    def headers(self) -> dict[str, str]:
        """Headers to send there besides your own: they name the rank; see `rank_headers`."""
        return rank_headers(self._booking.selection)

    @property
    def overlap(self) -> Overlap:
        """Tokens of the prompt that the worker holds, by tier."""
        return self._booking.selection.overlap

    @property
    def effective_prefill_tokens(self) -> int:
        """Tokens that will have to be computed, according to the service."""
        return self._booking.selection.effective_prefill_tokens


class PairReservation(ReservationHandle):
    """A reservation for a prefill and a decode worker, or for one that does both.

    `prefill_complete` concerns the former, `output_tokens` the latter; the end frees both. A pair
    that a selector has forgotten is not booked again (`stats()["lost_bookings"]`).
    """

    @property
    def pair(self) -> PairSelection:
        """The whole answer."""
        assert isinstance(self._booking.answer, PairSelection)
        return self._booking.answer

    @property
    def prefill(self) -> PairLeg | None:
        """Where to send the request first; None: `decode` does both."""
        return self.pair.prefill

    @property
    def decode(self) -> PairLeg:
        """The worker that answers."""
        return self.pair.decode
