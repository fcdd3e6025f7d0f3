"""What 1.0 means: the highest rate at which every class is in time, found in the model.

All are let in, in order of arrival; the rate is halved in until two rates lie close together,
one with every class in time for every seed, one without.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.admission.simulated import Simulated

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.admission.measures import Result
    from bench.admission.play import Script
    from bench.admission.worker import Happening

__all__ = ["ATTAINED_MIN", "Capacity", "measure_capacity", "measure_throughput"]

ATTAINED_MIN = 0.99
_SEEDS = (11, 12, 13)
_SECONDS = 60.0
_CLOSE = 0.02


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the pool of a script can do."""

    rate: float  # requests per second with every class in time
    tokens_per_s: float  # their input tokens
    in_flight_max: int  # most requests of one worker at that rate


def measure_capacity(script: Script, progress: Callable[[str], None]) -> Capacity:
    """Find it; takes some seconds."""
    settings = script.settings
    prefill_s = script.workload.mean_tokens * settings.prefill_token_s
    low, high = 0.0, script.workers / prefill_s  # nothing but prompts, without any step's own time
    in_flight = 0
    while high - low > _CLOSE * high:
        rate = (low + high) / 2
        found = _all_in_time(replace(script, rate=rate))
        progress(f"capacity: {rate:6.1f} requests/s {'fit' if found else 'do not fit'}")
        if found:
            low, in_flight = rate, found
        else:
            high = rate
    return Capacity(low, low * script.workload.mean_tokens, in_flight)


def measure_throughput(script: Script) -> Capacity:
    """Return what the pool computes when more waits at every worker than it can, late or not."""
    work = script.settings.work_s
    work_s = sum(one.share * work(one.tokens, one.output_tokens) for one in script.workload.sources)
    rate = 4 * script.workers / work_s
    run = _Watched(
        replace(script, rate=rate, seconds=_SECONDS, seed=_SEEDS[0], retries=0), "always-admit", {}
    )
    run.run()
    since = _SECONDS / 2
    ended = sum(since <= at < _SECONDS for at in run.ended_at)
    return Capacity(rate := ended / since, rate * script.workload.mean_tokens, run.in_flight_max)


def _all_in_time(script: Script) -> int:
    """Return the most requests in flight on one worker; 0 if some class was late."""
    most = 0
    for seed in _SEEDS:
        run = _Watched(replace(script, seconds=_SECONDS, seed=seed, retries=0), "always-admit", {})
        if not _fits(run.run()):
            return 0
        most = max(most, run.in_flight_max)
    return most


def _fits(result: Result) -> bool:
    return all(one.attained >= ATTAINED_MIN for one in result.classes.values())


class _Watched(Simulated):
    """Remembers the most requests a worker had."""

    in_flight_max = 0

    def __init__(self, script: Script, policy: str, config: dict[str, Any]) -> None:
        super().__init__(script, policy, config)
        self.ended_at: list[float] = []

    def _note(self, happening: Happening, now: float) -> int:
        if happening.kind == "done":
            self.ended_at.append(now)
        return super()._note(happening, now)

    def _report(self, slot: int, now: float) -> None:
        super()._report(slot, now)
        self.in_flight_max = max(self.in_flight_max, self._ranks[slot].requests)
