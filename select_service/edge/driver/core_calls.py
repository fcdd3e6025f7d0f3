"""What every operation of the driver works with; the groups of operations inherit it.

Each operation reads the clock, calls the core and carries out its effects. The groups are in
`worker_operations.py`, `selection_operations.py` and so on; `driver.py` joins them in one class and
creates what they declare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.effects import Effects
    from select_service.core.ledger.reservation_ids import ReservationIds
    from select_service.core.service import SelectionCore
    from select_service.edge.state.keeper import Keeper


class CallContext(NamedTuple):
    """What parts of the driver beside its operations need for the same three steps."""

    core: SelectionCore
    clock: Callable[[], float]  # monotonic seconds
    carry_out: Callable[[Effects], None]


class CoreCalls:
    """The core, the clock, and where effects go.

    Attributes:
        core: the state, and the operations that change it.
        bookings: the live reservations by their ids.
        keeper: keeps the state on disk, so it must learn of calls without effects, too; None: none.
    """

    core: SelectionCore
    bookings: ReservationIds
    keeper: Keeper | None
    _clock: Callable[[], float]  # monotonic seconds
    _carry_out: Callable[[Effects], None]
