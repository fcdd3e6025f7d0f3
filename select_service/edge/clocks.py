"""A clock for the core, which asks that time never goes back.

The system's monotonic clock does not; who gives the service a clock of his own may give it one that
is set by others, and for as long as that is behind, time stands still.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["forwards_only"]


def forwards_only(clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that never goes back: the system's as it is, another one held to that."""
    if clock is time.monotonic:
        return clock
    latest = -math.inf

    def now() -> float:
        nonlocal latest
        latest = max(latest, clock())
        return latest

    return now
