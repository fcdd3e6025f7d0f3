"""Curves through points that do not overshoot: monotone cubics (Fritsch and Carlson 1980).

In numpy, for a handful of knots: scipy's PCHIP has other slopes at both ends, and would be a heavy
dependency of every planner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from select_service.planner.core.profile import Floats

__all__ = ["MonotoneCurve", "isotonic"]


class MonotoneCurve:
    """Through at least two points, never outside the values of its neighbours."""

    def __init__(self, x: Floats, y: Floats) -> None:
        self._x, self._y = x, y
        self._slopes = _monotone_slopes(x, y)

    def at(self, x: float) -> float:
        """Return the value at x, held constant beyond both ends."""
        return _hermite(self._x, self._y, self._slopes, x)


def isotonic(y: Floats) -> Floats:
    """Return the nearest (least squares) values that never fall; pool adjacent violators, O(n)."""
    blocks: list[tuple[float, int]] = []
    for value in y.tolist():
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean = (before * many + mean * count) / (many + count)
            count += many
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def _hermite(xs: Floats, ys: Floats, slopes: Floats, x: float) -> float:
    x = min(max(x, float(xs[0])), float(xs[-1]))
    i = min(max(int(np.searchsorted(xs, x, side="right")) - 1, 0), len(xs) - 2)
    step = float(xs[i + 1] - xs[i])
    t = (x - float(xs[i])) / step
    a, b = float(ys[i]), float(ys[i + 1])
    m, n = step * float(slopes[i]), step * float(slopes[i + 1])
    return (
        a * (1 + 2 * t) * (1 - t) ** 2
        + m * t * (1 - t) ** 2
        + b * t * t * (3 - 2 * t)
        + n * t * t * (t - 1)
    )


def _monotone_slopes(x: Floats, y: Floats) -> Floats:
    steps = np.diff(x)
    rises = np.diff(y) / steps
    slopes = np.empty(len(x))
    slopes[0], slopes[-1] = rises[0], rises[-1]
    for i in range(1, len(x) - 1):
        before, after = rises[i - 1], rises[i]
        if before * after <= 0:
            slopes[i] = 0.0
        else:
            w1 = 2 * steps[i] + steps[i - 1]
            w2 = steps[i] + 2 * steps[i - 1]
            slopes[i] = (w1 + w2) / (w1 / before + w2 / after)
    return slopes
