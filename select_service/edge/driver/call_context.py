"""What every call of a verb needs; `driver.py` makes one and passes it to all callers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.effects import Effects
    from select_service.core.service import SelectionCore

__all__ = ["CallContext"]


class CallContext(NamedTuple):
    """Read the clock, call the core, carry out its effects: every verb does these three."""

    core: SelectionCore
    clock: Callable[[], float]  # monotonic seconds
    carry_out: Callable[[Effects], None]
