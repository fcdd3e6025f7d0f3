"""Arrival times: endless sequences in seconds from 0, drawn from a given rng."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Independent arrivals, `rate` per second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def gamma(rng: random.Random, rate: float, cv: float) -> Iterator[float]:
    """Gaps with coefficient of variation `cv`: 1 is Poisson, above is burstier, below more even."""
    shape = 1.0 / (cv * cv)
    now = 0.0
    while True:
        now += rng.gammavariate(shape, 1.0 / (shape * rate))
        yield now


def bursts(rng: random.Random, rate: float, size: int) -> Iterator[float]:
    """Bursts of `size` simultaneous arrivals, `rate` per second on average."""
    for now in poisson(rng, rate / size):
        for _ in range(size):
            yield now


def diurnal(
    rng: random.Random, times: Iterator[float], period_s: float, depth: float
) -> Iterator[float]:
    """Thin arrivals so that their rate oscillates between all and `1 - depth` of it."""
    for now in times:
        share = 1.0 - depth * (1.0 - math.cos(2.0 * math.pi * now / period_s)) / 2.0
        if rng.random() < share:
            yield now
