"""Wait times of requests, in plain integers; `edge/metrics/admission_metrics.py` reads them."""

from __future__ import annotations

from typing import Final

_WAIT_BUCKETS_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class WaitTimes:
    """A histogram of the wait times of one class."""

    bounds: Final = _WAIT_BUCKETS_S

    def __init__(self) -> None:
        self.counts = [0] * (len(_WAIT_BUCKETS_S) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count the wait of one request, whatever its outcome."""
        at = sum(seconds > bound for bound in _WAIT_BUCKETS_S)
        self.counts[at] += 1
        self.seconds += seconds
