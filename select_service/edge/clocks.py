"""A clock for the core, which requires that time never goes back.

The system's monotonic clock meets that. A clock supplied by an embedding caller may be set back;
time then stands still until it has caught up.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def forwards_only(clock: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that never goes back: `time.monotonic` as it is, any other one wrapped."""
    if clock is time.monotonic:
        return clock
    latest = -math.inf

    def now() -> float:
        nonlocal latest
        latest = max(latest, clock())
        return latest

    return now
