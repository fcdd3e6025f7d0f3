"""The fast loop: what the load at this moment asks for, whatever was forecast.

New engines need a minute or so to start, so no number of them saves who waits now; what counts is
that the queue stops growing and is gone soon. Work arrives as fast as the queue grows plus what
ready engines compute meanwhile: that many engines are needed, and some more to work the queue off.
Nothing climbs one replica at a time, and nothing asks for engines to empty a queue at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from select_service.planner.types import Value

if TYPE_CHECKING:
    from select_service.planner.core.surface import Surface
    from select_service.planner.types import Load

__all__ = ["PrefillReactor", "react_decode"]

RECOVERY_S: Final = 60.0
"""A queue is to be worked off within that time."""
_BUSY_MOST: Final = 0.9  # of engines that keep up with what arrives
_MEMORY: Final = 0.6  # of the growth seen before, per look
_SPARE_TIMES: Final = 2.0  # so much more than fits before the target is a queue, less is chance


class PrefillReactor:
    """Watches one pool's queue."""

    def __init__(self) -> None:
        self._work_s: float | None = None
        self._at = 0.0
        self._growth = 0.0

    def react(
        self, surface: Surface, load: Load, now: float, *, target_ms: float, isl: float, ready: int
    ) -> tuple[int | None, str]:
        """Return (engines the queue asks for, why); None: nobody knows."""
        backlog = load.prefill_backlog_tokens
        if not isinstance(backlog, Value) or isl <= 0:
            self._work_s = None
            return None, ""
        one_s = surface.prefill.ttft_ms(isl) / 1e3
        work_s = backlog.value / isl * one_s
        self._follow(work_s, now)
        spare_s = max(target_ms / 1e3 - one_s, 0.1 * target_ms / 1e3)
        if work_s <= _SPARE_TIMES * spare_s * max(1, ready):
            return math.ceil(work_s / spare_s / _SPARE_TIMES), "the queue is short"
        arriving = max(0.0, ready + self._growth)  # engines' worth: all that are ready compute
        engines = math.ceil(arriving / _BUSY_MOST + work_s / RECOVERY_S)
        return engines, (
            f"{backlog.value:.0f} tokens wait to be computed, {work_s:.1f} s of work for {ready} "
            f"engines, growing by {self._growth:+.1f} s a second"
        )

    def _follow(self, work_s: float, now: float) -> None:
        if self._work_s is not None and now > self._at:
            growth = (work_s - self._work_s) / (now - self._at)
            self._growth += (1 - _MEMORY) * (growth - self._growth)
        self._work_s, self._at = work_s, now


def react_decode(surface: Surface, load: Load, *, itl_ms: float) -> tuple[int | None, str]:
    """Return (engines that keep the ITL with these live requests, why); None: nobody knows."""
    live, context = load.concurrency, load.context_tokens
    if not isinstance(live, Value) or not isinstance(context, Value) or context.value <= 0:
        return None, ""
    best = surface.decode.best(itl_ms, context.value)
    if best is None:
        return None, ""
    return math.ceil(live.value / best.concurrency), (
        f"{live.value:.0f} live requests of {context.value:.0f} tokens; "
        f"{best.concurrency:.1f} per engine keep the ITL target"
    )
