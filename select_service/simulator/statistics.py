"""Means over seeds with their confidence interval: Student's t, 95 %.

With a table of its quantiles: an installation without extras has no scipy, whose `stats` also takes
a second to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_T95: Final = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
"""The 97.5 % quantile by degrees of freedom, from 1."""

_NORMAL: Final = 1.959964


class Estimate(NamedTuple):
    """A mean, and half of its interval; a single value has none."""

    mean: float
    half: float | None

    def text(self, digits: int = 3, scale: float = 1.0) -> str:
        """Format it for people."""
        mean = f"{self.mean * scale:z.{digits}f}"  # z: what rounds to nothing has no sign
        return mean if self.half is None else f"{mean} ±{self.half * scale:.{digits}f}"

    def signed(self, scale: float = 100.0) -> str:
        """Format a difference, by default of shares as percentages."""
        half = "" if self.half is None else f" ±{self.half * scale:.1f}"
        return f"{self.mean * scale:+z.1f}{half}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of at least one value, and half of its 95 % interval."""
    number = len(values)
    mean = sum(values) / number
    if number == 1:
        return Estimate(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (number - 1)
    return Estimate(mean, float(_quantile(number - 1) * (variance / number) ** 0.5))


def _quantile(freedom: int) -> float:
    """Beyond the table use the first terms of Fisher's series: exact to four digits there."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = _NORMAL
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
