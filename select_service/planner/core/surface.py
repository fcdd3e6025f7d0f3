"""A repaired profile: more load is never faster, and a looser target never yields less.

Measurements are noisy and cubics oscillate, so the curves are made monotone first: TTFT by prompt
length, ITL and throughput by KV use at each profiled context length. In between they are linear.
`compatible_lookup.py` reads the same profile like the reference; `sizing.py` uses this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from select_service.planner.core.profile import DecodeProfile, Floats, PrefillProfile, Profile

_CELLS: Final = 201  # along KV use: half a percent each
_ONE_LENGTH: Final = 1.05  # context lengths with a smaller ratio count as one
_SAMPLES_MIN: Final = 3  # for a curve along KV use
_SAMPLES: Final = 8  # per curve, if samples are scattered

Rows: TypeAlias = NDArray[np.intp]


class PrefillCurve:
    """The time one engine takes per prompt.

    Args:
        profile: of an engine that computes nothing else.
        latency_ms: that a first token takes besides, in which the engine computes others.
    """

    def __init__(self, profile: PrefillProfile, latency_ms: float = 0.0) -> None:
        self.latency_ms = latency_ms
        ttft = isotonic(profile.ttft_ms)
        self._curve = MonotoneCurve(profile.isl, ttft)
        self._first, self._last = float(profile.isl[0]), float(profile.isl[-1])
        rise = float((ttft[-1] - ttft[-2]) / (profile.isl[-1] - profile.isl[-2]))
        self._slope_beyond = max(rise, float(ttft[-1] / profile.isl[-1]))

    def ttft_ms(self, isl: float) -> float:
        """Return how long one prompt keeps an engine busy, also beyond the lengths profiled."""
        beyond = max(0.0, isl - self._last)
        return self._curve.at(isl) + beyond * self._slope_beyond


class Capacity(NamedTuple):
    """The most one engine can carry at a context length within an ITL."""

    thpt_per_gpu: float
    itl_ms: float
    kv_usage: float
    concurrency: float


class DecodeSurface:
    """The decode speed of one engine by its load."""

    def __init__(self, profile: DecodeProfile) -> None:
        self._max_kv_tokens = profile.max_kv_tokens
        self._kv = np.linspace(0.0, 1.0, _CELLS)
        groups = _by_context(profile)
        self._contexts = np.array([context for context, _ in groups])
        self._itl = np.array([self._itl_row(profile, rows) for _, rows in groups])
        # throughput falls as 1/context at equal KV use; their product does not
        thpt = np.array([self._thpt_row(profile, rows) for _, rows in groups])
        self._tokens = thpt * self._contexts[:, None]

    def itl_ms(self, concurrency: float, context: float) -> float:
        """Return the ITL of an engine with this many requests, at most that of a full one."""
        kv_usage = concurrency * context / self._max_kv_tokens
        return float(np.interp(kv_usage, self._kv, self._at(self._itl, context)))

    def is_full(self, concurrency: float, context: float) -> bool:
        """Whether some of so many requests wait for others to end."""
        return concurrency * context > self._max_kv_tokens

    def best(self, itl_ms: float, context: float) -> Capacity | None:
        """Return the highest capacity within an ITL; None if even a single request is slower."""
        itl = self._at(self._itl, context)
        cell = int(np.searchsorted(itl, itl_ms, side="right")) - 1
        if cell < 1:
            return None
        kv_usage = float(self._kv[cell])
        if cell < _CELLS - 1 and itl[cell + 1] > itl[cell]:
            share = (itl_ms - itl[cell]) / (itl[cell + 1] - itl[cell])
            kv_usage += float(share) / (_CELLS - 1)
        concurrency = kv_usage * self._max_kv_tokens / context
        if concurrency < 1 and cell < _CELLS - 1:
            return None  # less than one request is none; one that fills the engine may be cut off
        context_known = min(max(context, float(self._contexts[0])), float(self._contexts[-1]))
        tokens = float(np.interp(kv_usage, self._kv, self._at(self._tokens, context)))
        return Capacity(
            thpt_per_gpu=tokens / context_known,
            itl_ms=float(np.interp(kv_usage, self._kv, itl)),
            kv_usage=kv_usage,
            concurrency=concurrency,
        )

    def _at(self, rows: Floats, context: float) -> Floats:
        contexts = self._contexts
        if context <= contexts[0] or len(contexts) == 1:
            first: Floats = rows[0]
            return first
        if context >= contexts[-1]:
            last: Floats = rows[-1]
            return last
        above = int(np.searchsorted(contexts, context, side="right"))
        share = (context - contexts[above - 1]) / (contexts[above] - contexts[above - 1])
        mixed: Floats = (1 - share) * rows[above - 1] + share * rows[above]
        return mixed

    def _itl_row(self, profile: DecodeProfile, rows: Rows) -> Floats:
        """By KV use at one context length, monotone, on the grid."""
        kv, itl = _sorted(profile.kv_usage[rows], profile.itl_ms[rows])
        # an empty engine was hardly ever measured: extrapolate, but not below any measurement
        slope = (itl[-1] - itl[0]) / max(kv[-1] - kv[0], 1e-9)
        empty = min(max(itl[0] - slope * kv[0], float(profile.itl_ms.min())), itl[0])
        row: Floats = np.interp(self._kv, np.append(0.0, kv), np.append(empty, itl))
        return row

    def _thpt_row(self, profile: DecodeProfile, rows: Rows) -> Floats:
        """The same for throughput; without requests it is 0."""
        kv, thpt = _sorted(profile.kv_usage[rows], profile.thpt_per_gpu[rows])
        row: Floats = np.interp(self._kv, np.append(0.0, kv), np.append(0.0, thpt))
        return row


def _sorted(kv: Floats, values: Floats) -> tuple[Floats, Floats]:
    order = np.argsort(kv, kind="stable")
    return kv[order], isotonic(values[order])


class Surface(NamedTuple):
    """Both halves: of a profile, or as engines were measured (`engine_speed.py`)."""

    prefill: PrefillCurve
    decode: DecodeSurface


def surface_of(profile: Profile) -> Surface:
    """Return the repaired profile."""
    return Surface(PrefillCurve(profile.prefill), DecodeSurface(profile.decode))


def _by_context(profile: DecodeProfile) -> list[tuple[float, Rows]]:
    """Group samples of nearly equal context length; split a scatter without such groups evenly."""
    order = np.argsort(profile.context_length, kind="stable")
    lengths = profile.context_length[order]
    groups = np.split(order, np.flatnonzero(lengths[1:] > _ONE_LENGTH * lengths[:-1]) + 1)
    if min(len(group) for group in groups) < _SAMPLES_MIN:
        groups = np.array_split(order, max(1, len(order) // _SAMPLES))
    return [(float(np.mean(profile.context_length[group])), group) for group in groups]


# Curves through points that do not overshoot: monotone cubics (Fritsch and Carlson 1980). In numpy,
# for a handful of knots: scipy's PCHIP has other slopes at both ends, and would be a heavy
# dependency of every planner.


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
