"""The protocol of sources, and how their answers become readings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from select_service.planner.types import IDLE, MOMENTS, Missing, Moments, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from select_service.planner.types import Load, ModelKey, Reading, Window


class TrafficSource(Protocol):
    """Provides measurements of the traffic."""

    @property
    def warnings(self) -> Sequence[str]:
        """What makes the measurements doubtful, as text."""

    async def begin(self, models: Sequence[ModelKey]) -> None:
        """Start: the first window begins here."""

    async def windows(self, models: Sequence[ModelKey], seconds: float) -> dict[ModelKey, Window]:
        """Return the measurements of the last `seconds`; unknown ones are Missing."""

    async def loads(self, models: Sequence[ModelKey]) -> dict[ModelKey, Load]:
        """Return the current load of the engines."""

    async def close(self) -> None:
        """Close the connections."""


def counted(number: float | None, why: str) -> Reading:
    """Turn a count of requests into a reading: 0 is idle, None is missing."""
    if number is None or not math.isfinite(number) or number < 0:
        return Missing(why)
    return Value(number) if number > 0 else IDLE


def ratio(total: float | None, count: float | None, why: str, scale: float = 1.0) -> Reading:
    """Turn a sum and a count into a mean: a count of 0 is idle, whatever the sum.

    One that is negative or no number is missing: everything that is averaged is a time or a length.
    """
    if total is None or count is None or not (math.isfinite(total) and math.isfinite(count)):
        return Missing(why)
    if count <= 0:
        return IDLE
    mean = scale * total / count
    if not 0 <= mean < math.inf:
        return Missing(f"{why} that can be: the mean is {mean:g}")
    return Value(mean)


def moments(values: Mapping[str, float | None], why: str) -> Moments | Missing:
    """Turn sums by the name of their moment into one reading; one that lacks is missing."""
    found = [values.get(name) for name in MOMENTS]
    if all(one is None for one in found):
        return Missing(why)
    for name, one in zip(MOMENTS, found, strict=True):
        if one is None:
            return Missing(f'{why} of moment "{name}"')
    return Moments(*(one or 0.0 for one in found))
