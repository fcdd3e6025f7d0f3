"""An answer that cannot be given takes back what it says was booked.

Written means handed to the kernel: whether the client reads it is beyond us. What becomes of the
booking is decided by `core/operations/reservation_calls.py`; a lease decides for itself. The HTTP
connection finds out whether an answer was written (`edge/http/connection_guard.py`), handlers and
the embedded service whether their caller went before there was one.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from select_service.types.batches import SelectBatchAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from select_service.core.ledger.reservation_ids import ReservationIds


class Withdraws(Protocol):
    """The driver, or a tenant's view of it."""

    bookings: ReservationIds

    def withdraw(self, answer: object, added: int) -> None:
        """Take back what an answer says was booked; see `ReservationCalls.withdraw`."""


def ids_in(answer: object) -> list[str]:
    """Return the ids of the reservations and pairs that an answer carries."""
    if isinstance(answer, SelectBatchAnswer):
        return [name for one in answer.results for name in ids_in(one.selection)]
    name = getattr(answer, "reservation_id", None)
    return [name] if isinstance(name, str) else []


@contextmanager
def withdrawn_if_lost(service: Withdraws, answer: object) -> Iterator[None]:
    """Take back what an answer says was booked if the block does not come to its end."""
    added = service.bookings.added
    try:
        yield
    except BaseException:
        service.withdraw(answer, added)
        raise
