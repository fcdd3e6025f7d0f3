"""What bursts cost that are not announced: `python -m bench.planner.bursts`.

Bursts come by chance, and take no time to rise or more than an engine takes to start. Three know
different things of them. The oracle knows every request. A planner that knows the *law* knows the
rate of this moment exactly, and the law that bursts follow, but not when the next one begins: no
planner can know more without foreseeing, and of the standing engines it may choose from, it gets
afterwards what would have been the cheapest for 99 %. Ours has seen two hours of requests. Leaves a
JSON file.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import msgspec

from bench.output import progress
from bench.planner.shapes import HOUR_S, Bursts, traffic
from bench.provenance import provenance
from select_service.planner.core.decode_sizing import size_decode
from select_service.planner.core.demand import Forecast, intervals_of
from select_service.planner.core.lengths import Lengths, from_values
from select_service.planner.core.prefill_sizing import size_prefill
from select_service.planner.core.sizing import Goals
from select_service.planner.core.surface import Surface, surface_of
from select_service.planner.core.warm_up import TracedRequest
from select_service.planner.edge.baselines import Contest
from select_service.planner.edge.predictors import PredictorSettings
from select_service.planner.edge.profile_files import read_profile
from select_service.planner.edge.trace_replay import DECODE, PREFILL, ReplaySettings
from select_service.planner.types import Load, PoolKey, PoolState, Window

PROFILE: Final = Path(__file__).parents[2] / "tests" / "golden" / "planner" / "profile_a"
RISES_S: Final = (0.0, 60.0, 180.0, 300.0, 600.0)
PREPARED: Final = (0.0, 0.5, 1.0)
"""For so much of what may have come, when engines ordered now have started, some stand ready."""
GOAL: Final = 0.99
LEARNT_H: Final = 2
GPUS_MAX: Final = 64
SETTINGS: Final = ReplaySettings(ttft_ms=600.0, itl_ms=20.0)
States = dict[PoolKey, PoolState]


class Lawful:
    """Knows the law of the bursts and what has come of it so far, and not what will come."""

    def __init__(
        self, bursts: Bursts, prepared: float, settings: ReplaySettings = SETTINGS
    ) -> None:
        self.name = f"law, prepared {prepared:g}"
        self._bursts = bursts
        self._prepared = prepared
        self._ahead_s = settings.startup_s + settings.fast_s

    def slow(self, window: Window, states: States, now: float) -> dict[PoolKey, int]:
        """See Policy."""
        return self._at(now)

    def fast(self, load: Load, states: States, now: float) -> dict[PoolKey, int]:
        """See Policy."""
        return self._at(now)

    def _at(self, now: float) -> dict[PoolKey, int]:
        prefill, decode = engines_for(self._most(now))
        return {PREFILL: prefill, DECODE: decode}

    def _most(self, now: float) -> float:
        """Return the highest rate until what is ordered now has started."""
        bursts, there = self._bursts, self._bursts.current(now)
        if there is None:
            over = max((end for end in map(bursts.end_s, bursts.drawn) if end <= now), default=0.0)
            begin = max(now, over + bursts.QUIET_S[0])  # the soonest
            soon = now + self._prepared * self._ahead_s - begin
            return bursts.risen(soon) if soon > 0 else bursts.LOW
        age = now - there.begin_s
        if age < bursts.rise_s + there.stays_s:
            return bursts.risen(age + self._ahead_s)  # it is not known when it will fall
        return bursts.rate(now)


@cache
def engines_for(rate: float) -> tuple[int, int]:
    """Return what serves a rate that is known exactly."""
    surface, forecast = _surface(), Forecast(math.ceil(10 * rate) / 10, *_lengths(), 1.0)
    goals = Goals(ttft_ms=SETTINGS.ttft_ms, itl_ms=SETTINGS.itl_ms, attainment=GOAL)
    prefill = size_prefill(surface, forecast, goals, 1.0)
    decode = size_decode(surface, forecast, goals, 1.0, gpus=1)
    return math.ceil(prefill.engines), math.ceil(decode.engines)


@lru_cache(maxsize=1)
def _surface() -> Surface:
    return surface_of(read_profile(PROFILE))


@lru_cache(maxsize=1)
def _lengths() -> tuple[Lengths, float]:
    found = traffic(lambda _: 10.0, 1000.0, 1)
    lengths = Lengths.of(from_values(one.isl for one in found))
    assert lengths is not None
    return lengths, statistics.mean(one.osl for one in found)


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    rise_s: float
    seed: int
    policy: str  # oracle, law or ours
    prepared: float = 0.0
    attainment: float
    gpu_hours: float
    turns: int


def run(rise_s: float, seed: int, policy: str, settings: ReplaySettings = SETTINGS) -> Done:
    """Replay an hour; of those that know the law the cheapest that keeps the goal, or the best."""
    bursts = Bursts(seed, rise_s)
    requests = traffic(bursts.rate, HOUR_S, seed)
    if policy != "law":
        return _replayed(bursts, requests, seed, policy, settings)
    best: Done | None = None
    for prepared in PREPARED:
        found = _replayed(bursts, requests, seed, policy, settings, prepared)
        if best is None or found.attainment > best.attainment:
            best = found
        if found.attainment >= GOAL:
            break  # more that stand ready are dearer
    assert best is not None
    return best


def _replayed(
    bursts: Bursts,
    requests: Sequence[TracedRequest],
    seed: int,
    policy: str,
    surrounding: ReplaySettings,
    prepared: float = 0.0,
) -> Done:
    end = LEARNT_H * HOUR_S
    before = traffic(bursts.rate, end, seed, -end)
    # `whole_bins` leaves the last interval out, which may be a part: add one that is
    past = intervals_of([*before, TracedRequest(end + 1.0, 1.0, 1.0)], surrounding.interval_s)
    settings = replace(
        surrounding,
        start=engines_for(bursts.HIGH),  # a burst may begin before engines could have started
        attainment=GOAL,
        warmup=tuple(past),
    )
    profile = read_profile(PROFILE)
    tuning = PredictorSettings(name="auto", interval_s=settings.interval_s)
    contest = Contest(profile, requests, settings, GPUS_MAX)
    name = "slo" if policy == "ours" else policy
    lawful = Lawful(bursts, prepared, settings)
    result = contest.result(name, lawful if policy == "law" else contest.policy(name, tuning))
    return Done(
        rise_s=bursts.rise_s,
        seed=seed,
        policy=policy,
        prepared=prepared,
        attainment=result.attainment,
        gpu_hours=result.gpu_hours,
        turns=result.turns,
    )


def _rows(done: Sequence[Done], rises_s: Sequence[float]) -> list[str]:
    oracles = {(one.rise_s, one.seed): one for one in done if one.policy == "oracle"}
    rows = []
    for rise_s in rises_s:
        for policy in ("oracle", "law", "ours"):
            found = [
                one
                for one in done
                if (one.rise_s, one.policy) == (rise_s, policy) and (rise_s, one.seed) in oracles
            ]
            if not found:
                continue
            prices = [one.gpu_hours / oracles[rise_s, one.seed].gpu_hours for one in found]
            rows.append(
                f"rise {rise_s:3.0f} s  {policy:6}  "
                f"{100 * statistics.mean(one.attainment for one in found):6.2f} % in time "
                f"(least {100 * min(one.attainment for one in found):6.2f}), "
                f"{statistics.mean(prices):.2f} of the oracle's GPU-hours "
                f"({min(prices):.2f} to {max(prices):.2f}), {len(found)} seeds"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 5, 6, 7, 8])
    parser.add_argument("--rises", type=float, nargs="+", default=RISES_S, metavar="SECONDS")
    parser.add_argument("--interval", type=float, default=SETTINGS.interval_s, metavar="SECONDS")
    parser.add_argument("--startup", type=float, default=SETTINGS.startup_s, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("build/bench-bursts.json"))
    args = parser.parse_args()
    settings = replace(SETTINGS, interval_s=args.interval, startup_s=args.startup)
    done: list[Done] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        asked = [
            pool.submit(run, rise_s, seed, policy, settings)
            for seed in args.seeds
            for rise_s in args.rises
            for policy in ("oracle", "law", "ours")
        ]
        for one in as_completed(asked):
            done.append(one.result())
            progress(str(done[-1]))
            _write(args.out, settings, done)  # what there is: it may take an hour
    print("\n".join(_rows(done, args.rises)))


def _write(out: Path, settings: ReplaySettings, done: Sequence[Done]) -> None:
    result = {
        "what": "bursts by chance that take their time to rise, simulated",
        "provenance": provenance(),
        "startup_s": settings.startup_s,
        "interval_s": settings.interval_s,
        "goal": GOAL,
        "learnt_hours": LEARNT_H,
        "runs": sorted(done, key=lambda one: (one.rise_s, one.seed, one.policy)),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


if __name__ == "__main__":
    main()
