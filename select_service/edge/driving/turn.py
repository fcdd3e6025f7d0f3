"""What a call of a verb is made of; `driver.py` makes one and hands it to all who call the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from select_service.core.effects import Effects
    from select_service.core.service import SelectionCore

__all__ = ["Turn"]


class Turn(NamedTuple):
    """Read the clock, call the core, have its effects carried out: every verb is these three."""

    core: SelectionCore
    clock: Callable[[], float]  # monotonic seconds
    carry_out: Callable[[Effects], None]
