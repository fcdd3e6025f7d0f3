"""A profile as the reference reads it: cubics, and a grid of 100 by 100 cells for decode.

Reproduced exactly, including artefacts, to answer what the reference would do: the cubic surface is
not monotone, so a looser target may find a lower throughput. `surface.py` has our own reading.
Needs scipy, as the reference does: its splines, and the triangulation that determines the cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from select_service.planner.errors import MissingExtra, ProfileError

if TYPE_CHECKING:
    from types import ModuleType

    from select_service.planner.core.profile import (
        DecodeProfile,
        Floats,
        PrefillProfile,
        Profile,
    )

RESOLUTION: Final = 100


class Best(NamedTuple):
    """The most an engine provides at a context length and an ITL."""

    thpt_per_gpu: float
    itl_ms: float
    kv_usage: float


class CompatiblePrefill:
    """TTFT and throughput by prompt length, clamped to the profiled range."""

    def __init__(self, profile: PrefillProfile) -> None:
        spline = _interpolation().make_interp_spline  # a cubic, as by the reference's interp1d
        self._least, self._most = float(profile.isl[0]), float(profile.isl[-1])
        self._ttft = spline(profile.isl, profile.ttft_ms)
        self._thpt = spline(profile.isl, profile.thpt_per_gpu)

    def ttft_ms(self, isl: float) -> float:
        """Return the time of one prompt alone on an engine."""
        return float(self._ttft(self._clamped(isl)))

    def thpt_per_gpu(self, isl: float) -> float:
        """Return input tokens per second and GPU."""
        return float(self._thpt(self._clamped(isl)))

    def _clamped(self, isl: float) -> float:
        return min(max(isl, self._least), self._most)


class CompatibleDecode:
    """ITL and throughput by KV use and context length."""

    def __init__(self, profile: DecodeProfile) -> None:
        self._max_kv_tokens = profile.max_kv_tokens
        self._kv = np.linspace(0, 1, RESOLUTION)
        self._context = np.linspace(0, float(profile.context_length.max()), RESOLUTION)
        cells = self._gridded(profile)
        self._itl, self._thpt = cells[..., 0], cells[..., 1]

    def at(self, concurrency: float, context_length: float) -> tuple[float, float]:
        """Return (ITL in ms, output tokens per second and GPU) of the nearest cell."""
        column, row = self.cell(concurrency, context_length)
        return float(self._itl[row, column]), float(self._thpt[row, column])

    def cell(self, concurrency: float, context_length: float) -> tuple[int, int]:
        """Return the indices along KV use and context length."""
        kv_usage = concurrency * context_length / self._max_kv_tokens
        return _nearest(self._kv, kv_usage), _nearest(self._context, context_length)

    def best(self, itl_ms: float, context_length: float) -> Best:
        """Return the first cell from full KV downwards that keeps the ITL, or else the emptiest."""
        row = _nearest(self._context, context_length)
        for column in range(RESOLUTION - 1, -1, -1):
            if self._itl[row, column] <= itl_ms:
                break
        else:
            column = 0
        return Best(
            float(self._thpt[row, column]),
            float(self._itl[row, column]),
            float(self._kv[column]),
        )

    def _gridded(self, profile: DecodeProfile) -> Floats:
        griddata = _interpolation().griddata
        from scipy.spatial import QhullError

        points = (profile.kv_usage, profile.context_length)
        values = np.column_stack((profile.itl_ms, profile.thpt_per_gpu))
        grid = tuple(np.meshgrid(self._kv, self._context))
        try:
            cubic: Floats = griddata(points, values, grid, method="cubic")
        except QhullError as error:
            raise ProfileError(
                "the decode samples lie on one line (one KV use, or one context length): the "
                "reference's surface needs others beside it; --mode slo plans with these, too"
            ) from error
        nearest: Floats = griddata(points, values, grid, method="nearest")
        return np.where(np.isnan(cubic), nearest, cubic)


class CompatibleLookup:
    """Both halves of a profile.

    Raises:
        ProfileError: its decode samples span no surface.
        MissingExtra: there is no scipy.
    """

    def __init__(self, profile: Profile) -> None:
        self.prefill = CompatiblePrefill(profile.prefill)
        self.decode = CompatibleDecode(profile.decode)


def _interpolation() -> ModuleType:
    """Load scipy's module, which only this mode needs.

    Raises:
        MissingExtra: there is none.
    """
    try:
        import scipy.interpolate
    except ImportError as error:
        raise MissingExtra("compatible", "planner", "scipy>=1.12") from error
    module: ModuleType = scipy.interpolate
    return module


def _nearest(axis: Floats, value: float) -> int:
    step = float(axis[1] - axis[0])
    return int(np.clip(np.round((value - float(axis[0])) / step), 0, RESOLUTION - 1))
