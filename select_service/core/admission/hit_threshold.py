"""The cache-hit threshold: filters out candidates that hold too little of the prompt.

The request's threshold, even 0, overrides the process-wide one. Retries after such a refusal must
end: from an attempt on, the threshold counts as 0. `cache_hits.py` applies this to requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from select_service.core.columns import Floats, Slots

Scope = Literal["gpu", "cpu", "disk", "any"]
Basis = Literal["prompt", "cacheable"]
Source = Literal["request", "global", "loop_guard"]

DEFAULT_ATTEMPTS_MAX: Final = 3
"""Refusals one request may get before it is placed regardless."""


class Threshold(NamedTuple):
    """The threshold in force for one request, and its source."""

    value: float
    source: Source


def check_threshold(value: object) -> float:
    """Return a threshold as a number.

    Raises:
        ValueError: it is no finite number in 0..1; a bool or a text is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("cache_hit_threshold must be a number")  # noqa: TRY004 - one kind of refusal
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        raise ValueError(f"cache_hit_threshold must be in 0..1, got {value:g}")
    return float(value)


def threshold_in_force(
    requested: float | None,
    process_wide: float,
    *,
    attempt: int = 0,
    attempts_max: int = DEFAULT_ATTEMPTS_MAX,
) -> Threshold:
    """Return the threshold that applies to a request.

    Args:
        requested: its own threshold, if it has one.
        process_wide: the flag's.
        attempt: how often it was refused or preempted before, by its own account.
        attempts_max: from here on it is let through.
    """
    asked = Threshold(process_wide, "global") if requested is None else None
    asked = asked or Threshold(requested or 0.0, "request")
    if asked.value > 0.0 and attempt >= attempts_max:
        return Threshold(0.0, "loop_guard")
    return asked


def base_tokens(isl_tokens: int, block_size: int, basis: Basis) -> int:
    """Return the tokens a hit rate is measured against.

    "cacheable": whole blocks of all but the last token, which an engine always computes itself.
    """
    if basis == "prompt":
        return isl_tokens
    return max(0, isl_tokens - 1) // block_size * block_size


def cached_blocks(device: Floats, host: Floats, disk: Floats, scope: Scope) -> Floats:
    """Return the cached blocks per row down to a tier; `host` and `disk` extend `device`."""
    if scope == "gpu":
        return device
    if scope == "cpu":
        return device + host
    return device + host + disk


class Hits(NamedTuple):
    """The result of a filter: the candidates that pass, and the best one."""

    passing: Slots | None  # positions, ascending; None: all
    best_row: int  # -1: nothing was measured
    best_rate: float | None

    @property
    def refused(self) -> bool:
        """Whether no candidate passes."""
        return self.passing is not None and not len(self.passing)


def filter_rows(
    blocks: Floats, block_size: int, isl_tokens: int, threshold: float, basis: Basis = "prompt"
) -> Hits:
    """Keep the rows whose hit rate reaches the threshold; equal passes.

    `blocks` are the cached blocks by candidate row; a prompt of 0 tokens is never refused.
    """
    base = base_tokens(isl_tokens, block_size, basis)
    if not base or not len(blocks):
        return Hits(None, -1, None)
    cached = np.minimum(blocks * block_size, base)
    best = int(cached.argmax())
    rate = float(cached[best]) / base
    if threshold <= 0.0:
        return Hits(None, best, rate)
    passing = np.flatnonzero(cached / base >= threshold)
    return Hits(None if len(passing) == len(blocks) else passing, best, rate)


def filter_groups(
    groups: Sequence[tuple[int, Slots]],
    rows: int,
    block_size: int,
    isl_tokens: int,
    threshold: float,
    basis: Basis = "prompt",
) -> Hits:
    """Do the same where few rows hold anything, without visiting the others.

    `groups` are (cached blocks > 0, rows), disjoint; rows that are no candidates are skipped.
    The rest of the `rows` candidates hold nothing.
    """
    base = base_tokens(isl_tokens, block_size, basis)
    if not base or not rows:
        return Hits(None, -1, None)
    best, most = 0, 0
    passing: list[int] = []
    for blocks, slots in groups:
        here = [slot for slot in slots.tolist() if slot < rows]
        if not here:
            continue
        cached = min(blocks * block_size, base)
        first = min(here)
        if cached > most or (cached == most and first < best):
            best, most = first, cached
        if cached / base >= threshold:
            passing += here
    if threshold <= 0.0:
        return Hits(None, best, most / base)
    if len(passing) == rows:
        return Hits(None, best, most / base)
    return Hits(np.array(sorted(passing), dtype=np.int64), best, most / base)
