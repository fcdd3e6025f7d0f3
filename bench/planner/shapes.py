"""Made-up traffic: rates over an hour, and requests drawn from them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final, NamedTuple

from select_service.planner.core.warm_up import TracedRequest

HOUR_S: Final = 3600.0
DAY_S: Final = 8 * HOUR_S
"""Of the days that are played: three for the price of one, which is as hard to follow."""

Rate = Callable[[float], float]
"""Requests a second at a time."""


def _chance_bursts(seed: int) -> Rate:
    """Bursts of 36 requests/s on 10, 100 to 200 seconds long, which are not expected."""
    rng, now = random.Random(f"{seed}/bursts"), -3 * HOUR_S
    found: list[tuple[float, float]] = []
    while now < HOUR_S:
        found.append((now, now + rng.uniform(100.0, 200.0)))
        now += rng.uniform(400.0, 1100.0)
    return lambda now: 36.0 if any(begin <= now < end for begin, end in found) else 10.0


def _odd_bursts(_: int) -> Rate:
    """80 seconds every 11 minutes and 20, to 30 requests/s and to 42 in turns: no whole minutes."""
    return lambda now: (10.0, 30.0, 10.0, 42.0)[
        2 * int(now % 1_360.0 >= 680.0) + int(230.0 <= now % 680.0 < 310.0)
    ]


SHAPES: Final[dict[str, Callable[[int], Rate]]] = {
    "diurnal": lambda _: lambda now: 22 - 16 * math.cos(2 * math.pi * now / HOUR_S),
    "ramp": lambda _: lambda now: 4 + 36 * min(1.0, now / HOUR_S),
    "bursts": _chance_bursts,
    "recurring bursts": lambda _: lambda now: 36.0 if now % 900.0 >= 750.0 else 10.0,
    "odd bursts": _odd_bursts,
}


class Burst(NamedTuple):
    """One that rises, stays and falls."""

    begin_s: float
    stays_s: float


class Bursts:
    """Bursts that cannot be known before they begin: their law, and what was drawn from it.

    Between two of them lie 400 to 1,100 quiet seconds; each takes so long to rise, stays 100 to
    200 seconds, and falls as it rose.
    """

    LOW: Final = 10.0
    HIGH: Final = 36.0
    QUIET_S: Final = (400.0, 1100.0)
    STAYS_S: Final = (100.0, 200.0)

    def __init__(self, seed: int, rise_s: float) -> None:
        self.rise_s = rise_s
        rng, now = random.Random(f"{seed}/gradual/{rise_s}"), -3 * HOUR_S
        self.drawn: list[Burst] = []
        while now < HOUR_S:
            one = Burst(now + rng.uniform(*self.QUIET_S), rng.uniform(*self.STAYS_S))
            self.drawn.append(one)
            now = self.end_s(one)

    def end_s(self, one: Burst) -> float:
        """When one is over."""
        return one.begin_s + 2 * self.rise_s + one.stays_s

    def current(self, now: float) -> Burst | None:
        """Return the burst there is."""
        return next((one for one in self.drawn if one.begin_s <= now < self.end_s(one)), None)

    def risen(self, seconds: float) -> float:
        """Return the rate so long after the begin of a burst that stays for ever."""
        share = 1.0 if not self.rise_s else min(1.0, seconds / self.rise_s)
        return self.LOW + (self.HIGH - self.LOW) * share

    def rate(self, now: float) -> float:
        """Return requests a second."""
        one = self.current(now)
        if one is None:
            return self.LOW
        left = self.end_s(one) - now
        return min(self.risen(now - one.begin_s), self.risen(left))


def code_completion(seed: int, seconds: float = HOUR_S) -> list[TracedRequest]:
    """Requests as in Azure's public trace of code completion of 2023: 2.6/s, in clumps.

    Bursts of 3 to 40 requests/s last some seconds, with quiet seconds to minutes between them;
    prompts have a median of 1,500 tokens and 7,437 at the most, outputs a median of 13.
    """
    return _clumps(random.Random(f"{seed}/code"), seconds, lambda _: 1.0)


def code_completion_by_day(seed: int, seconds: float = DAY_S) -> list[TracedRequest]:
    """Such requests over a day, of so many seconds: by night a twelfth of what comes at noon."""
    rng = random.Random(f"{seed}/code day")
    return _clumps(rng, seconds, lambda now: 0.54 - 0.46 * math.cos(2 * math.pi * now / seconds))


def _clumps(rng: random.Random, seconds: float, busy: Rate) -> list[TracedRequest]:
    """Draw code completion: what comes is in proportion to `busy`, in size and number of clumps."""
    now = 0.0
    found: list[TracedRequest] = []
    while True:
        root = math.sqrt(busy(now))
        ends = now + rng.lognormvariate(math.log(5.0), 0.6)
        rate = min(40.0, rng.lognormvariate(math.log(9.0), 0.8)) * root
        while (now := now + rng.expovariate(rate)) < ends:
            if now >= seconds:
                return found
            isl = min(7_437.0, rng.lognormvariate(math.log(1_500.0), 1.2))
            found.append(TracedRequest(now, isl, 5 + rng.lognormvariate(math.log(8.0), 1.1)))
        now = ends + rng.lognormvariate(math.log(10.0), 1.25) / root


def conversation(seed: int, seconds: float = HOUR_S) -> list[TracedRequest]:
    """Requests as in Azure's public trace of conversations of 2023: 5.5/s, that hardly vary.

    Prompts have a median of 1,020 tokens, outputs one of 129 and a mean of 211.
    """
    rng = random.Random(f"{seed}/conversation")
    phase = rng.uniform(0.0, 2 * math.pi)
    now = 0.0
    found: list[TracedRequest] = []
    while True:
        drift = 1.0 + 0.25 * math.sin(phase + now / 900.0) + 0.1 * math.sin(now / 97.0)
        now += rng.expovariate(5.5 * drift)
        if now >= seconds:
            return found
        isl = min(14_000.0, rng.lognormvariate(math.log(1_020.0), 0.75))
        found.append(TracedRequest(now, isl, min(1_000.0, rng.lognormvariate(math.log(129), 1.0))))


def lumps(seed: int, seconds: float = HOUR_S) -> list[TracedRequest]:
    """Requests as in Mooncake's public trace of conversations: 3.3/s, ten or so every 3 seconds.

    Prompts have a median of 7,500 tokens and 12,000 at the most, outputs one of 300.
    """
    rng = random.Random(f"{seed}/lumps")
    phase = rng.uniform(0.0, 2 * math.pi)
    found: list[TracedRequest] = []
    for at in range(int(seconds / 3.0)):
        mean = 10.0 * (1.0 + 0.12 * math.sin(phase + at * 3.0 / 700.0))
        for _ in range(max(0, round(rng.gauss(mean, 1.4 * math.sqrt(mean))))):
            isl = min(12_000.0, rng.lognormvariate(math.log(7_500.0), 0.9))
            osl = min(1_500.0, rng.lognormvariate(math.log(300.0), 0.6))
            found.append(TracedRequest(3.0 * at, isl, osl))
    return found


PUBLIC: Final[dict[str, Callable[[int, float], list[TracedRequest]]]] = {
    "code completion": code_completion,
    "conversation": conversation,
    "lumps": lumps,
}

DAYS: Final[dict[str, Callable[[int, float], list[TracedRequest]]]] = {
    "code completion by day": code_completion_by_day,
}


def traffic(rate: Rate, seconds: float, seed: int, begin: float = 0.0) -> list[TracedRequest]:
    """Draw the requests that come from `begin` on, at 0 the first of them."""
    rng = random.Random(seed + 1000) if begin else random.Random(seed)
    now = 0.0
    found: list[TracedRequest] = []
    while True:
        now += rng.expovariate(rate(begin + now))
        if now >= seconds:
            return found
        isl = min(12_000.0, rng.lognormvariate(7.3, 0.6))
        found.append(TracedRequest(now, isl, max(20.0, rng.lognormvariate(5.0, 0.5))))
