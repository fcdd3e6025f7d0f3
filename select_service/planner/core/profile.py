"""Profiling results: how fast an engine computes prompts, and how fast it generates.

Raw arrays are validated once, here; every message names the array and, if possible, the position.
`edge/profile_files.py` reads the files; `compatible_lookup.py` and `surface.py` interpolate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from select_service.planner.errors import ProfileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Floats: TypeAlias = NDArray[np.float64]

_PREFILL: Final = ("prefill_isl", "prefill_ttft", "prefill_thpt_per_gpu")
_DECODE: Final = ("x_kv_usage", "y_context_length", "z_itl", "z_thpt_per_gpu")
_POINTS_MIN: Final = 4  # of a cubic
_KV_MOST: Final = 1.05  # tolerates shares above 1 by rounding


@dataclass(frozen=True, slots=True)
class PrefillProfile:
    """One engine computing one prompt at a time; sorted by `isl`, without duplicates."""

    isl: Floats
    """Tokens."""
    ttft_ms: Floats
    thpt_per_gpu: Floats
    """Input tokens per second and GPU."""


@dataclass(frozen=True, slots=True)
class DecodeProfile:
    """One engine generating; scattered samples, in no order."""

    kv_usage: Floats
    """Share of the engine's KV tokens in use, 0 to 1."""
    context_length: Floats
    """Tokens of one request, including its output so far."""
    itl_ms: Floats
    thpt_per_gpu: Floats
    """Output tokens per second and GPU."""
    max_kv_tokens: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Both halves."""

    prefill: PrefillProfile
    decode: DecodeProfile


def prefill_of(arrays: Mapping[str, object], where: str) -> PrefillProfile:
    """Validate the arrays of a prefill profile and sort them by prompt length.

    Raises:
        ProfileError: an array is missing, of another length, not finite or not positive; fewer
            than four lengths, or one twice.
    """
    isl, ttft, thpt = _equally_long(arrays, _PREFILL, where)
    if len(isl) < _POINTS_MIN:
        raise ProfileError(
            f"{where}: prefill_isl has {len(isl)} lengths, interpolation needs {_POINTS_MIN}"
        )
    order = np.argsort(isl, kind="stable")
    isl, ttft, thpt = isl[order], ttft[order], thpt[order]
    twice = np.flatnonzero(np.diff(isl) == 0)
    if len(twice):
        raise ProfileError(f"{where}: prefill_isl has {isl[twice[0]]:g} twice")
    for name, values in zip(_PREFILL, (isl, ttft, thpt), strict=True):
        _positive(values, name, where)
    return PrefillProfile(isl, ttft, thpt)


def decode_of(arrays: Mapping[str, object], where: str) -> DecodeProfile:
    """Validate the arrays of a decode profile.

    Raises:
        ProfileError: likewise; or a share of KV tokens is outside 0 to 1.
    """
    kv_usage, context, itl, thpt = _equally_long(arrays, _DECODE, where)
    if len(kv_usage) < _POINTS_MIN:
        raise ProfileError(
            f"{where}: x_kv_usage has {len(kv_usage)} samples, interpolation needs {_POINTS_MIN}"
        )
    outside = np.flatnonzero((kv_usage < 0) | (kv_usage > _KV_MOST))
    if len(outside):
        raise ProfileError(
            f"{where}: x_kv_usage[{outside[0]}] is {kv_usage[outside[0]]:g}, not within 0 and 1"
            + (" (a percentage?)" if kv_usage[outside[0]] > 1 else "")
        )
    for name, values in zip(_DECODE[1:], (context, itl, thpt), strict=True):
        _positive(values, name, where)
    if "max_kv_tokens" not in arrays:
        raise ProfileError(f"{where}: max_kv_tokens is missing")
    tokens = _array(arrays["max_kv_tokens"], "max_kv_tokens", where)
    if tokens.size != 1 or not np.all(tokens > 0):
        raise ProfileError(f"{where}: max_kv_tokens must be one positive number")
    return DecodeProfile(kv_usage, context, itl, thpt, float(tokens.reshape(-1)[0]))


def _equally_long(arrays: Mapping[str, object], names: Sequence[str], where: str) -> list[Floats]:
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ProfileError(f"{where}: {', '.join(missing)} missing")
    values = [_array(arrays[name], name, where) for name in names]
    for name, one in zip(names, values, strict=True):
        if one.ndim != 1:
            raise ProfileError(f"{where}: {name} has {one.ndim} dimensions, not 1")
        if len(one) != len(values[0]):
            raise ProfileError(
                f"{where}: {name} has {len(one)} values, {names[0]} has {len(values[0])}"
            )
    return values


def _array(raw: object, name: str, where: str) -> Floats:
    try:
        values: Floats = np.asarray(raw, dtype=np.float64)
    except (TypeError, ValueError):
        raise ProfileError(f"{where}: {name} is no array of numbers") from None
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise ProfileError(f"{where}: {name}[{wrong[0]}] is {values.reshape(-1)[wrong[0]]}")
    return values


def _positive(values: Floats, name: str, where: str) -> None:
    wrong = np.flatnonzero(values <= 0)
    if len(wrong):
        raise ProfileError(f"{where}: {name}[{wrong[0]}] is {values[wrong[0]]:g}, not positive")
