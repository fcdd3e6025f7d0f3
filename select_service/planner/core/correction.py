"""The deviation of reality from the profile: a factor that moves slowly and never far.

The reference divides one interval's mean by the profile and multiplies by the result at once; a
missing metric is a zero there, and scales the pool away. Here the logarithm of the ratio is
smoothed and clamped, and counts only if many requests contributed while replicas stood still.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.core.lengths import Lengths
from select_service.planner.core.prefill_sizing import PrefillQueue
from select_service.planner.types import Value

if TYPE_CHECKING:
    from select_service.planner.core.sizing import Goals
    from select_service.planner.core.surface import Surface
    from select_service.planner.types import Reading, Window

FACTOR_LEAST: Final = 0.5
FACTOR_MOST: Final = 2.0
SAMPLES_MIN: Final = 20
_WEIGHT: Final = 0.3  # of a new interval
_BUSY_MOST: Final = 0.9  # a fuller queue does not reflect the profile


class Correction:
    """The ratio of measured to profiled, for one metric of one model."""

    def __init__(self, factor: float = 1.0) -> None:
        self._log = math.log(factor)

    @property
    def factor(self) -> float:
        """1 is as profiled, 2 twice as slow."""
        return math.exp(self._log)

    def observe(self, measured: Reading, profiled: float, samples: float, *, steady: bool) -> bool:
        """Add one interval if it is meaningful; returns whether it was."""
        if not isinstance(measured, Value) or measured.value <= 0 or profiled <= 0:
            return False
        if samples < SAMPLES_MIN or not steady:
            return False
        ratio = min(max(measured.value / profiled, FACTOR_LEAST), FACTOR_MOST)
        self._log += _WEIGHT * (math.log(ratio) - self._log)
        return True


def expected_ttft_ms(
    surface: Surface,
    goals: Goals,
    computed: float,
    window: Window,
    engines: int,
    lumps_s: float = 0.0,
) -> float:
    """Return the profiled TTFT including the wait; 0 if the queue is too full to compare.

    Any measurement between the wait under ideal placement and that of separate queues, or of the
    largest lumps that there may be, says nothing about the engines: it counts as expected.

    Args:
        surface: of the engines.
        goals: of the model.
        computed: share of prompt tokens not cached on any worker.
        window: what was measured.
        engines: that were ready.
        lumps_s: of how many seconds requests may come at once; 0: they come one by one.
    """
    found = measured_queue(surface, computed, window, engines, lumps_s=lumps_s)
    if found is None:
        return 0.0
    queue, rho = found
    alone_s = queue.mean_s + queue.latency_s
    longest = 1e3 * (alone_s + max(queue.wait_s(rho), queue.lump_wait_s(rho)))
    if not (goals.pooled or lumps_s) or not isinstance(window.ttft_ms, Value):
        return longest
    shortest = 1e3 * (alone_s + queue.wait_s(rho, engines, rho**engines))
    return min(max(window.ttft_ms.value, shortest), longest)


def measured_queue(
    surface: Surface,
    computed: float,
    window: Window,
    engines: int,
    slowness: float = 1.0,
    lumps_s: float = 0.0,
) -> tuple[PrefillQueue, float] | None:
    """Return the queue of an interval's prompts and its utilization; None: unknown, or too full."""
    if not isinstance(window.requests, Value) or not isinstance(window.isl, Value):
        return None
    lengths = Lengths.of(window.isl_mix, window.isl.value) or Lengths.single(window.isl.value)
    queue = PrefillQueue(surface.prefill, lengths.scaled(computed), slowness, lumps_s)
    rho = window.requests.value / window.seconds * queue.mean_s / engines
    return None if rho > _BUSY_MOST else (queue, rho)


def expected_itl_ms(surface: Surface, window: Window, engines: int) -> float:
    """Return the profiled ITL at the measured concurrency; 0 if that is unknown.

    Or if requests wait for a place: what that takes says nothing of how fast engines are.
    """
    live, isl, osl = window.concurrency, window.isl, window.osl
    if not (isinstance(live, Value) and isinstance(isl, Value) and isinstance(osl, Value)):
        return 0.0
    each, context = live.value / engines, isl.value + osl.value / 2
    if surface.decode.is_full(each, context):
        return 0.0
    return surface.decode.itl_ms(each, context)
