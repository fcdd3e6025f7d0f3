"""A profile for people: what was measured, what we make of it, and where the two differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from select_service.planner.core.surface import Surface
from select_service.planner.edge.charts import Chart, Line, page

if TYPE_CHECKING:
    from select_service.planner.core.profile import Profile

__all__ = ["findings", "html"]

_POINTS = 80


def findings(profile: Profile) -> list[str]:
    """Return what was repaired, in words."""
    told = []
    falls = np.flatnonzero(np.diff(profile.prefill.ttft_ms) < 0)
    told += [
        f"TTFT falls from {profile.prefill.isl[at]:g} to {profile.prefill.isl[at + 1]:g} tokens"
        for at in falls
    ]
    decode = profile.decode
    for context in sorted(set(decode.context_length.tolist())):
        rows = np.flatnonzero(decode.context_length == context)
        rows = rows[np.argsort(decode.kv_usage[rows])]
        for name, values in (("ITL", decode.itl_ms), ("throughput", decode.thpt_per_gpu)):
            if np.any(np.diff(values[rows]) < 0):
                told.append(f"{name} falls with KV use at a context of {context:g} tokens")
    return told


def html(profile: Profile, name: str) -> str:
    """Return one HTML document with a chart per curve."""
    surface = Surface(profile)
    prefill, decode = profile.prefill, profile.decode
    lengths = np.linspace(float(prefill.isl[0]), float(prefill.isl[-1]), _POINTS).tolist()
    contexts = sorted(set(decode.context_length.tolist()))
    shown = contexts[:: max(1, len(contexts) // 6)][:7]
    measured = list(zip(prefill.isl.tolist(), prefill.ttft_ms.tolist(), strict=True))
    charts = [
        Chart(
            "Prefill: time of one prompt",
            "ISL in tokens",
            "TTFT in ms",
            [
                Line("repaired", [(isl, surface.prefill.ttft_ms(isl)) for isl in lengths]),
                Line("measured", measured, "dots"),
            ],
        ),
        Chart(
            "Decode: ITL by live requests",
            "requests on one engine",
            "ITL in ms",
            [_itl(surface, decode.max_kv_tokens, context) for context in shown],
        ),
        Chart(
            "Decode: the most one engine gives within an ITL",
            "ITL target in ms",
            "tokens/s/GPU",
            [_best(surface, float(decode.itl_ms.max()), context) for context in shown],
        ),
    ]
    rows = [["repaired"], *([one] for one in findings(profile) or ["nothing: it is monotone"])]
    return page(f"Profile {name}", [rows, *charts])


def _itl(surface: Surface, max_kv_tokens: float, context: float) -> Line:
    most = max_kv_tokens / context
    counts = np.linspace(0.0, min(most, 256.0), _POINTS).tolist()
    points = [(count, surface.decode.itl_ms(count, context)) for count in counts]
    return Line(f"{context:g} tokens", points)


def _best(surface: Surface, itl_most: float, context: float) -> Line:
    points = []
    for target in np.linspace(1.0, 1.1 * itl_most, _POINTS).tolist():
        best = surface.decode.best(target, context)
        points.append((target, best.thpt_per_gpu if best else 0.0))
    return Line(f"{context:g} tokens", points)
