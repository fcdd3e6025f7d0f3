"""The duration of an engine's steps: an analytic model, or a measured profile.

A *step* decodes one token of every running sequence and computes chunks of prompts. Between two
changes of the batch, steps differ only in the KV cache, which grows by a token per sequence. So a
model gives the time of a whole *stretch* of steps at once, without simulating token by token.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_TIME_MAX_S = 3_600.0
"""Limit of a step's time, and of what a token adds to it: runs are simulated by the second."""


class Latency(Protocol):
    """Times of an engine; seconds."""

    def prefill_s(self, tokens: int, past: int) -> float:
        """Return the time that `tokens` of a prompt after `past` others add to a step."""

    def stretch_s(self, sequences: int, kv_tokens: int, steps: int) -> float:
        """Return the duration of this many decode-only steps.

        Args:
            sequences: in the batch; with none and one step: the fixed cost of a step.
            kv_tokens: of all sequences before the first step; each step adds `sequences`.
            steps: at least 1.
        """

    def steps_in(self, sequences: int, kv_tokens: int, seconds: float) -> int:
        """Return how many steps of such a stretch have ended after this many seconds."""


@dataclass(frozen=True, slots=True)
class AnalyticLatency:
    """Step time is `base + prefill + sequences * per sequence + KV tokens * per token`.

    Prefill of n tokens after p others is `n * per token + n * (p + n/2) * per pair`: linear layers
    and attention. Defaults are near an 8B model on one H100: 30,000 prompt tokens per second, 13 ms
    between tokens with twenty sequences of 3,000 tokens.
    """

    base_s: float = 6e-3
    prefill_token_s: float = 30e-6
    prefill_pair_s: float = 2e-10
    sequence_s: float = 0.1e-3
    kv_token_s: float = 75e-9

    def __post_init__(self) -> None:
        """Refuse negative times, and steps that take no time.

        Raises:
            ValueError: naming what is wrong.
        """
        for name in self.__slots__:
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, and finite")
            if getattr(self, name) > _TIME_MAX_S:
                raise ValueError(f"{name} must be at most {_TIME_MAX_S:.0f}")
        if not (self.base_s > 0.0 or self.sequence_s > 0.0):
            raise ValueError("base_s or sequence_s must be above 0: a step takes time")

    def prefill_s(self, tokens: int, past: int) -> float:
        """Return the class's formula for prefill."""
        return tokens * (self.prefill_token_s + (past + tokens / 2) * self.prefill_pair_s)

    def stretch_s(self, sequences: int, kv_tokens: int, steps: int) -> float:
        """Return the class's formula, summed over the steps."""
        first = self.base_s + self.sequence_s * sequences + self.kv_token_s * kv_tokens
        return steps * (first + self.kv_token_s * sequences * (steps - 1) / 2)

    def steps_in(self, sequences: int, kv_tokens: int, seconds: float) -> int:
        """Solve that sum for the number of steps."""
        growth = self.kv_token_s * sequences / 2
        first = self.base_s + self.sequence_s * sequences + self.kv_token_s * kv_tokens - growth
        if growth * seconds < 1e-12 * first * first:
            return int(seconds / (first + growth))
        # the root of growth·x² + first·x = seconds, in the form that does not cancel
        return int(2 * seconds / (first + (first * first + 4 * growth * seconds) ** 0.5))


@dataclass(frozen=True, slots=True)
class SlowedLatency:
    """Another engine's times at a fraction of its speed: an older or degraded device."""

    of: Latency
    speed: float  # 1: the same speed

    def __post_init__(self) -> None:
        """Refuse speeds that are not positive.

        Raises:
            ValueError: the speed is not above 0, or not finite.
        """
        if not 0.0 < self.speed < math.inf:
            raise ValueError("the speed of an engine must be above 0, and finite")

    def prefill_s(self, tokens: int, past: int) -> float:
        """Return that engine's time, scaled."""
        return self.of.prefill_s(tokens, past) / self.speed

    def stretch_s(self, sequences: int, kv_tokens: int, steps: int) -> float:
        """Return that engine's time, scaled."""
        return self.of.stretch_s(sequences, kv_tokens, steps) / self.speed

    def steps_in(self, sequences: int, kv_tokens: int, seconds: float) -> int:
        """Return that engine's steps in the scaled time."""
        return self.of.steps_in(sequences, kv_tokens, seconds * self.speed)


class ProfileLatency:
    """Times from a planner's profile: TTFT by prompt length, ITL by KV usage and context.

    Interpolation is linear; outside the measurements the nearest value holds. A prompt after cached
    tokens costs the difference of two TTFTs; a step without decoding sequences has no fixed cost,
    as a TTFT was measured with everything included.
    """

    def __init__(
        self, prefill: Mapping[str, Sequence[float]], decode: Mapping[str, Sequence[float]]
    ) -> None:
        """Take the arrays of `raw_data.npz`.

        Args:
            prefill: `prefill_isl` in tokens, `prefill_ttft` in ms.
            decode: `x_kv_usage` 0..1, `y_context_length` in tokens, `z_itl` in ms, as points, and
                `max_kv_tokens`.

        Raises:
            KeyError: an array is missing.
            ValueError: arrays do not fit together.
        """
        isl = np.ravel(np.asarray(prefill["prefill_isl"], dtype=np.float64))
        ttft = np.ravel(np.asarray(prefill["prefill_ttft"], dtype=np.float64))
        if isl.shape != ttft.shape or not len(isl):
            raise ValueError("prefill_isl and prefill_ttft must have the same length, at least 1")
        _expect_finite(prefill_isl=isl, prefill_ttft=ttft)
        order = np.argsort(isl, kind="stable")
        rising = np.maximum.accumulate(ttft[order]) / 1e3  # more tokens never take less
        self._isl: list[float] = [0.0, *isl[order].tolist()]
        self._ttft: list[float] = [0.0, *rising.tolist()]
        self._slope = self._ttft[-1] / max(self._isl[-1], 1.0)
        self.max_kv_tokens = float(np.ravel(np.asarray(decode["max_kv_tokens"]))[0])
        if not self.max_kv_tokens > 0.0:
            raise ValueError("max_kv_tokens must be above 0")
        self._contexts, self._curves = _curves(decode)

    def prefill_s(self, tokens: int, past: int) -> float:
        """Return the difference of two TTFTs."""
        return self._ttft_s(past + tokens) - self._ttft_s(past)

    def _ttft_s(self, tokens: int) -> float:
        last = self._isl[-1]
        if tokens > last:
            return self._ttft[-1] + (tokens - last) * self._slope
        return _interpolated(tokens, self._isl, self._ttft)

    def step_s(self, sequences: int, kv_tokens: float) -> float:
        """Return the time between two tokens with such a batch."""
        if not sequences:
            return 0.0
        usage, context = kv_tokens / self.max_kv_tokens, kv_tokens / sequences
        above = bisect_left(self._contexts, context)
        if above == 0 or above == len(self._contexts):
            return self._on_curve(min(above, len(self._curves) - 1), usage)
        low, high = self._contexts[above - 1], self._contexts[above]
        share = (context - low) / (high - low)
        one, other = self._on_curve(above - 1, usage), self._on_curve(above, usage)
        return one + (other - one) * share

    def _on_curve(self, number: int, usage: float) -> float:
        return _interpolated(usage, *self._curves[number])

    def stretch_s(self, sequences: int, kv_tokens: int, steps: int) -> float:
        """Multiply the middle step's time by the number of steps."""
        return steps * self.step_s(sequences, kv_tokens + sequences * (steps - 1) / 2)

    def steps_in(self, sequences: int, kv_tokens: int, seconds: float) -> int:
        """Find the number by bisection; stretches never get shorter with more steps."""
        first = self.step_s(sequences, kv_tokens)
        low, high = 0, max(1, int(2 * seconds / first) + 1)
        while low < high:
            middle = (low + high + 1) // 2
            if self.stretch_s(sequences, kv_tokens, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low


def _expect_finite(**columns: NDArray[np.float64]) -> None:
    for name, column in columns.items():
        if not (np.isfinite(column) & (column >= 0.0)).all():
            raise ValueError(f"{name} must be finite, and at least 0")


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Like `numpy.interp`, which takes ten times as long for a single number."""
    above = bisect_right(xs, x)
    if above == 0:
        return ys[0]
    if above == len(xs):
        return ys[-1]
    left, y = xs[above - 1], ys[above - 1]
    return y + (ys[above] - y) / (xs[above] - left) * (x - left)


def _curves(
    decode: Mapping[str, Sequence[float]],
) -> tuple[list[float], list[tuple[list[float], list[float]]]]:
    """Group points by context length; each group has ITL by usage, rising."""
    names = ("x_kv_usage", "y_context_length", "z_itl")
    usage, context, itl = (np.ravel(np.asarray(decode[name], dtype=np.float64)) for name in names)
    if not (len(usage) == len(context) == len(itl) > 0):
        raise ValueError(f"{', '.join(names)} must have the same length, at least 1")
    _expect_finite(x_kv_usage=usage, y_context_length=context)
    if not ((itl > 0.0) & (itl < np.inf)).all():
        raise ValueError("z_itl must be above 0")
    contexts = np.unique(context)
    curves = []
    for one in contexts:
        rows = np.flatnonzero(context == one)
        rows = rows[np.argsort(usage[rows], kind="stable")]
        rising = np.maximum.accumulate(itl[rows]) / 1e3
        curves.append((usage[rows].tolist(), rising.tolist()))
    lengths: list[float] = contexts.tolist()
    return lengths, curves
